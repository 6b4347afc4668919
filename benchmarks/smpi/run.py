"""Predictions for 128 to 1,024 ranks against SimGrid, calibrated on 2 to 64 simulated ones.

    python benchmarks/smpi/run.py -o results/smpi/DATE-COMMIT [--libraries smpi-ring] [--small]

Sweeps on a fat tree are simulated by SMPI, written as a measurement directory, and fitted by `calibrate fit`;
`predict`'s cost model then says what larger sweeps and iterations take, and SimGrid what they take. Every simulated
case is kept under OUTPUT/simulated when it is done: called again, the run goes on. Writes report.md and pairs.csv.
Simulated time does not depend on the host's load; simulating takes half an hour or so. Needs smpicc and smpirun
(libsimgrid-dev).
"""

from __future__ import annotations

import argparse
import csv
import io
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby, product
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(Path(__file__).parent))

from cases import Extent, calibration, judged  # noqa: E402
from fat_tree import FatTree  # noqa: E402
from judging import Judge, Pair, toolkit, write_measurements  # noqa: E402
from simulation import MODEL, SELECTIONS, NotSimulatedError, Simulator  # noqa: E402

from calibrate.profile.profile import read_profile  # noqa: E402
from paradl_bench.core.errors import ParadlError, UserError  # noqa: E402
from paradl_bench.core.files.storage import write_text_atomically  # noqa: E402
from paradl_bench.plan.strategy import parse_strategy  # noqa: E402

LAYERS = ROOT / "results" / "cpu-2core" / "2026-11-21-ffbe79c" / "accuracy" / "profile.json"
SMALL = {
    "calibration_ranks": (2, 4, 8),
    "calibration_sizes": (1 << 10, 1 << 13, 1 << 16, 1 << 19),
    "judged_ranks": (16,),
    "judged_sizes": (1 << 16,),
    "large_ranks": (),
    "models": ("resnet18",),
    "iteration_ranks": (8,),
    "large_iteration_ranks": (),
}
COLLECTIVE_GOAL = 0.15
ITERATION_GOAL = 0.10


def profiles(simulator: Simulator, extent: Extent, output: Path, layers: Path) -> Path:
    """The profile of the simulated sweeps and of the layers' times, made as a user makes it."""
    measurements, communication, profile = (
        output / name for name in ("measurements", "communication.json", "profile.json")
    )
    cases = [case for case in calibration(extent, simulator.tree) if case.sizes]
    for case in cases:
        simulator.sweep(case)
        say(case.name)
    write_measurements(simulator, cases, measurements, ["python", *sys.argv])
    toolkit("calibrate", "fit", str(measurements), "-o", str(communication), "--force")
    # The machine that computed is not the one that is simulated: hence --force. Its own collectives keep their library.
    toolkit("calibrate", "merge", str(layers), str(communication), "-o", str(profile), "--force")
    return profile


def pairs(judge: Judge, extent: Extent, tree: FatTree) -> tuple[list[Pair], int]:
    """Everything that was not fitted, from the quickest on; and how many cases were to be kept and are not."""
    found: list[Pair] = []
    missing = 0
    for name, predict in _to_judge(judge, extent, tree):
        try:
            found += predict()
            say(name)
        except NotSimulatedError:
            missing += 1
    return found, missing


