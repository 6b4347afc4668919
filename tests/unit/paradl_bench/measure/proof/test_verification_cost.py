"""When a proof is left out, and what it holds two tensors equal by."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from paradl_bench.measure.proof.comparison import FLOAT64, NO_NUMBER, difference
from paradl_bench.measure.proof.cost import LIMIT_S, cost_of, what_forbids
from paradl_bench.measure.proof.parts import Place
from paradl_bench.network.graph import Layer, ModelGraph, Tensor

NETWORK = ModelGraph(
    name="n",
    input_shape=(4,),
    layers=(
        Layer(
            name="a",
            kind="linear",
            attributes={},
            inputs=("input",),
            input_shapes=((4,),),
            output_shape=(1000,),
            parameters=("a.weight",),
        ),
    ),
    parameters=(Tensor(name="a.weight", shape=(1000, 4)),),
)


def test_a_quick_proof_is_made_unasked() -> None:
    quick, long = (
        cost_of(NETWORK, Place(0, 2, 3, 2), 1e-3, joint=False),
        cost_of(NETWORK, Place(0, 2, 3, 2), 1.0, joint=False),
    )
    assert what_forbids(quick, 2**40, limited=True) == ""
    assert long.seconds > LIMIT_S
    assert what_forbids(long, 2**40, limited=True) == "it would take about 48.0 s; give --verify to do it"
    assert what_forbids(long, 2**40, limited=False) == ""


def test_verification_too_large_for_memory_is_skipped_even_if_requested() -> None:
    quick = cost_of(NETWORK, Place(0, 2, 3, 2), 1e-3, joint=False)
    assert quick.bytes == 8 * (8 * 4000 + 8 * 1000)
    assert what_forbids(quick, quick.bytes - 1, limited=False).startswith("it needs 312 KiB of memory a rank")


def test_slow_links_count() -> None:
    slow = cost_of(NETWORK, Place(0, 2, 3, 2), 1e-3, joint=False, link_bytes_per_s=1000)
    assert slow.seconds > 100


def test_replicas_that_synchronise_are_computed_on_every_rank() -> None:
    apart, joint = (cost_of(NETWORK, Place(0, 2, 3, 2), 1.0, joint=joint).seconds for joint in (False, True))
    assert joint - apart == pytest.approx(6 * 3)


@pytest.mark.parametrize(
    ("found", "exact", "differs"),
    [
        ([1.0, 2.0], [1.0, 2.0 + 1e-7], False),
        ([1.0, 2.0], [1.0, 2.0 + 1e-4], True),
        # Noise beside the largest gradient of all.
        ([1e-17], [-1e-17], False),
        ([1e-6], [-1e-6], True),
        ([float("inf"), 1.0], [float("inf"), 1.0], False),
        ([float("inf"), 1.0], [float("inf"), 2.0], True),
        ([float("inf")], [-float("inf")], True),
        ([float("nan")], [1.0], True),
        ([1.0, 2.0], [1.0], True),
        ([], [], False),
    ],
)
def test_what_counts_as_equal(found: list[float], exact: list[float], differs: bool) -> None:
    tensors = (torch.tensor(values, dtype=torch.float64) for values in (found, exact))
    said, by = difference(*tensors, FLOAT64, 1.0)
    assert said is differs
    assert 0 <= by <= NO_NUMBER
