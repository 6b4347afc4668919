"""SimuMax's runs: how its system file becomes the times of layers and collectives, and what each run is planned as."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks" / "published"))

from published_runs import DATA
from sets.runs import Predicted
from sets.simumax import links, prices, published_set

from paradl_bench.network.graph import Layer, ModelGraph, Tensor


def test_a_case_says_its_strategy() -> None:
    pipeline = published_set.case_of("llama3_70b_l12_tp1_pp2_dp4_mbc8_cef", "llama3-70b", 8)
    how = ("--schedule", "1f1b", "--micro-batches", "8", "--stages", "blocks.6.norm_1")
    assert pipeline.strategy == ("z1d4p2", "--batch", "32", *how)
    tensor = published_set.case_of("llama3_405b_l4_tp4_pp1_dp2_mbc4_cef", "llama3-405b", 4)
    how = ("--sequence-parallel", "on", "--accumulate", "4")
    assert tensor.strategy == ("z1d2t4", "--batch", "8", *how)


def test_experts_and_context_have_strategies() -> None:
    experts = published_set.case_of("deepseekv2_tp1_ep8_pp1_dp8_l4_mbc4_cef", "deepseekv2", 4)
    assert experts.strategy == ("z1d1e8", "--batch", "32", "--accumulate", "4")
    long = published_set.case_of("llama3_405b_l4_tp2_cp4_pp1_dp1_seq131072_mbc4_cef", "llama3-405b", 4)
    how = ("--context-exchange", "all-to-all", "--sequence-parallel", "on", "--accumulate", "4")
    assert long.strategy == ("z1d1x4t2", "--batch", "4", *how)
    assert (long.network, long.tokens) == ("llama3_405b_128k", 131072)


def test_times_and_peaks_are_sets_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"mbc": 4, "real_ms": 500.0, "real_alloc_gib": 40.0, "perf_ms": 400.0, "perf_alloc_gib": 38.0}
    path = tmp_path / published_set.RUNS
    path.parent.mkdir()
    path.write_text(json.dumps([{**said, "case": "l4_tp4_pp1_dp2_mbc4", "model": "llama3-405b"}]))
    told = published_set.Answer(Predicted("simulate", 0.45), Predicted("walk", 50.0))
    found = told, Predicted("FLOPs", 0.3)
    monkeypatch.setattr(published_set, "predictions", lambda data, work: {"l4_tp4_pp1_dp2_mbc4": found})
    times, peaks = published_set.published(tmp_path, tmp_path)
    assert [run.error(at) for run in times.runs for at in range(3)] == pytest.approx([-0.1, -0.4, -0.2])
    assert [peaks.runs[0].error(at) for at in range(2)] == pytest.approx([0.25, -0.05])


def test_experts_are_predicted_beside_a_parted_state(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(module: str, *arguments: str) -> str:
        asked.append(arguments[arguments.index("--strategy") + 1])
        return json.dumps([{"iteration_s": 2.0, "interval_s": [1.0, 3.0], "memory_bytes": 2**31}])

    monkeypatch.setattr(published_set, "run", run)
    experts = published_set.case_of("deepseekv2_tp1_ep8_pp1_dp8_l4_mbc4_cef", "deepseekv2", 4)
    told = published_set.predicted(Path("p.json"), experts, Path("c.yaml"))
    assert asked == ["z1d1e8"]
    assert (told.simulated.value, told.simulated.interval, told.memory.value) == (2.0, (1.0, 3.0), 2.0)


SHARE = {"efficient_factor": 0.5, "gbps": 8, "latency_us": 30}
SYSTEM = {"accelerator": {"bandwidth": dict.fromkeys(("default", "ce_fusion", "permute_fwd", "permute_bwd"), SHARE)}}


def layer(name: str, kind: str, inputs: tuple[str, ...], shape: tuple[int, ...], *output: int, **attributes) -> Layer:
    return Layer(
        name=name, kind=kind, attributes=attributes, inputs=inputs, input_shapes=(shape,), output_shape=tuple(output)
    )


def linear(name: str, features: int) -> Layer:
    return layer(name, "linear", ("x",), (4, 8), 4, features, out_features=features, bias=False)


def moved_s(size_bytes: float) -> float:
    return size_bytes / 2**32 + 30e-6


def test_queries_keys_and_values_share_one_product() -> None:
    times = {
        ("linear", stage, (1, 4, 0, 8, 12)): seconds
        for stage, seconds in (("FW", 3.0), ("BW_input", 4.0), ("BW_weight", 5.0))
    }
    # The head's vocabulary was padded.
    times["linear", "FW", (1, 4, 0, 8, 128)] = 20.0
    found = prices.Prices(SYSTEM, times, prices.Beside(qkv_features=12, tokens=128))
    shares = [found.timed(linear(name, features)) for name, features in (("query", 8), ("key", 2), ("value", 2))]
    assert [each.forward_s for each in shares] == pytest.approx([2.0, 0.5, 0.5])
    assert sum(each.backward_s for each in shares) == pytest.approx(9.0)
    assert found._seconds(linear("head", 100), "FW") == 20.0
    # A kernel that memory bounds takes its latency too.
    assert found._moved_s(2**32, "default") == pytest.approx(1 + 30e-6)


def test_experts_have_equal_rows_and_copy_them() -> None:
    # 10 rows over 4 experts are 3 each; of these a copy moves 8 features.
    times = {("grouped_matmul", "FW", (1, 12, 2, 8, 16)): 7.0}
    found = prices.Prices(SYSTEM, times, prices.Beside(qkv_features=0, tokens=128, experts=4, width=8))
    up = Layer(
        name="up",
        kind="grouped_matmul",
        attributes={"function": "grouped_mm", "groups": 2, "out_features": 16},
        inputs=("rows",),
        input_shapes=((10, 8),),
        output_shape=(10, 16),
        parameters=("weight",),
    )
    assert found._seconds(up, "FW") == pytest.approx(7.0 + moved_s(2 * 12 * 8 * 2))


def test_rows_are_moved_as_their_publisher_counts_bytes() -> None:
    gather = msgspec.structs.replace(layer("rows", "gather", ("x", "whose"), (), 6, 8), input_shapes=((4, 8), (6,)))
    found = prices.Prices(SYSTEM, {}, prices.Beside(qkv_features=0, tokens=128))
    # Tokens once and rows three times, by one of the two kernels that were timed with four launches.
    assert found._seconds(gather, "FW") == pytest.approx(moved_s((4 + 3 * 6) * 8 * 2) + 30e-6)


def test_a_loss_moves_logits_twice_each_way() -> None:
    loss = layer("loss", "loss", ("head",), (4, 100), 1)
    found = prices.Prices(SYSTEM, {}, prices.Beside(qkv_features=0, tokens=128))
    assert [found._seconds(loss, stage) for stage in ("FW", "BW")] == pytest.approx(2 * [moved_s(2 * 4 * 100 * 2)])


@pytest.mark.parametrize(("groups", "copies"), [(2, True), (4, False)])
def test_queries_among_keys_and_values_are_copied_apart(groups: int, copies: bool) -> None:
    queries, keys = (1, 4, 16, 8), (1, groups, 16, 8)
    seen = layer("seen", "attention", ("query", "key", "value"), (), *queries)
    seen = msgspec.structs.replace(seen, input_shapes=(queries, keys, keys))
    found = prices.Prices(SYSTEM, {}, prices.Beside(qkv_features=12, tokens=128))
    of_queries, of_keys = 4 * 16 * 8 * 4, groups * 16 * 8 * 4
    forward_s = moved_s(of_queries) + moved_s(of_keys) if copies else 0.0
    backward_s = moved_s(of_queries + 2 * of_keys) if copies else 0.0
    assert found._put_in_order_s(seen, "FW") == pytest.approx(forward_s)
    assert found._put_in_order_s(seen, "BW") == pytest.approx(backward_s)


def test_gradients_that_meet_are_added() -> None:
    layers = (
        layer("one", "linear", ("input",), (4, 8), 4, 8),
        layer("flat", "view", ("one",), (4, 8), 32, function="flatten"),
        *(layer(name, "linear", ("flat",), (4, 8), 4, 8) for name in ("query", "key", "value", "other")),
        layer("halves", "view", ("other",), (4, 8), 4, 4, function="chunk"),
        *(layer(name, "elementwise", ("halves",), (4, 4), 4, 4, function="mul") for name in ("left", "right")),
    )
    weight = Tensor(name="one.weight", shape=(8, 8), dtype="fp32")
    layers = (msgspec.structs.replace(layers[0], parameters=(weight.name,)), *layers[1:])
    network = ModelGraph(name="toy", input_shape=(4, 8), layers=layers, parameters=(weight,))
    # One product makes queries, keys and values; one kernel writes the gradients of both halves.
    assert prices.readers_of(network) == {"one": 2}
    times = {("linear", stage, (1, 4, 0, 8, 8)): 1.0 for stage in ("FW", "BW_weight")}
    alone, read_twice = (
        prices.Prices(SYSTEM, times, prices.Beside(0, 128, readers=readers)).timed(
            msgspec.structs.replace(linear("one", 8), inputs=("input",))
        )
        for readers in ({}, {"one": 2})
    )
    assert read_twice.backward_s - alone.backward_s == pytest.approx(moved_s(3 * 4 * 8 * 2))


def test_the_whole_gradient_of_an_embedding_is_cleared() -> None:
    found = prices.Prices(SYSTEM, {}, prices.Beside(qkv_features=0, tokens=128))
    table = layer("embedding", "embedding", ("input",), (4,), 4, 8, rows=100)
    assert found._seconds(table, "BW") == pytest.approx(moved_s(100 * 8 * 2) + moved_s(2 * 4 * 8 * 2))


FIT = {"scale": 1, "offset": -1, "efficient_factor": 0.5, "latency_us": 5.0, "fixed_latency_us": 12.0}
LINK = {
    "bandwidth": {"gbps": 2},
    "op": {
        "reduce_scatter": FIT,
        "all_gather": FIT,
        "all_reduce": {**FIT, "scale": 2},
        "all2all": {**FIT, "fixed_latency_us_by_comm_num": {"8": 0.0}},
        "p2p": {"scale": 1, "offset": 0, "efficient_factor": 0.5, "latency_us": 16.0},
    },
}


def test_a_collective_takes_what_the_file_says() -> None:
    of_bytes = 2**30
    assert links.seconds(LINK, "all_reduce", 4, of_bytes) == pytest.approx((6 * 5 + 12) * 1e-6 + 2 * 0.75)
    assert links.seconds(LINK, "all2all", 8, of_bytes) == pytest.approx(7 * 5e-6 + 7 / 8)
    assert links.seconds(LINK, "all2all", 4, of_bytes) == pytest.approx((3 * 5 + 12) * 1e-6 + 0.75)
    assert links.seconds(LINK, "p2p", 2, of_bytes) == pytest.approx(16e-6 + 1)


def test_sweeps_count_bytes_as_the_tool_does() -> None:
    gathers, sums = (links.sweep(LINK, name) for name in ("all_gather", "all_reduce"))
    assert [record.message_bytes for record in gathers[:2]] == [2048, 8192]
    assert sums[0].message_bytes == 4096
    assert len(gathers[-1].samples_s) == 8
    assert {record.ranks for record in links.sweep(LINK, "send_recv")} == {2}


def test_a_link_is_a_hop_of_the_fitted_ring(tmp_path: Path) -> None:
    system = {"networks": {"high_intra_node": LINK}}
    level = json.loads(links.link_file(system, 4, tmp_path / "c.yaml").read_text())["levels"][0]
    assert level["alpha_s"] == pytest.approx(9e-6)
    assert level["beta_s_per_byte"] == pytest.approx(1 / 2**30)


@pytest.mark.skipif(not DATA.is_dir(), reason="the published measurements are not beside the repository")
def test_every_run_has_a_network() -> None:
    from sets.simumax import models

    found = published_set.cases(DATA)
    assert len(found) == 22
    assert all(callable(getattr(models, case.network)) for case in found)
