"""Ranks that make a mesh whose groups move nothing, and write what calls on them have left. Argument: where to."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch
from torch import nn

from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.models.catalog import load_model
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.ranks.groups.process_group import end_groups, is_silent, silent_groups
from paradl_bench.ranks.groups.process_groups import join_ranks
from paradl_bench.strategies.exchange.replicated_module import exchange_gradients
from paradl_bench.strategies.nesting.process_mesh import ProcessMesh


class One(nn.Module):
    """A weight, whose gradient is the input."""

    input_shape = (3,)

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


def gradient_of(rank: int, mesh: ProcessMesh) -> list[float]:
    """The weight's after backward of a rank's own input, through the exchange of gradients."""
    model = load_model(f"{__name__}:{One.__name__}")
    network = trace_network(model)
    group = mesh.group((0,)).process_group
    module = exchange_gradients(model.module, network, PlanSettings(batch=2), torch.device("cpu"), group)
    for _ in range(2):
        model.module.zero_grad()
        module(torch.full((1, 3), rank + 1.0)).sum().backward()
    (weight,) = model.module.parameters()
    assert weight.grad is not None
    return weight.grad.flatten().tolist()


if __name__ == "__main__":
    with join_ranks("gloo", "cpu", timeout_s=60) as context:
        strategy = parse_strategy("d2")
        with silent_groups():
            silent = ProcessMesh(strategy)
            quiet, heard = silent.group((0,)), silent.group((0,), heard=True)
        after = ProcessMesh(strategy)
        kept, summed = torch.ones(2), torch.ones(2)
        quiet.all_reduce(kept)
        heard.all_reduce(summed)
        with silent_groups():
            own = gradient_of(context.rank, silent)
        found = {
            "silent": [is_silent(each.process_group) for each in (quiet, heard, after.group((0,)))],
            "kept": kept.tolist(),
            "summed": summed.tolist(),
            "own": own,
            "mean": gradient_of(context.rank, after),
        }
        Path(sys.argv[1], f"{context.rank}.json").write_bytes(msgspec.json.encode(found))
        context.barrier()
        end_groups(silent.groups[1:])
