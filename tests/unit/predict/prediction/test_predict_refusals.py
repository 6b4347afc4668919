"""What ``predict`` refuses: one clear line for each mistake in options, profiles, clusters and networks."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from network_factory import NetworkFactory
from predict_caller import Caller
from profile_factory import make_network, make_profile, ring_fit

from calibrate.profile.profile import SCHEMA_VERSION, write_profile
from paradl_bench.core.files.storage import encode_pretty


@pytest.fixture
def predict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Caller:
    return Caller(tmp_path, monkeypatch, capfd)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--strategy", "d3", "--batch", "8"),
            "strategy d3: batch 8 does not split evenly over 3 ranks; the nearest that do are 6 and 9",
        ),
        (("--strategy", "d16", "--batch", "8"), "strategy d16: batch 8 is smaller than 16 ranks; give at least 16"),
        (("--strategy", "q4", "--batch", "8"), "strategy 'q4' does not parse"),
        (
            ("--strategy", "t400", "--batch", "8"),
            "400 ranks along t400, but p <= 128: fewest features, layer fc0",
        ),
        (
            ("--strategy", "p4", "--batch", "8"),
            "chain cannot be cut into 4 stages that each have a parameter: 3 is the most",
        ),
        (
            ("--strategy", "p5", "--batch", "8"),
            "chain cannot be cut into 5 stages that each have a parameter: 3 is the most",
        ),
        (("--strategy", "dta", "--ranks", "4", "--batch", "8"), "'dta' does not parse: did you mean data? else write"),
        (("--strategy", "data+filter", "--ranks", "4", "--batch", "8"), "write the degrees of both, as d4f1"),
        (("--strategy", "data", "--batch", "8"), "strategy 'data' has no degree: give numbers of ranks"),
        (("--strategy", "d4", "--ranks", "2:8:x2", "--batch", "8"), "the degrees of d4 are fixed"),
        (("--strategy", "data", "--ranks", "8:2:x2", "--batch", "8"), "the last count is smaller"),
        (("--strategy", "serial", "--batch", "eight"), "'eight' is not a positive whole number"),
        (("--strategy", "serial", "--batch", "8", "--evaluator", "magic"), "unknown evaluator 'magic'"),
        (("--strategy", "serial", "--batch", "8", "--backend", "nccl"), "unknown backend 'nccl': choices are gloo"),
        (("--strategy", "serial", "--batch", "8", "--optimizer", "adam"), "no weight update of 'adam', only of sgd"),
        (("--strategy", "serial", "--batch", "8", "--dtype", "bf16"), "holds no iterations in bf16"),
        (
            ("--strategy", "serial", "--batch", "8", "--backend", "nccl"),
            "measure its collectives: paradl-bench collectives --ranks N --backend nccl -o DIR, then calibrate fit",
        ),
        (("--strategy", "serial", "--batch", "8", "--backend", "foo"), "unknown backend 'foo': choices are gloo\n"),
        (
            ("--strategy", "serial", "--batch", "8", "--optimizer", "foo"),
            "adam, adamw, adamw-fused, sgd\n",
        ),
        (
            ("--strategy", "serial", "--batch", "8", "--dtype", "fp17"),
            "unknown dtype 'fp17': choices are bf16, bf16-weights, fp32\n",
        ),
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


def test_an_unknown_model_lists_known_ones_and_how_to_add(predict: Caller) -> None:
    result = predict("--strategy", "serial", "--batch", "8", model="chian")
    assert result.code == 2
    assert "unknown model 'chian': did you mean chain?" in result.err
    assert "paradl-bench layers chian --batch N" in result.err


def test_a_profile_without_models_says_so(predict: Caller) -> None:
    write_profile(predict.profile, make_profile(network={}))
    result = predict("--strategy", "serial", "--batch", "8")
    assert result.code == 2
    assert "json holds no model; add it" in result.err
    assert "paradl-bench models lists all" in result.err


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
def test_a_layer_unfit_for_its_kind_is_named(
    predict: Caller, kind: str, attributes: dict[str, object], message: str
) -> None:
    path = _with_layer(predict, 0, kind=kind, attributes=attributes)
    result = predict("--strategy", "serial", "--batch", "8", "--network", str(path))
    assert result.code == 2
    assert result.err.startswith(f"predict: error: network {path}: layer 'fc0' of kind {kind} ")
    assert message in result.err
    assert result.err.count("\n") == 1


def test_a_layer_that_reads_what_has_no_shape_is_named(predict: Caller) -> None:
    result = predict("--strategy", "serial", "--batch", "8", "--network", str(_with_layer(predict, 1, input_shapes=())))
    assert result.code == 2
    assert "reads fc0 and has no input_shapes" in result.err


def test_empty_networks_and_layers_without_inputs_are_refused(predict: Caller) -> None:
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


@pytest.mark.parametrize("evaluator", ["simulate", "dag"])
@pytest.mark.parametrize("option", ["--io-seconds", "--h2d-seconds"])
@pytest.mark.parametrize("value", ["nan", "inf", "1e308", "-1"])
def test_seconds_that_are_none_are_refused(predict: Caller, evaluator: str, option: str, value: str) -> None:
    result = predict("--strategy", "d2", "--batch", "8", "--evaluator", evaluator, option, value)
    assert result.code == 2
    assert result.err == f"predict: error: {option} {float(value):g}: give a finite number of seconds from 0 to 1e+09\n"
    assert not result.out


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--slow-rank", "--slow-rank: '1e308' is no FACTOR[@RANK], as 1.5 or 1.5@3: a factor from 1 to 1e+09"),
        ("--price", "--price 1e+308: give a finite price of a rank-hour from 0 to 1e+09"),
        ("--dilate", "--dilate 1e+308 has to be a positive number up to 1e+09"),
    ],
)
def test_numbers_that_nothing_can_be_computed_with_are_refused(predict: Caller, option: str, message: str) -> None:
    result = predict("--strategy", "d2", "--batch", "8", option, "1e308")
    assert result.code == 2
    assert result.err.startswith(f"predict: error: {message}")
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("strategy", "change", "message"),
    [
        ("s2", {"kernel": [3, 2**63 - 1]}, "holds more than 1125899906842624 elements"),
        ("f2", {"input_shapes": [[0, 0, 16]]}, "layer conv has 0 channels in 1 groups and 8 filters: no part"),
        ("serial", {"parameters": "without elements"}, ""),
    ],
)
def test_a_network_file_of_impossible_layers_is_one_line(
    predict: Caller, strategy: str, change: dict[str, object], message: str
) -> None:
    factory = NetworkFactory(3, 16, 16)
    factory.conv("conv", 8)
    factory.flatten("flatten")
    factory.linear("fc", 10)
    factory.loss()
    network = msgspec.to_builtins(factory.network("chain"))
    layer = network["layers"][0]
    if "kernel" in change:
        layer["attributes"] |= change
    elif "parameters" in change:
        for parameter in network["parameters"]:
            parameter["shape"] = [0]
    else:
        layer |= change
    path = predict.folder / "network.json"
    path.write_bytes(msgspec.json.encode(network))
    fits = tuple(ring_fit(name) for name in ("all_reduce", "all_gather", "send_recv", "exchange"))
    write_profile(predict.profile, make_profile(communication=fits))
    result = predict("--strategy", strategy, "--batch", "8", "--network", str(path))
    assert message in result.err
    assert result.code == (2 if message else 0)
    assert len(result.err.strip().splitlines()) == (1 if message else 0)
