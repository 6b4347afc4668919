"""Runs of the judge under smpirun: one case a file, kept when it is done, so that an interrupted sweep goes on."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec
from fat_tree import FatTree

from paradl_bench.core.errors import UserError, WorkError
from paradl_bench.core.files.storage import write_bytes_atomically, write_text_atomically
from paradl_bench.records.emulation import SimulatedMessages

SOURCE = Path(__file__).with_name("judge.c")
SELECTIONS = {
    "smpi-ring": (
        *("smpi/allreduce:lr", "smpi/allgather:NTSLR"),
        *("smpi/reduce_scatter:ompi_ring", "smpi/bcast:binomial_tree"),
    ),
    "smpi-mpich": ("smpi/coll-selector:mpich",),
}
"""By name of the library under which measurements are kept: how SMPI chooses algorithms.

Its all-gather ``ring`` sends each part straight to every rank, at growing distances; NTSLR is what others call a ring.
"""
MODEL = ("smpi/simulate-computation:no", "network/crosstraffic:no")
"""No time but that of messages and sleeps; and no acknowledgements on the way back, which are TCP's: with them SimGrid
3.32 lets two large messages in opposite directions through one switch take 1.65 times as long, or not, by who sends.
"""
_STRANGE = re.compile(r"[^\w.-]+")


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """A collective at some sizes.

    Attributes:
        ranks: of one group. groups: how many there are, of every such rank; the first alone, then all at once.
    """

    library: str
    operation: str
    ranks: int
    sizes: tuple[int, ...]
    groups: int = 1

    @property
    def name(self) -> str:
        """Of its file."""
        sizes = "-".join(map(str, dict.fromkeys((self.sizes[0], self.sizes[-1]))))
        return f"{self.library}-{self.operation}-{self.groups}x{self.ranks}-{sizes}"

    @property
    def arguments(self) -> list[str]:
        """Of the judge."""
        return ["sweep", self.operation, str(self.groups), *map(str, self.sizes)]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What one call took.

    Attributes:
        together: how many groups were at it.
        seconds: of each simulated process.
    """

    operation: str
    message_bytes: int
    together: int
    seconds: tuple[float, ...]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A case's file: what was asked for, of which simulator, and what came.

    Attributes:
        platform: the first digits of the SHA-256 of platform, program and settings; another one is simulated anew.
    """

    name: str
    simgrid: str
    platform: str
    settings: tuple[str, ...]
    rows: tuple[Row, ...]


def installed_version() -> str:
    """SimGrid's, as smpirun says it.

    Raises:
        WorkError: smpirun or smpicc is missing.
    """
    for tool in ("smpirun", "smpicc"):
        if shutil.which(tool) is None:
            raise WorkError(f"{tool} is not installed: apt-get install libsimgrid-dev (Debian), or build SimGrid")
    said = subprocess.run(["smpirun", "-version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"\d+(\.\d+)+", said)
    return found.group() if found else "unknown"


class NotSimulatedError(Exception):
    """A case that is not at hand, where nothing new is to be simulated."""


class Simulator:
    """The compiled judge on one platform, and where results are kept.

    Args:
        results: folder of a file a case. build: of what is made anew each time: program, platform and plan files.
        only_kept: raise :class:`NotSimulatedError` for a case that is not at hand.

    Raises:
        WorkError: SimGrid is missing, or does not compile the judge.
    """

    def __init__(self, tree: FatTree, results: Path, build: Path, *, only_kept: bool = False) -> None:
        self.version = installed_version()
        self.tree = tree
        self._results, self._build, self._only_kept = results, build, only_kept
        self._platform = build / "platform.xml"
        write_text_atomically(self._platform, tree.platform_xml())
        self._program = self._build / "judge"
        _checked(["smpicc", "-O2", "-o", str(self._program), str(SOURCE)], "smpicc")

    @property
    def messages(self) -> SimulatedMessages:
        """What measurements made of its results say of themselves."""
        tree = self.tree
        told = "\n".join((tree.platform_xml(), *MODEL))
        return SimulatedMessages(
            simulator=f"SimGrid {self.version}",
            platform=f"a fat tree of {tree.nodes} nodes of {tree.ranks_per_node} ranks,"
            f" 1:{tree.oversubscription:g} oversubscribed",
            platform_sha256=hashlib.sha256(told.encode()).hexdigest(),
        )

    def sweep(self, case: Sweep) -> Result:
        """The case's result, simulated unless it is at hand."""
        if not case.sizes or case.ranks < 2:
            raise UserError(f"{case.name}: a sweep has at least 2 ranks and one size")
        return self._result(case.name, case.library, case.arguments, case.ranks * case.groups, 1)

    def iteration(self, name: str, library: str, ranks: int, plan: str) -> Result:
        """An iteration of a plan file's text: two processes a rank."""
        path = self._build / f"{_safe(name)}.plan"
        write_text_atomically(path, plan)
        return self._result(name, library, ["iteration", str(path)], ranks, 2, content=plan)

    def _result(
        self, name: str, library: str, arguments: Sequence[str], ranks: int, processes: int, content: str = ""
    ) -> Result:
        settings = (*MODEL, *SELECTIONS[library])
        parts = self.tree.platform_xml(), SOURCE.read_text(), *settings, content or " ".join(arguments), self.version
        digest = hashlib.sha256("\n".join((*parts, str(ranks))).encode()).hexdigest()[:16]
        path = self._results / f"{_safe(name)}.json"
        if path.exists():
            kept = msgspec.json.decode(path.read_bytes(), type=Result)
            if kept.platform == digest:
                return kept
        if self._only_kept:
            raise NotSimulatedError(name)
        rows = self._run(settings, arguments, ranks, processes)
        result = Result(name=name, simgrid=self.version, platform=digest, settings=settings, rows=rows)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomically(path, msgspec.json.encode(result) + b"\n")
        return result

    def _run(self, settings: Sequence[str], arguments: Sequence[str], ranks: int, processes: int) -> tuple[Row, ...]:
        hosts = self._build / f"hosts-{ranks}x{processes}"
        write_text_atomically(hosts, self.tree.host_file(ranks, processes))
        command = ["smpirun", "-no-privatize", "-platform", str(self._platform), "-hostfile", str(hosts)]
        command += ["-np", str(ranks * processes), "--log=root.thres:warning"]
        command += [f"--cfg={setting}" for setting in settings]
        printed = _checked([*command, str(self._program), *arguments], "smpirun")
        rows = [_row(line) for line in printed.splitlines() if line.startswith("RESULT ")]
        if not rows:
            raise WorkError(f"smpirun printed no result: {printed[-300:]}")
        return tuple(rows)


def _row(line: str) -> Row:
    _, operation, message_bytes, together, *seconds = line.split()
    return Row(
        operation=operation,
        message_bytes=int(message_bytes),
        together=int(together),
        seconds=tuple(map(float, seconds)),
    )


def _safe(name: str) -> str:
    return _STRANGE.sub("-", name)


def _checked(command: Sequence[str], what: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"})
    if done.returncode:
        raise WorkError(f"{what} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout
