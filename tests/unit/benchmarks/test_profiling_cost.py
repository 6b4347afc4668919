"""Cost of profiling a search: seconds of devices by records, against those of running what a grid tries."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "speed"))

import profiling_cost
from profile_factory import make_profile, ring_fit
from synthetic_measurements import network, write_collectives, write_layers

from calibrate.profile.profile import write_profile
from paradl_bench.core.files.json_lines import append_lines
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.records.hosts.host_load import LOAD_FILE, HostLoad
from predict.costs.cost_model import CostModel
from predict.prediction.prediction import Predictor
from predict.workload import Configuration, evaluator_named

RANKS = 2
"""Of the synthetic sweep."""


@pytest.fixture
def measured(tmp_path: Path) -> list[Path]:
    """Layers of one device, and a sweep by several ranks, which took 20 and 6 seconds."""
    paths = [tmp_path / "layers", tmp_path / "sweep"]
    write_layers(paths[0])
    write_collectives(paths[1])
    append_lines(paths[0] / LOAD_FILE, [HostLoad(seconds=seconds, cores=1) for seconds in (15.0, 5.0)])
    # The moment before is no part of it.
    append_lines(paths[1] / LOAD_FILE, [HostLoad(seconds=9.0, cores=2, while_measuring=False)])
    append_lines(paths[1] / LOAD_FILE, [HostLoad(seconds=6.0, cores=2)])
    return paths


def test_measurements_cost_their_whole_time_on_every_rank(measured: list[Path]) -> None:
    layers, sweep = map(profiling_cost.measured_cost, measured)
    assert (layers.devices, layers.device_s) == (1, 20.0)
    assert (sweep.devices, sweep.device_s) == (RANKS, RANKS * 6.0)


def test_a_search_is_held_against_running_its_grid(
    measured: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chain = network()
    profile = make_profile(chain, communication=tuple(map(ring_fit, ("all_reduce", "send_recv"))))
    write_profile(tmp_path / "profile.json", profile)
    asked = ["--from-profile", str(tmp_path / "profile.json"), "--model", chain.name, "--batch", "16", "--ranks", "2"]
    assert profiling_cost.main([*map(str, measured), *asked, "--iterations", "10"]) == 0
    out = capsys.readouterr().out
    model = CostModel(profile=profile, network=chain)
    point = Configuration(strategy=parse_strategy("d2"), settings=plan_settings(batch=16))
    whole_s = 2 * 10 * Predictor(model, evaluator_named("simulate")).predict(point).iteration_s
    assert "1M1P2D" in out
    costs, _ = profiling_cost.run_costs(model, 2, 16, 10)
    assert next(cost for cost in costs if cost.name == "1M1P2D").device_s == pytest.approx(whole_s)
    expected = (20 + RANKS * 6.0) / sum(cost.device_s for cost in costs)
    assert f"relative scale {expected:.4f}" in out


def test_a_measurement_without_its_length_is_refused(
    measured: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (measured[1] / LOAD_FILE).unlink()
    write_profile(tmp_path / "profile.json", make_profile(network()))
    asked = ["--from-profile", str(tmp_path / "profile.json"), "--model", network().name]
    assert profiling_cost.main([*map(str, measured), *asked]) == 2
    assert "does not say how long it took" in capsys.readouterr().err
