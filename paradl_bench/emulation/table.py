"""The table of ghost seconds: from its file, or made of a profile by who is registered to make such tables.

What predicts lies above this package and is never called from here. ``predict ghost`` writes a table; where a profile
is given instead, an entry point of the installed distribution says what makes a table of it. Either way the cost model
that predicts a run says what its ranks sleep, shapes and batches that nobody measured included.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

import msgspec

from paradl_bench.core.errors import UserError
from paradl_bench.core.files.storage import read_whole
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.records.training.ghost_record import GhostTable, read_table

MAKERS = "paradl_bench.ghost_tables"
"""Group of the entry points that make tables of profiles."""


class TableRequest(NamedTuple):
    """The run whose ranks sleep.

    Attributes:
        file: a table, or a profile that calibrate fit wrote.
        network: as traced; a profile need not hold the model, if it holds what tells of its layers.
    """

    file: str
    network: ModelGraph
    strategy: Strategy
    settings: PlanSettings
    dtype: str
    backend: str
    spread: bool = False

    def command(self, profile: str, output: str) -> str:
        """What writes its table."""
        words = ["predict", "ghost", "--from-profile", profile, "--model", self.network.name]
        words += ["--strategy", str(self.strategy), "--batch", str(self.settings.batch)]
        for name, text in options_of(self.settings).items():
            words += [f"--{name.replace('_', '-')}", text]
        return shlex.join([*words, *(("--spread",) if self.spread else ()), "-o", output])


TableMaker = Callable[[TableRequest], GhostTable]
"""Makes the table of a run from a profile; raises UserError for a file that is none, or that lacks a layer's time."""


def options_of(settings: PlanSettings) -> dict[str, str]:
    """The settings that decide who sleeps how long and are not the defaults, as the options of commands name them."""
    return {
        "optimizer": settings.optimizer,
        **{name: text for name, text in settings.options.items() if name not in ("cut_by", "fused_by")},
    }


def made_by_registered(asked: TableRequest) -> GhostTable:
    """The table of a profile, by the entry point of :data:`MAKERS`.

    Raises:
        UserError: there is none; or as of the maker.
    """
    entry = next(iter(entry_points(group=MAKERS)), None)
    if entry is None:
        raise UserError(
            f"this is no table of sleeps, and nothing is installed that makes one of a profile; make it:"
            f" {asked.command(asked.file, 'table.json')}"
        )
    make: TableMaker = entry.load()
    return make(asked)


def table_of(asked: TableRequest, make: TableMaker) -> GhostTable:
    """What every rank of a run sleeps.

    Args:
        make: of a file that is no table.

    Raises:
        UserError: a table of another run, with the command that writes this one's; or as of ``make``.
    """
    try:
        content = read_whole(Path(asked.file))
        table = read_table(content, "table of sleeps") if _is_table(content) else make(asked)
        _check(table, asked)
    except UserError as error:
        raise UserError(f"--emulate {asked.file}: {error}") from error
    return table if asked.spread else msgspec.structs.replace(table, spread=None)


def _is_table(content: bytes) -> bool:
    try:
        return "role_of_rank" in msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return False


def _check(table: GhostTable, asked: TableRequest) -> None:
    run = {
        "strategy": str(asked.strategy),
        "ranks": str(asked.strategy.ranks),
        "batch": str(asked.settings.batch),
        **options_of(asked.settings),
    }
    held = {
        "strategy": table.strategy,
        "ranks": str(len(table.role_of_rank)),
        "batch": str(table.batch),
        **table.options,
    }
    names = dict.fromkeys(name for name in (*run, *held) if run.get(name) != held.get(name))
    unlike = [f"{name} {held.get(name, 'by default')}, not {run.get(name, 'by default')}" for name in names]
    if table.network_digest != asked.network.digest:
        unlike.append(f"another network than {asked.network.name}")
    if asked.spread and table.spread is None:
        unlike.append("sleeps that do not spread")
    if unlike:
        command = f"{asked.command(table.profile, asked.file)} --force"
        raise UserError(f"the table is of {'; '.join(unlike)}. Make this run's: {command}")
