"""What a reader of another tool's files is given and gives back.

Rows are read as far as they can be; one that is not taken is kept with its line and the reason. Units are converted
here, once: seconds and bytes come out.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from paradl_bench.core.errors import UserError
from paradl_bench.core.files.storage import read_whole
from paradl_bench.core.units import format_bytes
from paradl_bench.network.graph import DTYPE_BYTES, ModelGraph
from paradl_bench.network.kernel import KernelSamples
from paradl_bench.records.cluster import NODE, Cluster
from paradl_bench.records.input_record import BatchSamples
from paradl_bench.records.samples import CollectiveSamples, LayerSamples, TraceTimes

MAX_BYTES = 1 << 29
"""Of one file, unpacked."""
_MOST_LINES = 1 << 25
_MOST_DECODED_BYTES = 5 << 29
_VALUE_BYTES = {"{": 232, "[": 88, ",": 58}
"""What Python holds for a small value, by the character that begins it or stands before it."""
SHOWN_CHARACTERS = 160
_PIECE_BYTES = 1 << 20

_HALF_PAIR = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)

# A UTF-16 mark is the beginning of a UTF-32 one. Shells of Windows write either behind ">".
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_FEWEST_PAIRS = 4
_LOOKED_AT = 1 << 16
"""Bytes, a multiple of every character's."""
Keep = Literal["empty", "wrong", "failed", "incomplete"]


