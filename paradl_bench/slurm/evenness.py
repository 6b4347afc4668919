"""How evenly the sweeps and runs of a calibration went: ranks and nodes that held the others up, and slow spells."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from paradl_bench.core.errors import UserError
from paradl_bench.measure.collectives.summary import summarise_collectives
from paradl_bench.measure.training.summary import summarise_training
from paradl_bench.records.measurement import read_manifest
from paradl_bench.slurm.progress import TaskState


class Evenness(msgspec.Struct, frozen=True, kw_only=True):
    """What a sweep or run has to say of its ranks and nodes, a line each; none where all kept pace."""

    name: str
    lines: tuple[str, ...]


def evenness_of(output: Path, states: Iterable[TaskState]) -> Iterator[Evenness]:
    """Of every sweep and run that has measured something; what can't be read is left out."""
    for state in states:
        directory = output / state.name
        if not state.measurement:
            continue
        with contextlib.suppress(UserError, OSError):
            kind = read_manifest(directory).kind
            if kind == "collectives":
                sweep = summarise_collectives(directory)
                if sweep.collectives:
                    yield Evenness(name=state.name, lines=(*sweep.nodes, *sweep.pace.lines()))
            elif kind == "training":
                run = summarise_training(directory)
                if run.ranks:
                    yield Evenness(name=state.name, lines=(*run.nodes, *run.pace.lines()))


def evenness_lines(measured: Sequence[Evenness]) -> Iterator[str]:
    """The section of the summary; nothing where nothing was measured."""
    if not measured:
        return
    yield ""
    yield "## Stragglers and slow spells"
    yield ""
    even = [measurement.name for measurement in measured if not measurement.lines]
    if even:
        yield f"- all ranks kept pace in {', '.join(even)}"
    for measurement in measured:
        if measurement.lines:
            yield f"- {measurement.name}"
            yield from (f"  - {line}" for line in measurement.lines)
