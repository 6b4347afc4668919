"""Published iterations: how tables become a model's layers, what the simplest prediction counts, and the report."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks" / "published"))

from published_runs import DATA, SETS, report
from sets import evidence, llm_foundry, neusight, neusight_four, primus, vtrain
from sets.measured_layers import Timed
from sets.runs import Predicted, PublishedSet, Run, coverage, orders, short_by, summary, table
from shipped.compact_fit import fit_compact

from calibrate.fitting.kernels.kernel_trial import timed_shapes
from calibrate.kernels.files import write_arrays
from calibrate.kernels.model import estimate
from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.network.kernel import KernelShape, KernelStage

_HEAD = "op,target,meta,latency,fw_latency,bw_latency,acc_latency,input_shapes,output_shape\n"
_ROWS = (
    # A block begins behind the embedding; sizes run no kernel.
    "call_module,wte,('wte'),3,1,1,1,\"[[1, 4]]\",\"(1, 4, 8)\"",
    "call_method,size,('transformer.h.0'),0.5,0.5,0,0,\"[[1, 4, 8]]\",\"(1,)\"",
    "call_function,<built-in method addmm of x>,('x.h.0'),6,2,3,1,\"[[16], [4, 8], [8, 16]]\",\"(4, 16)\"",
    "call_method,size,('transformer.h.0'),0.5,0.5,0,0,\"[[1, 4, 8]]\",\"(1,)\"",
    "call_module,lm_head,\"('h', <class 'torch.nn.modules.linear.Linear'>)])}\",5,2,3,0,\"[[1, 4, 8]]\",\"(1, 4, 10)\"",
)  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "neusight-train" / "NVIDIA_L4" / "toy-train-4-1.csv"
    path.parent.mkdir(parents=True)
    path.write_text(_HEAD + "\n".join(_ROWS))
    answer = {"num_layer": 3, "e2e_latency": 30.0, "fw_latency": 10.0, "bwall_latency": 20.0}
    path.with_suffix(".json").write_text(json.dumps(answer))
    return path


def test_blocks_are_repeated_and_launches_taken_off(trace: Path) -> None:
    operations = neusight.read_operations(trace)
    assert neusight.launch_ms(operations) == 0.5
    found = neusight.layers(operations, 3, 0.5)
    assert [each.forward_s for each in found] == pytest.approx([0.5e-3, *[0, 1.5e-3, 0] * 3, 1.5e-3])
    assert [each.backward_s for each in found] == pytest.approx([1e-3, *[0, 3e-3, 0] * 3, 2.5e-3])
    assert sum(each.forward_s for each in neusight.layers(operations, 3, 0.0)) == pytest.approx(12e-3)


def test_one_devices_runs_have_a_figure_of_their_own() -> None:
    names = {"NVIDIA_H100_80GB_HBM3 a": 1.05, "NVIDIA_L4 b": 1.5}
    runs = [Run(name, 1.0, (Predicted("", value),)) for name, value in names.items()]
    assert neusight.of_h100(runs) == "H100 alone, 1 runs: mean 5.0%, wanted 4.0%, missed by 1.0 points."


def test_the_simplest_prediction_counts_products_alone(trace: Path) -> None:
    flops = 3 * 2 * 4 * 8 * 16 + 2 * 4 * 8 * 10
    found = neusight.by_flops(trace)
    assert found.forward_s == pytest.approx(flops / (0.5 * 30.3e12), rel=0.01)
    assert found.backward_s == 2 * found.forward_s


def _network(*kinds: str) -> ModelGraph:
    names = [f"{at}.{kind}" for at, kind in enumerate(kinds)]
    before = ["input", *names]
    layers = (Layer(name=own, kind=kind, inputs=(last,)) for own, kind, last in zip(names, kinds, before, strict=False))
    return ModelGraph(name="toy", input_shape=(4,), layers=tuple(layers), parameters=())


def test_traced_operations_go_to_the_layers_that_do_the_same(trace: Path) -> None:
    rows = neusight_four.traced(trace)
    assert [row.kind for row in rows] == ["embedding", "", "addmm", "", "linear"]
    network = _network("embedding", "view", "addmm", "addmm", "linear", "loss")
    found = neusight_four.times_of(rows, network, 2)
    assert [each.layer.name for each in found] == ["0.embedding", "2.addmm", "3.addmm", "4.linear"]
    assert [each.forward_s for each in found] == pytest.approx([0.5e-3, 1.5e-3, 1.5e-3, 1.5e-3])
    assert [each.backward_s for each in found] == pytest.approx([1e-3, 3e-3, 3e-3, 2.5e-3])


def test_a_network_that_is_not_the_traces_is_refused(trace: Path) -> None:
    rows = neusight_four.traced(trace)
    with pytest.raises(ValueError, match="linear is 2"):
        neusight_four.times_of(rows, _network("embedding", "addmm", "addmm", "linear"), 1)


def test_a_table_has_signed_errors_and_what_is_left_out() -> None:
    runs = (
        Run("one", 1.0, (Predicted("a", 1.1, (0.9, 1.3)), Predicted("b", 0.8))),
        Run("two", 2.0, (Predicted("a", 1.8, (1.7, 1.9)), Predicted("b", 2.0))),
        Run("three", 3.0, (), "it cuts the sequence"),
    )
    assert coverage(runs[:2]) == (1, 2, pytest.approx((0.2 / 1.1 + 0.1 / 1.8) / 2))
    text = "\n".join(table(PublishedSet("T", "who", "what", ("a cause",), runs)))
    assert "| one | 1000 | +10.0% | -20.0% |  |" in text
    assert "| mean of errors' sizes | | 10.0% | 10.0% | |" in text
    assert "| mean error, signed | | +0.0% | -10.0% | |" in text
    assert "Of 2 90% intervals 1 hold; the median half-width is 11.9%." in text
    assert text.endswith("- Not predicted (1), it cuts the sequence: three\n- a cause\n")


def test_data_that_are_absent_are_said_to_be(tmp_path: Path) -> None:
    assert report(tmp_path, list(SETS)).count("skipped") == len(SETS)


@pytest.mark.skipif(not DATA.is_dir(), reason="the published measurements are not beside the repository")
def test_the_real_trace_has_every_kind_of_layer() -> None:
    rows = neusight_four.traced(DATA / neusight_four.TRACE)
    kinds = {
        "embedding",
        "norm",
        "addmm",
        "matmul",
        "elementwise",
        "mask",
        "softmax",
        "dropout",
        "activation",
        "linear",
    }
    assert {row.kind for row in rows} == kinds | {""}
    assert sum(row.in_block and row.kind != "" for row in rows) == 24


def _linear(name: str, features: int) -> Layer:
    attributes = {"out_features": features, "bias": False}
    return Layer(
        name=name,
        kind="linear",
        attributes=attributes,
        inputs=("x",),
        input_shapes=((4, 8),),
        output_shape=(4, features),
    )


_FSDP = (
    "model,seq_len,gpus,gpu,micro_batch,grad_accum,tokens_per_s_per_gpu,precision,mp_mode,activation_checkpointing\n"
)


@pytest.fixture
def fsdp(tmp_path: Path) -> Path:
    table = tmp_path / llm_foundry.RUNS
    table.parent.mkdir()
    lines = (
        "1b,2048,16,h100_80gb,4,1,900,amp_bf16,DEFAULT,False",
        "1b,2048,8,h100_80gb,2,3,1000,amp_bf16,PURE,True",
        "1b,4096,8,h100_80gb,2,3,500,amp_bf16,DEFAULT,False",
        "1b,2048,8,h100_80gb,2,3,2000,amp_fp8,DEFAULT,False",
        "3b,2048,8,h100_80gb,2,3,300,amp_bf16,DEFAULT,False",
        "1b,2048,8,a100_40gb,2,3,300,bf16,DEFAULT,False",
    )
    table.write_text(_FSDP + "\n".join(lines))
    return tmp_path


def test_models_with_one_rank_count_are_left_out(fsdp: Path) -> None:
    found = llm_foundry.by_model(llm_foundry.rows(fsdp, "h100_80gb"))
    assert [(row.ranks, row.accumulate, row.recompute) for row in found["1b"]] == [(8, 3, True), (16, 1, False)]
    assert [row.reduce_dtype for row in found["1b"]] == ["own", "fp32"]
    assert list(found) == ["1b"]


def test_layers_add_up_to_the_given_seconds(fsdp: Path) -> None:
    smallest = llm_foundry.rows(fsdp, "h100_80gb")[0]
    costs = {"fw_flops": 4, "bw_input_flops": 4, "bw_weight_flops": 4}
    layers = tuple(Layer(name=name, kind="linear", inputs=("input",), **costs) for name in ("blocks.0.up", "head"))
    network = ModelGraph(name="toy", input_shape=(10,), layers=layers, parameters=())
    block, head = llm_foundry.timed_layers(network, smallest, 0.02)
    # The block runs forward twice.
    assert 2 * block.forward_s + block.backward_s + head.forward_s + head.backward_s == pytest.approx(0.02)
    assert block.backward_s == head.backward_s == pytest.approx(2 * head.forward_s)


def test_the_smallest_run_takes_what_it_took(fsdp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the two samples of ten tokens in 20 ms, predict adds 3 ms and a tenth of what is computed."""
    smallest = llm_foundry.rows(fsdp, "h100_80gb")[0]
    layer = Layer(name="head", kind="linear", inputs=("input",), fw_flops=4, bw_input_flops=4, bw_weight_flops=4)
    network = ModelGraph(name="toy", input_shape=(10,), layers=(layer,), parameters=())
    computed: list[float] = []

    def write(folder: Path, _data: Path, _network: ModelGraph, timed: list[Timed], *_: object) -> None:
        folder.mkdir()
        computed.append(sum(each.forward_s + each.backward_s for each in timed))

    monkeypatch.setattr(llm_foundry, "write_layers", write)
    monkeypatch.setattr(llm_foundry, "run", lambda *_: None)
    monkeypatch.setattr(llm_foundry, "simulated", lambda *_: (2 / (1.1 * computed[-1] + 0.003), None, None))
    found = llm_foundry.computed_s(fsdp, network, smallest, tmp_path / "sweeps", tmp_path)
    assert 1.1 * found + 0.003 == pytest.approx(0.02, rel=0.003)


def test_larger_products_take_less_a_token(tmp_path: Path) -> None:
    for path in llm_foundry.LINEAR_LAYERS:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        lines = (
            "mp,b,l,dim,F_dur(us),B_dur(us)",
            "1,2,1024,8,1,2",
            "1,1,2048,8,2,3",
            "2,1,2048,8,9,9",
            "1,4,1024,8,2,3",
        )
        (tmp_path / path).write_text("\n".join(lines))
    assert llm_foundry.us_a_token(tmp_path, 8, 2048) == pytest.approx(4 * (3 + 5) / 2 / 2048)
    assert llm_foundry.us_a_token(tmp_path, 8, 4096) == pytest.approx(4 * 5 / 4096)
    assert llm_foundry.us_a_token(tmp_path, 16, 4096) is None
    norm = Layer(name="norm", kind="norm", inputs=("input",))
    timed = [Timed(_linear("up", 8), 1.0, 2.0), Timed(norm, 1.0, 2.0)]
    product, other = llm_foundry.of_micro_batch(timed, 3.0, 0.5)
    assert (product.forward_s, product.backward_s, other.forward_s, other.backward_s) == (1.5, 3.0, 3.0, 6.0)


def test_stages_have_as_many_blocks() -> None:
    assert primus.cuts(4) == "blocks.8.norm_1,blocks.16.norm_1,blocks.24.norm_1"


