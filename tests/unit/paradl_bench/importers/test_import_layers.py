"""Layer times of other tools: traces of PyTorch's profiler, S-SGD traces, PipeDream's profiles, the paper's files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from profile_factory import write_training_run
from recorded_logs import DATA, public_data, read_log
from synthetic_measurements import CollectivesSpec, LayersSpec, network, write_collectives, write_layers

from calibrate.cli import group as calibrate
from calibrate.fitting.collectives.communication_fit import fit_communication
from calibrate.fitting.fit import fit_profile
from paradl_bench.cli import group
from paradl_bench.core.errors import UserError
from paradl_bench.importers.importer import Imported, ImportOptions, LogFile, load_file
from paradl_bench.importers.kineto_traces.kineto_events import busy, shared, total
from paradl_bench.importers.paradl_net import read
from paradl_bench.network.kinds.kind import layer_kinds
from paradl_bench.plan.collectives.catalog import operations
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.records.cluster import Cluster
from paradl_bench.records.measurement import LAYERS_FILE, TRACE_FILE, read_records
from paradl_bench.records.samples import LayerSamples, TraceTimes
from paradl_bench.records.training.input_times import InputTimes, RunInput
from paradl_bench.records.training.training_record import TRAINING_FILE, TrainingIterations
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.splitting.channel_shards import splittable
from predict.costs.cost_model import CostModel
from predict.prediction.prediction import Predictor
from predict.workload import Configuration, evaluator_named, evaluators


def layer_ms(held: Imported) -> dict[tuple[str, str], list[float]]:
    return {(r.layer, r.phase): [round(1e3 * value, 6) for value in r.samples_s] for r in held.layers}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(group, list(arguments))


def test_a_profilers_trace_gives_layers_collectives_and_overlap() -> None:
    held = read_log("kineto", DATA / "kineto-rank2.json", ImportOptions(batch=8, level="node"))
    assert layer_ms(held) == {
        ("0.conv2d", "FW"): [0.3, 0.31],
        ("0.conv2d", "BW"): [0.7, 0.71],
        # The operator within took the sequence number; NCCL's kernel, launched between, is no part of a layer.
        ("1.linear", "FW"): [0.05, 0.06],
        ("1.linear", "BW"): [0.12, 0.13],
    }
    assert [(r.operation, r.message_bytes, r.ranks, r.dtype) for r in held.collectives] == [
        ("all_reduce", 4 * 40970, 4, "fp32"),
        ("reduce_scatter", 4096, 4, "fp32"),
    ]
    (times,) = held.traces
    assert (times.rank, times.ranks, times.iterations) == (2, 4, 2)
    assert times.communication_s == pytest.approx(1.8e-3)
    assert times.overlap_s == pytest.approx((500 + 510) * 1e-6)
    assert times.optimizer_s == pytest.approx(60e-6)
    assert {r.rank for r in held.layers} == {2}
    assert held.device_names == {"Example A100"}


def test_times_of_a_trace_are_not_fitted_as_collectives() -> None:
    held = read_log("kineto", DATA / "kineto-rank2.json", ImportOptions(level="node"))
    fits, _, notes = fit_communication(held.collectives, operations())
    assert fits == ()
    assert (
        notes[0] == "nccl all_reduce node: left out, because times from traces of runs include the wait for other ranks"
    )


def test_an_empty_trace_is_refused_with_advice_and_writes_nothing(tmp_path: Path) -> None:
    path, out = DATA / "kineto-rank2.json", tmp_path / "out"
    again = tmp_path / "again.json"
    again.write_text(path.read_text() + "\n")
    result = run("import", "kineto", str(path), str(again), "-o", str(out))
    assert isinstance(result.exception, UserError)
    assert str(result.exception) == (
        f"no file could be used: {path}: 2 layers are left out: give --batch, the number of samples in a"
        f" mini-batch; {path}: 4 NCCL kernels are left out: give --level, node or system (and so of 1 more)"
    )
    assert not out.exists()
    # A part is taken, and the rest is said.
    for told, missing in ((("--batch", "8"), "4 NCCL kernels"), (("--level", "node"), "2 layers")):
        result = run("import", "kineto", str(path), *told, "-o", str(tmp_path / told[1]))
        assert result.exit_code == 0, result.output
        assert f"{missing} are left out: give --" in result.output
    # What no option would bring is refused with its reason.
    document = json.loads(path.read_text())
    document["traceEvents"] = [e for e in document["traceEvents"] if "nccl" not in e.get("name", "").lower()]
    for event in document["traceEvents"]:
        event.get("args", {}).pop("Sequence number", None)
    again.write_text(json.dumps(document))
    result = run("import", "kineto", str(again), "--batch", "8", "--level", "node", "-o", str(out))
    assert isinstance(result.exception, UserError)
    assert "no operator has a backward" in str(result.exception)
    assert not out.exists()


def test_a_packed_trace_is_read_and_layers_need_a_batch(tmp_path: Path) -> None:
    packed = tmp_path / "trace.json.gz"
    packed.write_bytes(gzip.compress((DATA / "kineto-rank2.json").read_bytes()))
    held = read_log("kineto", packed)
    assert held.layers == []
    assert any("give --batch" in note for note in held.notes)
    assert any("give --level" in note for note in held.notes)
    packed.write_bytes(packed.read_bytes()[:200])
    with pytest.raises(UserError, match="broken gzip archive"):
        read_log("kineto", packed)


def test_unlike_iterations_of_a_trace_are_left_out_and_counted(tmp_path: Path) -> None:
    document = json.loads((DATA / "kineto-rank2.json").read_text())
    events = document["traceEvents"]
    late = [json.loads(json.dumps(event)) for event in events if event["ph"] == "X"]
    for event in late:
        event["ts"] += 100000
        if event["name"] == "aten::linear":
            event["args"]["Input Dims"] = [[8, 2048], [10, 2048], [10]]
        for key in ("correlation", "Sequence number"):
            if key in event["args"]:
                event["args"][key] += 1000
    document["traceEvents"] = [*events, *late[: len(late) // 2]]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(document))
    held = read_log("kineto", path, ImportOptions(batch=8))
    assert {len(r.samples_s) for r in held.layers} == {2}
    assert any(
        "1 of 3 iterations are left out, because they ran other operators than most" in note for note in held.notes
    )


def test_spans_are_united_and_shared() -> None:
    one = busy([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    assert one == [(0.0, 3.0), (5.0, 6.0)]
    assert total(one) == 4.0
    assert shared(one, [(2.0, 5.5)]) == 1.5
    assert shared(one, []) == 0.0


def test_an_ssgd_trace_keeps_all_iterations_except_a_torn_one() -> None:
    options = ImportOptions(batch=32, ranks=4, level="node")
    held = read_log("ssgd-trace", DATA / "ssgd-alexnet.txt", options)
    assert layer_ms(held)["1.conv1", "BW"] == [5.0, 5.01, 5.02]
    assert {name for name, _ in layer_ms(held)} == {"1.conv1", "2.relu1", "3.fc"}
    assert [(r.message_bytes, r.samples_s) for r in held.collectives] == [
        (37632, ((0.0009,) * 3,)),
        (4096000, ((0.004,) * 3,)),
    ]
    assert sorted(item.line for item in held.dropped) == [14, 15]
    (network,) = held.networks
    assert network.parameter_bytes == 37632 + 4096000
    assert [layer.inputs for layer in network.layers] == [("input",), ("1.conv1",), ("2.relu1",)]
    assert any("reading a mini-batch took 12.1 ms" in note for note in held.notes)
    with pytest.raises(UserError, match="give --batch"):
        read_log("ssgd-trace", DATA / "ssgd-alexnet.txt")


def test_pipedreams_profile_keeps_graph_times_and_sizes() -> None:
    held = read_log("pipedream", DATA / "pipedream-toy.graph.txt", ImportOptions(batch=64, model="toy"))
    assert layer_ms(held)["node2", "BW"] == [4.25]
    (network,) = held.networks
    layers = {layer.name: layer for layer in network.layers}
    assert layers["node4"].inputs == ("node3", "node2")
    assert layers["node2"].output_shape == (16777216 // 4 // 64,)
    assert layers["node4"].kind == "pipedream.LSTM"
    assert network.parameter_bytes == 7168 + 50364416
    assert [item.line for item in held.dropped] == [5]


def test_the_papers_network_has_shapes_flops_and_times() -> None:
    held = read_log("paradl-net", DATA / "tiny.net")
    (network,) = held.networks
    assert network.name == "Tiny"
    conv = network.layers[0]
    assert conv.attributes["stride"] == (2, 2)
    assert conv.attributes["padding"] == (3, 3)
    assert conv.fw_flops == 2 * 3 * 49 * 64 * 113 * 113
    assert {layer.name: layer.kind for layer in network.layers} == {
        "CONV_1": "conv",
        "BNORM": "batch_norm",
        "RELU": "activation",
        "MPOOL": "pool",
        "ADD": "paradl.add",
        "FC": "linear",
    }
    assert network.parameter_elements == 64 * 3 * 49 + 2 * 64 + 1000 * 64 * 56 * 56
    assert layer_ms(held)["CONV_1", "FWBW"] == [3.1]
    assert sorted(item.line for item in held.dropped) == [11, 13]
    # Kinds of ours carry what ours read of them.
    for layer in network.layers:
        kind = layer_kinds().get(layer.kind)
        if kind is not None:
            kind.saves(layer)
            if kind.windows is not None:
                kind.windows(layer.attributes)


def test_a_single_time_of_paradl_net_is_the_whole_models() -> None:
    held = read_log("paradl-net", DATA / "tiny-whole.net")
    assert sum(value for values in layer_ms(held).values() for value in values) == pytest.approx(3.1, abs=1e-5)
    assert layer_ms(held)["RELU", "FWBW"] == [0.0]
    assert any("split over layers by FLOPs: layers were not measured" in note for note in held.notes)


def test_layers_of_a_paradl_net_can_be_split(tmp_path: Path) -> None:
    path = tmp_path / "small.net"
    path.write_text("Input|10x3x8x8\nModel|small\nCONV_1|3x8x8|3x6x3x3|6x8x8|0.01\nFC_1|6x8x8|6x12x8x8|12x1x1|0\n")
    (network,) = read(load_file(path), ImportOptions(batch=1)).networks
    conv, linear = network.layers
    assert (linear.input_shapes, linear.output_shape) == (((384,),), (12,))
    assert splittable(network) == [conv, linear]
    strategy = parse_strategy("f6")
    planner_for(strategy).check(network, strategy, PlanSettings(batch=1))


def test_a_layer_that_takes_longer_than_any_is_dropped() -> None:
    content = (DATA / "tiny-whole.net").read_bytes().replace(b"64x113x113|0\n", b"64x113x113|1e308\n", 1)
    held = read(LogFile(path="odd.net", content=content), ImportOptions())
    assert [row.why for row in held.dropped] == ["no layer takes that long"]


def test_the_papers_platform_is_a_cluster_file(tmp_path: Path) -> None:
    files = [str(DATA / name) for name in ("tiny.net", "cluster.plat")]
    done = run("import", "paradl-net", *files, "--keep", "incomplete", "-o", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    cluster = msgspec.yaml.decode((tmp_path / "out" / "cluster-cluster.yaml").read_bytes(), type=Cluster)
    assert cluster.memory_bytes_per_rank == 16e9
    assert [(level.name, level.ranks) for level in cluster.levels] == [("node", 4), ("system", 4096)]
    assert (cluster.levels[1].alpha_s, cluster.levels[1].beta_s_per_byte) == (5e-6, 8e-11)


def test_incomplete_imported_layer_times_give_a_profile_that_says_so(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["import", "pipedream", str(DATA / "pipedream-toy.graph.txt"), "--batch", "64", "-o", str(out)]
    done = run(*arguments)
    assert isinstance(done.exception, UserError)
    assert "toy.graph.txt line 5: a time or size is no number; without it the network is incomplete" in str(
        done.exception
    )
    done = run(*arguments, "--keep", "incomplete")
    assert done.exit_code == 0, done.output
    profile = fit_profile([out], command_line=("calibrate",), force=False)
    assert len(profile.layer_times) == 8
    assert any("is not whole: rows of layers were dropped, line 5 first" in note for note in profile.notes)
    assert any("predict takes these as none" in note for note in profile.notes)
    assert profile.cluster.memory_bytes_per_rank is None


@pytest.mark.parametrize("evaluator", sorted({*evaluators()} - {"flops"}))
def test_predictions_of_a_network_that_is_not_whole_are_extrapolated(tmp_path: Path, evaluator: str) -> None:
    graph = str(DATA / "pipedream-toy.graph.txt")
    out = tmp_path / "out"
    assert run("import", "pipedream", graph, "--batch", "64", "--keep", "incomplete", "-o", str(out)).exit_code == 0
    profile = fit_profile([out], command_line=("calibrate",), force=False)
    part = profile.network["pipedream-toy"]
    # A network of that name that has all of its layers, as --network gives it, is predicted with them.
    last = msgspec.structs.replace(part.layers[-1], fw_flops=7)
    whole = msgspec.structs.replace(part, layers=(*part.layers[:-1], last))
    point = Configuration(strategy=parse_strategy("serial"), settings=PlanSettings(batch=64))
    for net, said in ((part, 1), (whole, 0)):
        model = CostModel(profile=profile, network=net)
        lines = Predictor(costs=model, evaluator=evaluator_named(evaluator)).predict(point).provenance.extrapolated
        assert sum("pipedream-toy is not whole: rows of layers were dropped" in line for line in lines) == said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["pipedream", "pipedream-toy.graph.txt", "--keep", "incomplete"], "8 layer times of pipedream-toy; no coll"),
        (
            ["kineto", "kineto-rank2.json", "--model", "m", "--level", "node"],
            "4 layer times without a network file, so they predict nothing",
        ),
        (["nccl-tests", "nccl-tests-2.17.log"], "no layer times; nccl all_"),
    ],
)
def test_a_fit_says_whose_imported_layers_it_holds(tmp_path: Path, words: list[str], said: str) -> None:
    form, name, *more = words
    batch = [] if form == "nccl-tests" else ["--batch", "8"]
    done = run("import", form, str(DATA / name), *more, *batch, "-o", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    fitted = CliRunner().invoke(calibrate, ["fit", str(tmp_path / "out"), "-o", str(tmp_path / "profile.json")])
    assert fitted.exit_code == 0, fitted.output
    assert f"profile.json: {said}" in fitted.stderr


def test_traces_of_two_runs_become_two_blocks_with_their_sums(tmp_path: Path) -> None:
    again = tmp_path / "again.json"
    again.write_text((DATA / "kineto-rank2.json").read_text() + "\n")
    out = tmp_path / "out"
    done = run(
        "import", "kineto", str(DATA / "kineto-rank2.json"), str(again), "--batch", "8", "--model", "m", "-o", str(out)
    )
    assert done.exit_code == 0, done.output
    assert {record.block for record in read_records(out, LAYERS_FILE, LayerSamples)} == {0, 1}
    assert len(read_records(out, TRACE_FILE, TraceTimes)) == 2


def test_layer_times_written_as_a_trace_are_read_back_unchanged(tmp_path: Path) -> None:
    measured = write_layers(tmp_path / "layers", LayersSpec(networks=(network(width=16),)))
    (measured / "network.json").write_bytes(msgspec.json.encode(network(width=16)))
    spec = CollectivesSpec(operations=("all_reduce",), noise=0.0, ranks=(4,))
    sweep = write_collectives(tmp_path / "sweep", spec)
    trace = tmp_path / "toy.txt"
    done = run("export", "ssgd-trace", str(measured), "--sweep", str(sweep), "--io-seconds", "0.02", "-o", str(trace))
    assert done.exit_code == 0, done.output
    held = read_log("ssgd-trace", trace, ImportOptions(batch=4, ranks=4, level="node"))
    assert held.dropped == []
    records = [r for r in read_records(measured, LAYERS_FILE, LayerSamples) if r.rank == 0]
    written = [value for r in records if (r.layer, r.phase) == ("conv", "BW") for value in r.samples_s]
    (back,) = [r for r in held.layers if (r.layer, r.phase) == ("1.conv", "BW")]
    assert back.samples_s == pytest.approx(written, rel=1e-8)
    sizes = {r.message_bytes: r.samples_s[0][0] for r in held.collectives}
    conv_bytes, fc_bytes = 16 * 27 * 4, 10 * 16 * 256 * 4
    assert sorted(sizes) == [conv_bytes, fc_bytes]
    assert sizes[fc_bytes] == pytest.approx(2 * 3 * 2e-5 + 2 * 3 / 4 * fc_bytes * 1e-9, rel=1e-3)


def test_a_trace_has_what_a_run_read(tmp_path: Path) -> None:
    toy = network(width=16)
    measured = write_layers(tmp_path / "layers", LayersSpec(networks=(toy,)))
    (measured / "network.json").write_bytes(msgspec.json.encode(toy))
    about = RunInput(source="images", files=9, crop=8, workers=1, preset="cntk")
    rows = [[(1.0, 2.0, 0.0, 0.1)] * 3] * 2
    path = write_training_run(tmp_path / "run", toy, batch=8, phases_s=rows, input=about)
    line = ("export", "ssgd-trace", str(measured), "-o")
    none = run(*line, "-", "--run", str(path))
    assert "read no images: measure it with paradl-bench train --input" in str(none.exception)
    parts = {"read_s": (0.001,) * 3, "decode_s": (0.02, 0.03, 0.04), "transform_s": (0.003,) * 3}
    read = InputTimes(waited_s=(0.0,) * 3, collate_s=(0.001,) * 3, **parts)
    records = read_records(path, TRAINING_FILE, TrainingIterations)
    lines = [msgspec.json.encode(msgspec.structs.replace(record, input=read)) for record in records]
    (path / TRAINING_FILE).write_bytes(b"\n".join(lines) + b"\n")
    trace = tmp_path / "trace.txt"
    done = run(*line, str(trace), "--run", str(path))
    assert done.exit_code == 0, done.output
    held = read_log("ssgd-trace", trace, ImportOptions(batch=4))
    (record,) = held.batches
    assert record.samples_s[:4] == pytest.approx((0.025, 0.035, 0.045, 0.025))
    both = run(*line, "-", "--run", str(path), "--io-seconds", "1")
    assert "both give the time of reading" in str(both.exception)
    other = write_training_run(tmp_path / "other", toy, batch=16, phases_s=rows, input=about)
    assert f"trained {toy.name} on 8 samples a rank" in str(run(*line, "-", "--run", str(other)).exception)


def test_an_imported_trace_is_written_again_unchanged(tmp_path: Path) -> None:
    first = "\n".join((DATA / "ssgd-alexnet.txt").read_text().split("\n")[:13]) + "\n"
    options = ("--batch", "32", "--ranks", "4", "--level", "node", "--model", "alexnet")
    for again in ("a", "b"):
        (tmp_path / f"{again}.txt").write_text(first)
        done = run("import", "ssgd-trace", str(tmp_path / f"{again}.txt"), *options, "-o", str(tmp_path / again))
        assert done.exit_code == 0, done.output
        written = tmp_path / f"{again}.written.txt"
        done = run("export", "ssgd-trace", str(tmp_path / again), "-o", str(written))
        assert done.exit_code == 0, done.output
        assert "--sweep" not in done.output
        assert "--io-seconds" not in done.output
        rows = [line.split() for line in written.read_text().split("\n")[1:] if line]
        assert rows == [line.split() for line in first.split("\n")[1:] if line]
        first = written.read_text()


def test_every_line_of_the_public_profiles_and_traces_is_read() -> None:
    folder = public_data()
    for path in sorted((folder / "pipedream-layers").glob("*.txt")):
        held = read_log("pipedream", path, ImportOptions(batch=64))
        assert held.dropped == []
        assert held.rows == path.read_text().count("forward_compute_time")
    trace = folder / "kineto" / "param_resnet_1gpu_2080Ti.json.gz"
    held = read_log("kineto", trace, ImportOptions(batch=64))
    (times,) = held.traces
    assert {len(record.samples_s) for record in held.layers} == {times.iterations} == {30}
    # Closure: layers and weight update are what the device computed, but for the loss's and metrics' own kernels.
    layers_s = sum(sum(record.samples_s) for record in held.layers)
    assert (layers_s + times.optimizer_s) / times.compute_s == pytest.approx(1.0, abs=0.02)
    for path in sorted((folder / "kineto" / "param_dlrm_8rank").iterdir()):
        held = read_log("kineto", path, ImportOptions(batch=1, level="node"))
        assert held.dropped == []
        assert sum(len(record.samples_s[0]) for record in held.collectives) == 8


def test_a_trace_of_no_layers_is_refused(tmp_path: Path) -> None:
    sweep = write_collectives(tmp_path / "sweep", CollectivesSpec())
    for directory, reason in ((sweep, "holds collectives without a network"), (tmp_path / "no", "does not exist")):
        done = run("export", "ssgd-trace", str(directory), "-o", str(tmp_path / "trace.txt"))
        assert reason in f"{done.output}{done.exception}"
