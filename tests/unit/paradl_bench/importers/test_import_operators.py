"""``paradl-bench import operators``: tables become kernels and calls, up to a prediction; mistakes are one line."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from click.testing import CliRunner
from recorded_logs import DATA, public_data

from calibrate.cli import group as calibrate
from paradl_bench.cli import group
from paradl_bench.importers.operator_tables.mapping import shipped_mappings
from paradl_bench.network.kernel import KERNELS_FILE, KernelSamples
from paradl_bench.records.measurement import COLLECTIVES_FILE, DROPPED_FILE, DroppedRow, read_manifest, read_records
from paradl_bench.records.samples import CollectiveSamples
from predict.cli import group as predict

_L4 = "NVIDIA L4"


def run(command: object, *arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(command, [*arguments])  # type: ignore[arg-type]
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        return getattr(done.exception, "exit_code", 1), str(done.exception)
    return done.exit_code, done.output


def imported(*arguments: str) -> tuple[int, str]:
    return run(group, "import", "operators", *arguments)


def kernels(folder: Path) -> list[KernelSamples]:
    return read_records(folder, KERNELS_FILE, KernelSamples)


def test_rows_become_kernels_and_calls_of_this_project(tmp_path: Path) -> None:
    out, table = tmp_path / "out", DATA / "operators.csv"
    code, output = imported(str(table), "--mapping", str(DATA / "operators.yaml"), "-o", str(out), "--json")
    assert code == 0, output
    summary = json.loads(output)
    assert (summary["rows"], [item["why"] for item in summary["dropped"]]) == (4, ["a view runs no kernel"])
    manifest = read_manifest(out)
    assert manifest.kind == "kernels"
    assert (manifest.environment.device_name, manifest.environment.versions) == (_L4, {"torch": "2.1"})
    (source,) = manifest.imported
    assert (source.path, source.format, source.tool_version, source.rows, source.dropped) == (
        str(table), "operators", "", 4, 1,
    )  # fmt: skip
    assert read_records(out, DROPPED_FILE, DroppedRow)[0].line == 6
    forward, backward, half, norm = kernels(out)
    # 8 x 16 rows of 64 to 3 x 64 features, with a bias.
    assert forward.shape.sizes == {"batch": 128, "in_features": 64, "out_features": 192, "bias": 1}
    assert forward.shape.flops == 2 * 128 * 64 * 192 + 128 * 192
    assert (forward.samples_s, backward.samples_s) == ((20.5e-6,), (41e-6,))
    assert (forward.dtype, half.dtype, half.shape.stage) == ("fp32", "fp16", "FW"), "a time of 0 was not measured"
    assert norm.samples_s == (pytest.approx(7 * 16 * 256 / 0.5e12),), "a rate gives a time"
    (call,) = read_records(out, COLLECTIVES_FILE, CollectiveSamples)
    assert (call.operation, call.ranks, call.ranks_per_node, call.level) == ("all_reduce", 8, 4, "system")
    assert (call.message_bytes, call.samples_s, call.source) == (16384, ((0.25e-3,),), f"{table}:5")


def test_a_json_file_gives_the_same_kernels(tmp_path: Path) -> None:
    for name in ("operators.csv", "operators.json"):
        assert imported(str(DATA / name), "--mapping", str(DATA / "operators.yaml"), "-o", str(tmp_path / name))[0] == 0
    first = kernels(tmp_path / "operators.csv")[:2]
    assert kernels(tmp_path / "operators.json") == first
    (dropped,) = read_records(tmp_path / "operators.json", DROPPED_FILE, DroppedRow)
    assert dropped.why == "3 * width / parts is 192/5, no whole number from 0"


def gpu_s(flops: float, moved: float, tiles: int) -> float:
    """A GPU of tiles of 128 x 128 on 100 multiprocessors, whose launches take 6 us: no law of the regressors."""
    return 6e-6 + max(flops * math.ceil(tiles / 100) * 100 / tiles / 1e13, moved / 3e11)


def write_tables(folder: Path) -> tuple[Path, Path, Path]:
    """Tables of linear layers and of pointwise ones, and a mapping; shares of a peak in the second."""
    draw = random.Random(0)
    rows = ["b,n,k,fw (us),bw"]
    for _ in range(160):
        b, n, k = (2 ** draw.randint(5, 12) * draw.choice([1, 3]) for _ in range(3))
        flops, moved = 2.0 * b * n * k, 4.0 * (b * n + n * k + b * k)
        tiles = math.ceil(b / 128) * math.ceil(n / 128)
        fw_us, half_us = 1e6 * gpu_s(flops, moved, tiles), 1e6 * gpu_s(flops, moved, math.ceil(tiles * 1.2))
        rows.append(f"{b},{n},{k},{fw_us},{2 * half_us}")
    linear = folder / "toy_linear.csv"
    linear.write_text("\n".join(rows))
    shares = {}
    for _ in range(60):
        b, n = 2 ** draw.randint(3, 14) * draw.choice([1, 3]), 2 ** draw.randint(6, 14)
        shares[f"b={b}, n={n}"] = b * n / gpu_s(0, 8.0 * b * n, 100) / 30e12
    pointwise = folder / "toy.json"
    pointwise.write_text(json.dumps({"gpu": {"peak": 30, "relu": shares}}))
    mapping = folder / "toy.yaml"
    mapping.write_text(f"""
