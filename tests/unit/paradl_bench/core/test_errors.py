"""The one family of errors: what a user reads, and the exit code behind it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paradl_bench.core.errors import ParadlError, UserError, WorkError, uneven, unknown_choice

names = st.text("abcdefghij0123456789_-", min_size=1, max_size=12)


def test_exit_codes() -> None:
    assert UserError("x").exit_code == 2
    assert WorkError("x").exit_code == 3
    assert issubclass(UserError, ParadlError)
    assert issubclass(WorkError, ParadlError)


def test_a_user_error_passes_validation_as_a_value_error() -> None:
    # msgspec turns a ValueError raised while decoding into an error that names the field's path.
    assert issubclass(UserError, ValueError)


@given(names, st.lists(names, min_size=1, max_size=20))
def test_all_of_a_few_choices_are_named(given_name: str, choices: list[str]) -> None:
    message = str(unknown_choice("model", given_name, choices))
    assert message.startswith(f"unknown model {given_name!r}: ")
    listed = message.split("choices are ")[1].split(", ")
    assert listed == sorted(set(choices))
    assert "\n" not in message


def test_of_many_choices_near_ones_are_named_and_others_counted() -> None:
    choices = [f"choice{number:03}" for number in range(100)] + ["resnet50"]
    message = str(unknown_choice("model", "resnet5O", choices))
    assert "did you mean resnet50?" in message
    assert message.endswith("and 77 more")


def test_a_command_lists_choices_too_many_for_a_line() -> None:
    error = unknown_choice("model", "resnet5O", ["resnet50", "vgg16"], listed_by="paradl-bench models")
    assert str(error) == "unknown model 'resnet5O': did you mean resnet50? paradl-bench models lists all"


@pytest.mark.parametrize(("count", "said"), [(510, "the nearest that do are 448 and 512"), (3, "give at least 64")])
def test_an_uneven_count_names_the_nearest_even_ones(count: int, said: str) -> None:
    assert str(uneven("batch", count, 64, "64 ranks")).endswith(f" 64 ranks; {said}")


@pytest.mark.parametrize("far", ["zzz", ""])
def test_nothing_near_no_hint(far: str) -> None:
    assert "did you mean" not in str(unknown_choice("backend", far, ["gloo", "nccl"]))
