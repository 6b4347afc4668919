"""``predict diagnose`` in a terminal: the table, and one line that says what it rests on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from network_factory import small_cnn
from profile_factory import layer_times, make_network, make_profile, ring_fit, write_training_run

from calibrate.profile.profile import Profile, write_profile
from paradl_bench.core.files.storage import encode_pretty
from predict.cli import group
from predict.validation.shown.report import markdown
from predict.validation.validation import validate_runs


def test_one_line_says_what_a_diagnosis_rests_on(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(encode_pretty(make_profile()))
    asked = ["--from-profile", str(path), "--model", "chain", "--strategy", "d4", "--batch", "8"]
    few, many = (CliRunner().invoke(group, ["diagnose", *asked, *more]).stdout for more in ([], ["--why"]))
    *_, last = few.splitlines()
    predicted = CliRunner().invoke(group, asked).stdout.splitlines()
    assert last in predicted, "predict says the same of this configuration"
    count = int(last.split(" remark")[0].split()[-1])
    *_, first, second = many.splitlines()[-count:]
    assert (first[:1], second[:1]) == (str(count - 1), str(count))
    assert not [line for line in few.splitlines() if line.startswith(("extrapolated", "published"))]


def shown(tmp_path: Path, made: Profile, *options: str) -> str:
    path = tmp_path / "profile.json"
    path.write_bytes(encode_pretty(made))
    result = CliRunner().invoke(group, ["diagnose", "--from-profile", str(path), *options])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_without_remedies_none_are_said_to_fail(tmp_path: Path) -> None:
    slow = make_profile(communication=(ring_fit("all_reduce", alpha_s=1.0), ring_fit("broadcast", alpha_s=1.0)))
    asked = ["--model", "chain", "--strategy", "d4", "--batch", "8"]
    told, quiet = shown(tmp_path, slow, *asked), shown(tmp_path, slow, *asked, "--no-remedies")
    assert "gradient exchange: " in told
    assert "gradient exchange" in quiet
    assert "gradient exchange: " not in quiet


def test_a_run_with_fusion_is_diagnosed_without_remedies(tmp_path: Path) -> None:
    network = small_cnn(6, 8)
    directory = tmp_path / "run"
    fused = {"fused_bytes": (network.parameter_bytes,), "fused_by": "none"}
    rows = [[(0.02, 0.04, 0.05, 1e-3)] * 6] * 2
    write_training_run(directory, network, ranks=2, batch=8, phases_s=rows, axis_options=fused)
    text = shown(tmp_path, make_profile(network), "--run", str(directory))
    assert "no remedies were tried: the run used --fusion none" in text
    assert "gradient exchange: " not in text


def test_nothing_helps_against_what_takes_nothing(tmp_path: Path) -> None:
    network = small_cnn(6, 8)
    times = layer_times(network, ranks_on_host={1: 1.0, 2: 1.0}, block_sd=0.5)
    # Stages compute nothing again, and other strategies are faster.
    fits = tuple(ring_fit(name) for name in ("all_reduce", "send_recv", "broadcast"))
    made = make_profile(network, layer_times=times, communication=fits)
    asked = ["--model", network.name, "--strategy", "p2", "--batch", "8", "--json"]
    (diagnosis,) = json.loads(shown(tmp_path, made, *asked))
    (row,) = [row for row in diagnosis["findings"] if row["limitation"]["name"] == "redundant computation"]
    assert (row["state"], row["seconds_s"], row["remedies"]) == ("possible", pytest.approx(0), [])
    assert all(max(row["share_interval"]) <= 1 for row in diagnosis["findings"] if row["share_interval"])


def test_validation_lists_what_limits_each_run(tmp_path: Path) -> None:
    write_profile(tmp_path / "p.json", make_profile())
    rows = [[(0.02, 0.04, 0.05, 1e-3)] * 6] * 2
    runs = [write_training_run(tmp_path / name, make_network(), phases_s=rows) for name in ("one", "two")]
    report = validate_runs(tmp_path / "p.json", runs, cluster_path=None, force=True)
    (alone,) = json.loads(shown(tmp_path, make_profile(), "--run", str(runs[1]), "--no-remedies", "--json", "--force"))
    said = [row for row in alone["findings"] if row["state"] in ("present", "possible")]
    listed = [row for row in report.limitations if row.run == str(runs[1])]
    assert [(row.limitation, row.state, row.share) for row in listed] == [
        (row["limitation"]["name"], row["state"], row["share"]) for row in said
    ]
    assert listed[0].limitation == "gradient exchange"
    assert f"| {runs[0]} | chain d2 16 | gradient exchange | communication | strategy | present |" in markdown(report)
