"""Cases planned on this process, and those that no limit refuses run on real ranks, many by one start of them."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from paradl_bench.core.errors import UserError, WorkError
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.measure.training.run import check_limits
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.models.catalog import load_model
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.ranks.launcher import launch_ranks
from random_modules.case import SAMPLES, Case

TESTS = Path(__file__).parents[1]
PROGRAM = TESTS / "random_modules" / "program.py"
AT_ONCE = 400
"""Cases that are planned together, and for which ranks are then started once for each number of ranks."""

Outcome = Literal["equal", "refused", "differs", "crashes", "other collectives"]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What was found of a case."""

    number: int
    case: str
    outcome: Outcome
    reasons: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether it should not have been found."""
        return self.outcome not in ("equal", "refused")

    @property
    def line(self) -> str:
        """With the command that repeats it."""
        reason = " ".join("; ".join(self.reasons[:3]).split())[:400]
        command = f"python benchmarks/correctness/drawn_modules.py --case {self.number}"
        return f"{command}  # {self.case}: {self.outcome}: {reason}"


class Planned(msgspec.Struct, frozen=True):
    """A case that no limit refuses."""

    case: Case
    network: ModelGraph


def plan(case: Case) -> Planned | Result:
    """What ``paradl-bench train`` does before it starts ranks; a module that no rank could train is passed over."""
    try:
        refused = _refused_by_torch(case)
        if refused:
            return Result(number=case.number, case=case.label, outcome="refused", reasons=(refused,))
        case.request().check()
        network = trace_network(load_model(case.model, device="meta"))
        request = case.request(network)
        request.check()
        check_limits(request, network)
    except UserError as error:
        return Result(number=case.number, case=case.label, outcome="refused", reasons=(str(error),))
    except Exception as error:
        reason = f"while planning: {type(error).__name__}: {error}"
        return Result(number=case.number, case=case.label, outcome="crashes", reasons=(reason,))
    return Planned(case, network)


def _refused_by_torch(case: Case) -> str:
    """Why the module does not train by itself, as where it changes what an LSTM has saved; empty if it does.

    A child finds out: torch crashes in backward of a group norm whose input lies channels last and needs no gradient.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        # Threads of a pool do not survive a fork.
        torch.set_num_threads(1)
        failed = 1
        try:
            with os.fdopen(writing, "w") as answer:
                answer.write(_trains_alone(case))
            failed = 0
        finally:
            os._exit(failed)
    os.close(writing)
    with os.fdopen(reading) as answer:
        said = answer.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status > 0:
        raise RuntimeError("drawing or loading the module failed")
    return f"the module does not train by itself: signal {-status}" if status else said


def _trains_alone(case: Case) -> str:
    model = load_model(case.model)
    inputs, targets = model.make_batch(SAMPLES, 0)
    try:
        model.loss(model.module(inputs), targets).backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return f"the module does not train by itself: {error}"
    return ""


def run(cases: Iterable[Case]) -> Iterator[Result]:
    """Results of cases, in the order in which they are found."""
    left = iter(cases)
    while some := list(islice(left, AT_ONCE)):
        planned: list[Planned] = []
        for case in some:
            found = plan(case)
            if isinstance(found, Result):
                yield found
            else:
                planned.append(found)
        planned.sort(key=_ranks)
        for ranks, of_ranks in groupby(planned, key=_ranks):
            yield from run_on_ranks(list(of_ranks), ranks)


def _ranks(planned: Planned) -> int:
    return parse_strategy(planned.case.strategy).ranks


def run_on_ranks(planned: Sequence[Planned], ranks: int) -> Iterator[Result]:
    """All by one start of ranks; by another one for those behind a failure."""
    with tempfile.TemporaryDirectory() as directory:
        left = list(planned)
        while left:
            place = Path(tempfile.mkdtemp(dir=directory))
            cases, results = place / "cases.json", place / "results.jsonl"
            cases.write_bytes(msgspec.json.encode([{"case": item.case, "network": item.network} for item in left]))
            failure = ""
            try:
                paths = [str(TESTS), str(TESTS / "on_ranks"), *filter(None, [os.environ.get("PYTHONPATH")])]
                environment = {"PYTHONPATH": os.pathsep.join(paths)}
                command = [sys.executable, str(PROGRAM), str(cases), str(results)]
                launch_ranks(command, ranks=ranks, device="cpu", timeout_s=None, environment=environment)
            except (UserError, WorkError) as error:
                failure = str(error)
            done = [_result(json.loads(line), item.case) for line, item in zip(_lines(results), left, strict=False)]
            yield from done
            left = left[len(done) :]
            if left and failure:
                yield _crash(left[0].case, results, failure)
                left = left[1:]


def _lines(results: Path) -> list[str]:
    return results.read_text().splitlines() if results.exists() else []


def _result(found: dict[str, Any], case: Case) -> Result:
    outcome: Outcome = "differs" if found["serial"] else "other collectives" if found["plan"] else "equal"
    return Result(
        number=case.number,
        case=case.label,
        outcome=outcome,
        reasons=(*found["serial"], *found["plan"]),
        seconds=float(found["seconds"]),
    )


def _crash(case: Case, results: Path, failure: str) -> Result:
    """The first rank's failure is the cause of the others'."""
    failed = [json.loads(path.read_text()) for path in results.parent.glob("*.failed")]
    failed.sort(key=lambda found: found["at"])
    reason = f"rank {failed[0]['rank']}: {failed[0]['error']}" if failed else failure
    return Result(number=case.number, case=case.label, outcome="crashes", reasons=(reason,))
