"""Ranks that hold parts of a vocabulary compute what the whole model does, in float64; ranks are threads here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[bench,test]'")

import torch.nn.functional as F

from paradl_bench.core.errors import WorkError
from paradl_bench.measure.layers.shards_proof import verify_shards
from paradl_bench.measure.proof.threads import ThreadGroup, run_threads
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.graph import Layer
from paradl_bench.network.models.catalog import load_model
from paradl_bench.network.partition import cut
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.records.training.verification import Verification
from paradl_bench.strategies.running.spans import Spans
from paradl_bench.strategies.tensor.vocabulary import module as vocabulary


def verified(name: str, strategy: str) -> Verification:
    network = trace_network(load_model(f"transformer_networks:{name}"))
    request: Any = SimpleNamespace(
        verify=True, batches=(2,), input_shape=None, settings=lambda batch: plan_settings(batch=batch)
    )
    (axis,) = parse_strategy(strategy).axes
    return verify_shards(request, network, axis, 0.0)


@pytest.mark.parametrize(
    ("name", "strategy"), [("Tied", "t2"), ("Tied", "t4"), ("Untied", "t2"), ("Untied", "t3"), ("Fused", "t2")]
)
def test_parts_compute_what_the_model_does(name: str, strategy: str) -> None:
    found = verified(name, strategy)
    assert (found.why_not, found.dtype) == ("", "fp64")
    assert found.largest_difference < 1e-13


def _first_rows(tokens: Any, weight: Any, first: int, padding: int | None) -> Any:
    return F.embedding(tokens.clamp(max=len(weight) - 1), weight)


def _without_target(logits: Any, largest: Any, places: Any) -> Any:
    return vocabulary._Exponents.apply(logits, largest, places - 1)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("function", "wrong", "first"),
    [
        ("_look_up", _first_rows, "embedding"),
        ("_exponents", _without_target, "the gradient of the output of mul"),
    ],
)
def test_wrong_parts_are_found(function: str, wrong: Any, first: str) -> None:
    with mock.patch.object(vocabulary, function, wrong), pytest.raises(WorkError, match=first):
        verified("Untied", "t2")


def entropy(logits: Any, targets: Any, ranks: int, **options: Any) -> list[tuple[Any, Any]]:
    """Per rank, the loss from parts of the logits, and the gradient of the rank's part."""
    layer = Layer(name="loss", kind="loss", attributes={"function": "cross_entropy"})

    def run(rank: int, meeting: Any) -> tuple[Any, Any]:
        group = ThreadGroup(process_group=None, rank=rank, size=ranks, spans=Spans(), meeting=meeting)  # type: ignore[arg-type]
        own = cut(logits.shape[-1], ranks)[rank]
        part = logits[:, own.start : own.stop].clone().requires_grad_()
        loss = vocabulary.PartedEntropy(layer, own, group)(F.cross_entropy, (part, targets), options)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach(), part.grad

    return run_threads(ranks, run)


@pytest.mark.parametrize("ranks", [2, 3])
def test_large_logits_and_ignored_targets_are_as_in_torch(ranks: int) -> None:
    generator = torch.Generator().manual_seed(3)
    # Exponents of these overflow by themselves.
    logits = 2000 * torch.randn((6, 11), generator=generator, dtype=torch.float64)
    targets = torch.tensor([0, 10, -100, 5, 7, -100])
    whole = logits.clone().requires_grad_()
    exact = F.cross_entropy(whole, targets)
    exact.backward()  # type: ignore[no-untyped-call]
    found = entropy(logits, targets, ranks)
    torch.testing.assert_close(torch.stack([loss for loss, _ in found]), exact.detach().expand(ranks))
    torch.testing.assert_close(torch.cat([gradient for _, gradient in found], 1), whole.grad)


def test_other_losses_are_refused_by_name() -> None:
    with pytest.raises(WorkError, match=r"layer loss is called with label_smoothing=0.1: .* by --split"):
        entropy(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64), 1, label_smoothing=0.1)
