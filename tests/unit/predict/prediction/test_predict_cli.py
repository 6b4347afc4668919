"""``predict`` as a user calls it: output, files, sweeps, and one clear line for each mistake."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path

import msgspec
import pytest
from profile_factory import layer_times, make_network, make_profile, model_times, ring_fit

from calibrate.profile.profile import SCHEMA_VERSION, write_profile
from paradl_bench.core.files.storage import encode_pretty
from paradl_bench.core.terminal.command_line import run_command
from predict.cli import group


class Result:
    """What a call printed and its exit code."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def json(self) -> list[dict[str, object]]:
        assert self.code == 0, self.err
        found: list[dict[str, object]] = json.loads(self.out)
        return found


class Caller:
    """Calls ``predict`` in this process with a profile."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder, self._monkeypatch, self._capfd = folder, monkeypatch, capfd
        self.profile = folder / "profile.json"
        write_profile(self.profile, make_profile())

    def bare(self, *arguments: str) -> Result:
        self._monkeypatch.setattr(sys, "argv", ["predict", *arguments])
        with pytest.raises(SystemExit) as caught:
            run_command(group, "predict")
        out, err = self._capfd.readouterr()
        assert isinstance(caught.value.code, int)
        return Result(caught.value.code, out, err)

    def __call__(self, *arguments: str, model: str = "chain") -> Result:
        return self.bare("--from-profile", str(self.profile), "--model", model, *arguments)


@pytest.fixture
def predict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Caller:
    return Caller(tmp_path, monkeypatch, capfd)


def test_the_table_names_every_strategy_and_says_what_was_extrapolated(predict: Caller) -> None:
    result = predict("--strategy", "serial,data", "--ranks", "2:8:x2", "--batch", "8")
    assert result.code == 0
    assert result.err == ""
    for text in ("serial", "d2", "d4", "d8", "iteration", "extrapolated: all_reduce beyond 2 ranks", "100.0%"):
        assert text in result.out


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


def test_a_file_holds_what_is_printed_and_is_not_overwritten_silently(predict: Caller) -> None:
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


def test_csv_has_a_row_a_prediction_and_a_column_a_number(predict: Caller) -> None:
    result = predict("--strategy", "serial,d2,d4", "--batch", "8,16", "--csv")
    rows = list(csv.DictReader(io.StringIO(result.out)))
    assert [(row["strategy"], row["batch"]) for row in rows] == [
        (strategy, batch) for batch in ("8", "16") for strategy in ("serial", "d2", "d4")
    ]
    assert float(rows[0]["interval_s.low"]) <= float(rows[0]["iteration_s"]) <= float(rows[0]["interval_s.high"])
    assert float(rows[1]["breakdown_s.exposed_communication"]) > 0


def test_weak_scaling_grows_the_batch_and_strong_keeps_it(predict: Caller) -> None:
    options = ("--strategy", "data", "--ranks", "2:8:x2", "--batch", "16", "--json")
    weak, strong = predict(*options).json(), predict(*options, "--scaling", "strong").json()
    assert [item["batch"] for item in weak] == [16, 32, 64]
    assert [item["local_batch"] for item in weak] == [8, 8, 8]
    assert [item["speedup_batch"] for item in weak] == [8, 8, 8]
    assert [item["batch"] for item in strong] == [16, 16, 16]
    assert [item["local_batch"] for item in strong] == [8, 4, 2]
    assert [item["speedup_batch"] for item in strong] == [16, 16, 16]


def test_efficiency_is_against_one_rank_on_the_local_batch(predict: Caller) -> None:
    serial, data = predict("--strategy", "serial,d2", "--batch", "8", "--json").json()
    (local,) = predict("--strategy", "serial", "--batch", "4", "--json").json()
    assert serial["efficiency"] == 1
    assert data["efficiency"] == pytest.approx(local["iteration_s"] / data["iteration_s"])
    assert data["speedup"] == pytest.approx(2 * data["efficiency"])


def test_a_sweep_leaves_out_what_cannot_be_and_says_why(predict: Caller) -> None:
    result = predict("--strategy", "data", "--ranks", "2:32:x2", "--batch", "8", "--scaling", "strong", "--json")
    assert [item["ranks"] for item in result.json()] == [2, 4, 8]
    assert "left out: batch 8 is smaller than the 16 ranks of d16" in result.err


def test_every_strategy_that_is_left_out_is_named(predict: Caller) -> None:
    result = predict("--strategy", "serial,f2,z3d2,z2d2,d16", "--batch", "8")
    assert result.code == 0
    lines = result.err.splitlines()
    assert lines[0] == "predict: left out: batch 8 is smaller than the 16 ranks of d16: give at least 16"
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


def test_a_network_file_is_predicted_from_what_was_measured_of_others(predict: Caller) -> None:
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--strategy", "d3", "--batch", "8"), "batch 8 does not part over the 3 ranks of d3: 6 or 9 do"),
        (("--strategy", "d16", "--batch", "8"), "batch 8 is smaller than the 16 ranks of d16: give at least 16"),
        (("--strategy", "q4", "--batch", "8"), "strategy 'q4' does not parse"),
        (
            ("--strategy", "t400", "--batch", "8"),
            "400 ranks along t400, but p <= 128: fewest features, layer fc0",
        ),
        (
            ("--strategy", "p4", "--batch", "8"),
            "chain cannot be cut into 4 stages that each have a parameter: 3 is the most",
        ),
        (("--strategy", "data+filter", "--ranks", "4", "--batch", "8"), "write the degrees of both, as d4f1"),
        (("--strategy", "data", "--batch", "8"), "strategy 'data' is a kind: say how many ranks"),
        (("--strategy", "d4", "--ranks", "2:8:x2", "--batch", "8"), "the degrees of d4 are fixed"),
        (("--strategy", "data", "--ranks", "8:2:x2", "--batch", "8"), "the last count is smaller"),
        (("--strategy", "serial", "--batch", "eight"), "'eight' is not a positive whole number"),
        (("--strategy", "serial", "--batch", "8", "--evaluator", "magic"), "unknown evaluator 'magic'"),
        (("--strategy", "serial", "--batch", "8", "--backend", "nccl"), "unknown backend 'nccl': choices are gloo"),
        (("--strategy", "serial", "--batch", "8", "--optimizer", "adam"), "no weight update by 'adam', only by sgd"),
        (("--strategy", "serial", "--batch", "8", "--dtype", "bf16"), "holds no iterations in bf16"),
        (
            ("--strategy", "serial", "--batch", "8", "--backend", "nccl"),
            "measure its collectives: paradl-bench collectives --ranks N --backend nccl -o DIR, then calibrate fit",
        ),
        (("--strategy", "serial", "--batch", "8", "--backend", "foo"), "unknown backend 'foo': choices are gloo\n"),
        (("--strategy", "serial", "--batch", "8", "--optimizer", "foo"), "'foo': choices are adam, sgd\n"),
        (("--strategy", "serial", "--batch", "8", "--dtype", "fp17"), "unknown dtype 'fp17': choices are bf16, fp32\n"),
        (
            ("--strategy", "serial", "--batch", "8", "--compile", "--no-tf32"),
            "measure some: paradl-bench layers chain --batch N --compile -o DIR, then calibrate fit",
        ),
        (("--strategy", "d2", "--batch", "8", "--split", "all"), "--split is for filter, channel, tensor parallelism"),
        (("--strategy", "d2", "--batch", "8", "--fusion-buffer", "0"), "--fusion-buffer: size '0' is not a whole"),
        (("--strategy", "d2", "--batch", "8", "--bucket-cap-mb", "0"), "positive number of MiB"),
        (("--strategy", "d2", "--batch", "8", "--bucket-cap-mb", "1e308"), "positive number of MiB, up to"),
        (("--strategy", "serial", "--batch", "8", "--json", "--csv"), "--json and --csv exclude each other"),
        (("--strategy", "serial"), "Missing option '--batch'"),
        (("--strategy", "z3d2", "--batch", "8"), "the profile holds no fit of all_gather"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(predict: Caller, arguments: tuple[str, ...], message: str) -> None:
    result = predict(*arguments)
    assert result.code == 2
    assert message in result.err
    assert len(result.err.strip().splitlines()) == 1
    assert result.out == ""


def test_an_unknown_model_names_those_of_the_profile_and_how_to_add_one(predict: Caller) -> None:
    result = predict("--strategy", "serial", "--batch", "8", model="chian")
    assert result.code == 2
    assert "unknown model 'chian': did you mean chain?" in result.err
    assert "paradl-bench layers chian --batch N" in result.err


def test_a_profile_without_models_says_so(predict: Caller) -> None:
    write_profile(predict.profile, make_profile(network={}))
    result = predict("--strategy", "serial", "--batch", "8")
    assert result.code == 2
    assert "json holds no model; add it" in result.err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "no valid JSON (truncated?)"),
        (
            lambda text: text.replace(f'"schema_version": {SCHEMA_VERSION}', '"schema_version": 99'),
            "install a newer paradl",
        ),
        (lambda text: text.replace('"median_s": 0.0001', '"median_s": NaN', 1), "no valid JSON"),
        (lambda text: text.replace('"median_s": 0.0001,', '"median_s": -1.0,', 1), "$.model_times[0].wu"),
        (lambda text: text.replace('"layer_times"', '"leyer_times"'), "leyer_times"),
    ],
)
def test_a_broken_profile_is_refused_by_the_field(predict: Caller, change: object, message: str) -> None:
    assert callable(change)
    changed = change(predict.profile.read_text())
    assert changed != predict.profile.read_text()
    predict.profile.write_text(changed)
    result = predict("--strategy", "serial", "--batch", "8")
    assert result.code == 2
    assert message in result.err
    assert len(result.err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("name: x\nlevels:\n  - {name: node, rank: 2}\n", "`rank`"),
        ("name: x\nlevels:\n  - {name: node, ranks: two}\n", "$.levels[0].ranks"),
        (
            "name: x\nlevels:\n  - {name: node, ranks: 2, alpha_s: -1}\n",
            "Expected `float` >= 0.0 - at `$.levels[0].alpha_s`",
        ),
        ("name: x\nlevels: []\n", "has no levels"),
        ("name: [x\n", "no valid YAML"),
        ("levels: " + "[" * 100, "line 1: nested deeper than 64 levels"),
        ("just text", "cluster"),
        ("", "cluster"),
    ],
)
def test_a_wrong_cluster_file_is_refused_by_the_field(predict: Caller, content: str, message: str) -> None:
    cluster = predict.folder / "cluster.yaml"
    cluster.write_text(content)
    result = predict("--strategy", "d2", "--batch", "8", "--cluster", str(cluster))
    assert result.code == 2
    assert message in result.err
    assert "cluster.yaml" in result.err


def test_more_ranks_than_a_given_cluster_holds_is_refused(predict: Caller) -> None:
    cluster = predict.folder / "cluster.yaml"
    cluster.write_text("name: x\nlevels:\n  - {name: node, ranks: 2}\n")
    result = predict("--strategy", "d4", "--batch", "8", "--cluster", str(cluster))
    assert result.code == 2
    assert "4 ranks do not fit cluster 'x', which holds 2" in result.err


def test_a_network_of_another_name_is_refused(predict: Caller) -> None:
    other = predict.folder / "network.json"
    other.write_bytes(encode_pretty(make_network(name="other")))
    result = predict("--strategy", "serial", "--batch", "8", "--network", str(other))
    assert result.code == 2
    assert "describes 'other', not 'chain'" in result.err
    other.write_text("{}")
    assert predict("--strategy", "serial", "--batch", "8", "--network", str(other)).code == 2


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


def test_of_several_dtypes_without_the_default_one_has_to_be_named(predict: Caller) -> None:
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
    assert "reduce was not measured: as a broadcast, its sums left out" in str(led["extrapolated"])
    write_profile(predict.profile, make_profile(communication=(*fits, ring_fit("reduce", beta_s_per_byte=3e-9))))
    (slower,) = predict(*options, "--exchange", "leader").json()
    assert "reduce was not measured" not in str(slower["extrapolated"])
    more_s = slower["breakdown_s"]["GE"] - led["breakdown_s"]["GE"]  # type: ignore[index]
    assert more_s == pytest.approx(size * 2e-9)
    (wider,) = predict(*options, "--exchange", "leader", "--evaluator", "paradl").json()
    assert "the closed form exchanges gradients flat, and stands for leader" in str(wider["extrapolated"])
    for wrong, said in (
        (("--exchange", "ring"), "--exchange ring: give flat, leader, leaders:K (as leaders:2) or segmented"),
        (("--ranks-per-node", "2"), "--ranks-per-node is for --exchange leader"),
        (("--exchange", "leader", "--ranks-per-node", "4"), "give --ranks-per-node of less, or --exchange flat"),
    ):
        result = predict(*options, *wrong)
        assert result.code == 2
        assert said in result.err
        assert len(result.err.strip().splitlines()) == 1


def _with_layer(predict: Caller, index: int, **changes: object) -> Path:
    """A network file of the profile's chain with one layer changed."""
    network = make_network()
    layers = list(network.layers)
    layers[index] = msgspec.structs.replace(layers[index], **changes)
    path = predict.folder / "changed.json"
    path.write_bytes(encode_pretty(msgspec.structs.replace(network, layers=tuple(layers))))
    return path


