"""How the fuzzer changes an input: bytes, numbers, lines, values of a JSON document, encodings, nesting and length."""

from __future__ import annotations

import functools
import gzip
import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

MAX_BYTES = 1 << 16

Change = Callable[[bytes, random.Random, Sequence[bytes]], bytes]

_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_SCALAR = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null')
_TOKENS = [
    *(b"0", b"-1", b"1e309", b"nan", b"inf", b"N/A", b"18446744073709551616", b"9223372036854775807", b"1e-320", b""),
    *(b"null", b"true", b"[]", b"{}", b'""', b'"\\ud800"', b"\x00", b"\xff\xfe", b"\r", b"\n", b"\t", b"#", b"|", b"x"),
    *(b"-0", b"1e400", b"0x10", b"1_000", b"1,5", b"+1", b".5", b"1e", b"9" * 400, b"9" * 5000, b"1e99999", b"-inf"),
    *(b"[" * 300, b"[" * 5000, b'{"a":' * 1500, b"- " * 500, b"\xe9", b"\xef\xbb\xbf", b"%s", b"../", b":", b"@", b"="),
    "\u0661".encode(),
    "\u2028".encode(),
    "\xb2".encode(),
]
_JSON_VALUES: list[Any] = [None, True, -1, 0, 1e308, 2**70, "", "x" * 300, "\ud800", [], {}, [[]], {"a": 1}, 0.1, -0.0]
_JSON_SNIPPETS = [
    *(json.dumps(value).encode() for value in _JSON_VALUES),
    *(
        b"NaN",
        b"-Infinity",
        b"1e400",
        b"-1e-400",
        b"2.0",
        b"1",
        b"-9223372036854775809",
        b'"\\u0000"',
        b'"1"',
        b"9" * 30,
    ),
    *(b"[" * 600 + b"]" * 600, b'{"a":' * 600 + b"1" + b"}" * 600, b'"' + b"y" * 5000 + b'"', b"1e308", b"5e-324"),
]
_NUMBERS = (b"0", b"1", b"2", b"-1", b"1e308", b"5e-324", b"9223372036854775807", b"1.5", b"-0.0", b"1e-9", b"1000000")


@functools.lru_cache(maxsize=512)
def _spans(pattern: re.Pattern[bytes], content: bytes) -> tuple[tuple[int, int], ...]:
    return tuple(match.span() for match in pattern.finditer(content))


def changed(generator: random.Random, corpus: Sequence[bytes]) -> bytes:
    """One of the corpus, changed once to four times."""
    content = generator.choice(corpus)
    # Long inputs are rare: a reader's time grows with them, and what they reach does not.
    longest = MAX_BYTES if generator.random() < 0.03 else len(content) + 1024
    for _ in range(generator.choice((1, 1, 1, 2, 4))):
        content = generator.choice(_CHANGES)(content, generator, corpus)
    return content[:longest]


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
    found = _spans(_NUMBER, content)
    if not found:
        return content
    start, end = generator.choice(found)
    from_, to = generator.choice(found)
    other = generator.choice([generator.choice(_TOKENS), content[from_:to]])
    return content[:start] + other + content[end:]


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


def _repeat(content: bytes, generator: random.Random, corpus: Sequence[bytes]) -> bytes:
    """A piece many times over: long lines, many rows."""
    place = generator.randrange(len(content) + 1)
    piece = content[place : place + generator.choice((1, 1, 2, 8, 64, 256))]
    return content[:place] + piece * generator.choice((2, 10, 100, 1000)) + content[place:]


def _encoded(content: bytes, generator: random.Random, corpus: Sequence[bytes]) -> bytes:
    """The text as other programs and systems write it."""
    text = content.decode("utf-8", "replace")
    choice = generator.randrange(6)
    if choice == 0:
        return text.encode("utf-16")
    if choice == 1:
        return b"\xef\xbb\xbf" + content
    if choice == 2:
        return content.replace(b"\n", b"\r\n")
    if choice == 3:
        return text.replace("e", "\xe9").encode("latin-1", "replace")
    if choice == 4:
        return content.replace(b" ", b"\x00", 3)
    return gzip.compress(content, 1)


def _scalar(content: bytes, generator: random.Random, corpus: Sequence[bytes]) -> bytes:
    """Another value, or key, in a JSON document, its text otherwise as it was."""
    found = _spans(_SCALAR, content)
    if not found:
        return _token(content, generator, corpus)
    start, end = generator.choice(found)
    from_, to = generator.choice(found)
    chance = generator.random()
    if chance < 0.3 and content[start : start + 1] not in (b'"', b"t", b"f", b"n"):
        # A number for a number: most readers stop at another type.
        other = generator.choice(_NUMBERS)
    else:
        other = content[from_:to] if chance < 0.6 else generator.choice(_JSON_SNIPPETS)
    return content[:start] + other + content[end:]


def _json(content: bytes, generator: random.Random, corpus: Sequence[bytes]) -> bytes:
    """Replace, drop or double a value somewhere in a JSON document."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return _scalar(content, generator, corpus)
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
    try:
        return json.dumps(document).encode()
    except RecursionError:
        # The corpus holds nestings as deep as the parser still reads, and the writer does not.
        return content


_CHANGES: tuple[Change, ...] = (
    *(_flip, _cut, _token, _number, _number, _number, _lines, _lines, _splice),
    *(_scalar, _scalar, _scalar, _json, _repeat, _encoded),
)
