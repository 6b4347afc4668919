"""Ranks that train in given messages beside the serial model in float64. Arguments: where to write, then cases.

A case is NETWORK:RULE[:BUFFER]:ACCUMULATE[:after], the last one of messages behind backward; its
answer the largest differences from serial and what was sent, in order.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from paradl_bench.measure.execution.micro_steps import MicroSteps
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.models.catalog import LoadedModel, load_model
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Collective
from paradl_bench.ranks.groups.process_groups import RankContext, join_ranks
from paradl_bench.strategies.data.fusion.fusion_file import parse_fusion
from paradl_bench.strategies.exchange.options import ExchangeOptions
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.nesting.parallel import ParallelModule, build_parallel

_ITERATIONS = 3
_AFTER = ":after"


class Chain(nn.Module):
    """Layers of several sizes, one of them used twice, a head that no loss reads, and a frozen one."""

    input_shape = (6,)

    def __init__(self) -> None:
        super().__init__()
        self.one, self.twice = nn.Linear(6, 12), nn.Linear(12, 12)
        self.aside, self.frozen, self.head = nn.Linear(12, 3), nn.Linear(12, 12), nn.Linear(12, 10)
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tanh(self.twice(torch.tanh(self.twice(torch.tanh(self.one(x))))))
        return self.head(torch.tanh(self.frozen(x))), self.aside(x)


class Images(nn.Module):
    """Convolutions whose weights lie channels last, so that gradients do too."""

    input_shape = (3, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 6, 3), nn.Linear(6, 10)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.two(torch.tanh(self.one(x)))).mean((2, 3)))


class Turning(nn.Module):
    """Leaves a layer out in its second backward."""

    input_shape = (6,)
    passed = 0

    def __init__(self) -> None:
        super().__init__()
        self.one, self.head = nn.Linear(6, 6), nn.Linear(6, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passed += x.device.type != "meta" and x.dtype == torch.float64
        return self.head(x if self.passed == 2 else self.one(x))


def _step(
    built: ParallelModule, model: LoadedModel, batch: tuple[torch.Tensor, torch.Tensor], count: int, *, update: bool
) -> list[torch.Tensor | None]:
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.1)
    optimizer.zero_grad()
    MicroSteps(built, model.loss, *batch, count).run(None, lambda: None, [], lambda _: None)
    gradients = [None if p.grad is None else p.grad.clone() for p in model.module.parameters()]
    if update:
        optimizer.step()
    return gradients


def _largest(found: list[Any], exact: list[Any]) -> float:
    assert [one is None for one in found] == [one is None for one in exact]
    return max(float((one - other).abs().max()) for one, other in zip(found, exact, strict=True) if one is not None)


def run(case: str, context: RankContext) -> dict[str, Any]:
    """The largest differences of gradients and parameters, and bytes of what was sent and what was planned."""
    name, rule, *buffer, accumulate = case.removesuffix(_AFTER).split(":")
    model, serial = (load_model(f"fused_program:{name}") for _ in range(2))
    network, strategy, count = trace_network(model), parse_strategy("d2"), int(accumulate)
    asked = parse_fusion(rule, buffer[0] if buffer else None)
    assert asked is not None
    messages = asked.messages(network)
    exchange = ExchangeOptions(
        fused_bytes=messages, fused_by=asked.words(len(messages)), after_backward=case.endswith(_AFTER)
    )
    settings = PlanSettings(batch=8, accumulate=count, axes=(exchange,))
    plan = planner_for(strategy).plan(network, strategy, settings)
    (role,) = plan.roles
    works = [plan.works[work] for work in role.work.tolist()]
    planned = [w.message_bytes for w in works if isinstance(w, Collective) and w.operation == "all_reduce"]
    for each in (model, serial):
        each.module.double()
    inputs, targets = model.make_batch(8, seed=3)
    built = build_parallel(model.module, network, strategy, settings, context.device)
    alone = ParallelModule(serial.module, network, built.spans)
    own = inputs.double().chunk(2)[context.rank], targets.chunk(2)[context.rank]
    sent: list[int] = []
    started = dist.all_reduce

    def counted(tensor: torch.Tensor, **options: Any) -> Any:
        # Of fp32, as they are planned.
        sent.append(tensor.numel() * 4)
        return started(tensor, **options)

    of_gradients = of_parameters = 0.0
    with mock.patch.object(dist, "all_reduce", counted):
        for step in range(_ITERATIONS):
            found = _step(built, model, own, count, update=True)
            exact = _step(alone, serial, (inputs.double(), targets), 1, update=True)
            of_gradients = max(of_gradients, _largest(found, exact))
            both = ([p.detach() for p in each.module.parameters()] for each in (model, serial))
            of_parameters = max(of_parameters, _largest(*both))
            assert len(sent) == (step + 1) * len(messages)
    return {"gradients": of_gradients, "parameters": of_parameters, "sent": sent, "planned": planned * _ITERATIONS}


def refused(context: RankContext) -> str:
    """What a model says whose backward leaves a message incomplete, at the forward behind it."""
    model = load_model("fused_program:Turning")
    network = trace_network(model)
    exchange = ExchangeOptions(fused_bytes=(280, 168), fused_by="two messages")
    model.module.double()
    settings = PlanSettings(batch=4, axes=(exchange,))
    built = build_parallel(model.module, network, parse_strategy("d2"), settings, context.device)
    batch = model.make_batch(2, seed=3)
    for _ in range(3):
        try:
            _step(built, model, (batch[0].double(), batch[1]), 1, update=False)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def main(result: Path, cases: list[str]) -> None:
    # Models are found by the name of their module, and this one runs as a program.
    sys.modules["fused_program"] = sys.modules[__name__]
    with join_ranks("gloo", "cpu", timeout_s=120) as context:
        found: dict[str, Any] = {case: run(case, context) for case in cases}
        found["refused"] = refused(context)
        of_ranks = context.gather(found, dict)
        if context.rank == 0:
            result.write_bytes(msgspec.json.encode(of_ranks))
        context.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
