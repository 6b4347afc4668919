"""What few micro-batches tell of a pipeline is what all of them do."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from profile_factory import free_copies, make_profile, ring_fit

from calibrate.profile.profile import read_profile
from calibrate.profile.shipped.catalog import shipped_profiles
from paradl_bench.network.models.traced_networks import traced_network
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import degree_of
from paradl_bench.plan.schedules.catalog import schedule_of
from paradl_bench.plan.settings import PlanSettings, plan_settings
from paradl_bench.plan.strategy import Strategy, parse_strategy
from paradl_bench.plan.tasks import Compute, FrameworkOverhead, Plan
from paradl_bench.strategies.nesting.catalog import planner_for
from predict.costs.communication.calls import calls_of
from predict.costs.compute.host_dispatch import _stretches
from predict.costs.cost_model import CostModel
from predict.costs.priced import PricedPlan
from predict.simulation.pipelines.pipeline_simulation import PipelineSimulation
from predict.simulation.pipelines.stage import Stage, Transfers, meetings_of
from predict.simulation.pipelines.windows import NodeCosts

BLOCKS = {4: (3, 6, 9), 8: (2, 3, 4, 6, 8, 9, 10), 12: tuple(range(1, 12))}
"""Of GPT-2: blocks that begin a stage, by stages."""
CASES: list[tuple[str, dict[str, object]]] = [
    ("p4", {}),
    ("p4", {"schedule": "1f1b"}),
    ("p4", {"schedule": "1f1b", "recompute": ("all",)}),
    ("p4", {"schedule": "interleaved"}),
    ("p4", {"schedule": "zb"}),
    ("p4", {"schedule": "zbv"}),
    ("p4", {"schedule": "dualpipev"}),
    ("d2p4", {"schedule": "1f1b"}),
    ("d2p4", {"schedule": "interleaved"}),
    ("z1d2p4", {"schedule": "zbv", "dtype": "bf16"}),
    ("z1d2p4", {"schedule": "zb", "dtype": "bf16"}),
    ("d2p4t2", {"schedule": "1f1b", "sequence_parallel": "on", "recompute": ("all",)}),
    ("d2p4t2", {"schedule": "interleaved", "clip_norm": 1.0}),
    ("t2p4", {"schedule": "zb"}),
    ("p4x2", {"schedule": "1f1b", "context_exchange": "ring"}),
    ("d2p4x2", {"schedule": "1f1b"}),
    ("z1d2p4t2", {"preset": "megatron", "dtype": "bf16-weights", "clip_norm": 1.0, "schedule": "1f1b"}),
    ("z1d2p4", {"preset": "megatron", "dtype": "bf16-weights", "schedule": "interleaved"}),
]
CASES += [("p12", {"schedule": "1f1b"}), ("p12t2", {"schedule": "1f1b", "dtype": "bf16", "recompute": ("all",)})]
MICRO_BATCHES = 60


def settings_of(strategy: Strategy, options: dict[str, object]) -> PlanSettings:
    schedule = schedule_of(str(options.get("schedule", "gpipe")))
    stages = schedule.placement.stages(degree_of(strategy, Trait.STAGES))
    cuts = tuple(f"transformer.h.{block}" for block in BLOCKS[stages])
    given = {"batch": 2 * MICRO_BATCHES, "micro_batches": MICRO_BATCHES, "stages": cuts}
    return plan_settings(**(given | options))  # type: ignore[arg-type]


def plan_of(text: str, options: dict[str, object]) -> Plan:
    network, strategy = traced_network("gpt2"), parse_strategy(text)
    assert network is not None
    return planner_for(strategy).plan(network, strategy, settings_of(strategy, options))


def in_full(plan: Plan) -> Plan:
    """The same plan, all of whose tasks are looked at."""
    roles = tuple(dataclasses.replace(role, arrays=role.arrays.whole) for role in plan.roles)
    return dataclasses.replace(plan, roles=roles)


@pytest.fixture(params=CASES, ids=lambda case: "-".join([case[0], *map(str, case[1].values())]))
def plan(request: pytest.FixtureRequest) -> Plan:
    return plan_of(*request.param)


def test_few_tasks_stand_for_all(plan: Plan) -> None:
    for role in plan.roles:
        brief = role.arrays.brief
        assert not brief.is_whole
        assert len(brief.tasks.work) < role.tasks / 2
        assert brief.times.sum() == role.tasks
        counted = np.bincount(role.work, minlength=len(plan.works))
        assert role.counts(len(plan.works)).tolist() == counted.tolist()
        assert list(plan.of_kind(object, role)) == list(dict.fromkeys(role.work.tolist()))


def test_calls_are_told_by_few_micro_batches(plan: Plan) -> None:
    assert calls_of(plan) == calls_of(in_full(plan))


def test_stretches_of_one_phase_are_those_of_all_tasks(plan: Plan) -> None:
    overheads = np.array([isinstance(work, FrameworkOverhead) for work in plan.works])
    counted = overheads | np.array([isinstance(work, Compute) for work in plan.works])
    for one, other in zip(plan.roles, in_full(plan).roles, strict=True):
        few, every = (_stretches(role, counted, overheads) for role in (one, other))
        in_order = ([found.distinct[number].tolist() for number in found.order] for found in (few, every))
        assert next(in_order) == next(in_order)
        assert few.occurrences.tolist() == every.occurrences.tolist()


@pytest.mark.parametrize("blocks", [False, True])
def test_nodes_are_those_of_all_tasks(plan: Plan, blocks: bool) -> None:
    generator, works = np.random.default_rng(0), len(plan.works)
    chosen = frozenset(np.flatnonzero([work.is_of_layer and work.meets for work in plan.works]).tolist())
    transfers, meetings = Transfers(plan), meetings_of(plan)
    costs = generator.exponential(size=works), *(1 + generator.random((2, works)))
    for one, other in zip(plan.roles, in_full(plan).roles, strict=True):
        few, every = (
            Stage(
                plan,
                role,
                transfers,
                meetings,
                blocking=chosen if blocks else frozenset(),
                overlapped=True,
                merge=True,
            )
            for role in (one, other)
        )
        assert few.nodes.like is not None
        assert every.nodes.like is None
        assert few.nodes.graph.lane.tolist() == every.nodes.graph.lane.tolist()
        assert edges_in(few) == edges_in(every)
        for values, expected in zip(*(NodeCosts([of.nodes], [0]).of(*costs) for of in (few, every)), strict=True):
            assert values == pytest.approx(expected, rel=1e-12)
        assert {end: nodes.tolist() for end, nodes in few.ended.ends.items()} == {
            end: nodes.tolist() for end, nodes in every.ended.ends.items()
        }
        assert sorted(zip(*map(list, few.ended.meets), strict=True)) == sorted(
            zip(*map(list, every.ended.meets), strict=True)
        )


def edges_in(stage: Stage) -> set[tuple[int, int]]:
    source, target = stage.nodes.graph.edges
    return set(zip(source.tolist(), target.tolist(), strict=True))


def test_an_iteration_of_many_rows_takes_as_long(plan: Plan) -> None:
    generator, works = np.random.default_rng(0), len(plan.works)
    seconds, slowdowns = generator.exponential(size=(3, works)), 1 + generator.random((2, works))
    late = np.ones(works)
    few, every = PipelineSimulation(plan, late), PipelineSimulation(in_full(plan), late)
    assert few.iteration_s(seconds, *slowdowns) == pytest.approx(every.iteration_s(seconds, *slowdowns), rel=1e-12)
    ours, theirs = few.timing(seconds[0], *slowdowns), every.timing(seconds[0], *slowdowns)
    for name, value in ours._asdict().items():
        assert value == pytest.approx(getattr(theirs, name), rel=1e-9, abs=1e-9 * theirs.iteration_s), name


@pytest.mark.parametrize(("text", "options"), CASES[-7:])
def test_prices_are_those_of_all_tasks(text: str, options: dict[str, object]) -> None:
    network = traced_network("gpt2")
    assert network is not None
    operations = ("all_reduce", "all_gather", "reduce_scatter", "send_recv", "broadcast")
    profile = make_profile(network, communication=tuple(map(ring_fit, operations)), copies=free_copies())
    few, every = (CostModel(profile=profile, network=network).price(of) for of in _both(plan_of(text, options)))
    for one, other in zip(_numbers(few), _numbers(every), strict=True):
        assert one == pytest.approx(other, rel=1e-9)


@pytest.mark.parametrize(("text", "options"), CASES[-1:])
def test_waits_for_the_host_are_those_of_all_tasks(text: str, options: dict[str, object]) -> None:
    network = traced_network("gpt2")
    assert network is not None
    profile = read_profile(shipped_profiles()["h100-sxm"])
    few, every = (
        CostModel(profile=profile, network=network, dtype="bf16").price(of) for of in _both(plan_of(text, options))
    )
    assert few.costs.seconds == pytest.approx(every.costs.seconds, rel=1e-9)
    between = [index for index, work in enumerate(few.plan.works) if isinstance(work, FrameworkOverhead)]
    assert few.costs.seconds[between].max() > 0


def _both(plan: Plan) -> tuple[Plan, Plan]:
    return plan, in_full(plan)


def _numbers(priced: PricedPlan) -> list[np.ndarray]:
    costs = priced.costs
    return [costs.seconds, costs.counts, costs.compute_slowdown, costs.independent_sd_s, priced.own_relative_sd]