def test_ratios_count_where_they_are_near() -> None:
    runs = [Run(name, 1.0, tuple(Predicted("", value) for value in (1.03, 0.95, 1.1, 1.2))) for name in ("a", "b")]
    assert primus.of_each(runs).endswith("by micro-batches: 2 with 16, 0 with 32, 0 with 64, 0 with 128.")


def test_answers_are_ratios_to_the_first_schedule(tmp_path: Path) -> None:
    path = tmp_path / primus.RUNS
    path.parent.mkdir()
    path.write_text("schedule,tokens_per_s_per_gpu\n1f1b,100\nzbb,125\n")
    assert primus.read_answers(tmp_path) == {"zbb": 1.25}


def test_a_summary_has_a_row_a_set() -> None:
    runs = (Run("one", 1.0, (Predicted("a", 1.1, (0.9, 1.3)), Predicted("b", 0.8))), Run("two", 2.0))
    found = PublishedSet("T", "who", "what", (), runs, wanted=0.08)
    text = "\n".join(summary([found, PublishedSet("none", "", "", (), ())]))
    assert "| T | 1 of 2 | a 10.0%, +10.0%; wanted 8.0%, missed by 2.0 points | b 20.0% | 1 of 1 hold" in text
    assert "| mean of sets | | | | 100.0% hold, half-width 18.2% |\n" in text
    assert "| all runs | | | | 1 of 1 hold (100.0%), half-width 18.2% |\n" in text
    assert "\nMean: wanted 8.0%, missed by 2.0 points.\n" in "\n".join(table(found))
    assert short_by(0.08, 0.08) == "wanted 8.0%, reached"


