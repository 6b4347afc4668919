"""Numbers as tools print them: plain ASCII, finite, and with the precision that the digits show."""

from __future__ import annotations

import math
import re

_WHOLE = re.compile(r"[+-]?[0-9]{1,19}", re.ASCII)
_DECIMAL = re.compile(r"[+-]?(?:[0-9]{1,30}(?:\.([0-9]{0,30}))?|\.([0-9]{1,30}))(?:[eE]([+-]?[0-9]{1,3}))?", re.ASCII)


def whole(text: str) -> int | None:
    """A whole number of at most 19 digits; None where the text is none."""
    return int(text) if _WHOLE.fullmatch(text) else None


def decimal(text: str) -> float | None:
    """A finite number; None where the text is none (``N/A``, ``nan``, ``inf``)."""
    if not _DECIMAL.fullmatch(text):
        return None
    value = float(text)
    return value if math.isfinite(value) else None


def half_unit(text: str) -> float:
    """Half of the last digit's place: how far rounding may have moved the number. 0.005 for ``12.34``.

    The text has to be a :func:`decimal`.
    """
    match = _DECIMAL.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no number")
    fraction = match.group(1) or match.group(2) or ""
    exponent = int(match.group(3) or 0)
    return float(0.5 * 10.0 ** max(-300, min(300, exponent - len(fraction))))
