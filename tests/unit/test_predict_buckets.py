"""``predict buckets``: the grid, its best, and the groupings beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from profile_factory import free_copies, interference, make_network, make_profile, ring_fit

from calibrate.profile import write_profile
from paradl_bench.spec.errors import UserError
from predict.bucket_advice import parse_caps
from predict.cli import group

NETWORK = make_network((256, 512, 512, 512, 32))


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Exchanges whose start is worth some waiting, slowed down beside compute, and copies that take time."""
    made = make_profile(
        NETWORK,
        communication=(ring_fit(alpha_s=4e-4),),
        interference=(interference(1.2, 1.3),),
        copies=free_copies(beta_s_per_byte=1e-10),
    )
    write_profile(tmp_path / "p.json", made)
    return tmp_path / "p.json"


def asked(profile: Path, *options: str) -> Any:
    arguments = ["--from-profile", str(profile), "--model", "chain", *options]
    return CliRunner().invoke(group, ["buckets", *arguments])


def test_the_grid_is_what_predict_says_of_each_cap_and_the_best_is_its_shortest(profile: Path) -> None:
    result = asked(profile, "--strategy", "d2", "--batch", "16", "--caps", "4,0.25,1,0.25", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.output)
    names = ["torch's default", "bucket_cap_mb 0.25", "bucket_cap_mb 1", "bucket_cap_mb 4"]
    names += ["layer by layer", "adaFusion", "MG-WFBP"]
    assert [row["grouping"] for row in rows] == names
    grid = rows[:4]
    for row in grid:
        options = ["--from-profile", str(profile), "--model", "chain", "--strategy", "d2", "--batch", "16", "--json"]
        options += ["--bucket-cap-mb", str(row["bucket_cap_mb"])] if row["bucket_cap_mb"] else []
        (found,) = json.loads(CliRunner().invoke(group, options).output)
        assert (row["iteration_s"], row["interval_s"]) == (found["iteration_s"], found["interval_s"])
        assert row["overlap_s"] < row["iteration_s"]
    assert [row["grouping"] for row in rows if row["best"]] == [
        min(grid, key=lambda row: row["iteration_s"])["grouping"]
    ]
    assert len({row["iteration_s"] for row in grid}) > 1


def test_groupings_that_are_no_setting_of_ddp_have_free_overlap_alone(profile: Path) -> None:
    rows = json.loads(asked(profile, "--strategy", "d2", "--batch", "16", "--json").output)
    layers, ada, _ = rows[-3:]
    assert layers["all_reduces"] == 4
    assert layers["largest_bytes"] == 4 * (512 * 512 + 512)
    assert ada["iteration_s"] is None
    assert ada["overlap_s"] <= layers["overlap_s"]
    osf = ["--from-profile", str(profile), "--model", "chain", "--strategy", "d2", "--batch", "16"]
    (found,) = json.loads(CliRunner().invoke(group, [*osf, "--evaluator", "osf", "--fusion", "ada", "--json"]).output)
    assert ada["overlap_s"] == found["iteration_s"]


def test_the_table_names_the_best_and_what_it_gains(profile: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    result = asked(profile, "--strategy", "d2,d4", "--batch", "16", "--evaluator", "osf", "-o", str(target))
    assert result.exit_code == 0, result.output
    for text in ("buckets of d2, batch 16: osf", "buckets of d4, batch 16: osf", "adaFusion", "best of the grid: "):
        assert text in result.output
    rows = json.loads(target.read_text())
    assert {row["strategy"] for row in rows} == {"d2", "d4"}
    assert all(row["iteration_s"] == row["overlap_s"] for row in rows if row["iteration_s"] is not None)
    again = asked(profile, "--strategy", "d2", "--batch", "16", "-o", str(target))
    assert "exists; give --force" in str(again.exception)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--strategy", "f2"), "buckets are those of data parallelism on 2 ranks or more, not of f2"),
        (("--strategy", "serial"), "buckets are those of data parallelism on 2 ranks or more, not of serial"),
        (("--strategy", "d2", "--evaluator", "csf"), "--evaluator csf knows no buckets: give simulate or osf"),
        (("--strategy", "d2", "--bucket-cap-mb", "5"), "--bucket-cap-mb: predict buckets tries groupings"),
        (("--strategy", "d2", "--fusion", "ada"), "--fusion: predict buckets tries groupings"),
        (("--strategy", "d2", "--caps", "1,much"), "'much' is no number of MiB"),
    ],
)
def test_mistakes_are_one_line(profile: Path, options: tuple[str, ...], message: str) -> None:
    result = asked(profile, "--batch", "16", *options)
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)


def test_caps_rise_and_have_no_repeats() -> None:
    assert parse_caps("25,1, 2.5,1") == (1.0, 2.5, 25.0)
    for text in ("", "0", "nan", "-1", "inf"):
        with pytest.raises(UserError, match="--caps"):
            parse_caps(text)
