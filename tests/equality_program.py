"""What every rank of an equality test runs: a strategy's training beside the serial one, iteration by iteration.

Usage: equality_program.py CASES RESULT; both are JSON files. A case has ``network`` (a name, or what ``Drawn`` takes),
``strategy``, ``options`` (of PlanSettings), ``seeded`` (whether both draw the same random numbers), ``alike`` (to
hold ranks that compute alike against each other and not against serial) and ``repeated`` (to hold what computes
activations again against the same strategy that keeps them). The result is how many ran, and for those that
a limit refused, why.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import equality_networks
import msgspec
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from paradl_bench.collectives.process_group import end_groups
from paradl_bench.measure.micro_steps import MicroSteps
from paradl_bench.measure.optimizers import share_out_optimizer
from paradl_bench.measure.process_groups import RankContext, join_ranks
from paradl_bench.measure.tracing import trace_network
from paradl_bench.models.catalog import LoadedModel, load_model
from paradl_bench.spec.errors import UserError
from paradl_bench.spec.network import Network
from paradl_bench.spec.partition import shard_channels, shard_filters
from paradl_bench.spec.plan import PlanSettings
from paradl_bench.spec.strategy import Strategy, parse_strategy
from paradl_bench.strategies.catalog import planner_for
from paradl_bench.strategies.channel_shards import split_layers
from paradl_bench.strategies.parallel import build_parallel
from paradl_bench.strategies.tensor.pairs import find_pairs
from paradl_bench.strategies.tensor.plan import parameter_ranges

CUTS = {"filter": shard_filters, "channel": shard_channels}
SAMPLES = 3
"""A replica's."""


def assert_close(found: torch.Tensor, exact: torch.Tensor) -> None:
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-11)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that ranks hold rows of, on every rank; a collective where there are such."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_parts(network: Network, strategy: Strategy, rank: int, patterns: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Per parameter that is split, the slices or positions of it that this rank holds."""
    parts: dict[str, tuple[Any, ...]] = {}
    for axis, position in zip(strategy.axes, strategy.coordinates(rank), strict=True):
        if axis.kind == "tensor":
            held = parameter_ranges(network, find_pairs(network, patterns), axis.degree, position)
            for name, (dim, ranges) in held.items():
                own = [at for interval in ranges for at in range(*interval)]
                parts[name] = (*(slice(None),) * dim, own)
        if axis.kind not in CUTS:
            continue
        for index, shards in split_layers(network, axis.degree, CUTS[axis.kind], patterns).shards.items():
            names, own = network.layers[index].parameters, shards[position]
            parts[names[0]] = (slice(*own.filters), slice(*own.group_channels))
            if axis.kind == "filter":
                parts |= {name: (slice(*own.filters),) for name in names[1:]}
    return parts


def norm_cuts(strategy: Strategy, settings: PlanSettings) -> list[tuple[int, int]]:
    """Dims, and in how many parts, along which batch norm takes its statistics apart: of each micro-batch at least."""
    cuts = [(0, settings.accumulate)] if settings.accumulate > 1 else []
    for axis in strategy.axes if settings.batch_norm == "local" else ():
        if axis.kind == "data":
            cuts.insert(0, (0, axis.degree))
        elif axis.kind == "spatial":
            cuts += [(2 + dim, parts) for dim, parts in enumerate(axis.extents)]
    return cuts


def take_statistics_apart(
    module: nn.Module, cuts: Sequence[tuple[int, int]], within: Container[str] | None = None
) -> None:
    """Make batch norms those that local ones are defined to be: each part by its own statistics.

    Args:
        within: names of the norms that run in parts; None for all.
    """

    def forward(norm: Any, x: torch.Tensor, cuts: Sequence[tuple[int, int]]) -> torch.Tensor:
        if not cuts:
            return F.batch_norm(x, None, None, norm.weight, norm.bias, True, 0.0, norm.eps)
        (dim, parts), *rest = cuts
        return torch.cat([forward(norm, part, rest) for part in x.tensor_split(parts, dim)], dim)

    for name, norm in module.named_modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm) and (within is None or name in within):
            norm.forward = functools.partial(forward, norm, cuts=cuts)  # type: ignore[method-assign]