_CONV = {"kernel": [3], "stride": [1], "padding": [1], "dilation": [1], "groups": 1, "out_channels": 4, "bias": False}


@pytest.mark.parametrize(
    ("kind", "attributes", "message"),
    [
        ("conv", {"stride": [1]}, "of kind conv lacks the attribute 'kernel', a list of whole numbers from 1"),
        ("conv", {**_CONV, "groups": 0}, "has 0 for the attribute 'groups', which has to be a whole number from 1"),
        ("conv", {**_CONV, "stride": [0]}, "has (0,) for the attribute 'stride'"),
        ("conv", {**_CONV, "padding": "both"}, "has 'both' for the attribute 'padding'"),
        ("conv", _CONV, "differs in spatial dims: kernel 1"),
        ("pool", {"function": "max_pool1d", "kernel": 2}, "has 2 for the attribute 'kernel'"),
        ("activation", {"in_place": False}, "lacks the attribute 'function', a text"),
        ("activation", {"function": "relu", "in_place": "no"}, "has 'no' for the attribute 'in_place'"),
        ("elementwise", {}, "lacks the attribute 'function'"),
        ("view", {}, "lacks the attribute 'function'"),
        ("loss", {"function": 1}, "has 1 for the attribute 'function'"),
        ("linear", {"out_features": "8"}, "has '8' for the attribute 'out_features'"),
        ("adaptive_pool", {"function": "adaptive_pool", "output": [1]}, "one of adaptive_avg_pool1d"),
        ("norm", {"function": "layer_norm", "size": [0], "affine": True}, "has (0,) for the attribute 'size'"),
    ],
)
def test_a_layer_that_is_not_as_its_kind_needs_it_is_named(
    predict: Caller, kind: str, attributes: dict[str, object], message: str
) -> None:
    path = _with_layer(predict, 0, kind=kind, attributes=attributes)
    result = predict("--strategy", "serial", "--batch", "8", "--network", str(path))
    assert result.code == 2
    assert result.err.startswith(f"predict: error: network {path}: layer 'fc0' of kind {kind} ")
    assert message in result.err
    assert result.err.count("\n") == 1


