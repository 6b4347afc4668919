"""Measurements in Python: read raw samples, measure layers. Loads what it needs when it is called."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from paradl_bench.core.frames import Shown, frame_of

if TYPE_CHECKING:
    from pandas import DataFrame

PathLike = str | os.PathLike[str]


class RawSamples(Shown):
    """What a measurement directory holds: a manifest, and a table a kind of record.

    Attributes:
        path: of the directory.
        manifest: its command, environment and settings.
    """

    def __init__(self, directory: PathLike) -> None:
        from paradl_bench.records.measurement import read_manifest

        self.manifest = read_manifest(directory)
        # Records are read when they are asked for, maybe from another working directory.
        self.path = Path(directory).absolute()

    @functools.cached_property
    def tables(self) -> dict[str, int]:
        """How many records there are of each kind that the directory holds; the main one first."""
        from paradl_bench.api.directory_files import RECORDS

        kinds = [Path(name).stem for name in RECORDS]
        return {kind: count for kind in kinds if (count := len(self._records(kind)))}

    def to_frame(self, table: str | None = None) -> DataFrame:
        """The records of one kind, a row each; columns are the fields of the format.

        Samples are a list in their cell: ``to_frame("layers").explode("samples_s")`` gives a row a sample.

        Args:
            table: layers, collectives, training, ... as :attr:`tables` names them; None for the first of those.

        Raises:
            UserError: no such kind of record, or a record is wrong, which the message names.
        """
        from paradl_bench.api.directory_files import RECORDS
        from paradl_bench.core.errors import UserError, unknown_choice

        if table is None and not self.tables:
            raise UserError(f"{self.path} holds no records yet: measure into it, or name a table")
        table = table or next(iter(self.tables))
        if f"{table}.jsonl" not in RECORDS:
            raise unknown_choice("table of raw samples", table, [Path(name).stem for name in RECORDS])
        return frame_of(RECORDS[f"{table}.jsonl"], self._records(table))

    def _records(self, table: str) -> Sequence[msgspec.Struct]:
        from paradl_bench.api.directory_files import RECORDS
        from paradl_bench.records.contexts.older import read_contexts
        from paradl_bench.records.measurement import read_records

        name = f"{table}.jsonl"
        return read_contexts(self.path) if table == "contexts" else read_records(self.path, name, RECORDS[name])

    @property
    def title(self) -> str:
        """Which directory, of what, on which device."""
        held = ", ".join(f"{name} ({count})" for name, count in self.tables.items())
        state = "" if self.manifest.complete else ", incomplete"
        return f"{self.path}: {self.manifest.kind} on {self.manifest.environment.device_name}{state}. Tables: {held}"


def read(directory: PathLike) -> RawSamples:
    """Read a measurement directory of ``paradl-bench``.

    Raises:
        UserError: it is none, of a newer version, or a record is wrong.
    """
    return RawSamples(directory)


def measure_layers(model: str, output: PathLike, *, batch: int | Sequence[int], **options: object) -> RawSamples:
    """Measure the layers of a model, as ``paradl-bench layers`` does, and read the samples.

    The measurement runs in a process of its own, so that nothing else of this one is timed. Of ranks that torchrun
    started, all call this alike.

    Args:
        model: a name that ``paradl-bench models`` lists, or ``package.module:factory``, which builds a module.
        output: the measurement directory; one that is incomplete is gone on with.
        batch: local batches to measure.
        options: of the command, with underscores: ``device="cuda"``, ``shards="f2"``.

    Raises:
        UserError: a wrong model or option.
        WorkError: the measurement failed; what was measured is kept.
    """
    import subprocess

    from paradl_bench.commands.layers import COMMAND
    from paradl_bench.core.errors import UserError, WorkError
    from paradl_bench.core.terminal.keywords import ask

    asked = ask(COMMAND, "layers", [model, "-o", os.fspath(output)], {"batch": batch, **options})
    # -P: modules of the working directory are imported where the command asks for one, and not before.
    command = [sys.executable, "-P", "-m", "paradl_bench", *asked.words]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        _, _, said = done.stderr.rpartition("error: ")
        raise (UserError if done.returncode == UserError.exit_code else WorkError)(said.strip())
    return read(output)
