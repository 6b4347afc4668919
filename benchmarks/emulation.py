"""Every strategy on ghost layers over emulated nodes, predicted from a calibration of that very cluster.

    make emulate        or        python benchmarks/emulation.py -o DIR [--models M,...] [--ranks-per-node R,...]
                                  python benchmarks/emulation.py -o DIR --suite distsim
                                  python benchmarks/emulation.py -o DIR --table

A cluster has so many ranks a node, and links of one rate. For each layout copies of gradients are measured on this
host, by as many ranks at once; then its ranks, which are started once, sweep collectives (alone, in groups at once, and
inside of all nodes at once), have rank 0 fit a profile with layers of a synthetic device (:mod:`emulated_profile`), and
train every configuration.
Runs are held against predictions from the sweeps of their own layout: its ranks share this host's cores, so that what
fewer of them measure is of another cluster. ``table.md`` and ``table.json`` have a row each, and how strategies rank at
every size. A suite says which models train by which strategies: convolutional networks by all
(:mod:`emulation_cases`), or DistSim's three by its axes (:mod:`emulation_distsim`), and ``activity.md`` how far each
forward and backward of a micro-batch is off on every rank.

What is complete is not run again; remove a directory to have it measured anew. Nothing is begun after ``--minutes``;
the same command goes on with what is left. ``--table`` measures nothing, and has the rows of what is complete, also
while the suite runs. Needs the right to make network namespaces.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from emulated_profile import Sweep, fit, measure_copies
from emulation_cases import CLUSTERS, FOUND, LINK_BYTES_PER_S, NODES_OF, STRATEGIES, Case, Suite, cases_of, profile_of
from emulation_distsim import DISTSIM

from paradl_bench.core.files.storage import encode_pretty, write_bytes_atomically
from paradl_bench.measure.collectives.sweep import measure_collectives
from paradl_bench.measure.training.run import measure_training
from paradl_bench.ranks.emulated_nodes.cluster import emulated_cluster
from paradl_bench.ranks.emulated_nodes.layout import NodeLayout
from paradl_bench.ranks.groups.process_groups import RankContext, join_ranks
from paradl_bench.ranks.launcher import launch_ranks
from paradl_bench.records.measurement import is_complete
from predict.emulation.ghost import make_table
from predict.validation.validation import validate_runs

MINUTES = 28.5

SUITES = {"strategies": STRATEGIES, "distsim": DISTSIM}

_COMMAND = ("benchmarks/emulation.py",)


class LayoutWork(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks of a layout do from their start to their end: sweep, then train on ghosts.

    Attributes:
        sweeps: that they measure.
        cases: whose ghosts sleep by a profile that rank 0 fits where it is missing, of all models of the suite.
        suite: its name. host: copies of gradients.
        until: on the host's monotonic clock; nothing is begun later. None for no limit.
    """

    suite: str
    sweeps: list[Sweep]
    cases: list[Case]
    host: str
    until: float | None

    @property
    def layout(self) -> NodeLayout:
        """Of the ranks."""
        return self.cases[0].layout

    def is_over(self, now: float) -> bool:
        """Whether nothing is begun any more at a time of the host's monotonic clock."""
        return self.until is not None and now > self.until

    def is_over_for_all(self, context: RankContext) -> bool:
        """The same by the clock of rank 0, whose word the other ranks take."""
        return self.is_over(context.share(time.monotonic(), float))


def start(work: LayoutWork) -> None:
    """Measure what is not complete, by ranks that are started once for all of it."""
    sweeps = [sweep for sweep in work.sweeps if not sweep.complete]
    cases = [case for case in work.cases if not case.complete]
    if not (sweeps or cases) or work.is_over(time.monotonic()):
        return
    layout = work.layout
    print(f"{len(sweeps)} sweeps and {len(cases)} runs on {layout} ranks", flush=True)
    command = [sys.executable, str(Path(__file__).resolve()), "--as-rank", msgspec.json.encode(work).decode()]
    with emulated_cluster(layout) as cluster:
        launch_ranks(command, ranks=layout.ranks, device="cpu", timeout_s=3600, hang_timeout_s=600, cluster=cluster)


def take_part(work: LayoutWork, context: RankContext) -> None:
    """Measure as a rank, one after the other, together with the other ranks."""
    suite = SUITES[work.suite]
    for sweep in work.sweeps:
        # Rank 0's word: what it has just ended others might not have seen before.
        if context.share(not sweep.complete, bool):
            if work.is_over_for_all(context):
                return
            with _timed(context, sweep.directory):
                measure_collectives(sweep.request, context, Path(sweep.directory), _COMMAND)
            gc.collect()
    profile = Path(work.cases[0].profile)
    if context.share(not profile.exists(), bool):
        if context.rank == 0:
            fit(profile, work.sweeps, Path(work.host), [suite.traced(model) for model in suite.models])
            context.barrier()
        else:
            context.rest()
    for case in work.cases:
        if context.share(case.complete, bool):
            continue
        if work.is_over_for_all(context):
            return
        case.request.check()
        with _timed(context, case.directory):
            measure_training(
                case.request, context, Path(case.directory), _COMMAND, suite.traced(case.model), make_table
            )
            # Modules hold each other in circles, and their buckets and groups with them.
            gc.collect()


