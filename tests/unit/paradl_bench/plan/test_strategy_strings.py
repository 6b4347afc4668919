"""Strategy strings: one grammar, read from the outermost axis to the innermost."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from paradl_bench.core.errors import UserError
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.axes.registry import axis_kinds
from paradl_bench.plan.strategy import (
    Axis,
    Strategy,
    parse_strategy,
    parse_strategy_kinds,
)

KINDS = list(axis_kinds())


@st.composite
def axes(draw: st.DrawFn, kind: str) -> Axis:
    most = axis_kinds()[kind].dims
    extents = draw(st.lists(st.integers(1, 4096), min_size=1, max_size=most).map(tuple))
    return Axis(kind=kind, extents=extents, prefix=draw(st.integers(0, 3)) if axis_kinds()[kind].prefix else 0)


@st.composite
def strategies(draw: st.DrawFn) -> Strategy:
    kinds = draw(st.lists(st.sampled_from(KINDS), unique=True, max_size=len(KINDS)))
    return Strategy(axes=tuple(draw(axes(kind)) for kind in kinds))


@given(strategies())
def test_a_strategy_is_read_back_as_it_is_written(strategy: Strategy) -> None:
    # Of two axes that share layers, which no nesting has, s2 and x4 would be written as s2x4 is.
    assume(sum(axis.has(Trait.SHARDS_LAYERS) for axis in strategy.axes) <= 1)
    assert parse_strategy(str(strategy)) == strategy


@given(strategies())
def test_ranks_are_the_product_of_all_degrees(strategy: Strategy) -> None:
    assert strategy.ranks == math.prod(extent for axis in strategy.axes for extent in axis.extents)


@given(strategies())
def test_a_strategy_survives_json(strategy: Strategy) -> None:
    assert msgspec.json.decode(msgspec.json.encode(strategy), type=Strategy) == strategy


@pytest.mark.parametrize(
    ("text", "canonical", "ranks", "name"),
    [
        ("serial", "serial", 1, "serial"),
        ("Serial", "serial", 1, "serial"),
        ("d4", "d4", 4, "data"),
        ("s2x2", "s2x2", 4, "spatial"),
        (" d4f4 ", "d4f4", 16, "data+filter"),
        ("d16s2x2", "d16s2x2", 64, "data+spatial"),
        ("z3d8", "z3d8", 8, "data"),
        ("z0d8", "d8", 8, "data"),
        ("2M4P1D", "p4t2", 8, "pipeline+tensor"),
        ("2m4p3d", "d3p4t2", 24, "data+pipeline+tensor"),
        ("1M1P1D", "serial", 1, "serial"),
    ],
)
def test_what_users_write(text: str, canonical: str, ranks: int, name: str) -> None:
    strategy = parse_strategy(text)
    assert (str(strategy), strategy.ranks, strategy.name) == (canonical, ranks, name)


@given(st.one_of(st.text(), st.text("dsfcptzMPD0123456789x +", max_size=16)))
@example("d" + "9" * 5000)
@example("d\N{ARABIC-INDIC DIGIT THREE}")
@example("9" * 5000 + "M1P1D")
def test_any_text_is_a_strategy_or_a_users_mistake(text: str) -> None:
    try:
        strategy = parse_strategy(text)
    except UserError:
        return
    assert parse_strategy(str(strategy)) == strategy


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "write d4"),
        ("d", "write d4"),
        ("y4", "write d4"),
        ("d4 f4", "write d4"),
        ("d-4", "write d4"),
        ("d0", "at least 1"),
        ("z3f8", "z3d8"),
        ("z4d8", "write d4"),
        ("d2d2", "occurs twice"),
        ("0M4P1D", "at least 1"),
    ],
)
def test_a_mistake_says_what_would_be_right(text: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        parse_strategy(text)


def test_an_axis_validates_itself() -> None:
    with pytest.raises(ValueError, match="not 0, 1, 2 or 3"):
        Axis(kind="data", extents=(2,), prefix=4)
    with pytest.raises(ValueError, match="at least 1"):
        Axis(kind="spatial", extents=())
    with pytest.raises(AttributeError):
        Axis(kind="data", extents=(2,)).kind = "filter"  # type: ignore[misc]


@given(st.lists(st.sampled_from(KINDS), unique=True, min_size=1))
def test_kinds_by_letter_and_by_name(kinds: list[str]) -> None:
    assert parse_strategy_kinds("+".join(kinds)) == tuple(kinds)
    assert parse_strategy_kinds("+".join(axis_kinds()[kind].letter for kind in kinds)) == tuple(kinds)


@pytest.mark.parametrize("text", ["", "d4", "d4f4", "data+", "2M4P1D", "d f"])
def test_fixed_degrees_are_no_kinds(text: str) -> None:
    assert parse_strategy_kinds(text) is None


def test_kinds_nest_only_where_they_differ() -> None:
    assert parse_strategy_kinds("serial") == ()
    with pytest.raises(UserError, match="occurs twice"):
        parse_strategy_kinds("data+d")


def test_each_kind_has_a_letter_of_its_own() -> None:
    assert len({kind.letter for kind in axis_kinds().values()}) == len(KINDS)