def test_a_large_set_has_a_row_a_group() -> None:
    def of(name: str, group: str, predicted: float, half: float) -> Run:
        return Run(name, 1.0, (Predicted("a", predicted, (predicted - half, predicted + half)),), group=group)

    runs = (of("one", "t", 1.1, 0.2), of("two", "t", 0.8, 0.1), of("three", "d", 1.0, 0.1))
    lines = table(PublishedSet("T", "who", "what", (), runs))
    assert "| d | 1 | 0.0% | +0.0% | +0.0%, +0.0% | 100.0% | 10.0% |" in lines
    assert "| t | 2 | 15.0% | -5.0% | -20.0%, +10.0% | 50.0% | 15.3% |" in lines
    assert any(line.startswith("| all | 3 | 10.0% |") for line in lines)
    assert not any("one" in line for line in lines)


def _gpt_run(degrees: str, *, batch: int = 8, hidden: int = 1024) -> vtrain.Case:
    data, tensor, stages = (int(part[1:]) for part in (degrees[:2], degrees[2:4], degrees[4:]))
    return vtrain.Case(data * tensor * stages, batch, 1, hidden, 16, 24, 1024, tensor, data, stages)


def test_runs_for_the_host_are_chosen_by_settings_alone() -> None:
    few, many = _gpt_run("d1t2p1", batch=4), _gpt_run("d1t2p1", batch=16)
    wide, other = _gpt_run("d1t2p1", batch=2, hidden=2048), _gpt_run("d2t2p1", batch=4)
    chosen = vtrain.fitted_to([many, wide, few, other, _gpt_run("d1t1p2")])
    assert sorted(case.name for case in chosen) == sorted(case.name for case in (few, _gpt_run("d1t1p2")))


class _OneSecondForward(vtrain.Prices):
    def seconds(self, layer: Layer, stage: KernelStage, batch: int) -> float:
        return 1.0 if stage == "FW" else 2.0


def test_blocks_compute_forward_again_in_backward() -> None:
    prices = _OneSecondForward({}, {})
    in_block, head = (vtrain._timed(_linear(name, 8), "t2", prices, 1, 0.5) for name in ("blocks.0.up", "head"))
    assert (in_block.forward_s, in_block.backward_s) == (1.0, 3.5)
    assert head.backward_s == 2.0


