"""Diagnoses of real runs: each made worse in one way has to have that named first, and clean ones nothing.

    python benchmarks/diagnosis/diagnosis.py -o DIR [--table]

Layers and collectives are measured and a profile fitted of each link; then every run of :mod:`diagnosis_cases` is made
on two ranks (of shared links on eight, whose layers sleep), with what disturbs it beside it, and ``predict diagnose
--run`` is asked. ``table.md`` and ``table.json`` have a row each: the cause, what was named first, and its share.

An interrupted benchmark goes on when called again: what is complete is not measured again. ``--table`` measures nothing
and diagnoses what is complete. Needs the right to make network namespaces, and two cores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1] / "accuracy"))

from diagnosis_cases import (
    CAUSES,
    CLEAN,
    LAYERS,
    PROFILES,
    SWEEPS,
    Case,
    layers_arguments,
    train_arguments,
)
from diagnosis_disturbances import disturbed
from repetitions import run

from paradl_bench.core.files.storage import encode_pretty, write_bytes_atomically
from paradl_bench.records.measurement import is_complete
from predict.validation.diagnosis.findings import Diagnosis


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A run in the table.

    Attributes:
        cause: that was made; empty for a clean run. named: what is present, the first first.
        possible: what may be present.
        share, interval: of an iteration (of the peak for memory), of what is named first; None where it has no share.
        notes: of the diagnosis.
    """

    run: str
    made: str
    cause: str
    strategy: str
    emulated: bool
    iteration_s: float
    named: tuple[str, ...]
    possible: tuple[str, ...]
    share: float | None
    interval: tuple[float, float] | None
    notes: tuple[str, ...]

    @property
    def right(self) -> bool:
        """Whether the cause is named first, or nothing where there is none."""
        return self.named[:1] == ((self.cause,) if self.cause else ())


def measure(output: Path) -> None:
    """Measure layers, then of each link its collectives and its runs; what is complete is left as it is."""
    for name in LAYERS:
        _measure_missing(output / name, layers_arguments(name))
    for profile, sweeps in PROFILES.items():
        for name in sweeps:
            _measure_missing(output / name, ["collectives", *SWEEPS[name].split()])
        if not _profile(output, profile).exists():
            measured = [str(output / directory) for directory in (*LAYERS, *sweeps)]
            # By force: layers are of this host, and links of emulated nodes.
            run("calibrate", ["fit", *measured, "--force", "-o", str(_profile(output, profile))])
        for case in (*CAUSES, *CLEAN):
            if case.profile == profile and not is_complete(output / case.name):
                train(case, output)


def _measure_missing(directory: Path, arguments: list[str]) -> None:
    if not is_complete(directory):
        run("paradl_bench", [*arguments, "-o", str(directory)])


def train(case: Case, output: Path) -> None:
    """Make a case's run, with what disturbs it beside it.

    Raises:
        CalledProcessError: the run failed.
    """
    arguments = train_arguments(case, str(_profile(output, case.profile)))
    command = [sys.executable, "-m", "paradl_bench", *arguments, "-o", str(output / case.name)]
    print("$ paradl-bench", *arguments, f"# beside it: {case.beside}" if case.beside else "", flush=True)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as training, disturbed(training, case.beside):
        training.wait()
    if training.returncode:
        raise subprocess.CalledProcessError(training.returncode, command)


def _profile(output: Path, name: str) -> Path:
    return output / f"profile-{name}.json"


def diagnosed(case: Case, output: Path) -> Row:
    """A row of the table, by ``predict diagnose``."""
    written = output / "diagnoses" / f"{case.name}.json"
    written.parent.mkdir(exist_ok=True)
    options = ["--from-profile", str(_profile(output, case.profile)), "--run", str(output / case.name)]
    run("predict", ["diagnose", *options, *case.diagnose.split(), "--no-remedies", "--force", "-o", str(written)])
    (diagnosis,) = msgspec.json.decode(written.read_bytes(), type=list[Diagnosis])
    named = tuple(finding.limitation.name for finding in diagnosis.findings if finding.state == "present")
    first = next((finding for finding in diagnosis.findings if finding.state == "present"), None)
    return Row(
        run=case.name,
        made=case.made,
        cause=case.cause,
        strategy=diagnosis.strategy,
        emulated=case.emulated,
        iteration_s=diagnosis.iteration_s,
        named=named,
        possible=tuple(finding.limitation.name for finding in diagnosis.findings if finding.state == "possible"),
        share=first.share if first else None,
        interval=first.share_interval if first else None,
        notes=diagnosis.notes,
    )


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown, and below how many are right."""
    head = "| run | strategy | made worse by | cause | named first | share (90%) | named too | right |"
    lines = [head, "|" + "---|" * 8, *map(_line, rows)]
    worse, clean = [row for row in rows if row.cause], [row for row in rows if not row.cause]
    lines += ["", f"{sum(row.right for row in worse)} of {len(worse)} named first."]
    lines += [f"{sum(not row.right for row in clean)} false of {len(clean)} clean runs.", ""]
    return "\n".join(lines)


def _line(row: Row) -> str:
    share = "" if row.share is None else f"{row.share:.1%}"
    if row.interval is not None and row.interval[0] != row.interval[1]:
        share += f" ({row.interval[0]:.1%} to {row.interval[1]:.1%})"
    strategy = f"{row.strategy} (emulated)" if row.emulated else row.strategy
    first, others = (row.named or ("nothing",))[0], ", ".join(row.named[1:])
    cells = (row.run, strategy, row.made, row.cause, first, share, others, "yes" if row.right else "no")
    return f"| {' | '.join(cells)} |"


def complete(output: Path, cases: Iterable[Case]) -> list[Case]:
    """Cases whose runs have come to their end."""
    return [case for case in cases if is_complete(output / case.name)]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="measure nothing; diagnose what is complete")
    options = parser.parse_args()
    output = cast("Path", options.output).resolve()
    output.mkdir(parents=True, exist_ok=True)
    # Where ranks find the networks.
    networks = str(Path(__file__).parents[1] / "networks")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), networks]))
    if not options.table:
        measure(output)
    rows = [diagnosed(case, output) for case in complete(output, (*CAUSES, *CLEAN))]
    write_bytes_atomically(output / "table.json", encode_pretty(rows))
    text = table(rows)
    write_bytes_atomically(output / "table.md", text.encode())
    print(text)


if __name__ == "__main__":
    main()