def _to_judge(judge: Judge, extent: Extent, tree: FatTree) -> Iterator[tuple[str, Callable[[], Iterable[Pair]]]]:
    cases = list(judged(extent, tree))
    inside = tree.ranks_per_node
    for large in (False, True):
        for case in cases:
            if (case.ranks * case.groups in extent.large_ranks) == large:
                yield case.name, partial(judge.collective, case)
        counts = extent.large_iteration_ranks if large else extent.iteration_ranks
        for library, model, ranks in product(extent.libraries, extent.models, counts):
            for strategy, replicas in ((f"d{ranks}", ranks), (f"d{ranks // inside}f{inside}", ranks // inside)):
                point = model, parse_strategy(strategy), replicas * extent.replica_batch, library
                yield f"{library} {model} {strategy}", partial(judge.iteration, *point)


def report(found: Sequence[Pair], simulator: Simulator, extent: Extent, *, small: bool, missing: int = 0) -> str:
    """Markdown: the figures, then medians by what was predicted."""
    goals = {"collective": COLLECTIVE_GOAL, "iteration": ITERATION_GOAL}
    tree = simulator.tree
    lines = [
        "# Predictions against SimGrid",
        "",
        f"SimGrid {simulator.version}, SMPI, its default network model; {tree.nodes} nodes of {tree.ranks_per_node}"
        f" ranks, {tree.nodes_per_rack} to a rack and {tree.racks_per_pod} racks to a pod, 1:{tree.oversubscription:g}"
        f" oversubscribed above racks; calibrated on {extent.calibration_ranks[0]} to {extent.calibration_ranks[-1]}"
        " ranks. Error = (predicted - simulated) / simulated; median, quartiles and `phi = 1`, the median without"
        " contention, are of its size. Nothing is fitted to what is predicted.",
        "",
        *(["A small run, as the tests make: it says nothing of accuracy.", ""] if small else []),
        *([f"{missing} of what is judged is not simulated yet.", ""] if missing else []),
        "| | pairs | median error | quartiles | largest | phi = 1 | 90% interval holds | goal |",
        "|---|---|---|---|---|---|---|---|",
    ]

    def kind_and_ranks(pair: Pair) -> tuple[str, str, int]:
        return pair.kind, pair.library, pair.ranks

    for key, group in groupby(sorted(found, key=kind_and_ranks), key=kind_and_ranks):
        lines.append(f"| {' '.join(map(str, key))} ranks | {_figures(list(group))} | {goals[key[0]]:.0%} |")
    lines += [
        "",
        "## By operation or strategy",
        "",
        "| | pairs | median error | quartiles | largest | phi = 1 | 90% interval holds |",
    ]
    lines.append("|---|---|---|---|---|---|---|")

    def by_what(pair: Pair) -> tuple[str, str, int, int]:
        return pair.library, pair.what, pair.ranks, pair.groups

    for of, group in groupby(sorted(found, key=by_what), key=by_what):
        groups = f", {of[3]} groups at once" if of[3] > 1 else ""
        lines.append(f"| {of[0]} {of[1]}, {of[2]} ranks{groups} | {_figures(list(group))} |")
    lines += [
        "",
        "Ranks are those of all groups; of groups of one rank a node, the first one alone counts among those alone.",
    ]
    lines += ["", f"SMPI's settings ({', '.join(MODEL)}), and how it chooses algorithms:", ""]
    lines += [f"- {library}: {', '.join(SELECTIONS[library])}" for library in extent.libraries]
    return "\n".join([*lines, ""])


def _figures(group: Sequence[Pair]) -> str:
    errors, without = (
        np.abs([getattr(pair, name) for pair in group]) for name in ("error", "error_without_contention")
    )
    low, high = np.quantile(errors, [0.25, 0.75])
    held = sum(pair.held for pair in group)
    worst = max(group, key=lambda pair: abs(pair.error)).error
    cells = (f"{np.median(errors):.1%}", f"{low:.1%} to {high:.1%}", f"{worst:+.0%}", f"{np.median(without):.1%}")
    return f"{len(group)} | {' | '.join(cells)} | {held} of {len(group)}"


def as_csv(found: Sequence[Pair]) -> str:
    """Every pair."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*Pair._fields, "error", "error_without_contention", "held"])
    for pair in found:
        numbers = [f"{value:.6g}" if isinstance(value, float) else value for value in pair]
        writer.writerow([*numbers, f"{pair.error:.4f}", f"{pair.error_without_contention:.4f}", pair.held])
    return text.getvalue()


def say(text: str) -> None:
    """How far it is, on standard error."""
    print(text, file=sys.stderr, flush=True)


def extent_of(options: argparse.Namespace) -> Extent:
    """Raises:
    UserError: an unknown library.
    """
    libraries = tuple(options.libraries.split(","))
    unknown = sorted(set(libraries) - set(SELECTIONS))
    if unknown:
        raise UserError(f"--libraries {options.libraries}: unknown {unknown[0]}; choose from {', '.join(SELECTIONS)}")
    changes = SMALL if options.small else {}
    if options.models:
        changes = {**changes, "models": tuple(options.models.split(","))}
    if options.without_large:
        changes = {**changes, "large_ranks": (), "large_iteration_ranks": ()}
    return Extent(libraries=libraries, **changes)


def check_models(extent: Extent, layers: Path) -> None:
    """Raises:
    UserError: the profile of layers lacks a model.
    """
    known = read_profile(layers).network
    for model in extent.models:
        if model not in known:
            raise UserError(f"--models {model}: {layers.name} holds {', '.join(known)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, fit, predict and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True, help="Folder; one begun before is gone on with.")
    parser.add_argument("--libraries", default=",".join(SELECTIONS), help="Ways of choosing algorithms. [%(default)s]")
    parser.add_argument("--layers", type=Path, default=LAYERS, help="Profile that layers' times are taken from.")
    parser.add_argument("--models", help="Whose iterations are judged, of the profile's. [resnet18,vgg11]")
    parser.add_argument("--small", action="store_true", help="2 to 8 ranks and few sizes: shows that it runs.")
    parser.add_argument("--only-kept", action="store_true", help="Report what is there; simulate nothing.")
    parser.add_argument("--without-large", action="store_true", help="Nothing of 1,024 ranks, which takes longest.")
    options = parser.parse_args(arguments)
    try:
        extent = extent_of(options)
        with tempfile.TemporaryDirectory() as build:
            kept = options.output / "simulated"
            simulator = Simulator(FatTree(), kept, Path(build), only_kept=options.only_kept)
            check_models(extent, options.layers)
            profile = profiles(simulator, extent, options.output, options.layers)
            judge = Judge(simulator, profile, simulator.tree.cluster())
            found, missing = pairs(judge, extent, simulator.tree)
        text = report(found, simulator, extent, small=options.small, missing=missing)
        write_text_atomically(options.output / "pairs.csv", as_csv(found))
        write_text_atomically(options.output / "report.md", text)
        write_text_atomically(options.output / "command.txt", shlex.join(["python", *sys.argv]) + "\n")
    except ParadlError as error:
        print(f"run.py: {error}", file=sys.stderr)
        return error.exit_code
    except NotSimulatedError as error:
        print(f"run.py: {error} is not simulated yet, and the fit needs it: leave out --only-kept", file=sys.stderr)
        return UserError.exit_code
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
