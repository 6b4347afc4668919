"""Keys and values that go round: attention equal to serial, and not where broken; what is planned is what is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[bench,test]'")

import torch.nn.functional as F

from paradl_bench.core.errors import UserError
from paradl_bench.measure.layers import shards_proof
from paradl_bench.measure.proof.threads import Meeting, ThreadGroup, run_threads
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.models.catalog import load_model
from paradl_bench.plan.settings import PlanSettings, plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Compute, HaloExchange, Plan, Stream
from paradl_bench.strategies.context import by_ring, ring_kernels
from paradl_bench.strategies.context.by_ring import AttentionByRing, MirroredTokens
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.running.own_randomness import OwnRandomness
from paradl_bench.strategies.running.spans import Spans
from paradl_bench.strategies.tensor.sequence.on_tokens import OwnTokens

TOKENS, SAMPLES, WIDTH = 16, 2, 8
Tensors = tuple[torch.Tensor, ...]


def traced(name: str) -> ModelGraph:
    return trace_network(load_model(f"transformer_networks:{name}"))


class _Request:
    def settings(self, batch: int) -> PlanSettings:
        return plan_settings(batch=batch, context_exchange="ring")


def proved(name: str, strategy: str) -> Any:
    request: Any = _Request()
    model = load_model(f"transformer_networks:{name}")
    return shards_proof._prove(model, trace_network(model), parse_strategy(strategy), request, 3)


def planned(name: str, text: str, batch: int = 4, **options: Any) -> Plan:
    network = traced(name)
    strategy = parse_strategy(text)
    settings = plan_settings(batch=batch, context_exchange="ring", **options)
    return planner_for(strategy).plan(network, strategy, settings)


@pytest.mark.parametrize(
    ("name", "strategy"), [("gpt2_tokens", "x2"), ("llama_tokens", "x4"), ("bert_tokens", "x4"), ("masked", "x4")]
)
def test_parts_of_the_sequence_train_as_all_of_it(name: str, strategy: str) -> None:
    proof = proved(name, strategy).verification
    assert not proof.why_not
    assert proof.largest_difference < 1e-12


def operands(dtype: torch.dtype, heads: int, keys: int, value_width: int) -> Tensors:
    torch.manual_seed(7)
    shapes = (heads, WIDTH), (keys, WIDTH), (keys, value_width), (heads, value_width)
    return tuple(torch.randn(SAMPLES, count, TOKENS, width, dtype=dtype) for count, width in shapes)


def in_ring(
    ranks: int, given: Tensors, sent: list[list[tuple[int, ...]]] | None = None, **settings: Any
) -> list[Tensors]:
    """Output and gradients of query, key and value, each put together; ``sent`` takes each rank's messages in bytes."""
    tokens = MirroredTokens if settings.get("is_causal") else OwnTokens

    class Recorded(ThreadGroup):
        def begin_exchange(self, messages: Any, received: Any) -> Callable[[], None]:
            if sent is not None:
                assert [peer for peer, _ in messages] == [(self.rank + 1) % ranks] * len(messages)
                sent[self.rank].append(tuple(tensor.nbytes for _, tensor in messages))
            return super().begin_exchange(messages, received)

    def of_rank(rank: int, meeting: Meeting) -> Tensors:
        nobody: Any = None
        group = Recorded(process_group=nobody, rank=rank, size=ranks, spans=Spans(), meeting=meeting)
        own = tokens(group, TOKENS)
        *read, gradient = (own.part(tensor, -2).contiguous() for tensor in given)
        leaves = [tensor.requires_grad_() for tensor in read]
        made = AttentionByRing(own, OwnRandomness(group))(F.scaled_dot_product_attention, tuple(leaves), dict(settings))
        made.backward(gradient)
        return made.detach(), *(leaf.grad for leaf in leaves)

    return list(zip(*run_threads(ranks, of_rank), strict=True))