class NotOfFormat(UserError):
    """A file holds nothing that its importer reads: a launch that failed, a broken archive; others may be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """What a file may not say itself.

    Attributes:
        ranks, level, operation, library, iterations: of collectives, where the file does not say.
        ranks_per_node: the most of them that share a host, likewise.
        model, batch, dtype: of layers.
        device_name: of the accelerator; of a file with times of several, the one whose times are taken.
        mapping: of a table's columns: a file, or the name of one that comes with the program.
        keep: rows to take all the same: ``empty`` messages, ``wrong`` results, those of a run that ``failed``;
            networks that are ``incomplete``, since rows of their layers were dropped.
    """

    ranks: int | None = None
    level: str | None = None
    operation: str | None = None
    library: str | None = None
    iterations: int | None = None
    ranks_per_node: int | None = None
    model: str | None = None
    batch: int | None = None
    dtype: str = "fp32"
    device_name: str | None = None
    mapping: str | None = None
    keep: frozenset[Keep] = frozenset()

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the dtype.

        Raises:
            UserError: the dtype is none that networks have.
        """
        if self.dtype not in DTYPE_BYTES:
            raise UserError(f"--dtype {self.dtype}: choices are {', '.join(DTYPE_BYTES)}")
        return DTYPE_BYTES[self.dtype]

    def ranks_on_a_node(self, ranks: int, level: str) -> int:
        """The most ranks of a group that share a host, where nothing but the options tells; 0 where they do not."""
        return ranks if level == NODE else min(self.ranks_per_node or 0, ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFile:
    """A file's bytes, unpacked where it was compressed with gzip.

    Attributes:
        sha256: of the bytes on disk.
        refused: why there are none, of a broken archive.
    """

    path: str
    content: bytes
    sha256: str = ""
    refused: str = ""

    @property
    def text(self) -> str:
        """As UTF-8, or what a byte order mark or NUL bytes say; bytes that are none become replacement characters."""
        encoding = next((name for mark, name in _MARKS if self.content.startswith(mark)), None)
        encoding = encoding or _without_mark(self.content[:_LOOKED_AT])
        return self.content.decode(encoding, errors="replace")

    @property
    def json_text(self) -> str:
        """The text with halves of surrogate pairs replaced: JSON allows them, and no file can hold them.

        Raises:
            UserError: its values would take too much memory; a packed file of a megabyte may hold gigabytes of them.
        """
        text = self.text
        if sum(text.count(mark) * size for mark, size in _VALUE_BYTES.items()) > _MOST_DECODED_BYTES:
            raise NotOfFormat(
                f"{self.path} holds more JSON values than fit in {format_bytes(_MOST_DECODED_BYTES)} of memory; cut it"
                " into smaller ones, such as a trace of fewer iterations"
            )
        return _HALF_PAIR.sub(r"\\ufffd", text)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return Path(self.path).name


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A row that was not taken: number of its first line (from 1), its text, and why."""

    line: int
    text: str
    why: str


@dataclass(slots=True, kw_only=True)
class Imported:
    """What one file held.

    Attributes:
        rows: of its tables that were read (a row with times in place and out of place is one).
        device: ``cpu`` or ``cuda``, where the tool tells. device_names: as the tool prints them.
        hosts: as the tool prints them.
        ranks_per_host: the largest number seen.
        versions: of the tool (``nccl-tests``) and of the libraries it names.
        settings: what changes the times: validation, graph, buffers.
        variables: of the environment, where the file holds them.
        batches: reading a mini-batch inside of training.
        notes: in words, what cannot be used and why.
        left_out: in words, what an option that was not given would bring; these are among the notes.
        lost_layers: those of the dropped rows without which a network is not whole.
    """

    rows: int = 0
    collectives: list[CollectiveSamples] = field(default_factory=list)
    layers: list[LayerSamples] = field(default_factory=list)
    kernels: list[KernelSamples] = field(default_factory=list)
    networks: list[ModelGraph] = field(default_factory=list)
    clusters: list[Cluster] = field(default_factory=list)
    traces: list[TraceTimes] = field(default_factory=list)
    batches: list[BatchSamples] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    device: str | None = None
    device_names: set[str] = field(default_factory=set)
    hosts: set[str] = field(default_factory=set)
    ranks_per_host: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    command_lines: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    lost_layers: list[Dropped] = field(default_factory=list)

    def drop(self, line: int, text: str, why: str) -> None:
        """Count a row that was not taken."""
        shown = " ".join(text.split())
        if len(shown) > SHOWN_CHARACTERS:
            shown = shown[:SHOWN_CHARACTERS] + "..."
        self.dropped.append(Dropped(line=line, text=shown, why=why))

    def note(self, text: str) -> None:
        """Say something once."""
        if text not in self.notes:
            self.notes.append(text)

    def leave_out(self, note: str) -> None:
        """Note what is left out for want of an option."""
        self.notes.append(note)
        self.left_out.append(note)

    def drop_layer(self, line: int, text: str, why: str) -> None:
        """Count a row that was not taken, without which the network is not whole."""
        self.drop(line, text, why)
        self.lost_layers.append(self.dropped[-1])


times_in_situ = partial(LayerSamples, mode="in_situ", ranks_on_host=1, block=0)
"""A layer's seconds in one phase, as measured inside of real iterations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Importer:
    """A file format of another tool; a file of this package declares one as ``IMPORTER``.

    Attributes:
        name: as the command takes it (``nccl-tests``).
        reads: in words, for the command's help.
        kind: of the measurement directory that is written.
        reader: of one file; :meth:`read` holds what it gives to our formats.
    """

    name: str
    reads: str
    kind: Literal["collectives", "layers", "kernels"]
    reader: Callable[[LogFile, ImportOptions], Imported]

    def read(self, log: LogFile, options: ImportOptions) -> Imported:
        """From a file's bytes to what it holds. Any bytes give a result or one :class:`UserError`.

        Raises:
            UserError: the file is none of the format, or holds what no format of ours can hold.
        """
        held = self.reader(log, options)
        kinds: list[list[Any]] = [held.collectives, held.layers, held.kernels, held.networks]
        kinds += [held.clusters, held.traces, held.batches]
        for records in filter(None, kinds):
            # What is imported has to be read again.
            kind = type(records[0])
            try:
                msgspec.json.decode(msgspec.json.encode(records), type=list[kind])  # type: ignore[valid-type]
            except msgspec.ValidationError as error:
                raise UserError(f"{log.path}, {kind.__name__}: {error}") from None
        return held


def _without_mark(content: bytes) -> str:
    """The encoding of a text that no mark tells: nearly every character of a log has a NUL byte beside it in UTF-16.

    Its place tells the order of bytes. UTF-8's text has no NUL; a few, as a crash leaves them in a file, don't count.
    """
    pairs = len(content) // 2
    even, odd = content[::2].count(0), content[1::2].count(0)
    if pairs >= _FEWEST_PAIRS:
        if 2 * odd > pairs and 10 * even < pairs:
            return "utf-16-le"
        if 2 * even > pairs and 10 * odd < pairs:
            return "utf-16-be"
    return "utf-8"


def load_file(path: Path) -> LogFile:
    """A file's bytes; gzip is told by its first two bytes, not by the name.

    Raises:
        UserError: unreadable, no regular file, a broken archive, or too large.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder; give the files in it")
    content = read_whole(path, most_bytes=MAX_BYTES)
    digest = hashlib.sha256(content).hexdigest()
    return LogFile(path=str(path), content=unpacked(str(path), content), sha256=digest)


def load_or_refuse(path: Path) -> LogFile:
    """As :func:`load_file`, with the reason in place of what a broken archive holds.

    Raises:
        UserError: unreadable, no regular file, or too large.
    """
    try:
        return load_file(path)
    except NotOfFormat as error:
        return LogFile(path=str(path), content=b"", refused=str(error))


def unpacked(path: str, content: bytes) -> bytes:
    """The bytes behind gzip's packing, or the bytes themselves.

    Raises:
        UserError: a broken archive, or too large.
    """
    if not content.startswith(b"\x1f\x8b"):
        return content
    result = bytearray()
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as stream:
            # A read of so many bytes takes their memory, however few there are.
            while len(result) <= MAX_BYTES and (piece := stream.read(_PIECE_BYTES)):
                result += piece
    except (OSError, EOFError, zlib.error) as error:
        raise NotOfFormat(f"{path} is a broken gzip archive: {error}") from None
    if len(result) > MAX_BYTES:
        raise NotOfFormat(f"{path} holds more than {format_bytes(MAX_BYTES)}; cut it into smaller ones")
    if result.count(b"\n") > _MOST_LINES:
        raise NotOfFormat(f"{path} holds more than {_MOST_LINES} lines; cut it into smaller ones")
    return bytes(result)
