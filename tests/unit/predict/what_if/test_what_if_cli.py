"""``predict what-if`` and what sweeps print, as a user calls them."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path

import msgspec
import pytest
from profile_factory import make_profile, with_doctor

from calibrate.profile.profile import write_profile
from paradl_bench.core.terminal.command_line import run_command
from predict.cli import group
from predict.what_if.presentation import _lines
from predict.what_if.what_if import WhatIf

PNG = b"\x89PNG"


class Caller:
    """Calls ``predict`` in this process with a profile; returns exit code, standard output and error."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder, self._monkeypatch, self._capfd = folder, monkeypatch, capfd
        self.profile = folder / "profile.json"
        write_profile(self.profile, make_profile())

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        self._monkeypatch.setattr(sys, "argv", ["predict", *arguments])
        with pytest.raises(SystemExit) as caught:
            run_command(group, "predict")
        out, err = self._capfd.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, out, err

    def plain(self, *arguments: str) -> tuple[int, str, str]:
        return self("--from-profile", str(self.profile), "--model", "chain", *arguments)

    def what_if(self, *arguments: str) -> tuple[int, str, str]:
        given = ("--from-profile", str(self.profile), "--model", "chain", "--strategy", "d2", "--batch", "8")
        return self("what-if", *given, *arguments)


@pytest.fixture
def predict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Caller:
    return Caller(tmp_path, monkeypatch, capfd)


def test_the_table_shows_the_base_and_every_value(predict: Caller) -> None:
    code, out, err = predict.what_if("--vary", "bandwidth=0.1:10:log:3", "--vary", "latency@node=5")
    assert (code, err) == (0, "")
    for text in ("one at a time", "bandwidth 0.1", "bandwidth 1 ", "bandwidth 10", "latency@node 5", "bound by"):
        assert text in out


def test_json_has_a_row_per_value_and_a_plain_base(predict: Caller) -> None:
    code, out, _ = predict.what_if("--vary", "peak-flops=1,4", "--vary", "batch=8,16", "--grid", "--json")
    rows = json.loads(out)
    assert code == 0
    assert [row["varied"] for row in rows] == [
        {},
        *({"peak-flops": flops, "batch": batch} for flops in (1, 4) for batch in (8, 16)),
    ]
    (plain,) = json.loads(predict.plain("--strategy", "d2", "--batch", "8", "--json")[1])
    for row in rows[:2]:
        assert (row["iteration_s"], row["interval_s"]) == (plain["iteration_s"], plain["interval_s"])
        assert row["speedup_over_base"] == 1
    assert rows[3]["sources"]["scaled_by_roofline"] > 0 == rows[1]["sources"]["scaled_by_roofline"]


def test_sources_of_layer_times_are_drawn_side_by_side(predict: Caller) -> None:
    write_profile(predict.profile, with_doctor(make_profile()))
    sources, picture = ("measured", "roofline"), predict.folder / "x.png"
    varied = [word for name in ("bandwidth", "latency", "peak-flops", "batch") for word in ("--vary", f"{name}=2,4")]
    code, out, err = predict.what_if(*varied, "--layers", ",".join(sources), "--json", "--plot", str(picture))
    assert (code, err) == (0, "")
    rows = json.loads(out)
    assert [row["layers_from"] for row in rows] == [source for source in sources for _ in range(9)]
    lines = _lines(msgspec.convert(rows, list[WhatIf]), "bandwidth")
    assert list(lines) == [f"d2, batch 8, layers {source}" for source in sources]
    for source in sources:
        plain = json.loads(predict.plain("--strategy", "d2", "--batch", "8", "--layers", source, "--json")[1])[0]
        assert rows[9 * sources.index(source)]["iteration_s"] == plain["iteration_s"]
    assert picture.read_bytes().startswith(PNG)
    assert "layers" in predict.what_if(*varied[:2], "--layers", "measured,roofline")[1].splitlines()[2]