def load(case: dict[str, Any]) -> LoadedModel:
    name = case["network"]
    if not isinstance(name, str):
        equality_networks.drawn = lambda: equality_networks.Drawn(**case["network"])  # type: ignore[attr-defined]
        name = "drawn"
    place, _, factory = name.rpartition(".")
    model = load_model(f"{place or 'equality_networks'}:{factory}")
    return model


class Comparison:
    """One case on one rank."""

    def __init__(self, case: dict[str, Any], context: RankContext) -> None:
        self.strategy = parse_strategy(case["strategy"])
        self.seeded = case.get("seeded", False)
        self.context = context
        self.model, self.serial = load(case), load(case)
        self.network = trace_network(self.model)
        places = zip(self.strategy.axes, self.strategy.coordinates(context.rank), strict=True)
        self.replicas, replica = next(((axis.degree, at) for axis, at in places if axis.kind == "data"), (1, 0))
        self.own = slice(replica * SAMPLES, (replica + 1) * SAMPLES)
        chosen = {"first_bucket_bytes": 1000, "bucket_cap_bytes": 1000, **case.get("options", {})}
        settings = msgspec.convert({"batch": SAMPLES * self.replicas, **chosen}, PlanSettings)
        self.split = settings.split
        planner_for(self.strategy).plan(self.network, self.strategy, settings)
        self.model.module.double()
        self.serial.module.double()
        cuts = norm_cuts(self.strategy, settings)
        self.exact_buffers = not cuts
        if cuts:
            take_statistics_apart(self.serial.module, cuts)
        built = build_parallel(self.model.module, self.network, self.strategy, settings, context.device)
        self.parallel, self.groups, self.optimizer_group = built.module, built.groups, built.optimizer_group
        self.built, self.accumulate = built, settings.accumulate

    def close(self) -> None:
        """Let the groups go: hundreds of cases would leave thousands of threads."""
        self.context.barrier()
        groups = self.groups[1:]
        del self.parallel, self.built, self.groups, self.optimizer_group
        end_groups(groups)

    def run(self) -> None:
        """Three iterations; gradients, then what the optimizer makes of them."""
        inputs, targets = self.model.make_batch(SAMPLES * self.replicas, seed=7)
        inputs = inputs.double()
        optimizers = [self.optimizer(), torch.optim.SGD(self.serial.module.parameters(), lr=0.05, momentum=0.9)]
        for iteration in range(3):
            found_x, exact_x = inputs[self.own].clone().requires_grad_(), inputs.clone().requires_grad_()
            found = self.forward(self.parallel, found_x, iteration) if self.accumulate == 1 else None
            exact = self.forward(self.serial.module, exact_x, iteration)
            if not exact.isfinite().all():
                raise UserError(
                    "the serial model's own output is not finite: a window of a maximum reads padding alone"
                )
            for optimizer in optimizers:
                optimizer.zero_grad()
            if found is None:
                self.accumulated(found_x, targets[self.own], self.serial.loss(exact[self.own], targets[self.own]))
            else:
                assert_close(found, exact[self.own])
                self.model.loss(found, targets[self.own]).backward()  # type: ignore[no-untyped-call]
            self.serial.loss(exact, targets).backward()  # type: ignore[no-untyped-call]
            assert found_x.grad is not None
            assert exact_x.grad is not None
            assert_close(found_x.grad, exact_x.grad[self.own] * self.replicas)
            self.compare_parameters()
            for optimizer in optimizers:
                optimizer.step()

    def accumulated(self, inputs: torch.Tensor, targets: torch.Tensor, exact_loss: torch.Tensor) -> None:
        """Forward and backward of micro-batches."""
        rows: list[Any] = []
        steps = MicroSteps(self.built, self.model.loss, inputs, targets, self.accumulate)
        assert_close(steps.run(0, lambda: 0, rows, lambda _: None), exact_loss.detach())
        assert [row[0] for row in rows if row[0] in ("FW", "BW")] == ["FW", "BW"] * self.accumulate

    def optimizer(self) -> torch.optim.Optimizer:
        parameters = self.model.module.parameters()
        if self.optimizer_group is None:
            return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        return share_out_optimizer(torch.optim.SGD, parameters, self.optimizer_group, lr=0.05, momentum=0.9)

    def run_alike(self) -> None:
        """Three iterations after which ranks of a replica have the same outputs and the same whole parameters."""
        inputs, targets = self.model.make_batch(SAMPLES * self.replicas, seed=7)
        inputs, targets = inputs.double()[self.own], targets[self.own]
        optimizer = torch.optim.SGD(self.model.module.parameters(), lr=0.05, momentum=0.9)
        parts = own_parts(self.network, self.strategy, self.context.rank, self.split)
        torch.manual_seed(self.own.start)
        previous = None
        for _ in range(3):
            outputs = self.parallel(inputs)
            optimizer.zero_grad()
            self.model.loss(outputs, targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            whole = [p.sum().item() for name, p in self.model.module.named_parameters() if name not in parts]
            found = self.context.gather((self.own.start, outputs.tolist(), whole))
            assert [other for other in found if other[0] == self.own.start] == [
                (self.own.start, outputs.tolist(), whole)
            ] * (len(found) // self.replicas)
            assert outputs.tolist() != previous
            previous = outputs.tolist()

    def forward(self, module: nn.Module, inputs: torch.Tensor, seed: int) -> torch.Tensor:
        if self.seeded:
            torch.manual_seed(seed)
        outputs: torch.Tensor = module(inputs)
        return outputs

    def compare_parameters(self) -> None:
        parts = own_parts(self.network, self.strategy, self.context.rank, self.split)
        exact = dict(self.serial.module.named_parameters())
        for name, parameter in self.model.module.named_parameters():
            of = parts.get(name, ())
            gradient, exact_gradient = parameter.grad, exact[name].grad
            assert_close(whole(parameter), exact[name][of])
            if exact_gradient is None:
                # DDP sends zeros for a head that no loss reads.
                assert gradient is None or not whole(gradient).any(), name
                continue
            assert gradient is not None, name
            assert_close(whole(gradient), exact_gradient[of])
        if self.exact_buffers:
            buffers = dict(self.serial.module.named_buffers())
            for name, buffer in self.model.module.named_buffers():
                assert_close(buffer, buffers[name])


def run_repeated(case: dict[str, Any], context: RankContext) -> None:
    """Gradients with and without recomputation, from the same random numbers of each rank."""
    found = []
    for recompute in (case["options"]["recompute"], ()):
        one = Comparison({**case, "options": {**case["options"], "recompute": recompute}}, context)
        inputs, targets = one.model.make_batch(SAMPLES * one.replicas, seed=7)
        iterations = []
        torch.manual_seed(3)
        for _ in range(3):
            one.model.module.zero_grad()
            one.model.loss(one.parallel(inputs.double()[one.own]), targets[one.own]).backward()  # type: ignore[no-untyped-call]
            parameters = one.model.module.named_parameters()
            iterations.append({name: p.grad.clone() for name, p in parameters if p.grad is not None})
        found.append((iterations, dict(one.model.module.named_buffers())))
        one.close()
    (again, buffers), (kept, kept_buffers) = found
    for gradients, exact in zip(again, kept, strict=True):
        assert gradients.keys() == exact.keys()
        for name, gradient in gradients.items():
            assert_close(gradient, exact[name])
    first, second = (torch.cat([g.flatten() for g in gradients.values()]) for gradients in again[:2])
    assert not torch.equal(first, second), "nothing was drawn"
    for name, buffer in buffers.items():
        assert_close(buffer, kept_buffers[name])


def run_cases(cases: list[dict[str, Any]], context: RankContext) -> dict[str, Any]:
    """How many cases ran, and why the others were refused.

    Raises:
        AssertionError: names the case.
    """
    refused = []
    for case in cases:
        try:
            if case.get("repeated"):
                run_repeated(case, context)
                continue
            comparison = Comparison(case, context)
            comparison.run_alike() if case.get("alike") else comparison.run()
            comparison.close()
        except UserError as error:
            refused.append(str(error))
        except BaseException as error:
            raise AssertionError(f"{json.dumps(case)}, rank {context.rank}: {error}") from error
    return {"ran": len(cases) - len(refused), "refused": refused}


def main(cases: Path, result: Path) -> None:
    with join_ranks("gloo", "cpu", timeout_s=60) as context:
        # What was imported stays: a collection after each case is to be of that case.
        gc.freeze()
        found = run_cases(json.loads(cases.read_text()), context)
        if context.rank == 0:
            result.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
