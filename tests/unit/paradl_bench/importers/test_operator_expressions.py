"""Expressions over columns are what fractions say, names of files what their patterns say."""

from __future__ import annotations

import contextlib
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paradl_bench.core.errors import UserError
from paradl_bench.importers.operator_tables.expressions import NoNumber, parse_expression, shape_of
from paradl_bench.importers.operator_tables.patterns import check_pattern, fits, parts_of_path

ROW = {"a": "3", "b": "4.5", "dur(us)": "1e-3", "shapes": "[[2, 8, 64], [64, 32]]", "out": "(2, 8, 32)"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a + b * 2", Fraction(12)),
        ("(a + b) * 2 - -1", Fraction(16)),
        ("a / b / 2", Fraction(1, 3)),
        ("- a * 2", Fraction(-6)),
        ("ceil(50257 / (128 * a)) * 128", Fraction(131 * 128)),
        ("shapes[0][-1] * shapes[1][0]", Fraction(4096)),
        ("elements(shapes[0]) / out[-1]", Fraction(32)),
        ("`dur(us)` * 1000", Fraction(1)),
    ],
)
def test_expressions_are_exact(text: str, value: Fraction) -> None:
    assert parse_expression(text).number(ROW) == value


_NUMBERS = st.integers(0, 999).map(lambda value: (str(value), Fraction(value)))


def _joined(parts: tuple[tuple[str, Fraction], str, tuple[str, Fraction]]) -> tuple[str, Fraction]:
    (left, one), mark, (right, other) = parts
    if mark == "/" and not other:
        mark = "+"
    value = {"+": one + other, "-": one - other, "*": one * other}.get(mark)
    return f"({left} {mark} {right})", one / other if value is None else value


@given(
    st.recursive(_NUMBERS, lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(_joined), max_leaves=8)
)
def test_any_sum_and_product_is_what_fractions_say(pair: tuple[str, Fraction]) -> None:
    text, value = pair
    assert parse_expression(text).number({}) == value


@given(st.text(alphabet="ab1.2+-*/()[],` cei l", max_size=40))
def test_any_text_is_an_expression_or_an_error(text: str) -> None:
    with contextlib.suppress(UserError, NoNumber):
        expression = parse_expression(text)
        # A row has all columns that an expression reads: the importer has looked.
        expression.number({**dict.fromkeys(expression.columns, "2"), **ROW})


@given(st.lists(st.lists(st.integers(0, 10**9), max_size=4), max_size=4))
def test_shapes_are_read_as_python_writes_them(shapes: list[list[int]]) -> None:
    wanted = tuple(map(tuple, shapes))
    assert shape_of(str(shapes)) == shape_of(str(wanted)) == wanted


@pytest.mark.parametrize("text", ["[1, 2", "[1]]", "(", "[x]", "[[[[[1]]]]]", "[1] 2", "[" * 3000])
def test_broken_shapes_are_none(text: str) -> None:
    with pytest.raises(NoNumber):
        shape_of(text)


@pytest.mark.parametrize("text", ["out", "a / (a - 3)", "shapes[2]", "elements(shapes)", "a[0]", "elements(a)"])
def test_what_a_row_can_not_give_is_no_number(text: str) -> None:
    with pytest.raises(NoNumber):
        parse_expression(text).number(ROW)


@pytest.mark.parametrize(
    ("pattern", "path", "parts"),
    [
        ("*", "x/any.csv", {}),
        ("{gpu}_linear1_{dtype}.csv", "d/A100-80_linear1_fp16.csv", {"gpu": "A100-80", "dtype": "fp16"}),
        ("{gpu}/*-train-{n}.csv", "a/H100/gpt-train-8.csv", {"gpu": "H100", "n": "8"}),
        ("{gpu}_bmm.csv", "A_baddbmm.csv", None),
        ("{gpu}_bmm.csv", "_bmm.csv", None),
        ("a/b.csv", "b.csv", None),
        ("*.csv", "a.csv.gz", None),
    ],
)
def test_names_of_files_give_columns(pattern: str, path: str, parts: dict[str, str] | None) -> None:
    check_pattern(pattern)
    assert parts_of_path(pattern, path) == parts


@given(st.lists(st.text(alphabet="ab_", min_size=1, max_size=3), min_size=1, max_size=4))
def test_stars_stand_for_anything(parts: list[str]) -> None:
    assert fits("*".join(parts), "-".join(parts))
    assert fits("*" + "*".join(parts) + "*", "--".join(parts))
    assert not fits("*".join(["x", *parts]), "-".join(parts))


def test_rounding_is_never_silent() -> None:
    assert parse_expression("a * 4 / 6").whole({"a": "3"}) == math.floor(2)
    with pytest.raises(NoNumber, match="is 4/3, no whole number"):
        parse_expression("a * 4 / 6").whole({"a": "2"})
