"""A small coverage-guided fuzzer, for where atheris is not installed: inputs that reach new lines are changed on.

Lines are told by ``sys.settrace`` in this project's own modules only. The same seed gives the same inputs.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = str(Path(__file__).parents[1])
MAX_BYTES = 1 << 16

_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_TOKENS = [
    *(b"0", b"-1", b"1e309", b"nan", b"inf", b"N/A", b"18446744073709551616", b"9223372036854775807", b"1e-320", b""),
    *(b"null", b"true", b"[]", b"{}", b'""', b'"\\ud800"', b"\x00", b"\xff\xfe", b"\r", b"\n", b"\t", b"#", b"|", b"x"),
    "\u0661".encode(),
    "\u2028".encode(),
]
_JSON_VALUES: list[Any] = [None, True, -1, 0, 1e308, 2**70, "", "x" * 300, "\ud800", [], {}, [[]], {"a": 1}, 0.1, -0.0]


class Lines:
    """Which (code, line) pairs of the project ran under :meth:`run`."""

    def __init__(self) -> None:
        self.seen: set[tuple[CodeType, int]] = set()
        self.new = 0

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
        return self._line if frame.f_code.co_filename.startswith(ROOT) else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        place = (frame.f_code, frame.f_lineno)
        if place not in self.seen:
            self.seen.add(place)
            self.new += 1
        return self._line


@dataclass(slots=True)
class Fuzzer:
    """Fuzzes one target.

    Attributes:
        traced_every: of the inputs, each so-manieth is traced; the others run at full speed.
    """

    target: Callable[[bytes], None]
    corpus: list[bytes]
    generator: random.Random
    traced_every: int = 1
    lines: Lines = field(default_factory=Lines)
    runs: int = 0

    def run(self, count: int) -> None:
        """Try the corpus, then ``count`` changed inputs.

        Raises:
            AssertionError: an input gave anything but a result or one of the project's errors; the message holds it.
        """
        for content in list(self.corpus):
            self._try(content, traced=True)
        for number in range(count):
            content = self._changed()
            traced = number % self.traced_every == 0
            if self._try(content, traced=traced) and traced:
                self.corpus.append(content)

    def _try(self, content: bytes, *, traced: bool) -> bool:
        self.runs += 1
        try:
            if traced:
                return self.lines.run(self.target, content)
            self.target(content)
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}; input {content[:2000]!r}") from error
        return False

    def _changed(self) -> bytes:
        choose = self.generator.choice
        content = choose(self.corpus)
        for _ in range(choose((1, 1, 2, 4))):
            content = choose(_CHANGES)(content, self.generator, self.corpus)
        return content[:MAX_BYTES]


Change = Callable[[bytes, random.Random, Sequence[bytes]], bytes]


def _flip(content: bytes, generator: random.Random, corpus: Sequence[bytes]) -> bytes:
    place = generator.randrange(len(content) + 1)
    return content[:place] + bytes([generator.randrange(256)]) + content[place + 1 :]


def _cut(content: bytes, generator: random.Random, corpus: Sequence[bytes]) -> bytes:
    one, other = sorted(generator.randrange(len(content) + 1) for _ in range(2))
    return generator.choice((content[:one], content[one:], content[:one] + content[other:]))


def _token(content: bytes, generator: random.Random, corpus: Sequence[bytes]) -> bytes:
    place = generator.randrange(len(content) + 1)
    return content[:place] + generator.choice(_TOKENS) + content[place:]


def _number(content: bytes, generator: random.Random, corpus: Sequence[bytes]) -> bytes:
    found = list(_NUMBER.finditer(content))
    if not found:
        return content
    match = generator.choice(found)
    other = generator.choice([generator.choice(_TOKENS), generator.choice(found).group()])
    return content[: match.start()] + other + content[match.end() :]


def _lines(content: bytes, generator: random.Random, corpus: Sequence[bytes]) -> bytes:
    lines = content.split(b"\n")
    one, other = (generator.randrange(len(lines)) for _ in range(2))
    action = generator.randrange(4)
    if action == 0:
        lines[one], lines[other] = lines[other], lines[one]
    elif action == 1:
        lines.insert(one, lines[other])
    elif action == 2:
        del lines[one]
    else:
        lines[one] = lines[one] + lines[other]
    return b"\n".join(lines)


def _splice(content: bytes, generator: random.Random, corpus: Sequence[bytes]) -> bytes:
    other = generator.choice(corpus)
    return content[: generator.randrange(len(content) + 1)] + other[generator.randrange(len(other) + 1) :]


def _json(content: bytes, generator: random.Random, corpus: Sequence[bytes]) -> bytes:
    """Replace, drop or double a value somewhere in a JSON document."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return _token(content, generator, corpus)
    places: list[tuple[Any, Any]] = []
    pending = [document]
    while pending and len(places) < 5000:
        holder = pending.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        places += [(holder, key) for key in keys]
        pending += [holder[key] for key in keys]
    if not places:
        return content
    holder, key = generator.choice(places)
    if generator.random() < 0.2:
        del holder[key]
    else:
        other, place = generator.choice(places)
        try:
            value = other[place] if generator.random() < 0.3 else generator.choice(_JSON_VALUES)
            holder[key] = json.loads(json.dumps(value))
        except (KeyError, IndexError, ValueError, RecursionError):
            return content
    return json.dumps(document).encode()


_CHANGES: tuple[Change, ...] = (_flip, _cut, _token, _number, _number, _lines, _splice, _json, _json)
