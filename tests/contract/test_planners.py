"""What holds for the plan of every strategy that is planned, without naming one."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from paradl_bench.spec.errors import UserError
from paradl_bench.spec.network import Layer, Network, Tensor
from paradl_bench.spec.plan import Collective, Compute, Phase, Plan, Planner, PlanSettings, WeightUpdate, Work
from paradl_bench.spec.registry import discover
from paradl_bench.spec.strategy import Axis, Strategy
from paradl_bench.strategies.catalog import planner_for

PLANNERS = discover("paradl_bench.strategies", "PLANNER", Planner, submodule="plan")  # type: ignore[type-abstract]
SETTINGS = PlanSettings(batch=8)

every_planner = pytest.mark.parametrize("planner", PLANNERS.values(), ids=lambda planner: planner.name)


def layer(name: str, *inputs: str, parameters: tuple[str, ...] = ()) -> Layer:
    return Layer(name=name, kind="conv2d", inputs=inputs, output_shape=(4, 8, 8), parameters=parameters)


def branching_network() -> Network:
    """A skip connection, a shared parameter, batch norm's buffers and an operation that no gradient reaches."""
    return Network(
        name="branching",
        input_shape=(3, 8, 8),
        layers=(
            layer("scale", "input"),
            layer("conv1", "scale", parameters=("conv1.weight",)),
            layer("bn1", "conv1", parameters=("bn1.weight", "bn1.bias")),
            layer("conv2", "bn1", parameters=("shared.weight",)),
            layer("conv3", "conv2", parameters=("shared.weight",)),
            layer("add", "conv3", "bn1"),
            layer("fc", "add", parameters=("fc.weight", "fc.bias")),
            layer("loss", "fc"),
        ),
        parameters=(
            Tensor(name="conv1.weight", shape=(4, 3, 3, 3)),
            Tensor(name="bn1.weight", shape=(4,)),
            Tensor(name="bn1.bias", shape=(4,)),
            Tensor(name="shared.weight", shape=(4, 4, 3, 3)),
            Tensor(name="fc.weight", shape=(10, 4)),
            Tensor(name="fc.bias", shape=(10,)),
        ),
        buffers=(
            Tensor(name="bn1.running_mean", shape=(4,)),
            Tensor(name="bn1.running_var", shape=(4,)),
            Tensor(name="bn1.num_batches_tracked", shape=(), dtype="int64"),
        ),
        gradient_order=("fc.bias", "fc.weight", "shared.weight", "bn1.weight", "bn1.bias", "conv1.weight"),
    )


NETWORK = branching_network()


def strategy_of(planner: Planner, ranks: int) -> Strategy:
    """The planner's kinds over so many ranks, all of them along the outermost axis."""
    kinds = [] if planner.name == "serial" else planner.name.split("+")
    axes = [Axis(kind=kind, extents=(ranks if i == 0 else 1,)) for i, kind in enumerate(kinds)]  # type: ignore[arg-type]
    return Strategy(axes=tuple(axes))


def plan_over(planner: Planner, ranks: int) -> Plan:
    return planner.plan(NETWORK, strategy_of(planner, ranks), SETTINGS)


def counted(plan: Plan, of: type[Work]) -> Counter[Work]:
    return Counter(work for i in plan.roles[0].work if isinstance(work := plan.works[i], of))


@every_planner
def test_it_is_found_by_the_kinds_that_it_plans(planner: Planner) -> None:
    assert planner_for(strategy_of(planner, 1)) is planner


@every_planner
def test_one_pe_does_the_work_of_serial(planner: Planner) -> None:
    serial, alone = plan_over(PLANNERS["serial"], 1), plan_over(planner, 1)
    assert counted(alone, Compute) == counted(serial, Compute)
    assert counted(alone, WeightUpdate) == counted(serial, WeightUpdate)
    assert alone.local_batch == SETTINGS.batch
    assert {work.ranks for work in alone.works if isinstance(work, Collective)} <= {1}


@every_planner
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_roles_are_all_ranks_and_every_work_is_done(planner: Planner, ranks: int) -> None:
    plan = plan_over(planner, 1 if planner.name == "serial" else ranks)
    assert sum(role.multiplicity for role in plan.roles) == plan.strategy.ranks
    done = np.unique(np.concatenate([role.work for role in plan.roles]))
    assert done.tolist() == list(range(len(plan.works)))


@every_planner
def test_a_layer_waits_for_what_it_reads(planner: Planner) -> None:
    plan = plan_over(planner, 1)
    role = plan.roles[0]
    tasks = {
        (work.layer, work.phase): task
        for task, index in enumerate(role.work)
        if isinstance(work := plan.works[index], Compute)
    }
    waits = {
        task: set(role.dependencies[role.dependency_start[task] : role.dependency_start[task + 1]].tolist())
        for task in tasks.values()
    }
    for reader in NETWORK.layers:
        for source in set(reader.inputs) - {"input"}:
            assert tasks[source, "FW"] in waits[tasks[reader.name, "FW"]]
            if (source, "BW") in tasks:
                assert tasks[reader.name, "BW"] in waits[tasks[source, "BW"]]


@every_planner
def test_phases_follow_each_other(planner: Planner) -> None:
    role = plan_over(planner, 1).roles[0]
    compute = [phase for phase in role.phase.tolist() if phase != Phase.GE]
    assert compute == sorted(compute)
    assert compute[-1] == Phase.WU


@every_planner
def test_planning_twice_gives_the_same(planner: Planner) -> None:
    first, second = plan_over(planner, 1), plan_over(planner, 1)
    assert (first.works, first.setup, first.notes) == (second.works, second.setup, second.notes)
    for name in ("phase", "stream", "work", "dependency_start", "dependencies"):
        assert np.array_equal(getattr(first.roles[0], name), getattr(second.roles[0], name))


@every_planner
def test_limits_hold_and_are_explained(planner: Planner) -> None:
    limits = planner.limits(NETWORK, SETTINGS)
    assert limits
    smallest = min(limits, key=lambda limit: limit.ranks)
    assert smallest.reason
    assert str(smallest).startswith(f"p <= {smallest.ranks}: ")
    assert plan_over(planner, smallest.ranks).strategy.ranks == smallest.ranks
    if planner.name != "serial":
        with pytest.raises(UserError, match=str(SETTINGS.batch)):
            plan_over(planner, smallest.ranks + 1)
