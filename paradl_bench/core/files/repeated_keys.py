"""Keys that one object of a JSON document holds twice: decoders take the last, and nobody knows which was meant."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from paradl_bench.core.files.documents import places

_KEY_END = b'":'
_UNCOUNTED = (b"\\u0022", b" :", b"\t:", b"\n:", b"\r:")
"""What ends a key, or a text that looks like one, in another way."""


class _Repeated(dict[str, Any]):
    """An object with a key that it holds twice."""

    key = ""


def may_lose_keys(content: bytes, decoded: object) -> bool:
    """Whether decoding to builtins may have lost a key: fewer are left than the text has, or they can't be counted.

    To count them takes less time than decoding.
    """
    try:
        kept = msgspec.json.encode(decoded).count(_KEY_END)
    except (OverflowError, RecursionError, UnicodeEncodeError):
        return True
    return kept != content.count(_KEY_END) or any(mark in content for mark in _UNCOUNTED)


def repeated_key(content: bytes) -> str | None:
    """Path of the first key that an object holds twice, as ``$.layers[0].name``; None where there is none."""
    try:
        document = json.loads(content, object_pairs_hook=_object)
    except (ValueError, RecursionError):
        return None
    return next((f"{where}.{item.key}" for where, item in places(document) if isinstance(item, _Repeated)), None)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in pairs:
        if key in kept:
            repeated = _Repeated(kept)
            repeated.key = key
            return repeated
        kept[key] = value
    return kept
