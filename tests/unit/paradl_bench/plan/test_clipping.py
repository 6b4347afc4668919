"""Gradients limited by their norm: what a plan issues for it, what it takes, and torch's own clipping on one rank."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from predict_caller import Caller
from profile_factory import free_copies, make_network, make_profile, ring_fit

from calibrate.profile.profile import write_profile
from paradl_bench.cli import group
from paradl_bench.network.graph import Tensor
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Collective, GradientPass, Plan, WeightUpdate
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.passes.clipping import ranks_alike, sums_before
from predict.simulation.pipelines.pipeline_simulation import PipelineSimulation

NETWORK = make_network((64, 128, 256, 32))
# Axes along which ranks hold other gradients, of all that a strategy has.
SUMMED = {
    "serial": (),
    "d4": (),
    "z1d4": (),
    "z2d4": (0,),
    "z3d4": (0,),
    "d2z3d2": (1,),
    "f4": (0,),
    "c4": (0,),
    "t4": (0,),
    "d2f2": (1,),
    "z3d2f2": (0, 1),
    "p2": (0,),
    "d2p2": (1,),
    "p2f2": (0, 1),
    "d2p2t2": (1, 2),
}


def planned(text: str, clip_norm: float | None = 1.0) -> Plan:
    strategy = parse_strategy(text)
    return planner_for(strategy).plan(NETWORK, strategy, PlanSettings(batch=32, clip_norm=clip_norm))


@pytest.mark.parametrize("text", SUMMED)
def test_one_number_is_summed_where_gradients_differ(text: str) -> None:
    plan, without = planned(text), planned(text, None)
    axes = SUMMED[text]
    ranks = math.prod(plan.strategy.axes[index].degree for index in axes)
    expected = [Collective(operation="all_reduce", message_bytes=4, ranks=ranks, axes=axes)] if axes else []
    for role, other in zip(plan.roles, without.roles, strict=True):
        works = [plan.works[index] for index in role.work]
        at = next(index for index, work in enumerate(works) if isinstance(work, GradientPass))
        norm, *summed, scale, update = works[at : at + 3 + len(expected)]
        assert isinstance(norm, GradientPass)
        assert isinstance(scale, GradientPass)
        assert [norm.part, scale.part] == ["norm", "scale"]
        assert summed == expected
        assert isinstance(update, WeightUpdate)
        # A rank of ZeRO's stage 1 clips all gradients, and updates its part of the parameters.
        assert norm.elements == (NETWORK.parameter_bytes // 4 if text == "z1d4" else update.elements)
        assert [w for i, w in enumerate(works) if not at <= i < at + 2 + len(expected)] == [
            without.works[index] for index in other.work
        ]
        assert [work for when, work in role.exchanged_before if when == "first" and work in expected] == expected


@pytest.mark.parametrize("text", ["f2", "d2f2", "z3d2f2"])
def test_whole_parameters_count_once_over_all_ranks(text: str) -> None:
    strategy, settings = parse_strategy(text), PlanSettings(batch=32, clip_norm=1.0)
    counted = dict.fromkeys((parameter.name for parameter in NETWORK.parameters), 0.0)
    for rank in range(2):
        alike = ranks_alike(NETWORK, strategy, rank, settings, {})
        split = planner_for(strategy).shards_of(rank, NETWORK, strategy, settings).network
        for whole, own in zip(NETWORK.parameters, split.parameters, strict=True):
            counted[whole.name] += own.elements / whole.elements / alike[whole.name]
    assert counted == dict.fromkeys(counted, 1.0)


def test_no_stage_scales_before_the_last_has_its_norm() -> None:
    plan = planned("p2")
    ones, seconds = np.ones(len(plan.works)), np.zeros(len(plan.works))
    norms = [index for index, work in plan.of_kind(GradientPass).items() if work.part == "norm"]
    updates = list(plan.of_kind(WeightUpdate))
    assert len(norms) == len(updates) == 2
    seconds[norms[0]], seconds[norms[1]] = 3.0, 5.0
    seconds[updates] = 7.0
    # Each update begins when both norms are there, whichever of the two stages it belongs to.
    assert PipelineSimulation(plan, ones).iteration_s(seconds, ones, ones) == 12.0
    seconds[norms[0]], seconds[norms[1]] = 6.0, 1.0
    seconds[updates[0]] = 0.0
    assert PipelineSimulation(plan, ones).iteration_s(seconds, ones, ones) == 13.0


@pytest.mark.parametrize("strategy", ["serial", "d2"])
def test_predicted_seconds_are_those_of_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], strategy: str
) -> None:
    """The norm takes half of a copy, since it writes nothing, and scaling a whole one."""
    call = Caller(tmp_path, monkeypatch, capfd)
    profile = make_profile(NETWORK, copies=free_copies(beta_s_per_byte=1e-9), communication=(ring_fit(alpha_s=0.0),))
    write_profile(call.profile, profile)
    asked = ("--strategy", strategy, "--batch", "8", "--format", "json")
    (without,), (clipped,) = call(*asked).json(), call(*asked, "--clip-norm", "1.5").json()
    assert clipped["options"] == {"clip_norm": "1.5"}
    held = plan_bytes(strategy)
    longer_s = float(clipped["iteration_s"]) - float(without["iteration_s"])
    assert longer_s == pytest.approx(1.5 * held * 1e-9, rel=0.02)
    assert any("clipping gradients was not measured" in text for text in clipped["extrapolated"])


def plan_bytes(text: str) -> int:
    """Of the gradients of the rank that holds most."""
    plan = planned(text)
    return max(4 * work.elements for work in plan.of_kind(GradientPass).values())


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "x"])
def test_a_limit_that_is_no_norm_is_refused(text: str) -> None:
    arguments = ["train", "plain", "--strategy", "d2", "--batch", "4", "-o", "x", "--clip-norm", text]
    result = CliRunner().invoke(group, arguments)
    assert result.exit_code == 2
    assert "--clip-norm" in result.output


@pytest.mark.parametrize("share", [0.3, 3.0])
def test_one_rank_clips_as_torch_does(share: float) -> None:
    torch = pytest.importorskip("torch")
    from paradl_bench.strategies.running.clipped_gradients import GradientClipper

    def model() -> torch.nn.Module:
        torch.manual_seed(3)
        made = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 3), torch.nn.Linear(3, 2)).double()
        made[1].requires_grad_(False)
        made(torch.ones(2, 4, dtype=torch.float64)).square().sum().backward()
        return made

    own, exact = model(), model()
    norm = torch.nn.utils.get_total_norm([p.grad for p in exact.parameters() if p.grad is not None])
    torch.nn.utils.clip_grad_norm_(exact.parameters(), share * float(norm))
    torch.testing.assert_close(
        GradientClipper(own, share * float(norm), {}, None, torch.float64).clip(), norm, rtol=1e-14, atol=0
    )
    for one, other in zip(own.parameters(), exact.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-14, atol=0)


@pytest.mark.parametrize(("dtypes", "size"), [("bfloat16 bfloat16", 4), ("float16 float32", 4), ("float32 float64", 8)])
def test_squares_are_added_in_the_dtype_that_is_planned(dtypes: str, size: int) -> None:
    """Squares of fp16 end at a norm of 256, and squares that bf16 adds up lose the small ones."""
    torch = pytest.importorskip("torch")
    from paradl_bench.strategies.running.clipped_gradients import GradientClipper, dtype_of_squares

    names = dtypes.split()
    module = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(4, dtype=getattr(torch, name))) for name in names)
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
    parameters = tuple(Tensor(name=str(index), shape=(4,), dtype=short[name]) for index, name in enumerate(names))
    network = msgspec.structs.replace(NETWORK, parameters=parameters, gradient_order=())
    (_, work), _ = sums_before(network, parse_strategy("f2"), PlanSettings(batch=8, clip_norm=1.0))
    assert work.message_bytes == dtype_of_squares(module).itemsize == size
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 300.0)
    norm = GradientClipper(module, 2.0, {"0": 4}, None, dtype_of_squares(module)).clip()
    # Of four ranks that hold the first alike this one counts a quarter of its squares.
    assert float(norm) == pytest.approx(math.sqrt(600.0**2 / 4 + 600.0**2), rel=3e-3)
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert parameter.grad.tolist() == pytest.approx([300.0 * 2.0 / float(norm)] * 4, rel=3e-3)
