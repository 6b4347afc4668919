"""Texts on which a regular expression takes longest: what it repeats, repeated, behind what has to stand before it."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

_COMMON = ' a1A_-.:,|#>()[]"\t='
_TAILS = ("", "\x00")
_CATEGORIES = {
    codes.CATEGORY_DIGIT: "1",
    codes.CATEGORY_SPACE: " ",
    codes.CATEGORY_WORD: "a",
    codes.CATEGORY_NOT_DIGIT: "a",
    codes.CATEGORY_NOT_SPACE: "a",
    codes.CATEGORY_NOT_WORD: " ",
}


def pumped(pattern: re.Pattern[str], length: int) -> Iterator[str]:
    """Texts of about ``length`` characters each."""
    tree = parser.parse(pattern.pattern, pattern.flags)
    prefixes, bodies = {""}, set(_COMMON) & (set(pattern.pattern) | set(" a1"))
    _collect(list(tree), "", prefixes, bodies)
    for body in sorted(bodies | {prefix for prefix in prefixes if prefix}):
        for prefix in sorted(prefixes):
            for tail in _TAILS:
                yield prefix + body * (length // len(body)) + tail


def _collect(nodes: list[Any], before: str, prefixes: set[str], bodies: set[str]) -> str:
    """Add what stands before each repetition, and what it repeats; returns a text that the nodes match."""
    for code, value in nodes:
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
            least, most, inner = value
            prefixes.add(before)
            once = _collect(list(inner), before, prefixes, bodies)[len(before) :]
            bodies.add(once)
            before += once * max(least, 1 if most else 0)
        elif code is codes.BRANCH:
            ends = [_collect(list(branch), before, prefixes, bodies) for branch in value[1]]
            before = ends[0]
        elif code is codes.SUBPATTERN:
            before = _collect(list(value[-1]), before, prefixes, bodies)
        elif code is codes.ATOMIC_GROUP:
            before = _collect(list(value), before, prefixes, bodies)
        else:
            before += _one(code, value)
    return before


def _one(code: Any, value: Any) -> str:
    if code is codes.LITERAL:
        return chr(value)
    if code is codes.NOT_LITERAL:
        return "a" if value != ord("a") else "b"
    if code is codes.ANY:
        return "a"
    if code is codes.IN:
        return _member(value)
    return ""  # places and looks take no text


def _member(items: list[Any]) -> str:
    if items[0][0] is codes.NEGATE:
        return next(char for char in "a 1" + string.printable if not any(_holds(item, char) for item in items[1:]))
    code, value = items[0]
    if code is codes.CATEGORY:
        return _CATEGORIES[value]
    return chr(value[0] if code is codes.RANGE else value)


def _holds(item: Any, char: str) -> bool:
    code, value = item
    if code is codes.RANGE:
        return bool(value[0] <= ord(char) <= value[1])
    if code is codes.CATEGORY:
        kinds = {codes.CATEGORY_DIGIT: char.isdigit(), codes.CATEGORY_SPACE: char.isspace()}
        return kinds.get(value, char.isalnum() or char == "_")
    return bool(ord(char) == value)
