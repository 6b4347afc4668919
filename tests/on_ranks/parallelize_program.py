"""What every rank of the comparison with torch's own tensor parallelism runs: BERT under ``parallelize_module``.

The styles come from the pairs that the plan found: columns are ColwiseParallel, rows RowwiseParallel, and where several
layers by columns read one tensor, their module's input is made a DTensor first (PrepareModuleInput). Gradients of this
rank's parts, and the all-reduces, are then those of this project's run and plan. The result is how many all-reduces
torch issues in an iteration, and how many without PrepareModuleInput.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from equality_program import assert_close
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.models.catalog import LoadedModel, load_model
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.ranks.groups.process_groups import RankContext, join_ranks
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.nesting.parallel import build_parallel
from paradl_bench.strategies.tensor.pairs import find_pairs

SAMPLES = 3
STRATEGY = parse_strategy("t2")
SETTINGS = PlanSettings(batch=SAMPLES)


class _AllReduces(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts all-reduces that DTensors make, by elements."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[int] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if function.namespace == "_c10d_functional" and function._opname == "all_reduce":
            self.counts[args[0].numel()] += 1
        return function(*args, **(kwargs or {}))


def styles(network: ModelGraph, *, prepared: bool) -> dict[str, Any]:
    """By path of a module, how torch parallelizes it."""
    pairs = find_pairs(network)
    found: dict[str, Any] = {}
    for index, linear in pairs.linear.items():
        path = linear.weight.rpartition(".")[0]
        piece = pairs.pieces[index]
        found[path] = ColwiseParallel() if piece.part == "column" else RowwiseParallel()
        if prepared and piece.leader != index:
            owner = path.rpartition(".")[0]
            found[owner] = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
    return found


def train(model: LoadedModel, module: nn.Module) -> None:
    inputs, targets = model.make_batch(SAMPLES, seed=7)
    model.loss(module(inputs.double()), targets).backward()  # type: ignore[no-untyped-call]


def by_torch(mesh: DeviceMesh, network: ModelGraph, *, prepared: bool) -> tuple[nn.Module, Counter[int]]:
    model = load_model("transformer_networks:bert")
    module = parallelize_module(model.module.double(), mesh, styles(network, prepared=prepared))
    with _AllReduces() as recorded:
        train(model, module)
    return module, recorded.counts


def main(result: Path) -> None:
    with join_ranks("gloo", "cpu", timeout_s=60) as context:
        found = compare(context)
        if context.rank == 0:
            result.write_text(json.dumps(found))


def compare(context: RankContext) -> list[int]:
    model = load_model("transformer_networks:bert")
    network = trace_network(model)
    plan = planner_for(STRATEGY).plan(network, STRATEGY, SETTINGS)
    model.module.double()
    built = build_parallel(model.module, network, STRATEGY, SETTINGS, context.device)
    train(model, built.module)
    mesh = init_device_mesh("cpu", (2,))
    torchs, issued = by_torch(mesh, network, prepared=True)
    exact = dict(torchs.named_parameters())
    for name, parameter in model.module.named_parameters():
        gradient = exact[name].grad
        assert (parameter.grad is None) == (gradient is None), name
        if parameter.grad is not None and gradient is not None:
            assert_close(parameter.grad, gradient.to_local() if isinstance(gradient, DTensor) else gradient)
    planned = Counter({size // 4: count for (_, size, _), count in plan.collectives().items()})
    assert issued == planned, (issued, planned)
    return [sum(issued.values()), sum(by_torch(mesh, network, prepared=False)[1].values())]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
