"""What a framework holds in the place of torch, against sums by hand and against autograd."""

from __future__ import annotations

import math

import msgspec
import pytest
from network_factory import NetworkFactory
from profile_factory import make_network

from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.strategies.frameworks.framework_memory import LLM_FOUNDRY, MEGATRON, TORCH, FrameworkMemory
from paradl_bench.strategies.memory.ledger import Ledger
from paradl_bench.strategies.memory.liveness import Liveness
from paradl_bench.strategies.memory.of_plan import memory_of_plan
from paradl_bench.strategies.memory.peak import buffer_bytes
from paradl_bench.strategies.memory.rank_operations import RankRun

SAMPLES, WIDTH, INNER, CLASSES = 6, 16, 40, 24
BF16, FP32 = 2, 4
WEIGHTS = "bf16-weights"


def parts(network: ModelGraph, text: str, preset: str, dtype: str = WEIGHTS, **chosen: object) -> dict[str, int]:
    settings = plan_settings(**{"batch": 16, "optimizer": "adamw-fused", "preset": preset, **chosen})
    return memory_of_plan(network, parse_strategy(text), settings, dtype=dtype, device="cuda").parts_bytes


def gated() -> ModelGraph:
    """Linear up, its two halves one gate, linear down, loss."""
    factory = NetworkFactory(WIDTH)
    factory.linear("up", 2 * INNER, bias=False)
    halves = factory.call("halves", "chunk", (factory._read("up"), 2, -1), (INNER,), ("up",))
    act = factory.call("act", "silu", (factory._read(halves),), (INNER,), (halves,))
    factory.call("gate", "mul", (factory._read(act), factory._read(halves)), (INNER,), (act, halves))
    factory.linear("down", CLASSES, bias=False)
    factory.loss()
    network = factory.network("gated")
    layers = [
        msgspec.structs.replace(layer, further_outputs=((INNER,),))
        if layer.name == "halves"
        else msgspec.structs.replace(layer, reads=(("act", 0), ("halves", 1)))
        if layer.name == "gate"
        else layer
        for layer in network.layers
    ]
    return msgspec.structs.replace(network, layers=tuple(layers))


class Activations(Ledger):
    """Notes when activations alone are most."""

    most = 0

    def mark(self, more: int = 0, gradients: int = 0) -> None:
        self.most = max(self.most, self.activations + more)


def kept(network: ModelGraph, framework: FrameworkMemory) -> tuple[int, int]:
    """Bytes of activations after forward, and at their most."""
    ledger = Activations()
    walk = Liveness(ledger, network, RankRun(samples=SAMPLES, framework=framework))
    received = ledger.allocate(SAMPLES * WIDTH * FP32)
    left = walk.forward(received)
    after = ledger.activations
    walk.backward(left)
    return after, ledger.most


