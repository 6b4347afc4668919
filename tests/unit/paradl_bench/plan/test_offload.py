"""The optimizer's state in host memory: its copies in plans, and what a rank holds of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from profile_factory import make_network

from paradl_bench.core.errors import UserError
from paradl_bench.measure.training.request import TrainingRequest
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Plan, Role, WeightUpdate
from paradl_bench.plan.works.moving import StateCopy
from paradl_bench.strategies.memory.of_plan import memory_of_plan
from paradl_bench.strategies.memory.peak import MemoryUse
from paradl_bench.strategies.nesting.catalog import planner_for

NETWORK = make_network((64, 128, 256, 32))
PARAMETERS = NETWORK.parameter_bytes
STRATEGIES = ["serial", "d2", "z1d2", "z2d2", "z3d2", "f2", "t2", "s2", "p2", "d2f2", "d2p2"]


def planned(strategy: str, **settings: Any) -> Plan:
    network = NETWORK if "s" not in strategy or strategy == "serial" else pictures()
    parsed = parse_strategy(strategy)
    return planner_for(parsed).plan(network, parsed, PlanSettings(batch=32, **settings))


def pictures() -> Any:
    from network_factory import NetworkFactory

    factory = NetworkFactory(8, 16, 16)
    factory.conv("conv", 8, 3, padding=1)
    factory.flatten("flatten")
    factory.linear("fc", 12)
    factory.loss()
    return factory.network("chain")


def waits(role: Role, task: int) -> list[int]:
    return role.dependencies[role.dependency_start[task] : role.dependency_start[task + 1]].tolist()


def works_of(plan: Plan, role: Role) -> list[object]:
    return [plan.works[index] for index in role.work.tolist()]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_state_is_copied_before_and_after_the_update(strategy: str, optimizer: str) -> None:
    copies = {"sgd": 1, "adam": 2}[optimizer]
    kept, moved = planned(strategy, optimizer=optimizer), planned(strategy, optimizer=optimizer, offload="optimizer")
    assert len(kept.roles) == len(moved.roles)
    for before, role in zip(kept.roles, moved.roles, strict=True):
        works = works_of(moved, role)
        (update,) = [task for task, work in enumerate(works) if isinstance(work, WeightUpdate)]
        fetch, work, store = works[update - 1 : update + 2]
        assert isinstance(work, WeightUpdate)
        size, tensors = copies * 4 * work.elements, copies * work.tensors
        assert fetch == StateCopy(direction="fetch", bytes=size, tensors=tensors)
        assert store == StateCopy(direction="store", bytes=size, tensors=tensors)
        # The copy waits for the gradients as the update did, which waits for the copy.
        assert waits(role, update - 1) == waits(before, update - 1)
        assert waits(role, update) == [update - 1]
        assert waits(role, update + 1) == [update]
        without = [other for other in works if not isinstance(other, StateCopy)]
        assert without == works_of(kept, before)


def test_stage_one_broadcasts_when_the_state_is_back() -> None:
    plan = planned("z1d2", offload="optimizer")
    (role,) = plan.roles
    (store,) = [task for task, work in enumerate(works_of(plan, role)) if isinstance(work, StateCopy)][1:]
    assert store < role.tasks - 1
    assert all(waits(role, task) == [store] for task in range(store + 1, role.tasks))


def held(strategy: str, batch: int, **settings: Any) -> MemoryUse:
    return memory_of_plan(NETWORK, parse_strategy(strategy), PlanSettings(batch=batch, **settings))


@pytest.mark.parametrize(("optimizer", "copies"), [("sgd", 1), ("adam", 2)])
@pytest.mark.parametrize("strategy", ["serial", "d2", "f2", "p2"])
def test_activations_that_outweigh_the_update_leave_the_whole_state_saved(
    strategy: str, optimizer: str, copies: int
) -> None:
    kept = held(strategy, 100_000, optimizer=optimizer)
    moved = held(strategy, 100_000, optimizer=optimizer, offload="optimizer")
    assert moved.parts_bytes["optimizer"] == 0 < kept.parts_bytes["optimizer"]
    assert kept.peak_bytes - moved.peak_bytes == kept.parts_bytes["optimizer"]
    assert kept.parts_bytes["optimizer"] <= copies * PARAMETERS


def test_the_update_holds_the_state_beside_the_gradients() -> None:
    kept, moved = held("serial", 1, optimizer="sgd"), held("serial", 1, optimizer="sgd", offload="optimizer")
    update = PARAMETERS + moved.parts_bytes["gradients"] + moved.parts_bytes["activations"]
    assert moved.parts_bytes["gradients"] + moved.parts_bytes["activations"] == 2 * PARAMETERS
    assert moved.peak_bytes == update + moved.parts_bytes["input"] + moved.parts_bytes["buffers"]
    assert moved.peak_bytes <= kept.peak_bytes


def test_a_stage_of_zero_moves_its_part_alone() -> None:
    whole, part = (held(strategy, 2, optimizer="adam", offload="optimizer") for strategy in ("d2", "z1d2"))
    assert part.peak_bytes < whole.peak_bytes


def test_requests_say_it_and_default_runs_do_not() -> None:
    request = TrainingRequest(
        model="m", input_shape=None, strategy=parse_strategy("d2"), batch=2, device="cpu", offload="optimizer"
    )
    assert request.settings.options == {"offload": "optimizer"}
    assert PlanSettings(batch=2).options == {}
    with pytest.raises(msgspec.ValidationError, match="offload"):
        msgspec.convert({"batch": 2, "offload": "gradients"}, PlanSettings)


def test_layers_that_sleep_have_no_state(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    table.touch()
    request = TrainingRequest(
        model="m",
        input_shape=None,
        strategy=parse_strategy("d2"),
        batch=2,
        device="cpu",
        emulate=str(table),
        offload="optimizer",
    )
    with pytest.raises(
        UserError, match="with --emulate there is no optimizer state to copy: leave out --offload optimizer"
    ):
        request.check()
