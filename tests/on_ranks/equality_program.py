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
from pathlib import Path
from typing import Any

import equality_networks
import torch
from shared_traces import trace_together, traced

from paradl_bench.core.errors import UserError
from paradl_bench.measure.proof.comparison import Tolerance
from paradl_bench.measure.proof.parts import own_parts, place_of
from paradl_bench.measure.proof.proving import Case, StrategyProof
from paradl_bench.measure.proof.reference import JoinedRanks
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.models.catalog import LoadedModel, load_model
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import degree_of
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.ranks.groups.process_group import end_groups
from paradl_bench.ranks.groups.process_groups import RankContext, join_ranks
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.nesting.parallel import ParallelModule, build_parallel

TOLERANCE = Tolerance(of_element=1e-9, of_tensor=0.0, of_all=0.0, absolute=1e-11)
SAMPLES = 3
"""A replica's."""


def assert_close(found: torch.Tensor, exact: torch.Tensor) -> None:
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-11)


def load(case: dict[str, Any]) -> LoadedModel:
    return load_model(name_of(case))


def name_of(case: dict[str, Any]) -> str:
    name = case["network"]
    if not isinstance(name, str):
        equality_networks.drawn = lambda: equality_networks.Drawn(**case["network"])  # type: ignore[attr-defined]
        name = "drawn"
    place, _, factory = name.rpartition(".")
    return f"{place or 'equality_networks'}:{factory}"


def network_of(case: dict[str, Any]) -> ModelGraph:
    return traced(name_of(case), json.dumps(case["network"]))


class Comparison:
    """One case on one rank."""

    def __init__(self, case: dict[str, Any], context: RankContext) -> None:
        self.strategy = parse_strategy(case["strategy"])
        self.seeded = case.get("seeded", False)
        self.context = context
        self.model, serial = load(case), load(case)
        self.network = network_of(case)
        self.replicas = degree_of(self.strategy, Trait.DIVIDES_BATCH)
        chosen = {"first_bucket_bytes": 1000, "bucket_cap_bytes": 1000, **case.get("options", {})}
        self.settings = plan_settings(
            **{
                name: tuple(own) if isinstance(own, list) else own
                for name, own in {"batch": SAMPLES * self.replicas, **chosen}.items()
            }
        )
        self.own = place_of(self.strategy, self.settings, context.rank).own
        planner_for(self.strategy).plan(self.network, self.strategy, self.settings)
        replica = place_of(self.strategy, self.settings, context.rank).replica
        self.own = slice(replica * SAMPLES, (replica + 1) * SAMPLES)
        self.model.module.double()
        serial.module.double()
        drawing = any(case.get(word) for word in ("seeded", "alike", "repeated"))
        # The serial model reads all samples at once, whatever ranks and micro-batches read.
        about = Case(self.network, self.strategy, self.settings, TOLERANCE, hold=not drawing, at_once="all")
        self.proof = StrategyProof(about, self.model, serial, JoinedRanks(context), self.build)

    def build(self, model: LoadedModel) -> ParallelModule:
        built = build_parallel(model.module, self.network, self.strategy, self.settings, self.context.device)
        self.parallel = built.module
        return built

    def close(self) -> None:
        """Let the groups go: hundreds of cases would leave thousands of threads."""
        self.context.barrier()
        groups = self.proof.groups
        del self.parallel, self.proof
        end_groups(groups)

    def run(self) -> None:
        """Three iterations; outputs and gradients, then what the optimizer makes of them."""
        inputs, targets = self.model.make_batch(SAMPLES * self.replicas, seed=7)
        inputs = inputs.double() if inputs.is_floating_point() else inputs
        for iteration in range(3):
            found = self.proof.iterate(inputs, targets, iteration if self.seeded else None)
            if not found.finite:
                raise UserError(
                    "the serial model's own output is not finite: a window of a maximum reads padding alone"
                )
            assert not found.differences, found.differences
            assert not (updated := self.proof.update()).differences, updated.differences

    def run_alike(self) -> None:
        """Three iterations after which ranks of a replica have the same outputs and the same whole parameters."""
        inputs, targets = self.model.make_batch(SAMPLES * self.replicas, seed=7)
        inputs, targets = inputs.double()[self.own], targets[self.own]
        optimizer = torch.optim.SGD(self.model.module.parameters(), lr=0.05, momentum=0.9)
        parts = own_parts(self.network, self.strategy, self.context.rank, self.settings)
        torch.manual_seed(self.own.start)
        previous = None
        for _ in range(3):
            outputs = self.parallel(inputs)
            optimizer.zero_grad()
            self.model.loss(outputs, targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            whole = [p.sum().item() for name, p in self.model.module.named_parameters() if name not in parts]
            found = self.context.gather((self.own.start, outputs.tolist(), whole), tuple[int, list, list])
            assert [other for other in found if other[0] == self.own.start] == [
                (self.own.start, outputs.tolist(), whole)
            ] * (len(found) // self.replicas)
            assert outputs.tolist() != previous
            previous = outputs.tolist()


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
        asked = json.loads(cases.read_text())
        of_networks = {json.dumps(case["network"]): case for case in asked}
        trace_together((functools.partial(network_of, case) for case in of_networks.values()), context)
        # What was imported and traced stays: a collection after each case is to be of that case.
        gc.freeze()
        found = run_cases(asked, context)
        if context.rank == 0:
            result.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
