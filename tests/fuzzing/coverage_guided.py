"""A small coverage-guided fuzzer, for where atheris is not installed: inputs that reach new lines are changed on.

Lines are told by ``sys.settrace`` in this project's own modules only. The same seed gives the same inputs.
"""

from __future__ import annotations

import contextlib
import random
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from fuzz_changes import changed

ROOT = str(Path(__file__).parents[2])
MAX_CPU_S = 2.0
"""Of one input."""
_TRACING = 8
"""Times as long may an input take whose lines are looked at."""
MAX_BYTES = 500 * 1024**2
"""That an input may ask for beyond what the process has once it is warm (:func:`limit_memory`)."""
_LONGEST_KEPT = 1 << 14


class Lines:
    """Which (code, line) pairs of the project ran under :meth:`run`."""

    def __init__(self) -> None:
        self.seen: set[tuple[CodeType, int]] = set()
        self.new = 0
        self._unseen: dict[CodeType, int] = {}

    def run(self, target: Callable[[bytes], None], content: bytes) -> bool:
        """Whether the input reached lines that none before it did."""
        self.new = 0
        previous = sys.gettrace()
        sys.settrace(self._enter)
        try:
            target(content)
        finally:
            sys.settrace(previous)
        return self.new > 0

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        unseen = self._unseen.get(code)
        if unseen is None:
            ours = code.co_filename.startswith(ROOT)
            lines = {line for *_, line in code.co_lines() if line is not None and line != code.co_firstlineno}
            self._unseen[code] = unseen = len(lines) if ours else 0
        # Code whose lines have all been seen has nothing new to tell, and runs at full speed.
        return self._line if unseen else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        place = (frame.f_code, frame.f_lineno)
        if place not in self.seen:
            self.seen.add(place)
            self.new += 1
            if frame.f_lineno != frame.f_code.co_firstlineno:
                self._unseen[frame.f_code] -= 1
        return self._line


class _TooSlow(BaseException):
    """An input took more than MAX_CPU_S of this process; no ``except Exception`` on the way may stop it."""


@contextlib.contextmanager
def _limited_time(seconds: float) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise _TooSlow(f"more than {seconds:g} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def limit_memory() -> None:
    """End an input that asks for more than :data:`MAX_BYTES`, beyond what the process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MAX_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


class Finding(AssertionError):
    """An input gave anything but a result or one of the project's errors.

    Attributes:
        content: the input. place: where it was raised, as ``file.py:12 ValueError``.
    """

    def __init__(self, content: bytes, error: BaseException) -> None:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(ROOT)]
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
        self.content = content
        self.place = f"{where} {type(error).__name__.strip('_')}"
        super().__init__(f"{self.place}: {str(error)[:500]}; input {content[:2000]!r}")


@dataclass(slots=True)
class Fuzzer:
    """Fuzzes one target.

    Attributes:
        traced_every: of the inputs, each so-manieth is traced; the others run at full speed.
        change: makes an input of the corpus.
        refused: inputs that gave one of the project's errors, where the target says so by returning true.
    """

    target: Callable[[bytes], object]
    corpus: list[bytes]
    generator: random.Random
    traced_every: int = 1
    lines: Lines = field(default_factory=Lines)
    runs: int = 0
    refused: int = 0
    change: Callable[[random.Random, Sequence[bytes]], bytes] = changed

    def run(self, count: int) -> None:
        """Try the corpus, then ``count`` changed inputs.

        Raises:
            Finding: an input gave anything but a result or one of the project's errors.
        """
        for content in list(self.corpus):
            self.attempt(content, traced=True)
        for number in range(count):
            self.step(traced=number % self.traced_every == 0)

    def step(self, *, traced: bool) -> None:
        """Try one changed input, and keep it for further changes if it reached new lines.

        Raises:
            Finding: as :meth:`run`.
        """
        content = self.change(self.generator, self.corpus)
        if self.attempt(content, traced=traced) and len(content) <= _LONGEST_KEPT:
            self.corpus.append(content)

    def attempt(self, content: bytes, *, traced: bool) -> bool:
        """Try one input; whether it was traced and reached new lines.

        Raises:
            Finding: as :meth:`run`.
        """
        self.runs += 1
        try:
            with _limited_time(MAX_CPU_S * (_TRACING if traced else 1)):
                if traced:
                    return self.lines.run(self._count, content)
                self._count(content)
        except (Exception, SystemExit, _TooSlow) as error:
            raise Finding(content, error) from error
        return False

    def _count(self, content: bytes) -> None:
        self.refused += bool(self.target(content))
