"""Memory of a rank, against sums by hand."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profile_factory import make_network

from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import Layer, ModelGraph, Tensor
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.strategies.data.zero.memory import ZeroState
from paradl_bench.strategies.data.zero.sharing import Shares
from paradl_bench.strategies.memory.paradl import paradl_memory
from paradl_bench.strategies.memory.peak import per_phase_memory

# 64 -> 128 -> 32, with relu in place after both.
SMALL = make_network((64, 128, 32), buffers=True)
PARAMETERS = 4 * (64 * 128 + 128 + 128 * 32 + 32)


def test_paradl_counts_every_tensor_twice_and_the_bias_once() -> None:
    elements = (64 + 128) + (128 + 128) + (128 + 32) + (32 + 32)
    bias = 4 * (128 + 32)
    expected = 2 * 4 * 10 * elements + 2 * (PARAMETERS - bias) + bias
    assert paradl_memory(SMALL, 10).peak_bytes == expected


def test_the_peak_is_in_backward_where_outputs_meet_gradients() -> None:
    found = per_phase_memory(SMALL, 1000, PlanSettings(batch=1), exchanged=False)
    # A target of 8 bytes a sample beside its 64 numbers.
    fixed = 2 * PARAMETERS + 4 * 128 + 1000 * (4 * 64 + 8)
    # Backward of relu0: outputs of fc0 and fc1 are freed from the back, so fc0's is left; relu0 has two gradients of
    # 128, and fc1's gradients are there. Backward of fc1: both outputs, gradients of 128 and 32.
    at_fc1 = 4 * 1000 * ((128 + 32) + (128 + 32)) + 4 * (128 * 32 + 32)
    at_relu0 = 4 * 1000 * (128 + 256) + 4 * (128 * 32 + 32)
    at_fc0 = 4 * 1000 * (128 + 64 + 128) + PARAMETERS
    assert found.peak_bytes == fixed + max(at_fc1, at_relu0, at_fc0)
    assert sum(found.parts_bytes.values()) == found.peak_bytes


def test_a_tiny_batch_peaks_at_or_just_before_weight_update() -> None:
    found = per_phase_memory(SMALL, 1, PlanSettings(batch=1), exchanged=False)
    assert found.parts_bytes["gradients"] == PARAMETERS


@pytest.mark.parametrize(("optimizer", "copies"), [("sgd", 1), ("adam", 2)])
def test_optimizers_hold_state(optimizer: str, copies: int) -> None:
    assert (
        per_phase_memory(SMALL, 1, PlanSettings(batch=1, optimizer=optimizer), exchanged=False).parts_bytes["optimizer"]
        == copies * PARAMETERS
    )


def test_parameters_without_a_gradient_have_no_state() -> None:
    read = tuple(reversed([parameter.name for parameter in SMALL.parameters]))
    unread = Tensor(name="unread.weight", shape=(100, 10))
    network = msgspec.structs.replace(SMALL, parameters=(*SMALL.parameters, unread), gradient_order=read)
    parts = [
        per_phase_memory(
            network, 1, PlanSettings(batch=1, optimizer="adam"), exchanged=True, parted=ZeroState(z, Shares(2))
        ).parts_bytes
        for z in (0, 1, 3)
    ]
    assert [of["optimizer"] for of in parts] == [2 * PARAMETERS, 2 * (4 * 128 * 64), PARAMETERS]
    assert [of["buckets"] for of in parts] == [PARAMETERS + 4000, PARAMETERS + 4000, 0]


def test_data_parallelism_holds_gradients_twice() -> None:
    alone, beside = (
        per_phase_memory(SMALL, 4, PlanSettings(batch=1), exchanged=exchanged) for exchanged in (False, True)
    )
    assert beside.peak_bytes - alone.peak_bytes == PARAMETERS


def test_an_optimizer_of_unknown_state_is_refused() -> None:
    with pytest.raises(UserError, match="unknown optimizer 'lion'"):
        per_phase_memory(SMALL, 4, PlanSettings(batch=1, optimizer="lion"), exchanged=False)


@pytest.mark.parametrize(("kind", "function", "held"), [("view", "flatten", 1), ("copy", "clone", 2)])
def test_views_own_nothing_and_copies_do(kind: str, function: str, held: int) -> None:
    last = Layer(
        name="last",
        kind=kind,
        attributes={"function": function},
        inputs=("fc0",),
        input_shapes=((128,),),
        output_shape=(128,),
    )
    network = ModelGraph(name="n", input_shape=(64,), layers=(SMALL.layers[0], last), parameters=SMALL.parameters[:2])
    found = per_phase_memory(network, 1000, PlanSettings(batch=1), exchanged=False).parts_bytes
    assert found["activations"] == 4 * 1000 * held * 128


def test_adam_works_in_tensors_of_its_own() -> None:
    sgd, adam, on_gpu = (
        per_phase_memory(
            SMALL, 1, PlanSettings(batch=1, optimizer=optimizer), exchanged=False, device=device
        ).parts_bytes["activations"]
        for optimizer, device in (("sgd", "cpu"), ("adam", "cpu"), ("adam", "cuda"))
    )
    assert sgd < 4 * 128 * 64
    assert adam == 2 * 4 * 128 * 64
    assert on_gpu == PARAMETERS


@given(st.lists(st.integers(1, 50), min_size=2, max_size=5), st.integers(1, 100))
def test_memory_grows_with_batch_and_exceeds_its_fixed_part(widths: list[int], batch: int) -> None:
    network = make_network(widths)
    one, more = (per_phase_memory(network, size, PlanSettings(batch=1), exchanged=False) for size in (batch, batch + 1))
    assert more.peak_bytes > one.peak_bytes
    assert one.peak_bytes >= 3 * network.parameter_bytes
    outputs = sum(layer.output_elements for layer in network.layers if layer.kind == "linear")
    assert one.peak_bytes >= 2 * network.parameter_bytes + 4 * batch * outputs
    assert paradl_memory(network, batch + 1).peak_bytes > paradl_memory(network, batch).peak_bytes
