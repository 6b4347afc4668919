"""Every strategy on ghost layers over emulated nodes, predicted from a calibration of that very cluster.

    make emulate    or    python benchmarks/emulation/emulation.py -o DIR [--models M,...] [--ranks-per-node R,...]
                          python benchmarks/emulation/emulation.py -o DIR --suite distsim
                          python benchmarks/emulation/emulation.py -o DIR --suite transformers [--ranks N,...]
                                                                   [--only 'gpt2-x4*',...] [--dilate K]
                          python benchmarks/emulation/emulation.py -o DIR --table

A cluster has so many ranks a node, and links of one rate. For each layout copies of gradients are measured on this
host, by as many ranks at once; then its ranks, which are started once, sweep collectives (alone, in groups at once, and
inside of all nodes at once), have rank 0 fit a profile with layers of a synthetic device (:mod:`emulated_profile`), and
train every configuration.
Runs are held against predictions from the sweeps of their own layout: its ranks share this host's cores, so that what
fewer of them measure is of another cluster. ``table.md`` and ``table.json`` have a row each, and how strategies rank at
every size. A suite says which models train by which strategies: convolutional networks by all
(:mod:`emulation_cases`), DistSim's three by its axes (:mod:`emulation_distsim`), or transformers by every axis that
trains them (:mod:`emulation_transformers`). ``activity.md`` says how far each forward and backward of a micro-batch is
off on every rank. ``--dilate K`` has the whole cluster K times as slow: layers sleep K times as long, links have a K-th
of their rate. What strategies take the host is then a K-th of what it was beside them.

What is complete is not run again; remove a directory to have it measured anew. Nothing is begun after ``--minutes``;
the same command goes on with what is left. ``--table`` measures nothing, and has the rows of what is complete, also
while the suite runs. Needs the right to make network namespaces.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec
from emulated_profile import Sweep, fit, measure_copies
from emulation_cases import CLUSTERS, LINK_BYTES_PER_S, NODES_OF, STRATEGIES, Case, Suite, cases_of, profile_of
from emulation_distsim import DISTSIM
from emulation_table import Row, activity_table, rows_of, table
from emulation_transformers import TRANSFORMERS

from paradl_bench.core.files.storage import encode_pretty, write_bytes_atomically
from paradl_bench.measure.collectives.sweep import measure_collectives
from paradl_bench.measure.training.run import measure_training
from paradl_bench.ranks.emulated_nodes.cluster import emulated_cluster
from paradl_bench.ranks.emulated_nodes.layout import NodeLayout
from paradl_bench.ranks.groups.process_groups import RankContext, join_ranks
from paradl_bench.ranks.launcher import launch_ranks
from paradl_bench.records.measurement import is_complete
from predict.emulation.ghost import make_table

MINUTES = 28.5

SUITES = {"strategies": STRATEGIES, "distsim": DISTSIM, "transformers": TRANSFORMERS}

_COMMAND = ("benchmarks/emulation/emulation.py",)


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


def run_suite(
    output: Path,
    name: str,
    models: Sequence[str],
    clusters: Iterable[int],
    *,
    ranks: Sequence[int] = (),
    only: Sequence[str] = ("*",),
    minutes: float | None = None,
    measure: bool = True,
    dilate: float = 1.0,
) -> list[Row]:
    """Calibrate, train and compare on every cluster, and write the table.

    Args:
        name: of the suite. ranks: of layouts that are measured; all where none are given. only: patterns of names of
            runs, as their directories have them.
        minutes: after which nothing is begun; None for no limit. measure: false takes what is complete.
        dilate: how many times as slow layers and links are as the suite has them.
    """
    suite = SUITES[name]
    until = None if minutes is None else time.monotonic() + 60 * minutes
    rows: list[Row] = []
    for on_node in clusters:
        base = output / f"{on_node}-a-node"
        layouts = [
            NodeLayout(nodes=nodes, ranks_per_node=on_node, link_bytes_per_s=LINK_BYTES_PER_S / dilate)
            for nodes in NODES_OF[on_node]
            if not ranks or nodes * on_node in ranks
        ]
        left = 0
        for layout in layouts:
            sweeps = suite.sweeps(base, layout)
            cases = [
                case
                for model in models
                for case in cases_of(base, suite, model, layout, dilate=dilate)
                if any(fnmatchcase(Path(case.directory).name, pattern) for pattern in only)
            ]
            if not cases:
                continue
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
    parser.add_argument("--ranks", help="of layouts, separated by commas: of 4, 8 and 16; all unless given")
    parser.add_argument("--only", default="*", help="runs of such names alone, separated by commas: 'gpt2-x4*'")
    parser.add_argument("--dilate", type=float, default=1.0, help="have layers and links be so many times as slow")
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
    sizes = sorted({int(on_node) * nodes for on_node in clusters for nodes in NODES_OF[int(on_node)]})
    ranks = options.ranks.split(",") if options.ranks else []
    if not set(ranks) <= set(map(str, sizes)):
        parser.error(f"--ranks takes {', '.join(map(str, sizes))}")
    if not 0 < options.dilate < math.inf:
        parser.error(f"--dilate {options.dilate} has to be a positive number")
    options.output.mkdir(parents=True, exist_ok=True)
    rows = run_suite(
        options.output.resolve(),
        options.suite,
        models,
        map(int, clusters),
        ranks=[*map(int, ranks)],
        only=options.only.split(","),
        minutes=options.minutes,
        measure=not options.table,
        dilate=options.dilate,
    )
    print(table(rows) if rows else f"nothing in {options.output} is complete yet")


if __name__ == "__main__":
    main()