def test_pairs_of_degrees_count_where_their_order_is_right() -> None:
    said = {"d2t1p1": (1.0, 1.0), "d1t2p1": (2.0, 3.0), "d1t1p2": (3.0, 2.0)}
    runs = [(_gpt_run(name), Run(name, measured, (Predicted("x", value),))) for name, (measured, value) in said.items()]
    alone = (_gpt_run("d4t1p1"), Run("d4t1p1", 1.0, (Predicted("x", 1.0),)))
    shares, wrong = orders(vtrain.alike([*runs, alone]))
    assert "Of 1 sets that differ by degrees alone, the order is right in 0.0% (90% wanted)" in shares
    assert "the best in 100.0%; of 3 pairs 66.7%" in shares
    assert wrong.endswith("tensor and pipeline 1 of 1, measured 50.0% apart in the median.")


def linear_kernel(batch: int) -> KernelShape:
    sizes = {"batch": batch, "in_features": 64, "out_features": 64, "bias": 0}
    flops = 2.0 * batch * 64 * 64
    return KernelShape(kind="linear", stage="FW", sizes=sizes, settings={"function": "linear"}, flops=flops, bytes=1.0)


def law_s(kernel: KernelShape) -> float:
    """A peak of 1e12 FLOP/s, of which whole tiles of 16 rows reach all and others 0.6."""
    return kernel.flops / 1e12 / (0.6 if kernel.sizes["batch"] % 16 else 1.0)


def test_many_shapes_give_small_trees_where_these_are_closer(tmp_path: Path) -> None:
    pytest.importorskip("lightgbm")
    shapes = [linear_kernel(1000 + 4 * number) for number in range(400)]
    fit = fit_compact(timed_shapes(shapes, [law_s(shape) for shape in shapes], "fp32"), "0")
    assert fit is not None
    path = tmp_path / "a.npz"
    sha256 = write_arrays(path, {f"0/{name.removeprefix('0/')}": array for name, array in fit[1].items()})
    model = msgspec.structs.replace(fit[0], file=str(path), sha256=sha256, arrays="0")
    assert model.model == "trees"
    assert model.candidates[0].held_out_re < 0.15
    known = estimate(model, linear_kernel(1300))
    assert known is not None
    assert known.seconds == pytest.approx(law_s(linear_kernel(1300)), rel=0.2)
    assert path.stat().st_size < 100_000


def test_fewer_than_nine_shapes_give_no_compact_fit() -> None:
    shapes = [linear_kernel(32 * number) for number in range(1, 9)]
    assert fit_compact(timed_shapes(shapes, [law_s(shape) for shape in shapes], "fp32"), "0") is None


def test_dispatch_of_a_trace_is_the_gap_between_launches(tmp_path: Path) -> None:
    """A view launches nothing, an operation inside of another is a part of it, and backward has its own thread."""

    def operation(thread: int, at_us: int, name: str, number: int | None) -> dict[str, object]:
        arguments = {} if number is None else {"Sequence number": number}
        return {"ph": "X", "cat": "cpu_op", "tid": thread, "ts": at_us, "dur": 10, "name": name, "args": arguments}

    def launch(thread: int, at_us: int) -> dict[str, object]:
        return {"ph": "X", "cat": "cuda_runtime", "tid": thread, "ts": at_us, "dur": 1, "name": "cudaLaunchKernel"}

    events = [operation(1, at, "aten::linear", number) for number, at in enumerate((0, 40, 80))]
    events += [launch(1, at + 5) for at in (0, 40, 80)]
    events += [operation(1, at, "aten::view", 9) for at in (15, 25, 55)]
    events += [{**operation(1, 2, "aten::addmm", 0), "dur": 6}]
    backward = "autograd::engine::evaluate_function: AddmmBackward0"
    events += [operation(2, at, backward, number) for number, at in enumerate((200, 290, 380))]
    events += [launch(2, at + 5) for at in (200, 290, 380)]
    path = tmp_path / "kineto" / "trace.json.gz"
    path.parent.mkdir()
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    assert evidence.dispatch_us(tmp_path) == {"trace": (40, 90)}
