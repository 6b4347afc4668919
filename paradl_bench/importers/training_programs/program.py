"""What each program's file declares as ``PROGRAM``: its settings from a launch, and back; found by discovery."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from paradl_bench.core.errors import UserError
from paradl_bench.core.registry import discover, lookup
from paradl_bench.importers.training_programs.file_formats import encode_settings, format_of, read_settings
from paradl_bench.importers.training_programs.launch import FileSettings, Launch, Settings, Wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program that trains.

    Attributes:
        name: as ``--export`` takes it. title: as it calls itself.
        looked_at: the version whose names of settings these are.
        formats: of files that it reads, the one that is written unless a file's name says another first.
        suffix: of that file.
        write: settings in a format; raises UserError where the program has none for what is wanted.
        knows: whether settings of a format are its own.
        read: raises UserError where predict has no strategy for what they say.
        start: how it is started, by format, with ``{file}`` for the settings.
    """

    name: str
    title: str
    looked_at: str
    formats: tuple[str, ...]
    suffix: str
    write: Callable[[Wanted, str], Settings]
    knows: Callable[[Mapping[str, object]], bool]
    read: Callable[[FileSettings], Launch]
    start: Mapping[str, str]

    @property
    def file(self) -> str:
        """The name of its file where nobody says another."""
        return f"{self.name}{self.suffix}"

    def format_of(self, target: str) -> str:
        """The format that a file of this name has.

        Raises:
            UserError: one that the program does not read.
        """
        kind = self.formats[0] if target == "-" else format_of(Path(target))
        if kind not in self.formats:
            raise UserError(
                f"--export-to {target}: {self.title} reads {' or '.join(self.formats)}; call it {self.file}"
            )
        return kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A file for a program.

    Attributes:
        notes: what it does not say; its comments hold them too, where the format has any.
        start: the command that runs it.
    """

    content: bytes
    notes: tuple[str, ...]
    start: str


def programs() -> dict[str, Program]:
    """Every program, by name."""
    return discover("paradl_bench.importers.training_programs", "PROGRAM", Program)


def program_named(name: str) -> Program:
    """The program of a name; a UserError, which names the choices, if there is none."""
    return lookup(programs(), name, "program")


def export_launch(launch: Launch, program: Program, target: str, predicted: str) -> Written:
    """The file that has a program run a launch.

    Args:
        target: the file's name, whose suffix says its format. predicted: what was, in words, for its first comment.

    Raises:
        UserError: the program has no setting for a part of it; the message says what would be right.
    """
    kind = program.format_of(target)
    wanted = Wanted(launch, program.title)
    settings = program.write(wanted, kind)
    notes = wanted.finish()
    ranks = launch.strategy.ranks
    start = program.start[kind].format(file=shlex.quote(program.file if target == "-" else target))
    content = encode_settings(settings, kind, (f"{predicted}, on {ranks} ranks", f"run by: {start}", *notes), ranks)
    return Written(content=content, notes=notes, start=start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What a file has a program run.

    Attributes:
        notes: what the program does and predictions leave out.
    """

    launch: Launch
    program: Program
    notes: tuple[str, ...]


def read_launch(path: Path, ranks: int | None = None) -> Read:
    """What a file has a program run; which program, the settings say.

    Args:
        ranks: in all; None for those that the file says.

    Raises:
        UserError: unreadable, of no program that is known, or saying what predict has no strategy for.
    """
    settings = read_settings(path)
    for program in programs().values():
        if format_of(path) in program.formats and program.knows(settings):
            file_settings = FileSettings(settings, str(path), ranks)
            return Read(launch=program.read(file_settings), program=program, notes=tuple(file_settings.notes))
    known = ", ".join(f"{program.title} ({', '.join(program.formats)})" for program in programs().values())
    raise UserError(f"--strategy @{path}: no configuration of a program that is known: {known}")