def test_twice_of_everything_is_ranked_by_what_helps(predict: Caller) -> None:
    rows = json.loads(predict.what_if("--json")[1])
    assert rows[0]["varied"] == {}
    gains = [row["speedup_over_base"] for row in rows[1:]]
    assert gains == sorted(gains, reverse=True)
    tried = {name: value for row in rows for name, value in row["varied"].items()}
    assert tried == {
        **{"bandwidth": 2, "latency": 0.5, "peak-flops": 2, "memory-bandwidth": 2},
        **{"batch": 16, "ranks": 4},
    }
    for row in rows[1:]:
        ((name, value),) = row["varied"].items()
        alone = json.loads(predict.what_if("--vary", f"{name}={value:g}", "--json")[1])[1]
        assert row["iteration_s"] == alone["iteration_s"], name
    (best,) = rows[1]["varied"]
    assert f"d2 on batch 8: {best} " in predict.what_if()[1]


def test_serial_training_has_no_links_to_double(predict: Caller) -> None:
    rows = json.loads(predict.what_if("--strategy", "serial", "--json")[1])
    assert {name for row in rows for name in row["varied"]} == {"peak-flops", "memory-bandwidth", "batch"}


def test_csv_and_files(predict: Caller) -> None:
    target = predict.folder / "out.csv"
    options = ("--vary", "bandwidth=1,2", "--csv", "-o", str(target))
    assert predict.what_if(*options)[0] == 0
    rows = list(csv.DictReader(io.StringIO(target.read_text())))
    assert [row["varied"] for row in rows] == ["", "bandwidth 1", "bandwidth 2"]
    assert [float(row["bandwidth"]) for row in rows] == [1, 1, 2]
    assert float(rows[1]["interval_low_s"]) <= float(rows[1]["iteration_s"])
    code, _, err = predict.what_if(*options)
    assert code == 2
    assert "exists; give --force" in err
    assert predict.what_if(*options, "--force")[0] == 0


