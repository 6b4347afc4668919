"""The benchmark on public measurements: what it reads, and its sums, on logs made up here."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path

import pytest
from recorded_logs import public_data

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "published"))

from public import abci, bcaffe, paradl_table, ranking, vtrain
from public.estimated import shared_out
from public.pairs import Pair, accuracy, as_csv, scores
from public_measurements import SOURCES, report

LOG = """\
file,snapshot,log_time,param_id,n_params,backward_compute_us,comm_us,merged_comm_us
tmp2comm.log,0,x,0,100,1,1,
tmp2comm.log,0,x,1,10,1,1,
tmp2comm.log,1,x,0,100,2000,3000,
tmp2comm.log,1,x,1,10,2000,500,
tmp2comm.log,1,x,2,200,1000,6000,
tmp2comm.log,1,x,3,20,1000,0,
tmp16ocomm.log,0,x,0,100,4000,9,700,
tmp16ocomm.log,0,x,1,10,4000,9,0
tmp16ocomm.log,0,x,2,200,1000,9,0
tmp16ocomm.log,0,x,3,20,1000,9,0
tmpcomm.log,0,x,0,100,2000,9,
tmpcomm.log,0,x,1,10,2000,9,
"""


def pair(predicted: float, measured: float, perfect: float = 1.0, **changes: object) -> Pair:
    fields = {
        "source": "S", "what": "w", "ranks": 2, "evaluator": "e", "chosen": True, "unit": "iteration", "low_s": 0.9,
        "high_s": 1.5, "predicted_s": predicted, "measured_s": measured, "perfect_s": perfect,
    }  # fmt: skip
    return Pair(**{**fields, **changes})


def test_errors_have_their_sign_and_extra_is_over_perfect_scaling() -> None:
    found = pair(1.1, 1.25)
    assert (found.error, found.perfect_error) == pytest.approx((-0.12, -0.2))
    assert (found.extra, found.measured_extra) == pytest.approx((0.1, 0.25))
    assert found.covered
    assert not pair(1.1, 1.6).covered
    assert accuracy([0.1, -0.3]) == pytest.approx(0.8)
    with pytest.raises(ValueError, match="outside of its interval"):
        pair(1.6, 1.0)


def test_scores_are_by_evaluator_and_csv_holds_every_pair() -> None:
    pairs = [pair(1.0, 1.25), pair(1.4, 1.25, evaluator="other", chosen=False)]
    lines = scores(pairs)
    assert "| **e** | 1 | 80.0% | 80.0% | 20.0% | 100% |" in lines
    assert any(line.startswith("| other | 1 | 88.0% |") for line in lines)
    rows = list(csv.DictReader(io.StringIO(as_csv(pairs))))
    assert [float(row["error"]) for row in rows] == pytest.approx([-0.2, 0.12])


def test_bcaffe_logs_count_backward_once_and_use_the_last_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "logs.csv"
    path.write_text(LOG)
    logs = bcaffe.read_logs(path)
    assert {name: bcaffe.nodes_of(name) for name in logs} == {"tmp2comm.log": 2, "tmp16ocomm.log": 16}
    alone = logs["tmp2comm.log"]
    assert [layer.backward_s for layer in alone] == pytest.approx([2e-3, 1e-3])
    assert bcaffe.mean_backward(logs.values()) == pytest.approx([3e-3, 1e-3])
    # Backward: layer 1 is done at 1 ms, its exchange at 7 ms; layer 0, done at 3 ms, exchanges from then to 10.5 ms.
    assert bcaffe.as_logged([2e-3, 1e-3], alone, 0.1) == pytest.approx(0.1 + 7.5e-3)
    # All four tensors go in the merged exchange, which starts when backward is over.
    merged = logs["tmp16ocomm.log"]
    assert bcaffe.exchanges(merged) == [[], [(4 * 330, pytest.approx(7e-4))]]
    assert bcaffe.as_logged([4e-3, 1e-3], merged, 0.1) == pytest.approx(0.1 + 7e-4)


def test_b_caffe_s_runs_can_be_added_to(tmp_path: Path) -> None:
    (tmp_path / "measured.csv").write_text("model,batch,nodes,exchange,images_per_s\ngooglenet,64,8,merged,1024\n")
    runs = {(run.model, run.nodes, run.exchange): run.iteration_s for run in bcaffe.read_measured(tmp_path)}
    assert runs["googlenet", 8, "merged"] == pytest.approx(0.5)
    assert runs["googlenet", 1, ""] == pytest.approx(64 / 163.4)


def test_an_epoch_has_a_last_iteration_that_is_not_full(tmp_path: Path) -> None:
    assert [abci.iterations(gpus) for gpus in (4, 32)] == [3337, 418]
    path = tmp_path / "epochs.csv"
    path.write_text("node_type,nodes,gpus,epoch,train_epoch_s\nx,1,8,0,\nx,1,8,1,10\nx,2,16,1,6\ny,1,4,1,3\n")
    assert abci.read_epochs(path) == [("x", {8: [10.0], 16: [6.0]}), ("y", {4: [3.0]})]


def test_an_iteration_is_shared_out_by_the_roofline() -> None:
    layer = {"batchless": False, "parameters": ["w"], "fw_bytes": 9e9, "bw_weight_flops": 157e9}
    network = {
        "parameters": [{"name": "w", "shape": [5, 2]}],
        "layers": [
            {"name": "a", **layer, "fw_flops": 157e9, "bw_input_flops": 0},
            {"name": "b", **layer, "fw_flops": 471e9, "bw_input_flops": 471e9, "fw_bytes": 9e6},
        ],
    }
    # On a V100 9 GB take 10 ms, as 157 GFLOP do: forward 10 and 30 ms, backward 10 and 40 ms a sample.
    first, second = shared_out(network, "Tesla V100-SXM2-16GB", 2, 9.0)
    assert (first.forward_s, first.backward_s) == pytest.approx((1.0, 1.0))
    assert (second.forward_s, second.backward_s) == pytest.approx((3.0, 4.0))
    assert (first.gradient_bytes, second.gradient_bytes) == (40, 0)


def test_vtrain_s_shapes_keep_what_a_replica_does(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    heads = ",".join(str(index) for index in range(11))
    path.write_text(f"{heads}\n2,16,8,1024,16,24,1024,1,1,2,300\n4,32,8,1024,16,24,1024,1,2,2,310\n")
    ((shape, seconds),) = vtrain.read_runs(path).items()
    assert seconds == pytest.approx({1: 0.3, 2: 0.31})
    layers, embeddings = 12 * (12 * 1024 + 13) * 1024, 51200 * 1024 + 1024 * 1024
    assert shape.gradient_bytes == 2 * (layers + embeddings)


def test_the_paper_tools_network_has_the_printed_weights() -> None:
    weights = 0
    for line in paradl_table.net_file().splitlines()[3:]:
        sizes = [int(number) for number in line.split("|")[2].split("x")]
        if not line.startswith("MPOOL"):
            weights += sizes[0] * sizes[1] * sizes[2] * sizes[3]
    assert weights == 169_801_408
    assert paradl_table.measured("| VGG16 | filter | 32 | 9033 | 77266 | 86299 | 19236 |") == [("filter", 32, 86299.0)]


def test_regret_is_judged_by_the_noise_floor() -> None:
    candidates = (ranking.Candidate("a", 1.0, 1.05, 0.01), ranking.Candidate("b", 2.0, 1.0, 0.06))
    choice = ranking.Choice("here", "set", candidates)
    assert (choice.taken.name, choice.best.name, choice.right) == ("a", "b", True)
    assert choice.regret == pytest.approx(0.05)
    assert not ranking.Choice("here", "set", tuple(c._replace(noise_floor=0.02) for c in candidates)).right


def test_without_data_every_source_is_skipped_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, pairs = report(tmp_path, tmp_path, tmp_path)
    assert pairs == []
    assert text.count("Skipped: ") == len(SOURCES)
    assert "bcaffe-k80/googlenet_k80_layerwise.csv is not under" in text


def test_perfect_scaling_scores_what_the_data_say() -> None:
    data = public_data()
    (vnode,) = abci.read_epochs(data / "abci-v100" / "resnet50_horovod_epoch_times.csv")
    middle = {gpus: sorted(seconds)[len(seconds) // 2] for gpus, seconds in vnode.seconds.items()}
    assert accuracy(middle[4] * 4 / gpus / middle[gpus] - 1 for gpus in (8, 16, 32)) == pytest.approx(0.952, abs=5e-4)
    runs = [run for run in bcaffe.read_measured(data / "bcaffe-k80") if run.model == "googlenet"]
    (alone,) = [run.iteration_s for run in runs if run.nodes == 1]
    errors = [alone / run.iteration_s - 1 for run in runs if run.nodes in (2, 4)]
    assert accuracy(errors) == pytest.approx(0.930, abs=5e-4)
