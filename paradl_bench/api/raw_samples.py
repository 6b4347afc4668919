"""Raw samples in Python. Loads what it needs when it is called."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from paradl_bench.core.frames import Shown, frame_of

if TYPE_CHECKING:
    from pandas import DataFrame

PathLike = str | os.PathLike[str]


class RawSamples(Shown):
    """A measurement directory: its manifest, and one table for each kind of record.

    Attributes:
        path: the directory.
        manifest: its command, environment and settings.
    """

    def __init__(self, directory: PathLike) -> None:
        from paradl_bench.records.measurement import read_manifest

        self.manifest = read_manifest(directory)
        # Records are read when they are asked for, maybe from another working directory.
        self.path = Path(directory).absolute()

    @functools.cached_property
    def tables(self) -> dict[str, int]:
        """How many records of each kind the directory holds; the main kind first."""
        from paradl_bench.api.directory_files import RECORDS

        kinds = [Path(name).stem for name in RECORDS]
        return {kind: count for kind in kinds if (count := len(self._records(kind)))}

    def to_frame(self, table: str | None = None) -> DataFrame:
        """The records of one kind, one in each row; columns are the fields of the format.

        Samples are a list in their cell: ``to_frame("layers").explode("samples_s")`` gives each sample its row.

        Args:
            table: layers, collectives, training, ... as :attr:`tables` names them; None for the first.

        Raises:
            UserError: the directory has no such kind of record, or a record is wrong. The message names it.
        """
        from paradl_bench.api.directory_files import RECORDS
        from paradl_bench.core.errors import UserError, unknown_choice

        if table is None and not self.tables:
            raise UserError(f"{self.path} holds no records yet: name a table, or measure into this directory")
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
        """The directory, its kind of measurement, and the device."""
        held = ", ".join(f"{name} ({count})" for name, count in self.tables.items())
        state = "" if self.manifest.complete else ", incomplete"
        return f"{self.path}: {self.manifest.kind} on {self.manifest.environment.device_name}{state}. Tables: {held}"


def read(directory: PathLike) -> RawSamples:
    """Read a measurement directory of ``paradl-bench``.

    Raises:
        UserError: the directory holds no measurement or one of a newer version, or a record is wrong.
    """
    return RawSamples(directory)
