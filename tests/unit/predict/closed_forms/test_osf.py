"""The evaluator ``osf``: against the paper's equations written out, cases worked out by hand, and the simulation."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from profile_factory import affine_seconds, layer_times, make_network, make_profile, model_times, ring_fit, with_compute

from calibrate.profile.profile import Profile, write_profile
from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.strategies.data.fusion.rules import RULES, Fusion, Gradients, last_of_buffers
from predict.cli import group
from predict.closed_forms.ledgers import exposed_in_turn
from predict.closed_forms.osf import exposed_seconds, scaling_factor, wait_seconds
from predict.costs.communication.fusion import fusion_options
from predict.costs.cost_model import CostModel
from predict.prediction.prediction import Prediction, Predictor
from predict.workload import Configuration, evaluator_named

layer_lists = st.lists(st.tuples(st.floats(1e-3, 1), st.integers(1, 100)), min_size=1, max_size=8)


def exchange(message_bytes: float) -> float:
    """0.1 s to start, then 0.01 s a byte; nothing for nothing."""
    return 0.1 + 0.01 * message_bytes if message_bytes else 0.0


def found_exposed(fusion: Fusion, layers: list[tuple[float, int]]) -> float:
    """What the module makes of (backward, bytes) per layer in the order of backward."""
    backward, sizes = zip(*layers, strict=True)
    ready = np.cumsum(backward)
    last = last_of_buffers(fusion, Gradients(ready, sizes), exchange)
    assert last[-1] == len(layers) - 1
    starts = (0, *(index + 1 for index in last))
    fused = [sum(sizes[low:high]) for low, high in itertools.pairwise(starts)]
    assert sum(fused) == sum(sizes)
    waits = wait_seconds(fusion, ready, last)
    return exposed_seconds(ready[list(last)], waits, np.array([exchange(size) for size in fused]), float(ready[-1]))


def papers_exposed(layers: list[tuple[float, int]], buffer_bytes: float, timeout_s: float) -> float:
    """T_update - T_overlap of eq. 10 and 12 to 16, layers counted from 1 at the input; the sums' indices mended."""
    n = len(layers)
    t_backward = {n - i: row[0] for i, row in enumerate(layers)}
    size = {n - i: row[1] for i, row in enumerate(layers)}
    held: dict[int, int] = {}
    sent: dict[int, int] = {}
    wait: dict[int, float] = {}
    for i in range(n, 0, -1):
        if i == n or held[i + 1] + size[i] > buffer_bytes or t_backward[i] >= timeout_s:
            held[i] = size[i]
        else:
            held[i] = held[i + 1] + size[i]
        full = i > 1 and held[i] + size[i - 1] > buffer_bytes
        late = i > 1 and t_backward[i - 1] >= timeout_s
        sent[i] = held[i] if i == 1 or late or full else 0
        wait[i] = timeout_s if late else t_backward[i - 1] if full else 0.0
    tau = 0.0
    for i in range(n - 1, 0, -1):
        tau = max(tau + wait[i + 1] + exchange(sent[i + 1]), sum(t_backward[j] for j in range(i, n)))
    return tau + exchange(sent[1]) - sum(t_backward[j] for j in range(1, n))


@given(layer_lists)
def test_without_fusion_it_is_the_papers_recursion(layers: list[tuple[float, int]]) -> None:
    n = len(layers)
    tau, ready = 0.0, 0.0
    for i in range(1, n):
        ready += layers[i][0]
        tau = max(tau + exchange(layers[i - 1][1]), ready)
    wanted = tau + exchange(layers[-1][1]) - ready
    assert found_exposed(Fusion(), layers) == pytest.approx(wanted)


@given(layer_lists, st.integers(1, 300), st.floats(1e-3, 2))
def test_a_buffer_with_a_timeout_is_the_papers_equations(
    layers: list[tuple[float, int]], buffer_bytes: int, timeout_s: float
) -> None:
    # What was summed up and what was given may be apart in the last digit, just where the timeout lies.
    assume(all(abs(backward_s - timeout_s) > 1e-9 for backward_s, _ in layers))
    fusion = Fusion(rule="buffer", buffer_bytes=buffer_bytes, timeout_s=timeout_s)
    assert found_exposed(fusion, layers) == pytest.approx(papers_exposed(layers, buffer_bytes, timeout_s))