def from_serial(ranks: int, dtype: torch.dtype, *shape: int, **settings: Any) -> float:
    """The largest relative difference of output and gradients from those of torch's attention in float64."""
    given = operands(dtype, *shape)
    leaves = [tensor.double().clone().requires_grad_() for tensor in given[:3]]
    whole = F.scaled_dot_product_attention(*leaves, **settings, enable_gqa=shape[0] != shape[1])
    whole.backward(given[3].double())
    differences = []
    expected = whole.detach(), *(leaf.grad for leaf in leaves)
    for of_ranks, serial in zip(in_ring(ranks, given, **settings), expected, strict=True):
        chunks = torch.cat(of_ranks, -2).double()
        if settings.get("is_causal"):
            both = serial.chunk(2 * ranks, -2)
            serial = torch.cat([both[at] for rank in range(ranks) for at in (rank, 2 * ranks - 1 - rank)], -2)
        differences.append(float((chunks - serial).abs().max() / serial.abs().max()))
    return max(differences)


CASES = [
    ("fused", torch.float64, (4, 4, WIDTH), 1e-12),
    ("grouped", torch.float64, (4, 2, WIDTH), 1e-12),
    ("wider values", torch.float64, (2, 2, 12), 1e-12),
    ("fp32", torch.float32, (4, 1, WIDTH), 1e-5),
    ("bf16", torch.bfloat16, (4, 2, WIDTH), 2e-2),
]


