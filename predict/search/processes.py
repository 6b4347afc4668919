"""Work on many things in as many processes as there are cores."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import TypeVar

import msgspec

T = TypeVar("T")

_MOST_PROCESSES = 4
"""Each holds what its own work adds to memory."""
_PLACE_BYTES = 2
_MOST_ITEMS = 4096 // _PLACE_BYTES
"""Every pipe has room for the places of so many."""


def find_each(find: Callable[[int], T], items: Sequence[int], found: type[T]) -> list[T]:
    """What ``find`` says of each item, in their order; ``found`` is its type, which msgspec encodes.

    This process and forked copies of it take one item after the other: those that take longest come first. A copy keeps
    to itself whatever else an item changes. Where this process has other threads it does all by itself: a lock that one
    of them holds would never be released in a copy.
    """
    assert len(items) <= _MOST_ITEMS
    copies = min(len(os.sched_getaffinity(0)), _MOST_PROCESSES, len(items)) - 1
    if threading.active_count() > 1:
        copies = 0

    def answers() -> list[tuple[int, T]]:
        return [(place, find(items[place])) for place in _taken(places)]

    decoder = msgspec.msgpack.Decoder(list[tuple[int, found]])  # type: ignore[valid-type]
    with _places(len(items)) as places, contextlib.ExitStack() as started:
        others = [started.enter_context(_copy(answers)) for _ in range(copies)]
        known = dict(answers())
        for other in others:
            # A copy that was ended has said nothing.
            with contextlib.suppress(EOFError):
                known.update(decoder.decode(other.recv_bytes()))
    return [known[place] if place in known else find(item) for place, item in enumerate(items)]


@contextlib.contextmanager
def _places(count: int) -> Iterator[int]:
    """A pipe with the places of as many items, each of which one process alone reads."""
    reader, writer = os.pipe()
    try:
        os.write(writer, b"".join(place.to_bytes(_PLACE_BYTES, "little") for place in range(count)))
        os.close(writer)
        yield reader
    finally:
        os.close(reader)


def _taken(places: int) -> Iterator[int]:
    """The places that this process gets."""
    while taken := os.read(places, _PLACE_BYTES):
        yield int.from_bytes(taken, "little")


@contextlib.contextmanager
def _copy(answers: Callable[[], list[tuple[int, T]]]) -> Iterator[Connection]:
    """A forked copy of this process at work, and where its answers come; it is ended with the context."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    copy = context.Process(target=_send, args=(answers, writer), daemon=True)
    copy.start()
    writer.close()
    try:
        yield reader
    finally:
        copy.kill()
        copy.join()
        reader.close()


def _send(answers: Callable[[], list[tuple[int, T]]], writer: Connection) -> None:
    # To look through what this process held before would copy its memory.
    gc.freeze()
    # What an item raises is raised by the first process, which misses the answer and works on it again.
    with contextlib.suppress(BaseException):
        writer.send_bytes(msgspec.msgpack.encode(answers()))
    os._exit(0)