@contextlib.contextmanager
def _timed(context: RankContext, directory: str) -> Iterator[None]:
    begin = time.monotonic()
    yield
    if context.rank == 0:
        print(f"{time.monotonic() - begin:.1f} s for {Path(directory).name}", flush=True)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration in the table.

    Attributes:
        layout: nodes x ranks on each. error: (predicted - measured) / measured. holds: whether the interval does.
        noise_floor: run-to-run spread of the measurement, relative to it.
        activity: how far begin and end of ranks' units of work are off, in the mean and on the worst rank, relative to
            the iteration; None where they are not known. units: the same of every unit, by rank, as ``{"FW1": 0.01}``.
    """

    model: str
    layout: str
    strategy: str
    options: str
    predicted_s: float
    measured_s: float
    error: float
    holds: bool
    noise_floor: float
    explained_by: str
    issued_equals_plan: bool | None
    activity: tuple[float, float] | None
    units: tuple[dict[str, float], ...] = ()

    @property
    def in_turns(self) -> bool:
        """Whether ranks work on one micro-batch after the other."""
        return any("FW2" in units for units in self.units)


def rows_of(profile: Path, cases: Sequence[Case]) -> list[Row]:
    """Every run beside its prediction by the simulation."""
    complete = {case.directory: case for case in cases if case.complete}
    if not complete:
        return []
    # By force: layers and collectives were not measured in one environment.
    report = validate_runs(profile, [Path(directory) for directory in complete], cluster_path=None, force=True)
    return [
        Row(
            model=pair.model,
            layout=str(complete[pair.run].layout),
            strategy=complete[pair.run].strategy,
            options=" ".join(
                [f"{name}={text}" for name, text in pair.options.items() if name not in FOUND]
                + ([] if pair.bucket_cap_bytes == 25 * 1024**2 else [f"bucket={pair.bucket_cap_bytes / 1024**2:g}MiB"])
                + ([f"slow_rank={complete[pair.run].slow_rank}"] if complete[pair.run].slow_rank else [])
            ),
            predicted_s=pair.predicted_s,
            measured_s=pair.measured_median_s,
            error=pair.error,
            holds=pair.covered,
            noise_floor=pair.noise_floor,
            explained_by=pair.explained_by,
            issued_equals_plan=pair.issued_equals_plan,
            activity=(pair.activity.mean_error, pair.activity.worst_rank_error) if pair.activity else None,
            units=tuple(
                {name: round(error, 4) for name, error in rank.by_unit.items()}
                for rank in (pair.activity.ranks if pair.activity else ())
            ),
        )
        for pair in report.pairs
        if pair.evaluator == "simulate"
    ]


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown, and below how strategies rank at every size."""
    known = [row.activity[0] for row in rows if row.activity]
    lines = [
        "| model | nodes x ranks | strategy | options | predicted s | measured s | error | in interval |"
        " activity error (worst rank) | as planned |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(
            f"| {row.model} | {row.layout} | {row.strategy} | {row.options} | {row.predicted_s:.4g} |"
            f" {row.measured_s:.4g} | {row.error:+.1%} | {'yes' if row.holds else 'no'} | {_activity(row)} |"
            f" {'yes' if row.issued_equals_plan else 'no'} |"
            for row in rows
        ),
        "",
        f"mean accuracy {1 - _mean(abs(row.error) for row in rows):.1%},"
        f" intervals hold {_mean(row.holds for row in rows):.0%} of {len(rows)}"
        + (f", activity error {_mean(known):.1%} in the mean" if known else "")
        + _turns(rows),
        "",
        "| model | nodes x ranks | best predicted | best measured | regret |",
        "|---|---|---|---|---|",
        *(_ranking(group) for group in _sizes(rows)),
    ]
    return "\n".join(lines) + "\n"


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def activity_table(rows: Sequence[Row]) -> str:
    """Of every run a line each rank, with the error of all its work and of each unit (DistSim, figures 9 and 10)."""
    lines = []
    for row in rows:
        columns = tuple(dict.fromkeys(name for units in row.units for name in units))
        lines += [f"{row.model}, {row.layout}, {row.strategy} {row.options}".rstrip(), ""]
        lines += [f"| rank | all | {' | '.join(columns)} |", "|---" * (2 + len(columns)) + "|"]
        for rank, units in enumerate(row.units):
            errors = [_mean(units.values()), *(units.get(name) for name in columns)]
            cells = " | ".join("" if error is None else f"{error:.1%}" for error in errors)
            lines.append(f"| {rank} | {cells} |")
        lines.append("")
    return "\n".join(lines)


