"""What the attributes of a layer have to be, held against networks that were read from a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from paradl_bench.network.graph import Attribute


@dataclass(frozen=True, slots=True)
class Need:
    """What an attribute has to be.

    Attributes:
        holds: whether a value is. right: what would be, in words.
        default: whether it may be missing, since readers know what older networks without it stand for.
    """

    holds: Callable[[Attribute], bool]
    right: str
    default: bool = False


def or_default(need: Need) -> Need:
    """The same of an attribute that may be missing."""
    return replace(need, default=True)


def _is_whole(value: Attribute, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_dim(value: Attribute) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_whole(value: Attribute, least: int) -> bool:
    return isinstance(value, tuple) and len(value) > 0 and all(_is_whole(item, least) for item in value)


TEXT = Need(lambda value: isinstance(value, str), "a text")
FLAG = Need(lambda value: isinstance(value, bool), "true or false")
IN_PLACE = or_default(FLAG)
"""Of networks that do not say, out of place."""
COUNT = Need(lambda value: _is_whole(value, 1), "a whole number from 1")
COUNTS = Need(lambda value: _are_whole(value, 1), "a list of whole numbers from 1")
COUNTS_IF_KNOWN = Need(
    lambda value: value is None or _is_whole(value, 1) or _are_whole(value, 1), "null, or whole numbers from 1"
)
PADDING = Need(
    lambda value: _are_whole(value, 0) or value in ("same", "valid"), "a list of whole numbers from 0, same or valid"
)
SHAPE = Need(
    lambda value: isinstance(value, tuple) and all(_is_whole(item, 0) for item in value),
    "a list of whole numbers from 0",
)
DIM = Need(_is_dim, "a whole number")
DIMS = Need(
    lambda value: value is None or _is_dim(value) or (isinstance(value, tuple) and all(map(_is_dim, value))),
    "null, or whole numbers",
)
SHARE = Need(
    lambda value: isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1,
    "a number between 0 and 1",
)


def wrong_attribute(needs: Mapping[str, Need], attributes: Mapping[str, Attribute]) -> str | None:
    """What is wrong with the first attribute that is missing or not as needed; None where all are right."""
    for name, need in needs.items():
        if name not in attributes:
            if not need.default:
                return f"lacks the attribute {name!r}, {need.right}"
        elif not need.holds(attributes[name]):
            return f"has {attributes[name]!r} for the attribute {name!r}, which has to be {need.right}"
    return None
