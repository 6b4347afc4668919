"""Random modules: drawn alike by every process, of every operation, trained by torch itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import permutations
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from random_modules.case import STRATEGIES, Case, case_of, every_step
from random_modules.decoder import describe_decoder
from random_modules.draw import describe, draw_description, trains
from random_modules.operation import OPERATIONS

from paradl_bench.core.errors import UserError
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.models.catalog import load_model
from paradl_bench.plan.axes.registry import axis_kinds
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.strategies.nesting.catalog import planner_for

NUMBERS = range(400)
DECODERS = 60
"""Of so many numbers, the decoders are looked at too."""


def test_a_number_is_one_module() -> None:
    for number in NUMBERS[:50]:
        again = describe.__wrapped__(number)
        assert json.loads(json.dumps(describe(number))) == again


def _drawn(draws: Callable[[int], Iterable[object]], wanted: set[Any]) -> set[Any]:
    """What numbers draw in turn until they have drawn all that is wanted, or have ended."""
    found: set[Any] = set()
    for number in NUMBERS:
        found.update(draws(number))
        if found >= wanted:
            break
    return found


def test_every_operation_is_drawn() -> None:
    def of_number(number: int) -> Iterator[str]:
        descriptions = [describe(number), *([describe_decoder(number)] if number < DECODERS else [])]
        return (step["do"] for description in descriptions for step in every_step(description["steps"]))

    every = {*OPERATIONS, "block"}
    assert _drawn(of_number, every) == every


def test_every_axis_and_setting_is_drawn() -> None:
    kinds = set(axis_kinds())
    options = {
        *(("optimizer", name) for name in ("adam", "adamw", "adamw-fused")),
        *(("sequence_parallel", "on"), ("expert_imbalance", "1.5"), ("recompute", "('all',)")),
        *(("schedule", name) for name in ("gpipe", "1f1b", "interleaved", "zb", "zbv", "dualpipev")),
    }

    def of_number(number: int) -> Iterator[object]:
        case = case_of(number)
        assert case.strategy in STRATEGIES[case.family]
        axes = parse_strategy(case.strategy).axes
        assert kinds >= {axis.kind for axis in axes}
        yield from (axis.kind for axis in axes)
        yield from ((name, str(value)) for name, value in case.options.items())
        if "recompute" in case.options and "p" in case.strategy:
            yield "recomputed pipeline"

    wanted = {*kinds, *options, "recomputed pipeline"}
    assert _drawn(of_number, wanted) >= wanted


def _axes_of(strategy: str) -> frozenset[tuple[str, int]]:
    return frozenset((axis.kind, axis.prefix) for axis in parse_strategy(strategy).axes)


def test_every_accepted_pair_of_axes_is_drawn() -> None:
    axes = [
        (f"{kind.prefix.letter}{number}" if kind.prefix and number else "") + f"{kind.letter}2"
        for kind in axis_kinds().values()
        for number in range((kind.prefix.most if kind.prefix else 0) + 1)
    ]
    nothing = ModelGraph(name="", input_shape=(), layers=(), parameters=())
    accepted = set()
    for written in map("".join, (*permutations(axes, 1), *permutations(axes, 2))):
        try:
            strategy = parse_strategy(written)
            planner_for(strategy).check(nothing, strategy, PlanSettings(batch=16))
        except UserError:
            continue
        accepted.add(_axes_of(written))
    assert len(accepted) > len(axes)
    assert accepted <= {_axes_of(strategy) for family in STRATEGIES.values() for strategy in family}


def test_what_torch_does_not_train_is_drawn_anew() -> None:
    number, attempt = next(
        (number, attempt)
        for number in range(1000)
        for attempt in range(1)
        if not trains(draw_description(number, attempt))
    )
    assert describe(number) != draw_description(number, attempt)
    assert trains(describe(number))


def test_modules_are_loaded_by_name() -> None:
    model = load_model(Case(number=3, strategy="d2", options={}).model)
    network = trace_network(model)
    assert network.input_shape == tuple(describe(3)["input_shape"])
    assert network.parameters