def _turns(rows: Sequence[Row]) -> str:
    """How far forward and backward of single micro-batches are off, over runs, ranks and turns."""
    errors = sorted(
        error
        for row in rows
        if row.in_turns
        for units in row.units
        for name, error in units.items()
        if name.startswith(("FW", "BW"))
    )
    if not errors:
        return ""
    return f", of single turns {statistics.median(errors):.1%} in the median and {errors[-1]:.1%} at most"


def _activity(row: Row) -> str:
    return f"{row.activity[0]:.1%} ({row.activity[1]:.1%})" if row.activity else "not known"


def _sizes(rows: Sequence[Row]) -> list[list[Row]]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.model, row.layout), []).append(row)
    return list(groups.values())


def _ranking(rows: Sequence[Row]) -> str:
    """Which was predicted best and which was; regret is what the first takes longer than the second."""
    predicted, measured = min(rows, key=lambda row: row.predicted_s), min(rows, key=lambda row: row.measured_s)
    names = [f"{row.strategy} {row.options}".strip() for row in (predicted, measured)]
    regret = predicted.measured_s / measured.measured_s - 1
    return f"| {rows[0].model} | {rows[0].layout} | {names[0]} | {names[1]} | {regret:.1%} |"


def run_suite(
    output: Path,
    name: str,
    models: Sequence[str],
    clusters: Iterable[int],
    *,
    minutes: float | None = None,
    measure: bool = True,
) -> list[Row]:
    """Calibrate, train and compare on every cluster, and write the table.

    Args:
        name: of the suite. minutes: after which nothing is begun; None for no limit. measure: false takes what is
            complete.
    """
    suite = SUITES[name]
    until = None if minutes is None else time.monotonic() + 60 * minutes
    rows: list[Row] = []
    for on_node in clusters:
        base = output / f"{on_node}-a-node"
        layouts = [
            NodeLayout(nodes=nodes, ranks_per_node=on_node, link_bytes_per_s=LINK_BYTES_PER_S)
            for nodes in NODES_OF[on_node]
        ]
        left = 0
        for layout in layouts:
            sweeps = suite.sweeps(base, layout)
            cases = [case for model in models for case in cases_of(base, suite, model, layout)]
            host = base / f"{layout}" / "host"
            work = LayoutWork(suite=name, sweeps=sweeps, cases=cases, host=str(host), until=until)
            fitted_before = profile_of(base, layout).exists()
            if measure and not work.is_over(time.monotonic()):
                measure_copies(host, layout)
                start(work)
            # What is known is written before the next layout.
            rows += compared(base, suite, work, fit_anew=fitted_before)
            _write(output, rows)
            left += sum(not case.complete for case in cases)
        if left:
            print(f"{left} runs on {on_node} ranks a node are left: the same command goes on with them")
    return rows


def compared(base: Path, suite: Suite, work: LayoutWork, *, fit_anew: bool) -> list[Row]:
    """Every run of a layout beside its prediction by what its ranks swept.

    Args:
        fit_anew: whether the profile by which ghosts slept may be of other sweeps, or of an older fit.
    """
    host = Path(work.host)
    measured = [any(each.complete for each in found) for found in (work.sweeps, work.cases)]
    if not (is_complete(host) and all(measured)):
        return []
    slept = profile_of(base, work.layout)
    if slept.exists() and not fit_anew:
        return rows_of(slept, work.cases)
    profile = slept.with_name("predicting.json")
    fit(profile, work.sweeps, host, [suite.traced(model) for model in suite.models])
    return rows_of(profile, work.cases)


def _write(output: Path, rows: Sequence[Row]) -> None:
    if rows:
        write_bytes_atomically(output / "table.json", encode_pretty(rows))
        write_bytes_atomically(output / "table.md", table(rows).encode())
        write_bytes_atomically(output / "activity.md", activity_table(rows).encode())


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--suite", default="strategies", choices=SUITES)
    parser.add_argument("--models", help="of the suite's, separated by commas; all unless given")
    parser.add_argument("--ranks-per-node", default=",".join(map(str, CLUSTERS)), help="clusters: 4, 2, or both")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="after which nothing is begun")
    parser.add_argument("--table", action="store_true", help="measure nothing: the table of what is complete")
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        with join_ranks("gloo", "cpu", timeout_s=3600) as context:
            take_part(msgspec.json.decode(options.as_rank, type=LayoutWork), context)
        return
    if options.output is None:
        parser.error("-o DIR: where measurements and the table go")
    known = SUITES[options.suite].models
    models, clusters = (options.models or ",".join(known)).split(","), options.ranks_per_node.split(",")
    if not set(models) <= set(known) or not set(clusters) <= set(map(str, NODES_OF)):
        parser.error(f"--models takes {', '.join(known)}; --ranks-per-node {', '.join(map(str, NODES_OF))}")
    options.output.mkdir(parents=True, exist_ok=True)
    rows = run_suite(
        options.output.resolve(),
        options.suite,
        models,
        map(int, clusters),
        minutes=options.minutes,
        measure=not options.table,
    )
    print(table(rows) if rows else f"nothing in {options.output} is complete yet")


if __name__ == "__main__":
    main()