@pytest.mark.parametrize("causal", [False, True], ids=["all pairs", "causal"])
@pytest.mark.parametrize(("dtype", "shape", "most"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
@pytest.mark.parametrize("ranks", [2, 4])
def test_attention_is_that_of_the_whole(
    ranks: int, dtype: torch.dtype, shape: tuple[int, ...], most: float, causal: bool
) -> None:
    assert from_serial(ranks, dtype, *shape, is_causal=causal, scale=0.4) < most


def test_rows_that_see_nothing_of_a_block_are_right() -> None:
    # The first tokens see those of the first rank alone; of each other block they see nothing.
    near = torch.ones(TOKENS, TOKENS).tril().bool()
    assert from_serial(4, torch.float64, 2, 2, WIDTH, attn_mask=near) < 1e-12
    far = torch.zeros(SAMPLES, 1, 1, TOKENS, dtype=torch.float64)
    far[..., TOKENS // 2 :] = float("-inf")
    assert from_serial(4, torch.float64, 2, 2, WIDTH, attn_mask=far) < 1e-12


def every_other_key(weights: torch.Tensor, drawn: Any, dropout: float) -> torch.Tensor:
    return torch.arange(weights.shape[-1]).remainder(2).expand_as(weights) / dropout


def test_dropped_weights_are_dropped_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_kernels, "_kept", every_other_key)
    given = operands(torch.float64, 2, 2, WIDTH)
    leaves = [tensor.clone().requires_grad_() for tensor in given[:3]]
    weights = torch.softmax(leaves[0] @ leaves[1].mT / WIDTH**0.5, -1)
    whole = weights * every_other_key(weights, (), 0.5) @ leaves[2]
    whole.backward(given[3])
    made = in_ring(4, tuple(tensor.detach() for tensor in given), dropout_p=0.5)
    for parts, serial in zip(made, (whole, *(leaf.grad for leaf in leaves)), strict=True):
        assert torch.allclose(torch.cat(parts, -2), serial, rtol=1e-12, atol=1e-12)


def test_dropout_is_drawn_for_each_block_and_again_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, asked = ring_kernels._kept, dict[int, list[torch.Tensor]]()

    def remembered(weights: torch.Tensor, drawn: Any, dropout: float) -> torch.Tensor:
        found = kept(weights, drawn, dropout)
        asked.setdefault(int(drawn[0]), []).append(found)
        return found

    monkeypatch.setattr(ring_kernels, "_kept", remembered)
    *given, gradient = operands(torch.float32, 2, 2, WIDTH)
    scoring = ring_kernels.Scoring(causal=False, scale=None, dropout=0.3)
    for _ in range(2):
        out, lse, drawn = ring_kernels.attend(tuple(given), None, scoring)
        ring_kernels.differentiate((gradient, *given, out, lse), None, drawn, scoring)
    (first, again), (second, _) = asked.values()
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert first.unique().tolist() == pytest.approx([0, 1 / 0.7])
    assert float(first.bool().float().mean()) == pytest.approx(0.7, abs=0.05)


def stays(self: Any, *tensors: torch.Tensor) -> Any:
    return [tensor.clone() for tensor in tensors], lambda: None


def unweighted(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    out.add_(part)


def at_hand_alone(ring: Any, sums: list[torch.Tensor], key: torch.Tensor, value: torch.Tensor) -> Any:
    return by_ring._parts(sums[0], key, value)


def one_chunk(self: MirroredTokens, rank: int, whole: torch.Tensor, dim: int) -> torch.Tensor:
    return OwnTokens.part_of(self, rank, whole, dim)


def no_half(self: Any, turn: int) -> tuple[slice, slice]:
    return slice(None), slice(None)


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (by_ring._Ring, "pass_on", stays),
        (ring_kernels, "join", unweighted),
        (by_ring, "_brought_home", at_hand_alone),
        (MirroredTokens, "part_of", one_chunk),
        (by_ring._Ring, "seen", no_half),
    ],
    ids=["blocks stay", "parts are added", "sums do not come home", "chunks of the front", "later tokens seen"],
)
def test_what_is_broken_differs_from_serial(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, broken: Callable[..., Any]
) -> None:
    monkeypatch.setattr(owner, name, broken)
    first = proved("llama_tokens", "x2").first
    assert first is not None
    assert first.relative > 1e-6


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_rank_sends_what_is_planned_in_its_order(ranks: int, dtype: str) -> None:
    plan = planned("llama_tokens", f"x{ranks}", batch=SAMPLES, dtype=dtype)
    messages = [work.sends_bytes for work in plan.of_layers() if isinstance(work, HaloExchange)]
    width = {"fp32": 4, "bf16": 2}[dtype]
    block = SAMPLES * 2 * (8 // ranks) * (4 + 4) * width
    sums = block // width * 4
    back = [(block,)] if ranks == 2 else [(block,), (block,), (block, sums), (sums,)]
    assert messages == [*[(block,)] * (ranks - 1)] * 2 + [*back, (sums,)] * 2
    assert all(work.receives_bytes == work.sends_bytes for work in plan.works if isinstance(work, HaloExchange))
    sent: list[list[tuple[int, ...]]] = [[] for _ in range(ranks)]
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    in_ring(ranks, operands(kind, 4, 2, WIDTH), sent, is_causal=True)
    # These tensors are of twice as many tokens, and heads twice as wide.
    one_layer = [*messages[: ranks - 1], *messages[2 * (ranks - 1) :][: len(back) + 1]]
    assert sent == [[tuple(4 * size for size in sizes) for sizes in one_layer]] * ranks


def test_messages_and_rounds_wait_for_the_same() -> None:
    plan = planned("llama_tokens", "d2x4")
    (role,) = plan.roles
    waits = [
        tuple(role.dependencies[role.dependency_start[task] : role.dependency_start[task + 1]])
        for task in range(role.tasks)
    ]
    pairs = 0
    for task in range(role.tasks - 1):
        work, after = plan.works[role.work[task]], plan.works[role.work[task + 1]]
        if isinstance(work, HaloExchange) and isinstance(after, Compute) and "attention" in after.operation:
            assert (role.stream[task], role.stream[task + 1]) == (Stream.COMMUNICATION, Stream.COMPUTE)
            assert waits[task] == waits[task + 1]
            pairs += 1
    # Two layers: three messages beside rounds forward, four backward.
    assert pairs == 2 * (3 + 4)


def test_rounds_make_up_a_share_of_the_causal_attention() -> None:
    network = traced("llama_tokens")
    plan = planned("llama_tokens", "x4")
    (attention,) = (layer for layer, _ in plan.sharded if layer.kind == "attention")
    (whole,) = {layer.operation: layer for layer in network.layers if layer.kind == "attention"}.values()
    assert attention.input_shapes == ((4, 2, 4), (2, 2, 4), (2, 2, 4))
    assert attention.attributes["causal"]
    computed = [plan.works[index] for index in plan.roles[0].work]
    forward = [work for work in computed if isinstance(work, Compute) and work.operation == attention.operation]
    assert len(forward) == 2 * 2 * 4
    assert attention.fw_flops * 4 * 4 == whole.fw_flops


@pytest.mark.parametrize(
    ("name", "strategy", "why"),
    [
        ("Biased", "x2", "a learned mask of layer scaled_dot_product_attention"),
        ("gpt2_tokens", "x8", "p <= 4: a sequence of 8 tokens, 2 chunks a rank"),
        ("gpt2_tokens", "x3", "does not split evenly over 3 ranks, 2 chunks each; the nearest that do are 6 and 12"),
    ],
)
def test_what_a_ring_does_not_run_is_refused(name: str, strategy: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        planned(name, strategy)
