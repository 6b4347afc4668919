"""Plan = reality: what every strategy of every model issues on real gloo ranks, held against its plan to the byte.

    python benchmarks/correctness/plan_equals_run.py -o DIR [--models vgg11,resnet18] [--memory 5GiB]
                                                            [--strategies f2,p2:1f1b]

Each case builds the strategy and trains it for a few iterations as ``paradl-bench train`` does, on samples so small
that two cores suffice. On every rank each collective and message of the construction and of the first three iterations
is compared with the plan's: operation, bytes, group, count and when. What a limit refuses is listed with the line
that says so. What was found is kept: called again, the benchmark goes on, and tries again what did not agree.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import msgspec

from paradl_bench.core.errors import UserError, WorkError
from paradl_bench.core.files.storage import encode_pretty, write_bytes_atomically, write_text_atomically
from paradl_bench.core.units import format_bytes, parse_size
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.measure.training.calls.recorder import differences, planned_collectives
from paradl_bench.measure.training.request import TrainingRequest
from paradl_bench.measure.training.trainer import Trainer
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.models.catalog import load_model
from paradl_bench.network.models.language_sizes import UNTIED
from paradl_bench.plan.axes.registry import read_options
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Plan
from paradl_bench.ranks.environment import capture_environment
from paradl_bench.ranks.groups.process_groups import RankContext, join_ranks
from paradl_bench.ranks.launcher import launch_ranks
from paradl_bench.strategies.memory.of_plan import memory_of_plan
from paradl_bench.strategies.nesting.catalog import planner_for

SHAPES = {
    "alexnet": (3, 64, 64),
    **dict.fromkeys(("vgg11", "vgg13", "vgg16", "vgg19"), (3, 32, 32)),
    **dict.fromkeys(("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"), (3, 64, 64)),
    **dict.fromkeys(("googlenet", "densenet121", "mobilenet_v2"), (3, 64, 64)),
    "cosmoflow": (4, 32, 32, 32),
    **dict.fromkeys(("t5-small", "t5-base", "bert-large", "gpt2-345m"), (16,)),
    **dict.fromkeys(("t5-small-untied", "bert-large-untied", "gpt2-345m-untied"), (16,)),
}
"""Of one sample, by model; those with untied weights are cut into stages alone, as the tied ones cannot be."""
STRATEGIES = (
    *("d2", "d2:sync", "z1d2", "z2d2", "z3d2", "f2", "f2:scatter", "c2", "s2", "s1x2:sync", "t2"),
    *("p2:gpipe", "p2:1f1b", "p2:interleaved"),
    *("d2f2", "d2c2", "d2s2", "d2t2", "d2p2", "p2f2", "p2c2", "p2s2", "p2t2", "d4:segmented", "s2x2"),
    *("d4", "f4", "c4", "s4", "t4", "p4:gpipe", "p4:1f1b"),
)
BATCH = 4
PROCESS_BYTES = 400 * 1024**2
"""What a rank needs without any model."""
SMALL_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1024**2),
    "MALLOC_TRIM_THRESHOLD_": str(1024**2),
    "MALLOC_MMAP_MAX_": "65536",
}
"""Times do not matter here: what is freed between cases goes back to the host."""
OPTIONS: dict[str, dict[str, Any]] = {
    "sync": {"batch_norm": "sync"},
    "scatter": {"filter_backward": "reduce-scatter"},
    "segmented": {"exchange": "segmented", "ranks_per_node": 2},
}
"""What follows a strategy's colon, where it is no schedule."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A model under a strategy, and what was found.

    Attributes:
        outcome: ``refused`` by a limit; ``not run`` where it needs more memory than allowed.
        reason: of a refusal or failure. differences: from the plan, of all ranks.
        issued: of an iteration, summed over ranks: per operation, calls and their bytes.
        all_calls: with those of the construction and of the iterations before, which are compared too.
    """

    model: str
    strategy: str
    input_shape: tuple[int, ...]
    batch: int = BATCH
    outcome: Literal["equal", "differs", "refused", "not run", "failed"] = "not run"
    reason: str = ""
    differences: tuple[str, ...] = ()
    issued: dict[str, tuple[int, int]] = {}
    all_calls: int = 0
    commit: str = ""

    @property
    def request(self) -> TrainingRequest:
        """What ``paradl-bench train`` would be asked for."""
        name, _, word = self.strategy.partition(":")
        options = OPTIONS.get(word, {"schedule": word} if word else {})
        axes, others = read_options(options)
        return TrainingRequest(
            axes=axes,
            model=self.model,
            input_shape=self.input_shape,
            strategy=parse_strategy(name),
            batch=self.batch,
            device="cpu",
            verify=False,
            **others,
        )

    def file(self, output: Path) -> Path:
        """Where it is kept."""
        return output / "cases" / f"{self.model}-{self.strategy.replace(':', '-')}.json"

    def keep(self, output: Path, **found: Any) -> None:
        """Write what was found of it."""
        write_bytes_atomically(self.file(output), encode_pretty(msgspec.structs.replace(self, **found)))


@cache
def network_of(model: str, shape: tuple[int, ...]) -> ModelGraph:
    """The traced network."""
    return trace_network(load_model(model, shape, device="meta"))


def plan_of(case: Case) -> Plan:
    """Raises:
    UserError: a limit is exceeded, or an option that the strategy does not have.
    """
    request = case.request
    request.check()
    network = network_of(case.model, case.input_shape)
    return planner_for(request.strategy).plan(network, request.strategy, request.settings)


def needed_bytes(case: Case) -> int:
    """Of all ranks together; each begins with the whole model."""
    request, network = case.request, network_of(case.model, case.input_shape)
    peak = memory_of_plan(network, request.strategy, request.settings).peak_bytes
    return request.strategy.ranks * (max(peak, 2 * network.parameter_bytes) + PROCESS_BYTES)


def to_run(cases: list[Case], output: Path, memory_bytes: int) -> Iterator[Case]:
    """Cases without an answer; those that a limit refuses, or that do not fit, get theirs here."""
    for case in cases:
        path = case.file(output)
        if path.exists() and msgspec.json.decode(path.read_bytes(), type=Case).outcome in ("equal", "refused"):
            continue
        try:
            plan_of(case)
        except UserError as error:
            case.keep(output, outcome="refused", reason=str(error))
            continue
        needed = needed_bytes(case)
        if needed > memory_bytes:
            case.keep(output, reason=f"its ranks need {format_bytes(needed)}, {format_bytes(memory_bytes)} are allowed")
            continue
        yield case


def run_on_ranks(cases: list[Case], output: Path) -> None:
    """All of them by one start of the ranks; by another one for those behind a failure."""
    while cases:
        for case in cases:
            case.file(output).unlink(missing_ok=True)
        names = [f"{case.model}={case.strategy}" for case in cases]
        command = [sys.executable, __file__, "--on-ranks", "-o", str(output), *names]
        failure = ""
        try:
            ranks = cases[0].request.strategy.ranks
            launch_ranks(command, ranks=ranks, device="cpu", timeout_s=None, environment=SMALL_MEMORY)
        except (UserError, WorkError) as error:
            failure = str(error)
        cases = [case for case in cases if not case.file(output).exists()]
        if cases and failure:
            cases[0].keep(output, outcome="failed", reason=failure)
            print(f"{cases[0].model} {cases[0].strategy}: {failure}", flush=True)
            cases = cases[1:]


def on_rank(cases: list[Case], output: Path) -> None:
    """What each rank runs."""
    with join_ranks("gloo", "cpu", timeout_s=900) as context:
        for case in cases:
            found = context.gather(compare(case, context), dict)
            gc.collect()
            if context.rank == 0:
                lines = tuple(f"rank {rank}, {line}" for rank, own in enumerate(found) for line in own["differences"])
                issued: Counter[str] = Counter()
                sent: Counter[str] = Counter()
                for operation, size, count in (row for own in found for row in own["issued"]):
                    issued[operation] += count
                    sent[operation] += count * size
                case.keep(
                    output,
                    outcome="differs" if lines else "equal",
                    differences=lines,
                    issued={name: (issued[name], sent[name]) for name in sorted(issued)},
                    all_calls=sum(own["calls"] for own in found),
                    commit=capture_environment("cpu", settings={}).commit or "",
                )
                print(f"{case.model} {case.strategy}: {'; '.join(lines) or 'equal'}", flush=True)


def compare(case: Case, context: RankContext) -> dict[str, Any]:
    """One case on this rank."""
    trainer = Trainer(load_model(case.model, case.input_shape), case.request, context)
    issued = trainer.prepare(network_of(case.model, case.input_shape))
    lines = differences(issued, planned_collectives(plan_of(case), context.rank))
    trainer.close()
    return {
        "differences": lines,
        "issued": [(item.operation, item.message_bytes, item.count) for item in issued if item.when == "iteration"],
        "calls": sum(item.count for item in issued),
    }


def table(cases: list[Case]) -> str:
    """Markdown: a row a model, a column a strategy; then refusals, each line once."""
    known = {(case.model, case.strategy): case for case in cases}
    models, strategies = (list(dict.fromkeys(names)) for names in zip(*known, strict=True))
    reasons = list(dict.fromkeys(case.reason for case in cases if case.reason))

    def cell(case: Case | None) -> str:
        if case is None:
            return ""
        if case.outcome == "equal":
            return str(sum(count for count, _ in case.issued.values()))
        return f"{case.outcome} [{reasons.index(case.reason) + 1}]" if case.reason else case.outcome

    of = Counter(case.outcome for case in cases)
    lines = [
        f"{len(cases)} cases: " + ", ".join(f"{count} {name}" for name, count in of.most_common()) + ".",
        "",
        "A number: collectives and messages that all ranks issued in one iteration, equal to the plan's in operation,",
        "bytes, group and count on every rank; those of the construction and of the first iterations are compared too",
        f"({sum(case.all_calls for case in cases)} calls in all).",
        "",
        f"| model | {' | '.join(strategies)} |",
        "|---" * (len(strategies) + 1) + "|",
        *(f"| {model} | {' | '.join(cell(known.get((model, name))) for name in strategies)} |" for model in models),
        "",
        *(f"[{number}] {reason}  " for number, reason in enumerate(reasons, start=1)),
        "",
        *(f"{case.model} {case.strategy}: {line}  " for case in cases for line in case.differences),
    ]
    return "\n".join(lines).rstrip() + "\n"


def summarise(cases: list[Case], output: Path) -> str:
    """Write the table and all that was found beside it."""
    found = [
        msgspec.json.decode(case.file(output).read_bytes(), type=Case) for case in cases if case.file(output).exists()
    ]
    environment = capture_environment("cpu", settings={})
    whole = {"command_line": sys.argv, "environment": environment, "cases": found}
    write_bytes_atomically(output / "plan_equals_run.json", encode_pretty(whole))
    text = table(found)
    write_text_atomically(output / "plan_equals_run.md", text)
    return text


def main() -> None:
    """Run what has no answer yet, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--memory", default="5GiB", help="that the ranks of a case may need together")
    parser.add_argument("--on-ranks", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("cases", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.on_ranks:
        pairs = [text.partition("=") for text in options.cases]
        on_rank([Case(model=m, strategy=s, input_shape=SHAPES[m]) for m, _, s in pairs], options.output)
        return
    (options.output / "cases").mkdir(parents=True, exist_ok=True)
    cases = [
        Case(model=model, strategy=strategy, input_shape=SHAPES[model])
        for model in options.models.split(",")
        for strategy in options.strategies.split(",")
        if "p" in strategy.partition(":")[0] or not model.endswith(UNTIED)
    ]
    by_ranks = sorted(cases, key=lambda case: case.request.strategy.ranks)
    for _, of_start in groupby(by_ranks, key=lambda case: (case.request.strategy.ranks, case.model)):
        run_on_ranks(list(to_run(list(of_start), options.output, parse_size(options.memory))), options.output)
        summarise(cases, options.output)
    print(summarise(cases, options.output))


if __name__ == "__main__":
    main()