def test_a_network_of_no_layers_and_a_layer_that_reads_nothing_are_refused(predict: Caller) -> None:
    path = predict.folder / "empty.json"
    path.write_bytes(
        encode_pretty(msgspec.structs.replace(make_network(), layers=(), parameters=(), gradient_order=()))
    )
    result = predict("--strategy", "d2", "--batch", "8", "--network", str(path))
    assert result.code == 2
    assert f"network {path}: it has no layers" in result.err
    path = _with_layer(predict, 0, input_shapes=())
    result = predict("--strategy", "serial", "--batch", "8", "--network", str(path))
    assert result.code == 2
    assert "has () for input_shapes" in result.err


def test_a_profile_whose_layers_do_not_say_whether_they_run_in_place_is_predicted(predict: Caller) -> None:
    committed = Path(__file__).parents[3] / "data" / "profile-v5.json"
    chosen = ("--model", "toy", "--no-channels-last", "--strategy", "serial", "--batch", "8")
    result = predict.bare("--from-profile", str(committed), *chosen)
    assert result.code == 0, result.err


@pytest.mark.parametrize("evaluator", ["simulate", "dag"])
@pytest.mark.parametrize("option", ["--io-seconds", "--h2d-seconds"])
@pytest.mark.parametrize("value", ["nan", "inf", "1e308", "-1"])
def test_seconds_that_are_none_are_refused(predict: Caller, evaluator: str, option: str, value: str) -> None:
    result = predict("--strategy", "d2", "--batch", "8", "--evaluator", evaluator, option, value)
    assert result.code == 2
    assert result.err == f"predict: error: {option} {float(value):g}: seconds are a finite number from 0 to 1e+09\n"
    assert not result.out


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--slow-rank", "--slow-rank: '1e308' is no FACTOR[@RANK], as 1.5 or 1.5@3: a factor from 1 to 1e+09"),
        ("--price", "--price 1e+308: a rank-hour costs a finite number from 0 to 1e+09"),
        ("--dilate", "--dilate 1e+308 has to be a positive number up to 1e+09"),
    ],
)
def test_numbers_that_nothing_can_be_computed_with_are_refused(predict: Caller, option: str, message: str) -> None:
    result = predict("--strategy", "d2", "--batch", "8", option, "1e308")
    assert result.code == 2
    assert result.err.startswith(f"predict: error: {message}")
    assert result.err.count("\n") == 1
