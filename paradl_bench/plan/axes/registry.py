"""Every kind of axis, found by looking into the folders of :mod:`paradl_bench.strategies`.

This is the one place where plans meet strategies, and it does so by name: strategies import plans, so an import the
other way round would be a circle, and a list of axes here would have to be edited for every new one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from paradl_bench.core.errors import UserError
from paradl_bench.core.registry import discover, lookup
from paradl_bench.plan.axes.kind import AxisKind, Trait
from paradl_bench.plan.axes.options import AxisOptions

_STRATEGIES = "paradl_bench.strategies"


@cache
def axis_kinds() -> Mapping[str, AxisKind]:
    """Kinds of axes by name, in their order.

    Raises:
        UserError: two have the same name or letter.
    """
    kinds = sorted(discover(_STRATEGIES, "AXIS", AxisKind, submodule="axis").values(), key=lambda kind: kind.order)
    letters = [letter for kind in kinds for letter in (kind.letter, *((kind.prefix.letter,) if kind.prefix else ()))]
    if len(set(letters)) != len(letters):
        raise UserError(f"{_STRATEGIES}: two axes have the same letter, of {' '.join(letters)}")
    return MappingProxyType({kind.name: kind for kind in kinds})


@cache
def option_types() -> Mapping[type[AxisOptions], tuple[AxisKind, ...]]:
    """Structs of options, each once, and the kinds of axes that have them.

    Raises:
        UserError: two have a field of the same name, which commands and files could not tell apart.
    """
    kinds_by_type: dict[type[AxisOptions], tuple[AxisKind, ...]] = {}
    for kind in axis_kinds().values():
        for options in kind.options:
            kinds_by_type[options] = (*kinds_by_type.get(options, ()), kind)
    fields = Counter(name for options in kinds_by_type for name in options.__struct_fields__)
    if several := [name for name, count in fields.items() if count > 1]:
        raise UserError(f"{_STRATEGIES}: two structs of options have a field {several[0]!r}; names have to differ")
    return MappingProxyType(kinds_by_type)


def read_options(given: Mapping[str, Any]) -> tuple[tuple[AxisOptions, ...], dict[str, Any]]:
    """Options of axes from what a command was given, by the names of its parameters, and whatever else it was given.

    Raises:
        UserError: a value that there is none of.
    """
    options, rest = [], dict(given)
    for kind in option_types():
        fields: dict[str, Any] = {}
        for shown in kind.shown:
            value = rest.pop(shown.name, None)
            fields |= {} if value is None else shown.fields(value)
        options.append(kind(**fields))
    return tuple(options), rest


def axis_kind(name: str) -> AxisKind:
    """The kind of this name.

    Raises:
        UserError: there is none; the message names those there are.
    """
    kinds = axis_kinds()
    return kinds[name] if name in kinds else lookup(dict(kinds), name, "axis")


@cache
def kinds_with(trait: Trait) -> tuple[AxisKind, ...]:
    """Kinds of axes that have a trait, in their order."""
    return tuple(kind for kind in axis_kinds().values() if trait in kind.traits)
