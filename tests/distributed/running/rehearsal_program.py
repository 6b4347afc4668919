"""What every rank of the rehearsal's test runs: parts of a network, alone and answered by the other rank.

The result is, by strategy, the collectives and messages that an iteration issues in both ways and that the plan has,
and how long an iteration took by the rehearsal's clock while the other rank came late to it.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paradl_bench.measure.layers import rehearsal
from paradl_bench.measure.layers.gathered import GatheredModel
from paradl_bench.measure.layers.rehearsal import RehearsedModel
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.models.catalog import load_model
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Collective, Transfer
from paradl_bench.ranks.groups.process_groups import RankContext, join_ranks
from paradl_bench.strategies.nesting.catalog import planner_for

STRATEGIES = ("f2", "c2", "s2", "t2")
SAMPLES = 4
LATE_S = 1.0


class Net(nn.Module):
    """Convolutions and two linear layers."""

    input_shape = (4, 16, 16)

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.wide, self.head = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.two(torch.relu(self.one(inputs))))
        return self.head(torch.relu(self.wide(hidden.mean((2, 3)))))


class Strided(nn.Module):
    """A convolution whose second half of rows receives a row, and sends none."""

    input_shape = (4, 16, 16)

    def __init__(self) -> None:
        super().__init__()
        self.one, self.head = nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.Linear(8, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.one(inputs)).mean((2, 3)))


@contextmanager
def counted(counts: Counter[str]) -> Iterator[None]:
    """Count calls of torch.distributed that the rehearsal makes."""
    names = {"all_reduce": dist, "all_to_all_single": dist, "batch_isend_irecv": dist}
    names |= {"all_gather_into": rehearsal, "reduce_scatter_into": rehearsal}  # type: ignore[dict-item]
    kept = {name: getattr(module, name) for name, module in names.items()}

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return call(*args, **kwargs)

        return made

    for name, module in names.items():
        setattr(module, name, counting(name, kept[name]))
    try:
        yield
    finally:
        for name, module in names.items():
            setattr(module, name, kept[name])


def planned(network: Any, text: str) -> dict[str, int]:
    """How often a rank communicates for its layers, by kind."""
    strategy = parse_strategy(text)
    plan = planner_for(strategy).plan(network, strategy, PlanSettings(batch=SAMPLES))
    works = plan.communication(0)
    counts = Counter(work.operation for work in works if isinstance(work, Collective))
    counts["halo"] = sum(not isinstance(work, (Collective, Transfer)) for work in works)
    return dict(counts)


def rehearsed(context: RankContext, text: str, name: str = "Net", position: int = 0) -> dict[str, Any]:
    """One strategy's part, trained alone and answered."""
    model = load_model(f"rehearsal_program:{name}")
    network = trace_network(model)
    (axis,) = parse_strategy(text).axes
    settings = PlanSettings(batch=SAMPLES)
    part = RehearsedModel(model, network, axis, position, settings, context.device)
    inputs, targets = model.make_batch(SAMPLES, context.rank)
    ways, found = {"alone": None, "answered": dist.group.WORLD}, {"planned": planned(network, text)}
    for way, group in ways.items():
        counts: Counter[str] = Counter()
        with part.answered(group), counted(counts):
            part.loss(inputs, targets).backward()  # type: ignore[no-untyped-call]
        found[way] = dict(counts)
    with part.answered(dist.group.WORLD):
        context.barrier()
        if context.rank:
            time.sleep(LATE_S)
        begin = part.clock.stamp()
        part.loss(inputs, targets).backward()  # type: ignore[no-untyped-call]
        found["seconds"] = part.clock.seconds(begin, part.clock.stamp())  # type: ignore[assignment]
    finite = all(torch.isfinite(parameter.grad).all() for parameter in model.module.parameters())
    return found | {"finite": finite}


def gathered(context: RankContext, text: str) -> dict[str, float]:
    """A whole model behind gathers: how long phases took by its clock, the other rank late in each."""
    model = load_model("rehearsal_program:Net")
    strategy, late_s = parse_strategy(text), LATE_S if context.rank else 0.0
    part = GatheredModel(model, trace_network(model), strategy, PlanSettings(batch=2 * SAMPLES), context.device)
    inputs, targets = model.make_batch(SAMPLES, context.rank)
    part.loss(inputs, targets).backward()  # type: ignore[no-untyped-call]
    stamps = []
    for _ in range(2):
        context.barrier()
        stamps.append(part.clock.stamp())
        time.sleep(late_s)
        loss = part.loss(inputs, targets)
        stamps.append(part.clock.stamp())
        time.sleep(late_s)
        loss.backward()  # type: ignore[no-untyped-call]
        stamps.append(part.clock.stamp())
        # Nothing is sent in an update.
        time.sleep(LATE_S)
        stamps.append(part.clock.stamp())
    names = ("forward", "backward", "update")
    return {name: part.clock.seconds(stamps[4 + at], stamps[5 + at]) for at, name in enumerate(names)}


def main() -> None:
    """Rank 0 writes the result."""
    # Memory that nothing was written to holds NaN.
    torch.use_deterministic_algorithms(True)
    with join_ranks("gloo", "cpu", timeout_s=100) as context:
        found = {text: rehearsed(context, text) for text in STRATEGIES}
        # In front of the first layer nothing is sent back, so each position has its halo forward alone.
        found |= {f"s2 strided {position}": rehearsed(context, "s2", "Strided", position) for position in (0, 1)}
        behind_gathers = {text: gathered(context, text) for text in ("z2d2", "z3d2")}
        context.barrier()
    if context.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps({"parts": found, "gathered": behind_gathers}))


if __name__ == "__main__":
    main()
