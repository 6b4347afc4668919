"""Fusion of gradients in the simulation: against OSF's closed form, and against starts worked out one by one."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from profile_factory import (
    affine_seconds,
    free_copies,
    layer_times,
    make_network,
    make_profile,
    model_times,
    ring_fit,
    with_compute,
)

from calibrate.profile.profile import Profile, write_profile
from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import BucketCopy, Collective, Wait
from paradl_bench.strategies.data.fusion.rules import Fusion, Rule
from predict.cli import group
from predict.costs.cost_model import CostModel
from predict.prediction.prediction import Prediction, Predictor
from predict.simulation.prepared import price
from predict.workload import Configuration, evaluator_named

RULES: tuple[Rule, ...] = ("none", "ada", "mg-wfbp")
networks = st.lists(st.integers(1, 200), min_size=2, max_size=6).map(make_network)


def profile_of(network: ModelGraph, **changes: object) -> Profile:
    base = make_profile(
        network,
        layer_times=layer_times(network, seconds=affine_seconds),
        model_times=model_times(network, seconds=affine_seconds, between_s=1e-4),
    )
    return msgspec.structs.replace(base, **changes)


def model_of(profile: Profile, fusion: Fusion) -> CostModel:
    return CostModel(profile=profile, network=next(iter(profile.network.values())), fusion=fusion)


def point_of(text: str, local: int = 4, **changes: object) -> Configuration:
    strategy = parse_strategy(text)
    wanted = plan_settings(batch=local * strategy.ranks, **changes)  # type: ignore[arg-type]
    return Configuration(strategy=strategy, settings=wanted)


def predicted(profile: Profile, fusion: Fusion, evaluator: str = "simulate", text: str = "d4") -> Prediction:
    return Predictor(model_of(profile, fusion), evaluator_named(evaluator)).predict(point_of(text))


@settings(max_examples=30)
@given(networks, st.sampled_from(RULES), st.integers(2, 32))
def test_what_waits_for_nothing_takes_what_osf_says(network: ModelGraph, rule: Rule, ranks: int) -> None:
    profile, fusion = profile_of(network), Fusion(rule=rule)
    simulated, osf = (predicted(profile, fusion, name, f"d{ranks}") for name in ("simulate", "osf"))
    assert simulated.iteration_s == pytest.approx(osf.iteration_s, rel=1e-9)
    for phase in ("FW", "BW", "GE", "WU"):
        assert simulated.time.breakdown_s[phase] == pytest.approx(osf.time.breakdown_s[phase], rel=1e-9, abs=1e-15)
    assert simulated.time.compute_s == pytest.approx(osf.time.compute_s)
    assert simulated.time.communication_s == pytest.approx(osf.time.communication_s)
    assert simulated.provenance.sources == pytest.approx(osf.provenance.sources)
    assert simulated.time.interval_s == pytest.approx(osf.time.interval_s, rel=1e-9)


@settings(max_examples=30)
@given(networks, st.integers(1, 100_000), st.floats(1e-5, 1e-2))
def test_a_buffer_on_a_free_channel_takes_what_osf_says(
    network: ModelGraph, buffer_bytes: int, timeout_s: float
) -> None:
    """Where every exchange is over before the next is sent, the wait may stand before it or behind the one before."""
    quick = (ring_fit(alpha_s=1e-12, beta_s_per_byte=1e-18),)
    fusion = Fusion(rule="buffer", buffer_bytes=buffer_bytes, timeout_s=timeout_s)
    simulated, osf = (predicted(profile_of(network, communication=quick), fusion, name) for name in ("simulate", "osf"))
    assert simulated.iteration_s == pytest.approx(osf.iteration_s, rel=1e-6)


@settings(max_examples=40)
@given(networks, st.integers(1, 100_000), st.floats(1e-5, 1e-2), st.floats(1e-6, 1e-2))
def test_a_fusion_buffer_starts_on_a_free_channel_after_waiting(
    network: ModelGraph, buffer_bytes: int, timeout_s: float, start_up_s: float
) -> None:
    """Worked out gradient by gradient, from seconds and bytes alone."""
    profile = profile_of(network, communication=(ring_fit(alpha_s=start_up_s),))
    local, ranks = 4, 4

    def layer_s(index: int, phase: str) -> float:
        between_s = (1e-4 if phase == "FW" else 2e-4) / len(network.layers)
        return affine_seconds(network.layers[index], phase, local) + between_s

    sizes = {
        layer.name: sum(t.bytes for t in network.parameters if t.name in layer.parameters) for layer in network.layers
    }
    order = range(len(network.layers) - 1, -1, -1)
    now, ready = 0.0, []
    for index in order:
        # The gradient is there before the time between operations.
        done = now + affine_seconds(network.layers[index], "BW", local)
        if sizes[network.layers[index].name]:
            ready.append((done, sizes[network.layers[index].name]))
        now += layer_s(index, "BW")
    backward_s, free, held = now, 0.0, 0
    for index, (at, size) in enumerate(ready):
        held += size
        gap = ready[index + 1][0] - at if index + 1 < len(ready) else None
        if gap is not None and abs(gap - timeout_s) < 1e-9:
            return
        if gap is None:
            wait = 0.0
        elif gap >= timeout_s:
            wait = timeout_s
        elif held + ready[index + 1][1] > buffer_bytes:
            wait = gap
        else:
            continue
        free = max(free, at + wait) + 2 * (ranks - 1) * (start_up_s + held / ranks * 1e-9)
        held = 0
    forward_s = sum(layer_s(index, "FW") for index in order)
    found = predicted(profile, Fusion(rule="buffer", buffer_bytes=buffer_bytes, timeout_s=timeout_s))
    assert found.iteration_s == pytest.approx(forward_s + max(backward_s, free) + 1e-4, rel=1e-6)
    assert found.time.breakdown_s["GE"] == pytest.approx(max(free - backward_s, 0.0), rel=1e-6, abs=1e-9)


def test_ddp_is_what_is_simulated_where_nothing_is_asked() -> None:
    network = make_network((64, 128, 256, 32))
    profile = profile_of(network)
    default = Predictor(CostModel(profile=profile, network=network), evaluator_named("simulate")).predict(
        point_of("d4")
    )
    assert predicted(profile, Fusion(rule="ddp")).iteration_s == default.iteration_s
    assert predicted(profile, Fusion(rule="none")).time.communication_s > default.time.communication_s


def test_the_exchange_is_hindered_and_late_as_any_other() -> None:
    network = make_network((64, 128, 256, 32))
    still = profile_of(network)
    hindered = profile_of(network, contexts=(with_compute(1.5, 2.0),))
    late = profile_of(
        network, model_times=model_times(network, seconds=affine_seconds, quantiles=(0.8, 1.0, 1.2), samples=100)
    )
    for rule in ("none", "buffer", "ada", "mg-wfbp"):
        fusion = Fusion(rule=rule, buffer_bytes=40_000)  # type: ignore[arg-type]
        alone = predicted(still, fusion)
        assert predicted(hindered, fusion).iteration_s > alone.iteration_s
        assert predicted(late, fusion).time.straggler > alone.time.straggler == 1.0


def test_several_tensors_are_copied_and_a_timer_counts_as_nothing() -> None:
    network = make_network((64, 128, 256, 32))
    profile = profile_of(network)
    # Every backward takes longer than the timeout, so each layer's weight and bias are sent after a timer.
    fusion = Fusion(rule="buffer", timeout_s=1e-5)
    plan = price(model_of(profile, fusion), point_of("d4")).plan
    (role,) = plan.roles
    kinds = [type(plan.works[work]) for work in role.work]
    assert kinds.count(Collective) == 3
    assert kinds.count(BucketCopy) == 6
    assert kinds.count(Wait) == 2  # the last one waits for nothing
    found, none = (predicted(profile, each) for each in (fusion, Fusion(rule="none")))
    assert found.time.communication_s == pytest.approx(none.time.communication_s)
    assert found.provenance.sources == pytest.approx(none.provenance.sources)
    copied = predicted(profile_of(network, copies=free_copies(beta_s_per_byte=1e-9)), fusion)
    gradients = 4 * sum(parameter.elements for parameter in network.parameters)
    assert copied.time.compute_s - found.time.compute_s == pytest.approx(2 * gradients * 1e-9)
    assert copied.iteration_s > found.iteration_s


def test_a_timer_is_some_time() -> None:
    with pytest.raises(ValueError, match="not negative, not -1"):
        Wait(seconds=-1.0)
    with pytest.raises(ValueError, match="finite"):
        Wait(seconds=float("nan"))


@pytest.mark.parametrize(
    ("text", "changes", "said"),
    [
        ("f2", {}, "--fusion ada is of data parallelism alone, not of f2: leave it out"),
        ("z1d4", {}, "not of z1d4"),
        ("d2f2", {}, "not of d2f2"),
        ("d4", {"exchange": "leader", "ranks_per_node": 2}, "leave out --exchange leader"),
        ("d4", {"batch_norm": "sync"}, "leave out --batch-norm sync"),
        ("d4", {"accumulate": 2}, "knows no --accumulate 2"),
        ("d4", {"recompute": ("all",)}, "knows no --recompute all: leave it out"),
    ],
)
def test_what_no_such_exchange_is_planned_of_is_refused(text: str, changes: dict[str, object], said: str) -> None:
    model = model_of(profile_of(make_network()), Fusion(rule="ada"))
    with pytest.raises(UserError, match=said):
        price(model, point_of(text, **changes))  # type: ignore[arg-type]


def test_predict_names_its_fusion_and_says_what_train_runs(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_profile(path, profile_of(make_network((64, 128, 256, 32))))
    given_options = ["--from-profile", str(path), "--model", "chain", "--batch", "16", "--strategy", "d4"]
    asked = [*given_options, "--fusion-buffer", "64KiB", "--fusion-timeout", "1ms"]
    result = CliRunner().invoke(group, [*asked, "--json"])
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.output)
    assert "a buffer of 64.0 KiB, timeout 1.00 ms" in " ".join(found["notes"])
    assert any("train runs its messages (--fusion-out)" in note for note in found["notes"])
    traced = CliRunner().invoke(group, ["timeline", *asked[:-1], "0.01ms", "-o", str(tmp_path / "trace.json")])
    assert traced.exit_code == 0, traced.output
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event.get("name") for event in events if event.get("ph") == "X"]
    assert {"wait for a gradient", "all_reduce", "copy into bucket"} <= set(names)
    last = max(event["ts"] + event["dur"] for event in events if event.get("ph") == "X")
    plain = json.loads(CliRunner().invoke(group, [*asked[:-1], "0.01ms", "--json"]).output)
    assert last == pytest.approx(plain[0]["iteration_s"] * 1e6, rel=1e-6)
    assert np.isfinite(last)