def test_a_fused_gate_keeps_what_an_autograd_function_does() -> None:
    torch = pytest.importorskip("torch")

    class Gate(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            one, other = x.chunk(2, -1)
            return torch.nn.functional.silu(one) * other

        @staticmethod
        def backward(ctx, gradient):
            raise NotImplementedError

    x = torch.randn(SAMPLES, WIDTH)
    up, down = torch.nn.Linear(WIDTH, 2 * INNER, bias=False), torch.nn.Linear(INNER, CLASSES, bias=False)
    of_parameters = {
        parameter.untyped_storage().data_ptr() for module in (up, down) for parameter in module.parameters()
    }

    def bytes_kept(gate) -> int:
        storages = {}

        def note(tensor):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            made = down(gate(up(x)))
        assert made.grad_fn is not None
        return sum(size for pointer, size in storages.items() if pointer not in of_parameters)

    def in_single_operations(x):
        one, other = x.chunk(2, -1)
        return torch.nn.functional.silu(one) * other

    # The loss keeps the logarithms of the probabilities, and the walk the batch that it was given.
    loss = SAMPLES * CLASSES * FP32
    fused = TORCH._replace(fuses=frozenset({"activation"}))
    for framework, gate in ((TORCH, in_single_operations), (fused, Gate.apply)):
        assert kept(gated(), framework)[0] == bytes_kept(gate) + loss
    assert bytes_kept(in_single_operations) - bytes_kept(Gate.apply) == SAMPLES * INNER * FP32


def test_backward_of_a_fused_gate_makes_one_gradient() -> None:
    half, batch = SAMPLES * INNER * FP32, SAMPLES * WIDTH * FP32
    fused = TORCH._replace(fuses=frozenset({"activation", "loss"}), overwrites_logits=True)
    # The batch and both halves. Down's backward lets go of the gate, and leaves its gradient; theirs is one tensor.
    assert kept(gated(), fused)[1] == batch + 2 * half + half + 2 * half


def head() -> ModelGraph:
    factory = NetworkFactory(WIDTH)
    factory.linear("head", CLASSES)
    factory.loss()
    return factory.network("head")


def test_a_loss_that_overwrites_logits_makes_nothing_beside_them() -> None:
    network = head()
    fused = TORCH._replace(fuses=frozenset({"loss"}), overwrites_logits=True)
    batch, logits = SAMPLES * WIDTH * FP32, SAMPLES * CLASSES * FP32
    after, most = kept(network, fused)
    assert after == batch
    # And the loss, a number a sample.
    assert most == batch + logits + SAMPLES * FP32
    assert kept(network, TORCH)[0] >= batch + logits


def test_llm_foundrys_loss_keeps_logits_beside_their_gradient() -> None:
    batch, logits, rows = SAMPLES * WIDTH * FP32, SAMPLES * CLASSES * FP32, SAMPLES * FP32
    after, most = kept(head(), LLM_FOUNDRY)
    assert after == batch + logits + rows
    assert most == batch + 2 * logits + rows


def test_llm_foundrys_logits_have_no_copies_of_another_dtype() -> None:
    many = {"batch": 4096, "optimizer": "adam"}
    logits = [parts(head(), "serial", preset, **many)["activations"] for preset in ("pytorch", "llm-foundry")]
    # Of torch's there are fp32 copies of the logits, their logarithms and gradients.
    assert logits[0] - logits[1] >= 4096 * CLASSES * (2 * FP32 - BF16)


def test_gradients_are_one_fp32_buffer_beside_placeholders() -> None:
    network = make_network((64, 64, 64, 32))
    elements = network.parameter_elements
    own, torchs = parts(network, "z1d4", "megatron"), parts(network, "z1d4", "")
    # Two layers share a placeholder; biases have none.
    placeholders = (64 * 64 + 64 * 32) * BF16
    assert own["buckets"] == 0
    assert own["parameters"] == torchs["parameters"] == elements * BF16
    # Biases' gradients are tensors for a moment, the largest of which may be there at the peak.
    assert 0 <= own["gradients"] - elements * FP32 - placeholders <= 64 * BF16
    assert torchs["buckets"] == elements * BF16


def test_the_buffer_is_there_for_one_replica_too() -> None:
    network = make_network((64, 64, 32))
    alone = parts(network, "serial", "megatron", dtype="fp32")
    assert alone["buckets"] == 0
    assert alone["gradients"] >= network.parameter_bytes


def test_state_is_parted_evenly_where_the_framework_does() -> None:
    network = make_network((64, 512, 8))
    whole = 3 * FP32 * network.parameter_elements
    assert parts(network, "z1d4", "megatron")["optimizer"] == pytest.approx(whole / 4, rel=1e-3)
    # The larger matrix is no less than one part.
    assert parts(network, "z1d4", "")["optimizer"] == 3 * FP32 * 64 * 512


def test_an_update_from_the_buffer_converts_no_gradient() -> None:
    network = make_network((8, 1024, 8))
    of_update = [sum(parts(network, "serial", preset, batch=1).values()) for preset in ("", "megatron")]
    # Both hold 16 bytes an element at the end: a bf16 gradient with its fp32 copy, or the buffer with a placeholder.
    assert of_update[0] - of_update[1] == pytest.approx(network.parameter_elements * (6 - 4 - 2), abs=1 << 14)


def test_an_optimizers_own_tensors_are_of_the_part_it_updates() -> None:
    """torch's ZeroRedundancyOptimizer steps an optimizer of the rank's own parameters alone."""
    network = make_network((256, 256, 256, 256, 256))
    plain, fused = (
        sum(parts(network, "z1d4", "", optimizer=name, dtype="fp32", batch=4).values())
        for name in ("adamw", "adamw-fused")
    )
    # One of four equal layers.
    assert plain - fused == pytest.approx(network.parameter_bytes / 4, rel=0.05)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb", "zbv", "dualpipev"])
def test_messages_take_no_buffer_for_every_micro_batch(schedule: str) -> None:
    network = make_network((WIDTH,) * 9)

    def held(preset: str, count: int) -> dict[str, int]:
        return parts(network, "p4", preset, micro_batches=count, batch=4 * count, schedule=schedule)

    few, many = (held("megatron", count) for count in (16, 64))
    assert few["communication"] == many["communication"] == 0
    torchs = held("", 64)
    assert torchs["communication"] == 4 * held("", 16)["communication"]
    assert sum(many.values()) < sum(torchs.values())
    if schedule != "gpipe":
        # As many micro-batches are under way.
        assert few["activations"] == many["activations"]


def test_what_a_stage_receives_and_reads_in_backward_is_held() -> None:
    network = make_network((WIDTH,) * 5)
    sample = WIDTH * BF16
    (count, at_once) = 8, 4
    found = parts(network, "p4", "megatron", micro_batches=count, batch=count * at_once, schedule="1f1b")
    # The first stage has four under way, each of which keeps its input, which lies in the batch, and ReLU its output.
    # Stages behind keep what they received too: the second has three
    # of both, a gradient that came and one that it made.
    assert found["activations"] >= 3 * 2 * at_once * sample


def test_parts_of_the_sequence_are_kept_and_gathered_again() -> None:
    pytest.importorskip("torch")
    from paradl_bench.measure.tracing.tracing import trace_network
    from paradl_bench.network.models.catalog import load_model
    from paradl_bench.strategies.nesting.catalog import planner_for

    network = trace_network(load_model("transformer_networks:llama_tokens"))
    strategy, settings = parse_strategy("t2"), plan_settings(batch=2, sequence_parallel="on")
    sharded = planner_for(strategy).shards(network, strategy, settings).distinct[0]
    found = []
    for again in (False, True):
        ledger, framework = Activations(), TORCH._replace(gathers_again=again)
        run = RankRun(samples=2, shards=sharded.shards, framework=framework)
        walk = Liveness(ledger, sharded.network, run)
        left = walk.forward(ledger.allocate(0))
        found.append(ledger.activations)
        walk.backward(left)
    gathered = {
        (layer.inputs[0], shard.before_fw[0].message_bytes)
        for layer, shard in ((network.layers[i], shard) for i, shard in sharded.shards.items())
        if layer.kind == "linear" and shard.before_fw and shard.before_fw[0].operation == "all_gather"
    }
    assert gathered
    # Of each tensor a rank keeps its half, which the walk of torch keeps whole.
    assert found[0] - found[1] == sum(size for _, size in gathered)


@pytest.mark.parametrize(
    ("text", "dtype", "message"),
    [
        (
            "d2",
            "bf16",
            "--preset megatron: its parameters are of the dtype that it computes in; give --dtype bf16-weights",
        ),
        ("z3d2", "fp32", "strategy z3d2: --preset megatron holds whole parameters, as under ZeRO's stage 1: write z1"),
    ],
)
def test_what_the_framework_does_not_train_by_is_refused(text: str, dtype: str, message: str) -> None:
    with pytest.raises(UserError) as refused:
        parts(make_network((8, 8)), text, "megatron", dtype=dtype)
    assert str(refused.value).startswith(message)


def test_every_declared_difference_lowers_some_peak() -> None:
    """No field of the declaration is without an effect."""
    assert all(getattr(MEGATRON, field) != getattr(TORCH, field) for field in FrameworkMemory._fields)
    assert math.isfinite(sum(parts(gated(), "d2", "megatron").values()))


def test_a_placeholder_is_of_one_expert() -> None:
    factory = NetworkFactory(WIDTH)
    matrices = factory._parameter("experts", 4, WIDTH, INNER)
    factory.call("up", "grouped_mm", (factory._read("input"), matrices), (INNER,), ("input",))
    factory.linear("down", CLASSES, bias=False)
    factory.loss()
    network = factory.network("experts")
    elements = 4 * WIDTH * INNER + INNER * CLASSES
    assert buffer_bytes(network, MEGATRON) == (elements + WIDTH * INNER + INNER * CLASSES) * FP32
