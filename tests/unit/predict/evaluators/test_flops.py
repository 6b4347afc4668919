"""``flops``: FLOPs over the peak and bytes over the bandwidth, by hand; its source, and what it refuses."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from profile_factory import in_context, make_network, make_profile, noisy_profile, ring_fit, with_doctor

from calibrate.profile.profile import Profile, write_profile
from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.settings import PlanSettings, plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.records.cluster import ClusterFile, Level
from predict.cli import group
from predict.costs.cost_model import CostModel
from predict.costs.hardware.what_if_hardware import Hardware
from predict.prediction.prediction import Prediction, Predictor
from predict.search.candidates.space import find_space
from predict.search.pricing.estimate import Estimates
from predict.search.pricing.shared_work import SharedWorks
from predict.workload import Configuration, evaluator_named

PEAK = 1e11
BETA = 1e-9
WIDTHS = (64, 128, 256, 32)
NETWORK = make_network(WIDTHS)
SQUARE = make_network((64, 64, 64))
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "send_recv", "broadcast", "reduce")


def known(network: ModelGraph = NETWORK, **changes: object) -> Profile:
    fits = tuple(ring_fit(operation) for operation in OPERATIONS)
    return with_doctor(make_profile(network, **{"communication": fits, **changes}), flops=PEAK)


def predict(profile: Profile, strategy: str, batch: int = 16, **model: object) -> Prediction:
    (network,) = profile.network.values()
    costs = CostModel(profile=profile, network=network, **model)  # type: ignore[arg-type]
    point = Configuration(strategy=parse_strategy(strategy), settings=plan_settings(batch=batch))
    return Predictor(costs, evaluator_named("flops")).predict(point)


def flops_by_hand(widths: tuple[int, ...], batch: int) -> float:
    """Three products of 2 rows x columns a linear layer, one operation an element and way an activation."""
    pairs = itertools.pairwise(widths)
    return batch * sum(3 * 2 * rows * columns + 2 * columns for rows, columns in pairs)


def weights_by_hand(widths: tuple[int, ...]) -> int:
    """Bytes of weights and biases."""
    return 4 * sum(rows * columns + columns for rows, columns in itertools.pairwise(widths))


def test_serial_is_flops_over_the_peak() -> None:
    found = predict(known(), "serial")
    assert found.iteration_s == pytest.approx(flops_by_hand(WIDTHS, 16) / PEAK)
    assert found.time.phases_s["WU"] == 0


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_data_adds_the_ring_s_bytes_over_bandwidth(ranks: int) -> None:
    found = predict(known(), f"d{ranks}", batch=8 * ranks)
    exchanged_s = 2 * (ranks - 1) / ranks * weights_by_hand(WIDTHS) * BETA
    assert found.iteration_s == pytest.approx(flops_by_hand(WIDTHS, 8) / PEAK + exchanged_s)
    assert found.time.phases_s["GE"] == pytest.approx(exchanged_s)


def test_a_pipeline_of_equal_stages_fills_and_drains() -> None:
    """Two stages, two micro-batches of 8 samples: three steps, and a message each way while the other stage waits."""
    beta = BETA / 10
    found = predict(known(SQUARE, communication=(ring_fit("send_recv", beta_s_per_byte=beta),)), "p2")
    step_s, message_s = flops_by_hand((64, 64), 8) / PEAK, 4 * 64 * 8 * beta
    assert found.iteration_s == pytest.approx(3 * step_s + 2 * message_s)


def test_nothing_measured_of_compute_or_latency_counts() -> None:
    alone = predict(known(), "d2").iteration_s
    noisy = noisy_profile(NETWORK)
    slow = tuple(
        ring_fit(fit.operation, alpha_s=1.0, block_relative_sd=0.1, covariance=fit.covariance)
        for fit in noisy.communication
    )
    late = msgspec.structs.replace(noisy, communication=slow, contexts=(in_context("after-compute", added_s=1.0),))
    found = predict(with_doctor(late, flops=PEAK), "d2")
    assert found.iteration_s == pytest.approx(alone)
    assert found.time.straggler == 1


def test_the_regime_of_the_largest_messages_gives_the_bandwidth() -> None:
    regimes = (
        ring_fit(regime="<=1024", beta_s_per_byte=7e-9, bytes_range=(1, 1024)),
        ring_fit(regime=">1024", bytes_range=(2048, 1 << 30)),
    )
    assert predict(known(communication=regimes), "d2").iteration_s == pytest.approx(predict(known(), "d2").iteration_s)


def test_a_cluster_file_states_peak_and_bandwidth() -> None:
    level = Level(name="node", ranks=2, alpha_s=1.0, beta_s_per_byte=2 * BETA, contention=3.0)
    site = ClusterFile(
        name="site", levels=(level,), device_name="other", peak_flops=2 * PEAK, memory_bandwidth_bytes_per_s=1.0
    )
    found = predict(known(), "d2", cluster=site)
    expected_s = flops_by_hand(WIDTHS, 8) / (2 * PEAK) + weights_by_hand(WIDTHS) * 2 * BETA
    assert found.iteration_s == pytest.approx(expected_s)
    assert "stated by the cluster file" in found.provenance.extrapolated[0]


def test_factors_of_hardware_count_once() -> None:
    found = predict(known(), "d2", hardware=Hardware(peak_flops=2.0, bandwidth=4.0, latency=9.0, memory_bandwidth=3.0))
    expected_s = flops_by_hand(WIDTHS, 8) / (2 * PEAK) + weights_by_hand(WIDTHS) * BETA / 4
    assert found.iteration_s == pytest.approx(expected_s)


def test_source_and_missing_interval_are_said() -> None:
    found = predict(known(), "d2")
    assert found.time.interval_s == (found.iteration_s, found.iteration_s)
    assert found.provenance.sources["roofline"] + found.provenance.sources["regressed"] == pytest.approx(1)
    (said,) = found.provenance.extrapolated
    assert "1e+11 FLOP/s a rank (measured by doctor in fp32)" in said
    assert "bandwidth" in said
    assert "nothing tells an interval" in said
    assert "bandwidth" not in predict(known(), "serial").provenance.extrapolated[0]


def test_without_a_peak_a_line_says_what_to_give() -> None:
    with pytest.raises(UserError, match=r"doctor --measure.*or give --cluster with peak_flops") as refused:
        predict(make_profile(), "serial")
    assert "\n" not in str(refused.value)


def test_a_network_without_flops_is_refused() -> None:
    layers = tuple(
        msgspec.structs.replace(layer, fw_flops=0, bw_input_flops=0, bw_weight_flops=0) for layer in NETWORK.layers
    )
    with pytest.raises(UserError, match="needs the FLOPs of layers, and chain was imported as times only"):
        predict(known(msgspec.structs.replace(NETWORK, layers=layers)), "serial")


def test_no_candidate_is_faster_than_its_estimate() -> None:
    costs = CostModel(profile=known(), network=NETWORK)
    space = find_space(NETWORK, PlanSettings(batch=16, blocking=True), 4, (1,))
    estimates = Estimates(costs.by_flops(), space, SharedWorks(NETWORK, space.settings)).seconds()
    whole = [candidate for candidate in range(len(space)) if not space.mesh(candidate).shared]
    assert len(whole) > 10
    for candidate in whole:
        strategy = space.strategies[space.strategy[candidate]]
        point = Configuration(strategy=strategy, settings=space.settings_of(candidate))
        exact_s = evaluator_named("flops").prepare(costs, point).timing().iteration_s
        assert 0 < estimates[candidate] <= exact_s * (1 + 1e-9), str(strategy)


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(group, words)
    return result.exit_code, str(result.exception) if result.exception else result.stdout


def test_the_command_says_that_no_interval_is_known(tmp_path: Path) -> None:
    write_profile(tmp_path / "p.json", known())
    asked = ("--from-profile", str(tmp_path / "p.json"), "--model", "chain", "--batch", "16")
    code, shown = run(*asked, "--strategy", "d2", "--evaluator", "flops")
    assert code == 0
    assert "not known" in shown
    assert ": flops" in shown


def test_a_search_by_flops_passes_the_evaluator_on(tmp_path: Path) -> None:
    write_profile(tmp_path / "p.json", known())
    asked = ("search", "--from-profile", str(tmp_path / "p.json"), "--model", "chain", "--batch", "16", "--ranks", "4")
    code, shown = run(*asked, "--evaluator", "flops", "--json")
    assert code == 0, shown
    first = json.loads(shown)["rows"][0]
    assert first["prediction"]["evaluator"] == "flops"
    assert first["predict_command"].endswith("--evaluator flops")
    assert "flops" not in first["train_command"]
    strategy = first["prediction"]["strategy"]
    predicted = CliRunner().invoke(group, [*first["predict_command"].split()[1:], "--json"])
    (again,) = json.loads(predicted.stdout)
    assert (again["strategy"], again["iteration_s"]) == (strategy, first["prediction"]["iteration_s"])


def test_a_search_refuses_evaluators_without_an_estimate(tmp_path: Path) -> None:
    write_profile(tmp_path / "p.json", known())
    asked = ("search", "--from-profile", str(tmp_path / "p.json"), "--model", "chain", "--batch", "16", "--ranks", "4")
    _, refused = run(*asked, "--evaluator", "paradl")
    expected = "--evaluator paradl: predict search has lower bounds of candidates only for flops or simulate: "
    assert refused == expected + "give one of them"
