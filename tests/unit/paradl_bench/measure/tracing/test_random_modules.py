"""Random modules: drawn alike by every process, of every operation, trained by torch itself."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

from random_modules.case import STRATEGIES, Case, case_of, every_step
from random_modules.draw import describe, draw_description, trains
from random_modules.operation import OPERATIONS

from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.models.catalog import load_model

NUMBERS = range(400)


def test_a_number_is_one_module() -> None:
    for number in NUMBERS[:50]:
        again = describe.__wrapped__(number)
        assert json.loads(json.dumps(describe(number))) == again


def test_every_operation_and_strategy_is_drawn() -> None:
    drawn = {step["do"] for number in NUMBERS for step in every_step(describe(number)["steps"])}
    assert drawn == {*OPERATIONS, "block"}
    assert {case_of(number).strategy.translate(str.maketrans("", "", "0123456789x")) for number in NUMBERS} >= {
        *("serial", "d", "zd", "f", "c", "s", "t", "p", "dp", "ps", "ds")
    }
    assert all(case_of(number).strategy in STRATEGIES for number in NUMBERS)


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
