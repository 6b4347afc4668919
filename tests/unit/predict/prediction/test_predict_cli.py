"""``predict`` as a user calls it: output, files, sweeps, defaults, and clusters and networks from files."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import msgspec
import pytest
from predict_caller import Caller
from profile_factory import layer_times, make_network, make_profile, model_times, ring_fit, source

from calibrate.profile.profile import write_profile
from paradl_bench.core.files.storage import encode_pretty
from paradl_bench.records.hosts.host_load import HostLoad


@pytest.fixture
def predict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Caller:
    return Caller(tmp_path, monkeypatch, capfd)


def test_the_table_names_every_strategy_and_says_what_was_extrapolated(predict: Caller) -> None:
    result = predict("--strategy", "serial,data", "--ranks", "2:8:x2", "--batch", "8")
    assert result.code == 0
    assert result.err == ""
    for text in ("serial", "d2", "d4", "d8", "iteration", "extrapolated: ranks beyond 2", "--why lists ", "100.0%"):
        assert text in result.out
    assert "all_reduce beyond 2 ranks" not in result.out
    assert "The serial row has 8 samples on its rank, other rows have 4: compare samples/s." in result.out


def test_every_remark_is_listed_for_those_who_ask(predict: Caller) -> None:
    asked = ("--strategy", "serial,d2,d8", "--batch", "8")
    told = predict(*asked, "--why").out
    remarks = {line for row in predict(*asked, "--json").json() for line in (*row["extrapolated"], *row["notes"])}
    assert remarks
    assert [line for line in remarks if line not in told] == []
    assert f"--why lists {len(remarks)} remark" in told
    assert "extrapolated: all_reduce beyond 2 ranks (d8)" in told


def test_measurements_of_a_busy_host_are_remarked(predict: Caller) -> None:
    asked = ("--strategy", "d2", "--batch", "8", "--why")
    for taken, is_told in ((0.02, False), (1.5, True)):
        load = HostLoad(seconds=9.0, cores=2, other_cores=taken)
        write_profile(predict.profile, make_profile(sources=(source("layers", load),)))
        told = predict(*asked).out
        assert ("measured on a busy host: layers (other processes took 1.5 of 2 cores)" in told) is is_told
        assert ("% measured; measurements on a busy host" in told) is is_told


@pytest.mark.parametrize("width", [80, 100])
def test_no_number_of_a_table_is_cut(predict: Caller, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    asked = ("--strategy", "data,p2", "--ranks", "2:8:x2", "--batch", "8", "--dataset-samples", "1000", "--wide")
    monkeypatch.setenv("COLUMNS", "1000")
    numbers = {word for line in predict(*asked).out.splitlines() if line.startswith(" d") for word in line.split()}
    monkeypatch.setenv("COLUMNS", str(width))
    rows = [line for line in predict(*asked).out.splitlines() if line.startswith(" ")]
    assert len(numbers) > 20
    assert numbers - {word for line in rows for word in line.split()} == set()
    assert max(map(len, rows)) <= width


def test_json_holds_what_the_interface_says(predict: Caller) -> None:
    (found,) = predict("--strategy", "d2", "--batch", "8", "--dataset-samples", "100", "--json").json()
    assert found["strategy"] == "d2"
    assert (found["ranks"], found["batch"], found["local_batch"], found["evaluator"]) == (2, 8, 4, "simulate")
    iteration_s, (low, high) = found["iteration_s"], found["interval_s"]
    assert low <= iteration_s <= high
    assert found["epoch_s"] == pytest.approx(13 * iteration_s)
    assert found["samples_per_s"] == pytest.approx(8 / iteration_s)
    parts = found["breakdown_s"]
    assert sum(parts[name] for name in ("FW", "BW", "GE", "WU")) == pytest.approx(iteration_s)
    assert sum(found["sources"].values()) == pytest.approx(1)
    assert found["fits"] is True
    assert found["limits"] == ["p <= 8: one sample a rank, batch 8"]
    assert found["extrapolated"] == []


def test_a_file_holds_the_printed_output_and_is_not_overwritten(predict: Caller) -> None:
    target = predict.folder / "out.json"
    options = ("--strategy", "serial", "--batch", "8", "-o", str(target))
    assert predict(*options).code == 0
    before = target.read_bytes()
    assert json.loads(before)[0]["strategy"] == "serial"
    again = predict(*options)
    assert again.code == 2
    assert "exists; give --force" in again.err
    assert target.read_bytes() == before
    assert predict(*options, "--force").code == 0


def test_minus_writes_json_to_standard_output_and_no_table(predict: Caller) -> None:
    assert predict("--strategy", "serial", "--batch", "8", "-o", "-").json()[0]["strategy"] == "serial"


def test_csv_has_a_row_per_prediction_and_column_per_number(predict: Caller) -> None:
    result = predict("--strategy", "serial,d2,d4", "--batch", "8,16", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(result.out)))
    assert [(row["strategy"], row["batch"]) for row in rows] == [
        (strategy, batch) for batch in ("8", "16") for strategy in ("serial", "d2", "d4")
    ]
    assert float(rows[0]["interval_low_s"]) <= float(rows[0]["iteration_s"]) <= float(rows[0]["interval_high_s"])
    assert float(rows[1]["exposed_communication_s"]) > 0
    assert predict("--strategy", "serial,d2,d4", "--batch", "8,16", "--csv").out == result.out, "the older word for it"


def test_weak_scaling_grows_the_batch_and_strong_keeps_it(predict: Caller) -> None:
    options = ("--strategy", "data", "--ranks", "2:8:x2", "--batch", "16", "--json")
    weak, strong = predict(*options).json(), predict(*options, "--scaling", "strong").json()
    assert [item["batch"] for item in weak] == [16, 32, 64]
    assert [item["local_batch"] for item in weak] == [8, 8, 8]
    assert [item["speedup_batch"] for item in weak] == [8, 8, 8]
    assert [item["batch"] for item in strong] == [16, 16, 16]
    assert [item["local_batch"] for item in strong] == [8, 4, 2]
    assert [item["speedup_batch"] for item in strong] == [16, 16, 16]


def test_the_table_says_how_the_batch_grows(predict: Caller) -> None:
    options = ("--strategy", "data", "--ranks", "2:8:x2", "--batch", "16")
    assert ": simulate, weak scaling (8 samples a rank)" in predict(*options).out
    assert ": simulate, strong scaling (batch 16)" in predict(*options, "--scaling", "strong").out
    assert "scaling (" not in predict("--strategy", "d2", "--batch", "16").out


def test_efficiency_is_against_one_rank_on_the_local_batch(predict: Caller) -> None:
    serial, data = predict("--strategy", "serial,d2", "--batch", "8", "--json").json()
    (local,) = predict("--strategy", "serial", "--batch", "4", "--json").json()
    assert serial["efficiency"] == 1
    assert data["efficiency"] == pytest.approx(local["iteration_s"] / data["iteration_s"])
    assert data["speedup"] == pytest.approx(2 * data["efficiency"])


def test_a_sweep_leaves_out_what_cannot_be_and_says_why(predict: Caller) -> None:
    result = predict("--strategy", "data", "--ranks", "2:32:x2", "--batch", "8", "--scaling", "strong", "--json")
    assert [item["ranks"] for item in result.json()] == [2, 4, 8]
    assert "left out: strategy d16: batch 8 is smaller than 16 ranks; " in result.err


def test_every_strategy_that_is_left_out_is_named(predict: Caller) -> None:
    result = predict("--strategy", "serial,f2,z3d2,z2d2,d16", "--batch", "8")
    assert result.code == 0
    lines = result.err.splitlines()
    assert lines[0] == "predict: left out: strategy d16: batch 8 is smaller than 16 ranks; give at least 16"
    for strategy in ("f2", "z3d2", "z2d2"):
        assert any(strategy in line.rpartition("(so not ")[2][:-1].split(", ") for line in lines[1:])


def test_a_cluster_file_sets_levels_and_memory(predict: Caller) -> None:
    cluster = predict.folder / "cluster.yaml"
    cluster.write_text(
        "name: small\nmemory_bytes_per_rank: 1e3\nlevels:\n  - {name: node, ranks: 1}\n"
        "  - {name: rack, ranks: 8, alpha_s: 1e-3, beta_s_per_byte: 0.0}\n"
    )
    (found,) = predict("--strategy", "d8", "--batch", "64", "--cluster", str(cluster), "--json").json()
    assert found["fits"] is False
    assert found["communication_s"] == pytest.approx(14e-3)
    assert found["sources"]["stated"] > 0
    assert "too much" in predict("--strategy", "d8", "--batch", "64", "--cluster", str(cluster)).out


def test_a_network_file_is_predicted_from_other_networks_measurements(predict: Caller) -> None:
    other = predict.folder / "network.json"
    other.write_bytes(encode_pretty(make_network((64, 512, 32), name="other")))
    (found,) = predict("--strategy", "serial", "--batch", "8", "--network", str(other), "--json", model="other").json()
    assert found["sources"]["scaled"] > 0
    assert any("not measured, scaled from the nearest" in line for line in found["extrapolated"])
    low, high = found["interval_s"]
    assert low < found["iteration_s"] < high


def test_buckets_follow_the_cap(predict: Caller) -> None:
    small, large = (
        predict("--strategy", "d2", "--batch", "8", "--bucket-cap-mb", cap, "--json").json()[0]
        for cap in ("0.001", "100")
    )
    assert small["communication_s"] > large["communication_s"]


def test_help_and_the_bare_command(predict: Caller) -> None:
    assert "--strategy" in predict.bare("--help").out
    assert predict.bare().code == 2
    assert predict.bare("--model", "chain", "validate", "x", "--from-profile", "p", "-o", "r").code == 2


def test_the_optimizer_that_was_measured_is_the_default(predict: Caller) -> None:
    network = make_network()
    write_profile(predict.profile, make_profile(model_times=model_times(network, optimizer="adam", wu_s=5e-4)))
    (found,) = predict("--strategy", "serial", "--batch", "8", "--json").json()
    assert found["optimizer"] == "adam"
    assert found["breakdown_s"]["WU"] == pytest.approx(5e-4)


def test_several_dtypes_without_the_default_need_an_explicit_choice(predict: Caller) -> None:
    network = make_network()
    times = [msgspec.structs.replace(time, dtype=dtype) for time in model_times(network) for dtype in ("bf16", "fp16")]
    layers = [msgspec.structs.replace(time, dtype=dtype) for time in layer_times(network) for dtype in ("bf16", "fp16")]
    write_profile(predict.profile, make_profile(model_times=tuple(times), layer_times=tuple(layers)))
    refused = predict("--strategy", "serial", "--batch", "8")
    assert refused.code == 2
    assert "several dtypes (bf16, fp16): say which by --dtype" in refused.err
    assert predict("--strategy", "serial", "--batch", "8", "--dtype", "bf16").code == 0


def test_an_exchange_over_nodes_is_priced_at_their_levels(predict: Caller) -> None:
    """All gradients in one bucket: in the node alpha 50 us, beta 1 ns; between nodes twice as much, as stated."""
    cluster = predict.folder / "cluster.json"
    levels = [{"name": "node", "ranks": 2}, {"name": "system", "ranks": 8, "alpha_s": 1e-4, "beta_s_per_byte": 2e-9}]
    cluster.write_text(json.dumps({"name": "two", "levels": levels}))
    fits = tuple(ring_fit(name) for name in ("all_reduce", "reduce_scatter", "all_gather", "broadcast"))
    write_profile(predict.profile, make_profile(communication=fits))
    options = ("--strategy", "d4", "--batch", "8", "--bucket-cap-mb", "1000", "--cluster", str(cluster), "--json")
    (flat,) = predict(*options).json()
    (found,) = predict(*options, "--exchange", "segmented").json()
    size = make_network().parameter_bytes
    between = 2 * (1e-4 + size / 4 * 2e-9)
    assert found["breakdown_s"]["GE"] == pytest.approx(2 * (50e-6 + size / 2 * 1e-9) + between)  # type: ignore[index]
    assert flat["breakdown_s"]["GE"] == pytest.approx(6 * (1e-4 + size / 4 * 2e-9))  # type: ignore[index]
    assert found["options"] == {"exchange": "segmented", "ranks_per_node": "2"}
    (led,) = predict(*options, "--exchange", "leader").json()
    text = "reduce was not measured: it is taken as a broadcast, without the time of its sums"
    assert text in str(led["extrapolated"])
    write_profile(predict.profile, make_profile(communication=(*fits, ring_fit("reduce", beta_s_per_byte=3e-9))))
    (slower,) = predict(*options, "--exchange", "leader").json()
    assert "reduce was not measured" not in str(slower["extrapolated"])
    more_s = slower["breakdown_s"]["GE"] - led["breakdown_s"]["GE"]  # type: ignore[index]
    assert more_s == pytest.approx(size * 2e-9)
    for evaluator in ("paradl", "csf"):
        asked = (*options, "--evaluator", evaluator, "--exchange")
        (segmented,) = predict(*asked, "segmented").json()
        assert segmented["breakdown_s"]["GE"] == pytest.approx(2 * (50e-6 + size / 2 * 1e-9) + between)  # type: ignore[index]
        (by_leader,) = predict(*asked, "leader").json()
        assert by_leader["breakdown_s"]["GE"] == pytest.approx(slower["breakdown_s"]["GE"])  # type: ignore[index]
    unbucketed = (*options[:4], *options[6:])
    (in_turn,) = predict(*unbucketed, "--exchange", "leader", "--evaluator", "osf").json()
    assert "the closed form assumes --exchange flat instead of --exchange leader" in str(in_turn["extrapolated"])
    for wrong, said in (
        (("--exchange", "ring"), "--exchange ring: give flat, leader, leaders:K (as leaders:2) or segmented"),
        (("--ranks-per-node", "2"), "--ranks-per-node is for --exchange leader"),
        (("--exchange", "leader", "--ranks-per-node", "4"), "give --ranks-per-node of less, or --exchange flat"),
    ):
        result = predict(*options, *wrong)
        assert result.code == 2
        assert said in result.err
        assert len(result.err.strip().splitlines()) == 1


def test_a_profile_without_in_place_marks_is_still_predicted(predict: Caller) -> None:
    committed = Path(__file__).parents[3] / "data" / "profile-v5.json"
    chosen = ("--model", "toy", "--no-channels-last", "--strategy", "serial", "--batch", "8")
    result = predict.bare("--from-profile", str(committed), *chosen)
    assert result.code == 0, result.err