def test_drawings_are_images_or_pages_that_hold_one(predict: Caller) -> None:
    picture, page = predict.folder / "x.png", predict.folder / "x.html"
    for target, values in ((picture, "bandwidth=0.5,2"), (page, "ranks=2,4")):
        varied = ("--vary", values, "--plot", str(target))
        code, _, err = predict.what_if(*varied)
        assert code == 0, err
    assert picture.read_bytes().startswith(PNG)
    assert "data:image/png;base64," in page.read_text()
    code, _, err = predict.what_if("--vary", "bandwidth=2", "--plot", str(predict.folder / "x.txt"))
    assert code == 2
    assert "has to end in .png, .svg, .html" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--vary", "speed=2"), "choices are bandwidth, "),
        (("--vary", "bandwidth@rack=2"), "rack"),
        (("--vary", "bandwidth=2", "--json", "--csv"), "exclude each other"),
        (("--vary", "bandwidth=2", "-o", "x.svg", "--plot", "./x.svg"), "both write to ./x.svg"),
        (("--vary", "batch=3"), "does not split evenly over 2 ranks"),
        (("--vary", "bandwidth=2", "--layers", "measured,measured"), "names a source twice"),
        (("--vary", "bandwidth=2", "--layers", "measured,guessed"), "choices are measured, "),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(predict: Caller, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = predict.what_if(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_sweep_has_bands_and_a_knee(predict: Caller) -> None:
    sweep = ("--strategy", "data", "--ranks", "2:8:x2", "--batch", "8")
    code, out, _ = predict.plain(*sweep)
    assert code == 0
    assert "knee of data, 4 samples a rank: " in out
    rows = json.loads(predict.plain(*sweep, "--knee", "0.999", "--json")[1])
    assert {row["knee_ranks"] for row in rows} == {2}
    for row in rows:
        low, high = row["efficiency_interval"]
        assert low <= row["efficiency"] <= high
    assert "knee" not in predict.plain("--strategy", "d2", "--batch", "8")[1]
    code, _, err = predict.plain(*sweep, "--knee", "2")
    assert code == 2
    assert "--knee 2" in err
    assert "--knee 2" in predict.plain("--strategy", "d3", "--batch", "8", "--knee", "2")[2]


CLUSTER = """name: small
levels:
  - {name: node, ranks: 4, alpha_s: 1.0e-5, beta_s_per_byte: 1.0e-9}
memory_bytes_per_rank: 1000000
"""


def test_ranks_beyond_the_cluster_are_left_out_of_any_sweep(predict: Caller) -> None:
    cluster = predict.folder / "cluster.yaml"
    cluster.write_text(CLUSTER)
    sweep = ("--strategy", "data", "--batch", "8", "--cluster", str(cluster), "--json", "--ranks")
    code, out, err = predict.plain(*sweep, "2:16:x2")
    assert (code, [row["ranks"] for row in json.loads(out)]) == (0, [2, 4])
    assert "left out: 16 ranks do not fit cluster 'small', which holds 4" in err
    code, out, err = predict.plain(*sweep, "8,16")
    assert (code, out) == (2, "")
    assert "error: 8 ranks do not fit" in err
    code, out, err = predict.what_if("--cluster", str(cluster), "--vary", "ranks=2:16:x2", "--json")
    assert (code, [row["ranks"] for row in json.loads(out)]) == (0, [2, 2, 4])
    assert err.count("predict: left out: ") == 2


def test_the_table_says_what_does_not_fit_and_the_notes(predict: Caller) -> None:
    cluster = predict.folder / "cluster.yaml"
    cluster.write_text(CLUSTER)
    code, out, _ = predict.what_if("--cluster", str(cluster), "--vary", "batch=8,4096", "--why")
    assert code == 0
    rows = {row.split()[0]: row for row in out.splitlines() if row.strip().startswith(("8 ", "4096 "))}
    assert "(too much)" in rows["4096"]
    assert "(too much)" not in rows["8"]
    assert "65536" in predict.what_if("--vary", "batch=65536", "--vary", "latency=2")[1]
    (found,) = json.loads(predict.plain("--strategy", "d2", "--batch", "8", "--cluster", str(cluster), "--json")[1])
    assert found["notes"]
    flat = " ".join(out.split())
    assert all(note in flat for note in found["notes"] if "speed-up" not in note)


def test_the_second_table_shows_use_and_cost(predict: Caller) -> None:
    given = ("--strategy", "d2", "--batch", "8", "--dataset-samples", "1000")
    assert "rank-hours" not in predict.plain(*given)[1]
    wide = predict.plain(*given, "--wide")[1]
    assert "rank-hours/epoch" in wide
    assert "no MFU: the profile holds no peak" in wide
    assert "cost" not in wide
    assert "cost/epoch" in predict.plain(*given, "--price", "2.5")[1]
    assert predict.plain(*given, "--price", "nan")[0] == 2


def test_a_cluster_file_of_another_device_is_refused_or_scaled(predict: Caller) -> None:
    cluster = predict.folder / "cluster.yaml"
    head = "name: other\nlevels:\n  - {name: node, ranks: 2}\ndevice_name: V100\n"
    cluster.write_text(head)
    given = ("--strategy", "d2", "--batch", "8", "--cluster", str(cluster), "--json")
    code, _, err = predict.plain(*given)
    assert code == 2
    assert "peak_flops and memory_bandwidth_bytes_per_s" in err
    write_profile(predict.profile, with_doctor(make_profile()))
    cluster.write_text(head + "peak_flops: 1e12\nmemory_bandwidth_bytes_per_s: 1e11\n")
    (found,) = json.loads(predict.plain(*given)[1])
    assert found["sources"]["scaled_by_roofline"] > 0
    assert found["model_flops_utilisation"] is not None
