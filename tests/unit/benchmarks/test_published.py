"""Published iterations: how a trace's operations become a model's layers, and what the simplest prediction counts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "published"))

from public import neusight
from published_runs import report

_HEAD = "op,target,meta,latency,fw_latency,bw_latency,acc_latency,input_shapes,output_shape\n"
_ROWS = (
    # A block begins behind the embedding; sizes run no kernel.
    "call_module,wte,('wte'),3,1,1,1,\"[[1, 4]]\",\"(1, 4, 8)\"",
    "call_method,size,('transformer.h.0'),0.5,0.5,0,0,\"[[1, 4, 8]]\",\"(1,)\"",
    "call_function,<built-in method addmm of x>,('x.h.0'),6,2,3,1,\"[[16], [4, 8], [8, 16]]\",\"(4, 16)\"",
    "call_method,size,('transformer.h.0'),0.5,0.5,0,0,\"[[1, 4, 8]]\",\"(1,)\"",
    "call_module,head,\"('head', <class 'torch.nn.modules.linear.Linear'>)])}\",5,2,3,0,\"[[1, 4, 8]]\",\"(1, 4, 10)\"",
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


def test_the_simplest_prediction_counts_products_alone(trace: Path) -> None:
    flops = 3 * 2 * 4 * 8 * 16 + 2 * 4 * 8 * 10
    found = neusight.by_flops(trace)
    assert found.forward_s == pytest.approx(flops / (0.5 * 30.3e12), rel=0.01)
    assert found.backward_s == 2 * found.forward_s


def test_a_report_has_a_row_a_run(trace: Path) -> None:
    answer = neusight.read_answer(trace)
    assert (answer.forward_s, answer.backward_s) == (0.01, 0.02)
    found = [neusight.Predicted("a", 0.01, 0.023), neusight.Predicted("b", 0.01, 0.017)]
    text = report([(answer, found), (answer, found[::-1])])
    assert "| NVIDIA_L4 toy-train-4-1 | 30.0 | +10.0% | -10.0% | +0.0%, +15.0% |" in text
    assert "all | | 10.0% | 10.0% | |" in text
    assert neusight.traces(trace.parents[2]) == [trace]