tool: toy
device: {_L4}
dtype: fp32
tables:
  - files: "*_linear.csv"
    kind: linear
    sizes: {{batch: b, in_features: k, out_features: n, bias: 0}}
    times: {{FW: "`fw (us)`", BW: bw}}
    unit: us
  - entry: gpu.relu
    files: toy.json
    kind: activation
    settings: {{function: relu}}
    sizes: {{batch: b, elements: n, in_place: 0}}
    times: {{FW: value}}
    unit: share of peak
    peak: gpu.peak TFLOP/s
""")
    return linear, pointwise, mapping


def network() -> dict[str, object]:
    """relu, linear (no bias), relu: a layer reads what another wrote, so that each runs its whole backward."""

    def layer(name: str, kind: str, reads: str, width: int, flops: int, **attributes: object) -> dict[str, object]:
        parameters = [f"{name}.weight"] if kind == "linear" else []
        inner = {"input_shapes": [[1024]], "output_shape": [width], "parameters": parameters}
        work = {"fw_flops": flops, "bw_input_flops": flops, "bw_weight_flops": flops if parameters else 0}
        return {"name": name, "kind": kind, "inputs": [reads], "attributes": attributes, **inner, **work, "fw_bytes": 1}

    layers = [
        layer("first", "activation", "input", 1024, 1024, function="relu", in_place=False),
        layer("middle", "linear", "first", 768, 2 * 1024 * 768, out_features=768, bias=False),
    ]
    weight = {"name": "middle.weight", "shape": [768, 1024], "dtype": "fp32"}
    return {"name": "toy", "input_shape": [1024], "layers": layers, "parameters": [weight]}


def test_from_tables_to_a_prediction_by_commands(tmp_path: Path) -> None:
    pytest.importorskip("lightgbm")
    linear, pointwise, mapping = write_tables(tmp_path)
    code, output = imported(str(linear), str(pointwise), "--mapping", str(mapping), "-o", str(tmp_path / "in"))
    assert code == 0, output
    profile = tmp_path / "profile.json"
    code, output = run(calibrate, "fit", str(tmp_path / "in"), "-o", str(profile))
    assert code == 0, output
    code, output = run(calibrate, "show", str(profile), "--json")
    assert code == 0, output
    held = {(each["kind"], each["stage"]): each for each in json.loads(output)["kernel_models"]}
    assert set(held) == {("linear", "FW"), ("linear", "BW"), ("activation", "FW")}
    chosen = {
        key: next(one for one in each["candidates"] if one["model"] == each["model"]) for key, each in held.items()
    }
    assert all(each["held_out_re"] < 0.15 for each in chosen.values()), chosen
    (tmp_path / "network.json").write_text(json.dumps(network()))
    given = ("--from-profile", str(profile), "--model", "toy", "--network", str(tmp_path / "network.json"))
    code, output = run(predict, *given, "--strategy", "serial", "--batch", "640", "--json")
    assert code == 0, output
    (row,) = json.loads(output)
    tiles = math.ceil(640 / 128) * math.ceil(768 / 128)
    flops, moved = 2.0 * 640 * 768 * 1024, 4.0 * (640 * 768 + 768 * 1024 + 640 * 1024)
    forward_s = gpu_s(0, 8.0 * 640 * 1024, 100) + gpu_s(flops, moved, tiles)
    assert row["phases_s"]["FW"] == pytest.approx(forward_s, rel=0.2)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("tool: toy", "tool: toy\ndevise: x"), "unknown field `devise`: did you mean device?"),
        (("kind: linear", "kind: lineer"), "table 1 (lineer): unknown kind 'lineer': did you mean linear?"),
        (("BW: bw", "BW: bww"), "unknown column 'bww': did you mean bw?"),
        (("unit: us", "unit: fortnights"), "Invalid enum value 'fortnights'"),
        (("{batch: b,", "{batch: b *,"), "'b *' is no expression: a number or a column is missing at its end"),
        (("{batch: b,", "{batch: b ** k,"), "'b ** k' is no expression: '*' stands where a number or a column"),
        (("{batch: b,", "{batch: __import__(b),"), "there is no function '__import__'"),
        (("{batch: b,", "{batch: " + "(" * 60 + "b,"), "parentheses are nested deeper than 16 levels"),
        (("{batch: b,", "{batsh: b,"), "its sizes lack 'batch': they are"),
        (("bias: 0}", "bias: 0, rows: b}"), "unknown size of linear 'rows'"),
        (("FW: \"`fw (us)`\"", "forward: bw"), "unknown stage 'forward'"),
        (("files: \"*_linear.csv\"", "files: \"*_lin{ear.csv\""), "has a brace without another"),
        (("files: \"*_linear.csv\"", "files: \"*_conv.csv\""), "does not read a file of the name"),
        (("device: NVIDIA L4", "device: \"{gpu}\""), "unknown column 'gpu'"),
        (("kind: linear", "kind: linear\n    collective: all_reduce"), "it has kind and collective; a table has one"),
        (("unit: us", "unit: share of peak"), "peak '': shares are of a peak with its unit"),
        (("tables:", "tables: []\nnames:"), "Expected `array` of length >= 1"),
    ],
)  # fmt: skip
def test_wrong_mappings_are_one_line(tmp_path: Path, change: tuple[str, str], told: str) -> None:
    linear, _, mapping = write_tables(tmp_path)
    text = mapping.read_text()
    assert change[0] in text
    mapping.write_text(text.replace(*change, 1))
    code, output = imported(str(linear), "--mapping", str(mapping), "-o", str(tmp_path / "out"))
    assert code == 2
    assert told in output
    assert "\n" not in output
    assert not (tmp_path / "out").exists()


def test_without_a_mapping_or_by_a_wrong_name(tmp_path: Path) -> None:
    linear, _, _ = write_tables(tmp_path)
    given = (str(linear), "-o", str(tmp_path / "out"))
    names = ", ".join(sorted(shipped_mappings()))
    assert imported(*given) == (2, f"tables of operators need a mapping: give --mapping FILE, or one of {names}")
    code, output = imported(*given, "--mapping", "neusite")
    assert (code, output) == (2, f"unknown mapping 'neusite': did you mean neusight? choices are {names}")
    assert "cannot read mapping" in imported(*given, "--mapping", str(tmp_path / "none.yaml"))[1]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("64,x,64,5,5", "n is 'x', no number"),
        ("64,,64,5,5", "n is empty"),
        ("64,64,64,fast,5", "fw (us) is 'fast', no number"),
        ("64,64,64,nan,5", "fw (us) is 'nan', no number"),
        ("64,64,64,-5,5", "`fw (us)` is -5, below 0"),
        ("64,64.5,64,5,5", "n is 129/2, no whole number from 0"),
        ("64,-64,64,5,5", "n is -64, no whole number from 0"),
        ("64,1e30,64,5,5", "n is 1000000000000000000000000000000: no operand is that large"),
        ("64,1e300,64,5,5", "the number has too many digits to be a size"),
        ("64,64,64,1e300,5", "the number has too many digits to be a size"),
        ("64,64,64,1e15,5", "no call takes that long"),
        ("64,64,64,5", "it has 4 cells, its header 5"),
        ("64,64,64,0,0", "all its times are 0: nothing was measured"),
        ("0,64,64,5,5", "a batch of 0 runs nothing"),
        ("4096,4096,4096,0.5,5", "more than 2 times the peak of l4: the unit is wrong"),
    ],
)
def test_rows_of_no_kernel_are_dropped_with_the_reason(tmp_path: Path, row: str, why: str) -> None:
    linear, _, mapping = write_tables(tmp_path)
    linear.write_text(f"b,n,k,fw (us),bw\n64,64,64,5,5\n{row}\n")
    out = tmp_path / "out"
    code, output = imported(str(linear), "--mapping", str(mapping), "-o", str(out))
    assert code == 0, output
    (dropped,) = read_records(out, DROPPED_FILE, DroppedRow)
    assert why in dropped.why
    assert (dropped.line, len(kernels(out))) == (3, 2)


def test_a_file_without_rows_says_what_its_header_is(tmp_path: Path) -> None:
    linear, _, mapping = write_tables(tmp_path)
    linear.write_text("b,n,k,fw (us),bw\n")
    code, output = imported(str(linear), "--mapping", str(mapping), "-o", str(tmp_path / "out"))
    assert code == 2
    assert "toy_linear.csv holds no rows below its header: b, n, k, fw (us), bw" in output


def test_a_share_of_several_peaks_is_in_another_unit(tmp_path: Path) -> None:
    """Times in microseconds that a mapping calls shares, on a device that no catalogue has."""
    linear, _, mapping = write_tables(tmp_path)
    text = mapping.read_text().replace("unit: us", "unit: share of peak\n    peak: 30 TFLOP/s", 1)
    mapping.write_text(text.replace(_L4, "my GPU"))
    linear.write_text("b,n,k,fw (us),bw\n64,64,64,12.5,20\n64,64,128,0.5,0.4\n")
    code, output = imported(str(linear), "--mapping", str(mapping), "-o", str(tmp_path / "out"))
    assert code == 0, output
    (dropped,) = read_records(tmp_path / "out", DROPPED_FILE, DroppedRow)
    assert "`fw (us)` is 12.5 times the peak: the unit or the peak is wrong" in dropped.why


def test_a_stage_not_timed_to_its_end_is_left_out(tmp_path: Path) -> None:
    linear, _, mapping = write_tables(tmp_path)
    # Backward is of its launch in all rows: the first one is small enough to be possible.
    rows = ("64,64,64,5,5", "4096,4096,4096,4000,5", "4096,4096,2048,2000,5")
    linear.write_text("\n".join(("b,n,k,fw (us),bw", *rows)))
    code, output = imported(str(linear), "--mapping", str(mapping), "-o", str(tmp_path / "out"))
    assert code == 0
    assert [kernel.shape.stage for kernel in kernels(tmp_path / "out")] == ["FW"] * 3
    assert "2 of 3 times of BW left out, and the others with them: more than 2 times the peak of l4" in output


def test_a_norm_over_nothing_is_dropped(tmp_path: Path) -> None:
    table = tmp_path / "ln.csv"
    table.write_text("OPName,Latency,Device,Torch Version,CUDA Version,B,H\nln,0.8,A,p,c,4,8\nln,1,A,p,c,4,0")
    assert imported(str(table), "--mapping", "neusight", "-o", str(tmp_path / "out"))[0] == 0
    assert len(kernels(tmp_path / "out")) == 1
    (dropped,) = read_records(tmp_path / "out", DROPPED_FILE, DroppedRow)
    assert dropped.why.startswith("no norm has these sizes")


def test_one_device_of_several_has_to_be_chosen(tmp_path: Path) -> None:
    table = tmp_path / "ln.csv"
    table.write_text("OPName,Latency,Device,Torch Version,CUDA Version,B,H\nln,0.8,A,p2.1.0,c,4,8\nln,1,B,p2.1.0,c,4,8")
    given = (str(table), "--mapping", "neusight", "-o", str(tmp_path / "out"))
    assert imported(*given)[1].endswith("holds times of several devices: give --device-name with one of A, B")
    assert "holds no times of 'C', only of A, B" in imported(*given, "--device-name", "C")[1]
    assert imported(*given, "--device-name", "B")[0] == 0
    (kernel,) = kernels(tmp_path / "out")
    assert (kernel.samples_s, kernel.shape.settings) == ((1e-3,), {"function": "layer_norm"})
    assert [item.why for item in read_records(tmp_path / "out", DROPPED_FILE, DroppedRow)] == ["of A"]
    assert read_manifest(tmp_path / "out").environment.device_name == "B"


@pytest.mark.parametrize(
    ("files", "mapping", "device", "kinds", "calls"),
    [
        ("neusight-train/kernels/*.csv", "neusight", "NVIDIA A100 80GB PCIe", {"linear", "matmul", "norm"}, 0),
        ("neusight-train/NVIDIA_L4/*.csv", "neusight", _L4, {"linear", "dropout", "elementwise", "norm"}, 0),
        ("simumax-b200/system_b200_bf16.json", "simumax", "NVIDIA B200", {"linear", "grouped_matmul", "attention"}, 0),
        ("transformer-operators/Vista/operator/*l_fp16.csv", "transformer-operators", None, {"linear"}, 0),
        ("transformer-operators/Vista/nccl/*_fp16_2_1.csv", "transformer-operators", None, set(), 4386),
    ],
)  # fmt: skip
def test_published_tables_are_read_by_shipped_mappings(
    tmp_path: Path, files: str, mapping: str, device: str | None, kinds: set[str], calls: int
) -> None:
    found = sorted(map(str, public_data().glob(files)))
    named = ("--device-name", device) if device else ()
    code, output = imported(*found, "--mapping", mapping, *named, "-o", str(tmp_path / "out"))
    assert code == 0, output
    assert kinds <= {record.shape.kind for record in kernels(tmp_path / "out")}
    assert len(read_records(tmp_path / "out", COLLECTIVES_FILE, CollectiveSamples)) == calls
    environment = read_manifest(tmp_path / "out").environment
    assert environment.device_name == (device or "NVIDIA GH200 120GB")
    lost = [item.why for item in read_records(tmp_path / "out", DROPPED_FILE, DroppedRow)]
    assert not any("no number" in why or "takes such a row" in why for why in lost)


def test_traced_operations_are_called_as_the_own_trace_does(tmp_path: Path) -> None:
    table = tmp_path / "NVIDIA_L4" / "toy-train-4-1.csv"
    table.parent.mkdir()
    head = "op,target,_args,_kwargs,meta,input_contiguous,dtype,fw_latency,bw_latency,input_shapes,output_shape\n"
    row = 'call_function,{},,"{}",,[True],torch.float32,1,2,"[[4, 64]]","(4, 64)"\n'
    drops = [row.format("<function dropout at 0x1>", f"{{'p': {share}, 'training': True}}") for share in (0.0, 0.1)]
    table.write_text(head + row.format("<built-in function truediv>", "") + "".join(drops))
    code, output = imported(str(table), "--mapping", "neusight", "-o", str(tmp_path / "out"))
    assert code == 0, output
    found = {record.shape.settings["function"] for record in kernels(tmp_path / "out")}
    assert found == {"div", "dropout"}
    (lost,) = read_records(tmp_path / "out", DROPPED_FILE, DroppedRow)
    assert lost.why == "a dropout of nothing runs no kernel"
