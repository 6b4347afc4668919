"""What-if with layers replaced: seconds and scaling factors by the tests' own arithmetic, and what is printed."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from predict_caller import Caller, Result
from profile_factory import make_network, make_profile, model_times, noisy_profile

from calibrate.profile.profile import write_profile
from predict.closed_forms.osf import scaling_factor

CHAIN = make_network()
ALPHA_S, BETA_S, UPDATE_S = 50e-6, 1e-9, 1e-4
NARROWED = ("--replace", "fc1=none", "--replace", "relu1=none", "--replace", "fc2=linear(128,32)")
"""64-128-256-32 to 64-128-32."""
PEAK, BANDWIDTH = 1e11, 1e10


@pytest.fixture
def predict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Caller:
    return Caller(tmp_path, monkeypatch, capfd)


def what_if(predict: Caller, *arguments: str, strategy: str = "d2") -> Result:
    given = ("--from-profile", str(predict.profile), "--model", "chain", "--strategy", strategy, "--batch", "8")
    return predict.bare("what-if", *given, *arguments)


def rows_of(predict: Caller, *arguments: str, strategy: str = "d2") -> list[dict[str, Any]]:
    """Rows of the chain with its middle narrowed, unless something else is replaced."""
    given = arguments if "--replace" in arguments else (*NARROWED, *arguments)
    found = what_if(predict, *given, "--json", strategy=strategy)
    assert found.code == 0, found.err
    rows: list[dict[str, Any]] = json.loads(found.out)
    return rows


def seconds_of(outputs: int, samples: int) -> float:
    """Forward and backward of a layer of the synthetic profile."""
    return 3e-6 * (1 + outputs) * samples


def all_reduce_s(elements: int) -> float:
    """A ring of two: 2 (p - 1) alpha + 2 (p - 1)/p bytes beta."""
    return 2 * ALPHA_S + 4 * elements * BETA_S


def roofline_s(rows: int, columns: int, samples: int, *, bias: int) -> float:
    """Forward of a linear layer; the synthetic network counts no FLOPs for a bias."""
    flops = samples * (2 * rows * columns + bias * columns)
    return max(flops / PEAK, 4 * (samples * (rows + columns) + rows * columns + columns) / BANDWIDTH)


def test_scaling_factors_before_and_after_by_hand(predict: Caller) -> None:
    before, after = rows_of(predict, "--evaluator", "csf")
    samples = 4
    kept_s = 2 * seconds_of(128, samples) + seconds_of(32, samples)
    # Of the linear layers that were measured fc2 has as many outputs: it stands for the new one.
    new_s = seconds_of(32, samples) * roofline_s(128, 32, samples, bias=1) / roofline_s(256, 32, samples, bias=0)
    old_elements = 64 * 128 + 128 + 128 * 256 + 256 + 256 * 32 + 32
    new_elements = 64 * 128 + 128 + 128 * 32 + 32
    compute_s = kept_s + new_s + UPDATE_S * new_elements / old_elements
    old_s = kept_s + 2 * seconds_of(256, samples) + seconds_of(32, samples) + UPDATE_S
    for row, own_s, elements in ((before, old_s, old_elements), (after, compute_s, new_elements)):
        exchange_s = all_reduce_s(elements)
        assert row["parameters"] == elements
        assert row["gradient_bytes"] == 4 * elements
        assert row["communication_s"] == pytest.approx(exchange_s)
        assert row["exposed_communication_s"] == pytest.approx(exchange_s)
        assert row["iteration_s"] == pytest.approx(own_s + exchange_s)
        assert row["scaling_factor"] == pytest.approx(scaling_factor(own_s, exchange_s))
    assert after["speedup_over_base"] == pytest.approx(before["iteration_s"] / after["iteration_s"])


def test_the_osf_evaluator_says_its_own_factor_too(predict: Caller) -> None:
    before, after = rows_of(predict, "--evaluator", "osf")
    for row in (before, after):
        times = row["breakdown_s"]
        assert isinstance(times, dict)
        own = scaling_factor(times["FW"] + times["BW"], times["exposed_communication"])
        assert any(f"scaling factor (OSF) {own:.4f}" in note for note in row["notes"])


def test_new_layers_come_with_sources_and_spread(predict: Caller) -> None:
    before, after = rows_of(predict)
    assert (before["replaced"], before["layers"], before["removed"]) == ([], [], [])
    assert after["replaced"] == list(NARROWED[1::2])
    assert after["removed"] == ["fc1", "relu1", "fc2"]
    (layer,) = after["layers"]
    assert (layer["name"], layer["is_new"], layer["parameters"]) == ("fc2", True, 128 * 32 + 32)
    assert layer["fw_source"] == layer["bw_source"] == "scaled"
    assert layer["fw_sd_s"] > 0
    shares = after["sources"]
    assert isinstance(shares, dict)
    assert shares["scaled"] > 0
    assert any("nearest operation of the kind" in line for line in after["extrapolated"])


def test_a_layer_replaced_by_itself_moves_no_second(predict: Caller) -> None:
    before, after = rows_of(predict, "--replace", "relu1=relu", strategy="serial")
    (layer,) = after["layers"]
    # Out of place it is another operation, which was not measured.
    assert layer["fw_source"] == "scaled"
    assert after["parameters"] == before["parameters"]
    assert after["iteration_s"] == pytest.approx(before["iteration_s"])


def test_other_models_do_not_stand_for_the_changed_one(predict: Caller) -> None:
    other = make_network((64, 32), name="other")
    both = {"chain": CHAIN, "other": other}
    times = (*model_times(CHAIN), *model_times(other, wu_s=1.0))
    alone = rows_of(predict)[1]["iteration_s"]
    write_profile(predict.profile, make_profile(network=both, model_times=times))
    assert rows_of(predict)[1]["iteration_s"] == pytest.approx(alone)


def test_the_table_has_both_networks_at_every_rank_count(predict: Caller) -> None:
    found = what_if(predict, *NARROWED, "--ranks", "1,2", strategy="data")
    assert (found.code, found.err) == (0, "")
    for text in ("as they are", "replaced", "scaling factor", "gradients", "fc2", "scaled", "T_1 / (N T_N)"):
        assert text in found.out
    parts = found.out.count("as they are  "), found.out.count("replaced     ")
    assert parts[0] == parts[1] > 0, "both networks stand in each part of the table"


def test_csv_names_layers_and_parts_intervals(predict: Caller) -> None:
    target = predict.folder / "rows.csv"
    assert what_if(predict, *NARROWED, "--csv", "-o", str(target)).code == 0
    rows = list(csv.DictReader(io.StringIO(target.read_text())))
    assert [bool(row["replaced"]) for row in rows] == [False, True]
    assert all(float(row["scaling_factor_interval_low"]) <= float(row["scaling_factor"]) for row in rows)
    assert rows_of(predict)[1]["layers"][0]["name"] == "fc2"


def test_the_drawing_has_a_line_for_each_network(predict: Caller) -> None:
    target = predict.folder / "factors.svg"
    found = what_if(predict, *NARROWED, "--ranks", "1,2", "--plot", str(target), strategy="data")
    assert (found.code, found.err) == (0, "")
    assert target.read_bytes().startswith(b"<?xml")
    assert what_if(predict, *NARROWED, "--plot", str(target)).code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--grid",), "--grid needs --vary: say what to vary"),
        (("--replace", "fc2=none", "--vary", "batch=8"), "--replace and --vary exclude each other"),
        (("--replace", "fc2=none", "--grid"), "--grid is for --vary"),
        (("--replace", "fc2=none", "--plot", "x.txt"), "the name has to end in .png"),
        (("--replace", "fc2=linear(256"), "is no module"),
        (("--replace", "fc1=none"), "layer fc2 (linear) gets 128 of relu1, it takes 256"),
        (("--replace", "*=none"), "no layer of chain stays"),
    ],
)
def test_refusals_are_one_line_and_code_two(predict: Caller, arguments: tuple[str, ...], message: str) -> None:
    found = what_if(predict, *arguments)
    assert (found.code, found.out) == (2, "")
    assert message in found.err
    assert found.err.count("\n") == 1


@pytest.mark.parametrize("strategy", ["serial", "d2", "f2", "c2", "p2", "d2p2", "d2f2"])
def test_every_strategy_predicts_the_changed_network(predict: Caller, strategy: str) -> None:
    write_profile(predict.profile, noisy_profile(CHAIN))
    before, after = rows_of(predict, strategy=strategy)
    assert after["iteration_s"] < before["iteration_s"]
