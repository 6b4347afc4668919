"""Every strategy on ghost layers over emulated nodes, predicted from a calibration of that very cluster.

    make emulate        or        python benchmarks/emulation.py -o DIR [--models M,...] [--ranks-per-node R,...]
                                  python benchmarks/emulation.py -o DIR --table

A cluster has so many ranks a node, and links of one rate. For each layout copies of gradients are measured on this
host, by as many ranks at once; then its ranks, which are started once, sweep collectives (alone, in groups at once, and
inside of all nodes at once), have rank 0 fit a profile with layers of a synthetic device (:mod:`emulated_profile`), and
train every configuration.
Runs are held against predictions from the sweeps of their own layout: its ranks share this host's cores, so that what
fewer of them measure is of another cluster. ``table.md`` and ``table.json`` have a row each, and how strategies rank at
every size.

What is complete is not run again; remove a directory to have it measured anew. No run is begun after ``--minutes``: the
same command goes on with those that are left. ``--table`` measures nothing, and has the rows of what is complete, also
while the suite runs. Needs the right to make network namespaces.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from emulated_profile import Sweep, fit, measure_copies, sweeps_of
from emulation_cases import CLUSTERS, FOUND, LINK_BYTES_PER_S, MODELS, NODES_OF, Case, cases_of, profile_of, traced

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

_COMMAND = ("benchmarks/emulation.py",)


class LayoutWork(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks of a layout do from their start to their end: sweep, then train on ghosts.

    Attributes:
        sweeps: that they measure.
        cases: whose ghosts sleep by a profile that rank 0 fits where it is missing.
        models: that the profile holds. host: copies of gradients.
        until: on the host's monotonic clock; no run is begun later. None for no limit.
    """

    sweeps: list[Sweep]
    cases: list[Case]
    models: list[str]
    host: str
    until: float | None

    @property
    def layout(self) -> NodeLayout:
        """Of the ranks."""
        return self.cases[0].layout

    def is_over(self, now: float) -> bool:
        """Whether no run is begun any more at a time of the host's monotonic clock."""
        return self.until is not None and now > self.until


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
    for sweep in work.sweeps:
        # Rank 0's word: what it has just ended others might not have seen before.
        if context.share(not sweep.complete, bool):
            with _timed(context, sweep.directory):
                measure_collectives(sweep.request, context, Path(sweep.directory), _COMMAND)
            gc.collect()
    profile = Path(work.cases[0].profile)
    if context.share(not profile.exists(), bool):
        if context.rank == 0:
            fit(profile, work.sweeps, Path(work.host), [traced(model) for model in work.models])
            context.barrier()
        else:
            context.rest()
    for case in work.cases:
        if context.share(case.complete, bool):
            continue
        if work.is_over(context.share(time.monotonic(), float)):
            return
        case.request.check()
        with _timed(context, case.directory):
            measure_training(case.request, context, Path(case.directory), _COMMAND, traced(case.model), make_table)
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
            the iteration; None where they are not known.
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
            strategy=pair.strategy,
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
        + (f", activity error {_mean(known):.1%} in the mean" if known else ""),
        "",
        "| model | nodes x ranks | best predicted | best measured | regret |",
        "|---|---|---|---|---|",
        *(_ranking(group) for group in _sizes(rows)),
    ]
    return "\n".join(lines) + "\n"


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


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
    models: Sequence[str],
    clusters: Iterable[int],
    *,
    minutes: float | None = None,
    measure: bool = True,
) -> list[Row]:
    """Calibrate, train and compare on every cluster, and write the table.

    Args:
        minutes: after which no run is begun; None for no limit. measure: false takes what is complete.
    """
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
            host = measure_copies(base, layout) if measure else base / f"{layout}" / "host"
            sweeps = sweeps_of(base, layout)
            cases = [case for model in models for case in cases_of(base, model, layout)]
            fitted_before = profile_of(base, layout).exists()
            if measure:
                start(LayoutWork(sweeps=sweeps, cases=cases, models=list(MODELS), host=str(host), until=until))
            # What is known is written before the next layout.
            rows += compared(base, layout, sweeps, host, cases, fit_anew=fitted_before)
            _write(output, rows)
            left += sum(not case.complete for case in cases)
        if left:
            print(f"{left} runs on {on_node} ranks a node are left: the same command goes on with them")
    return rows


def compared(
    base: Path, layout: NodeLayout, sweeps: Sequence[Sweep], host: Path, cases: Sequence[Case], *, fit_anew: bool
) -> list[Row]:
    """Every run of a layout beside its prediction by what its ranks swept.

    Args:
        fit_anew: whether the profile by which ghosts slept may be of other sweeps, or of an older fit.
    """
    if not (is_complete(host) and any(sweep.complete for sweep in sweeps) and any(case.complete for case in cases)):
        return []
    slept = profile_of(base, layout)
    if slept.exists() and not fit_anew:
        return rows_of(slept, cases)
    profile = slept.with_name("predicting.json")
    fit(profile, sweeps, host, [traced(model) for model in MODELS])
    return rows_of(profile, cases)


def _write(output: Path, rows: Sequence[Row]) -> None:
    if rows:
        write_bytes_atomically(output / "table.json", encode_pretty(rows))
        write_bytes_atomically(output / "table.md", table(rows).encode())


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--models", default=",".join(MODELS), help="of resnet50 and emulated_networks:small_vgg")
    parser.add_argument("--ranks-per-node", default=",".join(map(str, CLUSTERS)), help="clusters: 4, 2, or both")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="after which no run is begun")
    parser.add_argument("--table", action="store_true", help="measure nothing: the table of what is complete")
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        with join_ranks("gloo", "cpu", timeout_s=3600) as context:
            take_part(msgspec.json.decode(options.as_rank, type=LayoutWork), context)
        return
    if options.output is None:
        parser.error("-o DIR: where measurements and the table go")
    models, clusters = options.models.split(","), options.ranks_per_node.split(",")
    if not set(models) <= set(MODELS) or not set(clusters) <= set(map(str, NODES_OF)):
        parser.error(f"--models takes {', '.join(MODELS)}; --ranks-per-node {', '.join(map(str, NODES_OF))}")
    options.output.mkdir(parents=True, exist_ok=True)
    rows = run_suite(
        options.output.resolve(), models, map(int, clusters), minutes=options.minutes, measure=not options.table
    )
    print(table(rows) if rows else f"nothing in {options.output} is complete yet")


if __name__ == "__main__":
    main()