def test_a_buffer_worked_out_by_hand() -> None:
    """Backward of 1 s each; 30, 30, 30 and 10 bytes in a buffer of 60.

    60 bytes are ready at 2, the buffer learns at 3 that the next does not fit: sent at 2 as eq. 15 has it, with the
    wait of 1 s behind it; 0.7 s of exchange end at 3.7, so at 4 the last 40 bytes start, and take 0.5 s.
    """
    layers = [(1.0, 30), (1.0, 30), (1.0, 30), (1.0, 10)]
    assert found_exposed(Fusion(rule="buffer", buffer_bytes=60, timeout_s=10.0), layers) == pytest.approx(0.5)
    # Of 0.5 s the timeout ends every buffer: four exchanges of their own, each hidden but for the last.
    assert found_exposed(Fusion(rule="buffer", buffer_bytes=60, timeout_s=0.5), layers) == pytest.approx(0.2)
    # A channel that is busy all the time: waits come on top of it (3 of 0.05 s), as printed.
    fast = [(0.05, 30)] * 4
    busy = Fusion(rule="buffer", buffer_bytes=30, timeout_s=10.0)
    assert found_exposed(busy, fast) == pytest.approx(0.05 + 4 * 0.4 + 3 * 0.05 - 4 * 0.05)


def test_adafusion_worked_out_by_hand() -> None:
    """Fusing saves a start of 0.1 s, so it pays where the next backward takes less."""
    gradients = Gradients(np.array([0.5, 0.55, 0.75, 0.8, 0.88]), (10, 20, 30, 40, 50))
    assert last_of_buffers(Fusion(rule="ada"), gradients, exchange) == (1, 4)


def test_mg_wfbp_worked_out_by_hand() -> None:
    """The channel is free at first: gradient 0 waits for 1 (0.05 s later) and not for 2 (0.3 s later).

    Then it is busy from 0.55 to 0.95: gradient 3 comes before 0.95 + 0.1, and 4 not before 1.0 + 0.1.
    """
    gradients = Gradients(np.array([0.5, 0.55, 0.85, 1.0, 1.15]), (10, 20, 30, 40, 50))
    assert last_of_buffers(Fusion(rule="mg-wfbp"), gradients, exchange) == (1, 3, 4)


@given(layer_lists)
def test_adafusion_never_fuses_what_costs_more_than_it_saves(layers: list[tuple[float, int]]) -> None:
    backward, sizes = zip(*layers, strict=True)
    last = last_of_buffers(Fusion(rule="ada"), Gradients(np.cumsum(backward), sizes), exchange)
    assume(all(abs(backward_s - 0.1) > 1e-9 for backward_s in backward))
    for index in range(len(layers) - 1):
        assert (index not in last) == (backward[index + 1] < 0.1)


def test_scaling_factors_are_shares_of_compute() -> None:
    assert scaling_factor(3.0, 1.0) == 0.75
    assert scaling_factor(0.0, 0.0) == 1.0


def profile_of(network: ModelGraph, **changes: object) -> Profile:
    base = make_profile(
        network,
        layer_times=layer_times(network, seconds=affine_seconds),
        model_times=model_times(network, seconds=affine_seconds, between_s=1e-4),
    )
    return msgspec.structs.replace(base, **changes)


def predicted(
    profile: Profile,
    network: ModelGraph,
    strategy: str,
    batch: int,
    evaluator: str = "osf",
    *,
    bucket_bytes: int = 1 << 20,
    fusion: Fusion | None = None,
) -> Prediction:
    wanted = plan_settings(batch=batch, first_bucket_bytes=bucket_bytes, bucket_cap_bytes=bucket_bytes)
    costs = CostModel(profile=profile, network=network, fusion=fusion or Fusion())
    point = Configuration(strategy=parse_strategy(strategy), settings=wanted)
    return Predictor(costs, evaluator_named(evaluator)).predict(point)


