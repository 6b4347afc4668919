"""Kinds of work: each says what it is and declares its price, and nobody else asks which kind a work is."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from profile_factory import free_copies, layer_times, make_network, make_profile, ring_fit

from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Phase, Plan, Role, Stream, TaskArrays
from paradl_bench.plan.works.work import Sort, Work
from paradl_bench.strategies.nesting.catalog import planner_for
from predict.costs.cost_model import CostModel
from predict.costs.kinds import catalog
from predict.costs.kinds.kind_costs import KindCosts, KnownCosts, WorkContext
from predict.costs.sourced import Cost, Source
from predict.costs.spread.assembly import Priced
from predict.simulation.prepared import workload_of
from predict.timeline.trace_works import describe_works
from predict.workload import Configuration

ROOT = Path(__file__).parents[4]

BATCH = 16


def subclasses(of: type[Work]) -> set[type[Work]]:
    return {found for kind in of.__subclasses__() for found in (kind, *subclasses(kind))}


KINDS = {kind.__name__: kind for kind in subclasses(Work) if "kind" in vars(kind)}


class Checkpoint(Work, frozen=True, kw_only=True):
    """A kind that the program does not know."""

    kind: ClassVar[str] = "save a checkpoint"
    sort: ClassVar[Sort] = Sort.COPY

    bytes: int

    @property
    def details(self) -> dict[str, str | int]:
        return {"bytes": self.bytes}


def price(work: Checkpoint, known: KnownCosts, context: WorkContext) -> Priced:
    return Priced(Cost(work.bytes * 1e-6, Source.STATED), context.occurrences, work)


def costs() -> CostModel:
    network = make_network()
    profile = make_profile(layer_times=layer_times(network), communication=(ring_fit(),), copies=free_copies())
    return CostModel(profile=profile, network=network)


def plan_of(costs: CostModel, strategy: str) -> Plan:
    asked = parse_strategy(strategy)
    return planner_for(asked).plan(costs.network, asked, PlanSettings(batch=BATCH))


def with_last(plan: Plan, work: Work) -> Plan:
    """A plan whose roles end with a work that waits for all before it."""

    def longer(role: Role) -> Role:
        def joined(own: Any, value: int) -> Any:
            return np.append(own, np.int32(value))

        tasks = TaskArrays(
            phase=joined(role.phase, Phase.WU),
            stream=joined(role.stream, Stream.COPY_ENGINE),
            work=joined(role.work, len(plan.works)),
            dependency_start=joined(role.dependency_start, len(role.dependencies) + 1),
            dependencies=joined(role.dependencies, role.tasks - 1),
        )
        return dataclasses.replace(role, arrays=tasks)

    return dataclasses.replace(plan, works=(*plan.works, work), roles=tuple(map(longer, plan.roles)))


def iteration_s(costs: CostModel, plan: Plan) -> float:
    point = Configuration(strategy=plan.strategy, settings=PlanSettings(batch=BATCH))
    found = workload_of(costs, point, costs.price(plan))
    return found.time(found.costs.seconds, found.costs.compute_slowdown, found.costs.communication_slowdown).iteration_s


def test_a_new_kind_is_priced_simulated_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(catalog.kind_costs(), Checkpoint, KindCosts(kind=Checkpoint, price=price))
    model = costs()
    plan = plan_of(model, "d4")
    longer = with_last(plan, Checkpoint(bytes=3000))
    assert iteration_s(model, longer) == pytest.approx(iteration_s(model, plan) + 3e-3)
    shown = describe_works(model.price(longer))
    assert shown.named(len(plan.works), Phase.WU) == ("save a checkpoint", "WU")
    assert b'"bytes":3000' in shown.arguments[-1]


def test_a_kind_without_a_price_is_a_program_error() -> None:
    model = costs()
    with pytest.raises(KeyError, match="Checkpoint"):
        model.price(with_last(plan_of(model, "d2"), Checkpoint(bytes=1)))


def test_every_kind_has_a_price_but_joining_ones() -> None:
    of_input = {kind for kind in KINDS.values() if kind.sort is Sort.INPUT}
    assert set(catalog.kind_costs()) == set(KINDS.values()) - of_input


def kinds_asked_for(function: ast.AST) -> set[str]:
    """Kinds that a function asks for by isinstance; those of functions inside of it as well."""
    questions = [
        node.args[1]
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"
    ]
    return {part.id for asked in questions for part in ast.walk(asked) if isinstance(part, ast.Name)} & KINDS.keys()


def test_no_function_asks_which_of_several_kinds_a_work_is() -> None:
    chains = {
        f"{path.relative_to(ROOT)}: {node.name}"
        for package in ("paradl_bench", "calibrate", "predict", "benchmarks")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and len(kinds_asked_for(node)) > 1
    }
    assert not chains
