"""Rows of public logs, counted and read a second time by a method of its own.

Deliberately simple, and written from the files alone: messages that broke into a row are cut out of the text, and what
then looks like a row by its columns is one. Nothing here knows the importers.
"""

from __future__ import annotations

import gzip
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Fate = Literal["taken", "empty", "wrong"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row that has all its columns.

    Attributes:
        operation: empty where the method can't tell. ranks, ranks_per_node: None where the file lists none.
        message_bytes: as the operation's record has it. times_us: by buffers, as printed (out of place first).
        fate: whether an import has to take it, or to refuse it unless told.
    """

    operation: str
    ranks: int | None
    ranks_per_node: int | None
    message_bytes: int
    times_us: tuple[float, ...]
    fate: Fate = "taken"


_ELEMENT_BYTES = {"float": 4, "double": 8, "half": 2, "int8": 1, "uint8": 1, "int32": 4, "int64": 8, "bfloat16": 2}
_MESSAGES = re.compile(r"(?:[\w.-]+:\d+:\d+ \[\d+\] NCCL \w+|\[\d+\.\d+\] \[[\w-]+:\d+:\d+\])[^\n]*\n")
_NUMBER = r"(\d+(?:\.\d+)?)"
_CHECK = r"(N/A|\d+(?:e[+-]\d+)?)"
_NCCL = re.compile(
    rf"^(?:\s*\[?[\d,]+\]?(?:<stdout>)?:)?\s*(\d+)\s+(\d+)\s+({'|'.join(_ELEMENT_BYTES)})\s+(?:[a-z]+\s+)?(?:-?\d+\s+)?"
    rf"{_NUMBER}\s+{_NUMBER}\s+{_NUMBER}\s+{_CHECK}\s+{_NUMBER}\s+{_NUMBER}\s+{_NUMBER}\s+{_CHECK}\s*$"
)
_OPERATION = re.compile(r"(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|bcast|sendrecv|reduce)", re.I)
_NAMES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "bcast": "broadcast",
    "sendrecv": "send_recv",
}
_PARTED = ("all_gather", "reduce_scatter", "all_to_all")
_OSU = re.compile(rf"^(\d+)\s+{_NUMBER}(?:\s+{_NUMBER}\s+{_NUMBER})?(?:\s+\d+)?\s*$")
_IMB = re.compile(rf"^\s+(\d+)\s+\d+\s+{_NUMBER}\s+{_NUMBER}\s+{_NUMBER}\s*$")
_PIPEDREAM = re.compile(r"^node\d+ -- .*forward_compute_time=([\d.]+), backward_compute_time=([\d.]+),")


def named(text: str) -> str:
    """The operation that a text mentions first; empty where none."""
    found = _OPERATION.search(text)
    word = found.group(1).lower().replace("_", "") if found else ""
    return _NAMES.get(word, word)


def nccl_rows(path: Path) -> list[Row]:
    """Rows of nccl-tests."""
    operation, hosts = named(path.name), list[str]()
    rows = []
    for line in _MESSAGES.sub("", path.read_text(errors="replace")).split("\n"):
        if "nThread" in line:
            hosts = []
        device = re.match(r"#\s+Rank\s+\d+ .* on\s+(\S+) device", line)
        if device:
            hosts.append(device.group(1))
        elif "_perf" in line and ("starting" in line or line.startswith("Running:")):
            operation = named(line[: line.index("_perf")].rsplit(" ", 1)[-1].rsplit("/", 1)[-1])
        match = _NCCL.match(line)
        if match is None:
            continue
        size, count, kind, out, _, _, wrong_out, inside, _, _, wrong_in = match.groups()
        each = int(count) * _ELEMENT_BYTES[kind]
        wrong = any(check != "N/A" and float(check) >= 0.5 for check in (wrong_out, wrong_in))
        rows.append(
            Row(
                operation=operation,
                ranks=len(hosts) or None,
                ranks_per_node=max(map(hosts.count, hosts)) if hosts else None,
                # The size column is the whole buffer; what a rank contributes or keeps is in the count column.
                message_bytes=each if operation in _PARTED else int(size),
                times_us=(float(out), float(inside)),
                fate="empty" if int(size) == 0 else "wrong" if wrong else "taken",
            )
        )
    return rows


def osu_rows(path: Path) -> list[Row]:
    """Rows of the OSU micro-benchmarks; of three times the last one, which is the slowest rank's."""
    text = path.read_text(errors="replace")
    operation = named("".join(re.findall(r"# OSU.*", text)))
    rows = []
    for line in text.split("\n"):
        match = _OSU.match(line)
        if match:
            size, average, _, slowest = match.groups()
            time = float(slowest or average)
            rows.append(_plain(operation, None, int(size), time))
    return rows


def imb_rows(path: Path) -> list[Row]:
    """Rows of IMB; the slowest rank's time is the second of three."""
    operation, ranks, rows = "", None, []
    for line in path.read_text(errors="replace").split("\n"):
        if "Benchmarking" in line:
            operation = named(line)
        if "#processes =" in line:
            ranks = int(line.rsplit("=", 1)[1])
        match = _IMB.match(line)
        if match:
            rows.append(_plain(operation, ranks, int(match.group(1)), float(match.group(3))))
    return rows


def _plain(operation: str, ranks: int | None, size: int, time_us: float) -> Row:
    fate: Fate = "taken" if size else "empty"
    return Row(
        operation=operation, ranks=ranks, ranks_per_node=None, message_bytes=size, times_us=(time_us,), fate=fate
    )


def pipedream_times_ms(path: Path) -> list[tuple[float, float]]:
    """Forward and backward of every layer."""
    lines = path.read_text().split("\n")
    return [(float(m.group(1)), float(m.group(2))) for m in map(_PIPEDREAM.match, lines) if m]


def kineto_kernels(path: Path) -> tuple[list[float], int]:
    """Microseconds of every NCCL kernel, in order, and the number of all kernels: by the text, without reading JSON."""
    text = gzip.decompress(path.read_bytes()).decode()
    events = re.split(r'"ph"\s*:', text)
    kernels = [event for event in events if re.search(r'"cat"\s*:\s*"kernel"', event, re.I)]
    nccl = [event for event in kernels if re.search(r'"name"\s*:\s*"nccl', event)]
    return [float(re.search(r'"dur"\s*:\s*([\d.]+)', event).group(1)) for event in nccl], len(kernels)  # type: ignore[union-attr]