@settings(max_examples=25)
@given(st.integers(2, 120), st.integers(1, 5), st.integers(1, 32), st.integers(2, 32))
def test_one_bucket_a_layer_without_interference_is_what_simulate_gives(
    width: int, layers: int, local: int, ranks: int
) -> None:
    network = make_network([width] * (layers + 1))
    profile = profile_of(network)
    # A bucket is full with a layer's weight and not with its bias.
    osf, simulated, dag = (
        predicted(profile, network, f"d{ranks}", local * ranks, name, bucket_bytes=4 * width + 1)
        for name in ("osf", "simulate", "dag")
    )
    for other in (simulated, dag):
        assert osf.iteration_s == pytest.approx(other.iteration_s, rel=1e-9)
        for phase in ("FW", "BW", "GE", "WU"):
            assert osf.time.breakdown_s[phase] == pytest.approx(other.time.breakdown_s[phase], rel=1e-9, abs=1e-15)
    if 4 <= local <= 8:
        assert osf.time.interval_s == pytest.approx(simulated.time.interval_s, rel=1e-9)


@settings(max_examples=25)
@given(st.lists(st.integers(1, 200), min_size=2, max_size=6), st.integers(2, 16), st.integers(1, 100_000))
def test_ddps_buckets_without_interference_are_what_simulate_gives(
    widths: list[int], ranks: int, bucket_bytes: int
) -> None:
    network = make_network(widths)
    profile = profile_of(network)
    osf, simulated = (
        predicted(profile, network, f"d{ranks}", 4 * ranks, name, bucket_bytes=bucket_bytes, fusion=Fusion(rule="ddp"))
        for name in ("osf", "simulate")
    )
    assert osf.iteration_s == pytest.approx(simulated.iteration_s, rel=1e-9)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "none"])
def test_every_fusion_rule_sends_all_bytes_and_is_serial_alone(rule: str) -> None:
    network = make_network()
    slow = profile_of(network, communication=(ring_fit(alpha_s=1.0),))
    fusion = Fusion(rule=rule)  # type: ignore[arg-type]
    fused, apart = (predicted(slow, network, "d2", 8, fusion=each) for each in (fusion, Fusion()))
    # With a start of a second and backward of milliseconds one exchange is best, and all rules make one.
    assert fused.time.communication_s == pytest.approx(2 * (1.0 + network.parameter_bytes / 2 * 1e-9))
    assert fused.iteration_s < apart.iteration_s
    serial = predicted(slow, network, "serial", 8, fusion=fusion)
    assert serial.iteration_s == pytest.approx(predicted(slow, network, "serial", 8, "csf").iteration_s)
    assert not any("scaling factor" in note for note in serial.provenance.notes)


def test_osf_overlaps_for_free_and_notes_both_scaling_factors() -> None:
    network = make_network()
    hindered = profile_of(network, contexts=(with_compute(2.0, 2.0),))
    osf, csf = (predicted(hindered, network, "d2", 16, name) for name in ("osf", "csf"))
    assert osf.iteration_s == pytest.approx(predicted(profile_of(network), network, "d2", 16).iteration_s)
    compute_s = osf.time.breakdown_s["FW"] + osf.time.breakdown_s["BW"]
    factors = compute_s / (compute_s + osf.time.breakdown_s["GE"]), compute_s / (compute_s + csf.time.breakdown_s["GE"])
    assert factors[0] > factors[1]
    text = "scaling factor (OSF) {:.4f}, without overlap (CSF) {:.4f}, weight update left out".format(*factors)
    assert text in osf.provenance.notes
    # Neither has a straggler factor, so neither speaks of one.
    assert not any("straggler factor" in note for note in (*osf.provenance.notes, *csf.provenance.notes))
    assert f"scaling factor (CSF) {factors[1]:.4f}, weight update left out" in csf.provenance.notes


def test_options_are_horovods_and_for_osf_and_simulate() -> None:
    assert fusion_options("osf", {}) == Fusion()
    assert fusion_options("simulate", {}) is fusion_options("simulate", {"bucket_cap_mb": 5.0}) is None
    assert fusion_options("simulate", {"fusion_timeout": "2ms"}) == Fusion(rule="buffer", timeout_s=2e-3)
    assert fusion_options("osf", {"fusion_buffer": "2MiB"}) == Fusion(rule="buffer", buffer_bytes=2 << 20)
    assert fusion_options("osf", {"fusion": "ddp", "bucket_cap_mb": 5.0}) == Fusion(rule="ddp")
    assert fusion_options("osf", {"fusion_timeout": "2ms"}) == Fusion(rule="buffer", timeout_s=2e-3)
    for evaluator, options, message in (
        ("paradl", {"fusion": "ada"}, "--fusion is for --evaluator osf and simulate; paradl does not use it"),
        ("csf", {"fusion_buffer": "1M"}, "--fusion-buffer is for --evaluator osf and simulate; csf does not use it"),
        ("dag", {"fusion_timeout": "1ms"}, "--fusion-timeout is for --evaluator osf and simulate; dag does not use it"),
        (
            "simulate",
            {"bucket_cap_mb": 5.0, "fusion": "ada"},
            "--bucket-cap-mb is for --fusion ddp; --fusion ada has no",
        ),
        ("osf", {"fusion": "adda"}, "unknown --fusion 'adda': did you mean ada"),
        ("osf", {"fusion": "ada", "fusion_buffer": "1M"}, "is for --fusion buffer; --fusion ada has no buffer"),
        ("osf", {"fusion_buffer": "much"}, "size 'much' is not a size"),
        ("osf", {"fusion_timeout": "0"}, "--fusion-timeout: '0' is no time"),
        (
            "osf",
            {"bucket_cap_mb": 5.0},
            "--bucket-cap-mb is for --fusion ddp with --evaluator osf; --fusion none has no",
        ),
        ("osf", {"bucket_cap_mb": 5.0, "fusion": "ada"}, "--fusion ada has no DDP buckets"),
    ):
        with pytest.raises(UserError, match=message.replace("(", r"\(")):
            fusion_options(evaluator, options)
    with pytest.raises(ValueError, match="rule has to be one of"):
        Fusion(rule="all")  # type: ignore[arg-type]


def test_the_command_takes_them_and_refuses_other_strategies(tmp_path: Path) -> None:
    write_profile(tmp_path / "p.json", make_profile())
    given_options = ["--from-profile", str(tmp_path / "p.json"), "--model", "chain", "--batch", "8"]
    result = CliRunner().invoke(
        group, [*given_options, "--strategy", "d2", "--evaluator", "osf", "--fusion-buffer", "1KiB", "--json"]
    )
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.output)
    assert "a buffer of 1.00 KiB, timeout 5.00 ms: 3 all-reduces of the gradients of 3 layers" in found["notes"]
    assert any("eq. 15" in note for note in found["notes"])
    refused = CliRunner().invoke(group, [*given_options, "--strategy", "f2", "--evaluator", "osf"])
    assert "osf has closed forms for serial and data parallelism, not for f2" in str(refused.exception)


@given(layers=layer_lists, waits=st.lists(st.floats(0, 0.3), min_size=8, max_size=8), backward=st.floats(0, 20))
def test_what_is_exposed_of_each_exchange_adds_up(
    layers: list[tuple[float, int]], waits: list[float], backward: float
) -> None:
    ready = np.cumsum([seconds for seconds, _ in layers])
    sent, wait = np.array([exchange(size) for _, size in layers]), np.array(waits[: len(layers)])
    backward_s = max(backward, float(ready[-1]))
    of_waits, of_exchanges = exposed_in_turn(ready, wait, sent, backward_s)
    assert np.all(of_waits >= -1e-12)
    assert np.all(of_waits <= wait + 1e-12)
    assert np.all(of_exchanges >= -1e-12)
    assert np.all(of_exchanges <= sent + 1e-12)
    whole = exposed_seconds(ready, wait, sent, backward_s)
    assert of_waits.sum() + of_exchanges.sum() == pytest.approx(whole, abs=1e-9)
