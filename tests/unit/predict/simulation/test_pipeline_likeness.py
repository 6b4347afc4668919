"""Pipelines that are simulated alike are told from all others, and searches simulate each of them once."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from network_factory import NetworkFactory
from profile_factory import free_copies, make_profile, ring_fit

from paradl_bench.core.cache_keys import Answers
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from predict.costs.cost_model import CostModel
from predict.costs.priced import PricedPlan
from predict.costs.sourced import CorrelatedError
from predict.prediction import prediction
from predict.prediction.interval import Interval
from predict.prediction.prediction import Predictor
from predict.simulation.pipelines.likeness import likeness
from predict.simulation.prepared import price
from predict.workload import Configuration, PreparedEvaluation, evaluator_named


def chain() -> CostModel:
    factory = NetworkFactory(16)
    for number in range(6):
        factory.linear(f"fc{number}", 16)
    factory.loss()
    network = factory.network("chain")
    fits = tuple(map(ring_fit, ("all_reduce", "all_gather", "send_recv")))
    return CostModel(profile=make_profile(network, communication=fits, copies=free_copies()), network=network)


COSTS = chain()


def point(strategy: str, **settings: object) -> Configuration:
    given = {"batch": 32, "micro_batches": 8, "schedule": "1f1b", **settings}
    return Configuration(strategy=parse_strategy(strategy), settings=plan_settings(**given))  # type: ignore[arg-type]


def priced(strategy: str, **settings: object) -> PricedPlan:
    return price(COSTS, point(strategy, **settings))


@pytest.mark.parametrize("pair", [("d2p2", "p2d2"), ("d2p2f2", "p2d2f2"), ("d4p3", "p3d4")])
def test_orders_on_alike_links_are_alike_and_take_the_same(pair: tuple[str, str]) -> None:
    assert likeness(priced(pair[0])) == likeness(priced(pair[1]))
    predictor = Predictor(COSTS, evaluator_named("simulate"))
    first, second = (predictor.predict_timed(point(strategy))[1] for strategy in pair)
    assert first == second


def test_what_decides_an_iteration_decides_the_likeness() -> None:
    own = priced("d2p2f2")
    costs = own.costs
    longer = np.where(np.arange(len(costs.seconds)) == 3, 2.0, 1.0)
    mode = costs.modes[0]._replace(seconds=2 * costs.modes[0].seconds)
    others = [
        own,
        priced("d2p2"),
        priced("d2p3f2"),
        priced("d2p2f2", batch=64),
        priced("d2p2f2", micro_batches=4),
        priced("d2p2f2", schedule="gpipe"),
        dataclasses.replace(own, costs=dataclasses.replace(costs, seconds=costs.seconds * longer)),
        dataclasses.replace(own, costs=dataclasses.replace(costs, compute_slowdown=costs.compute_slowdown * longer)),
        dataclasses.replace(own, costs=dataclasses.replace(costs, independent_sd_s=costs.independent_sd_s + longer)),
        dataclasses.replace(own, costs=dataclasses.replace(costs, modes=(mode, *costs.modes[1:]))),
        dataclasses.replace(own, costs=dataclasses.replace(costs, modes=(CorrelatedError("x", *mode[1:]),))),
        dataclasses.replace(own, straggler=1.5),
        dataclasses.replace(own, slower=(2.0,) * len(own.plan.roles)),
        dataclasses.replace(own, blocking=frozenset({0})),
    ]
    for first, second in itertools.combinations(map(likeness, others), 2):
        assert first != second


def test_alike_pipelines_are_simulated_once_and_answer_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found, simulated = prediction.interval, []

    def counted(workload: PreparedEvaluation) -> Interval:
        simulated.append(workload)
        return found(workload)

    monkeypatch.setattr(prediction, "interval", counted)
    orders = ["d2p2f2", "p2d2f2", "d2p3f2"]
    evaluator = evaluator_named("simulate")
    alone = [Predictor(COSTS, evaluator).predict(point(order)) for order in orders]
    simulated.clear()
    together = Predictor(COSTS, evaluator, alike=Answers(8))
    assert [together.predict(point(order)) for order in orders] == alone
    # The serial run that each is compared with is known from before.
    assert len(simulated) == 2
