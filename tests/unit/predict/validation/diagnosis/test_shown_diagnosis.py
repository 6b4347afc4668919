"""``predict diagnose`` in a terminal: the table, and one line that says what it rests on."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner
from profile_factory import make_profile

from paradl_bench.core.files.storage import encode_pretty
from predict.cli import group


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
