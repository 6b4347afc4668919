"""Discovery: one file (or folder) a thing, found by looking, named nowhere else.

A registry imports every module of a package and collects the attribute that each of them declares.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from functools import cache
from typing import Protocol, TypeVar, cast

from paradl_bench.core.errors import UserError, unknown_choice


class Named(Protocol):
    """What a registry holds: anything with a name."""

    @property
    def name(self) -> str:
        """What it is looked up by; unique in its registry."""


T = TypeVar("T", bound=Named)


@cache
def _discovered(package: str, attribute: str, submodule: str) -> dict[str, Named]:
    entries: dict[str, Named] = {}
    path = importlib.import_module(package).__path__
    for info in sorted(pkgutil.iter_modules(path), key=lambda item: item.name):
        if submodule and not info.ispkg:
            continue
        name = f"{package}.{info.name}" + (f".{submodule}" if submodule else "")
        # A folder may lack the submodule; one whose import fails is broken, and that is never passed over.
        if submodule and importlib.util.find_spec(name) is None:
            continue
        entry = getattr(importlib.import_module(name), attribute, None)
        if entry is None:
            continue
        if entry.name in entries:
            raise UserError(f"{package}: two modules declare {attribute} {entry.name!r}; names have to differ")
        entries[entry.name] = entry
    return entries


def discover(package: str, attribute: str, of: type[T], *, submodule: str = "") -> dict[str, T]:
    """Every ``attribute`` declared by the modules of ``package``, by name.

    Args:
        attribute: the module-level name that a module declares its entry under; modules without it are passed over.
        submodule: where entries are folders, the module in each folder that declares it, if it is there.

    Raises:
        UserError: two modules declare the same name.
        TypeError: an entry is not of the type asked for.
    """
    return cast(dict[str, T], dict(_checked(package, attribute, of, submodule)))


# A search looks kinds up for each of its candidates.
@cache
def _checked(package: str, attribute: str, of: type[Named], submodule: str) -> dict[str, Named]:
    entries = _discovered(package, attribute, submodule)
    for name, entry in entries.items():
        if not isinstance(entry, of):
            raise TypeError(f"{package}: {attribute} {name!r} is no {of.__name__}")
    return entries


def lookup(entries: dict[str, T], name: str, what: str) -> T:
    """The entry called ``name``; an unknown one raises :class:`UserError` with the choices."""
    try:
        return entries[name]
    except KeyError:
        raise unknown_choice(what, name, entries) from None


def named(package: str, attribute: str, of: type[T], name: str, what: str) -> T:
    """The entry called ``name``, as of :func:`discover` and :func:`lookup`; the others are not imported where the
    module of that name declares it.
    """
    own = f"{package}.{name}"
    if name.isidentifier() and importlib.util.find_spec(own) is not None:
        entry = getattr(importlib.import_module(own), attribute, None)
        if isinstance(entry, of) and entry.name == name:
            return entry
    return lookup(discover(package, attribute, of), name, what)
