"""What ``--replace`` takes: a pattern of layer names, and the modules that stand in the place of its layers."""

from __future__ import annotations

import re
from typing import NamedTuple

from paradl_bench.core.errors import UserError, unknown_choice
from paradl_bench.network.replacement.modules import MODULES, Argument, Arguments, Module, Shape, Sort

NONE = "none"
ARRIVING = "*"
"""In the place of a width: whatever arrives."""
_LARGEST = 1_000_000
_WRITTEN = re.compile(r"([a-z][a-z0-9_]*)(?:\(([^()]*)\))?", re.ASCII)
_WHOLE = re.compile(r"[0-9]{1,7}", re.ASCII)
_EXTENTS = re.compile(r"[0-9]{1,7}(?:x[0-9]{1,7}){0,2}", re.ASCII)
_DECIMAL = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?", re.ASCII)
_RIGHT: dict[Sort, str] = {
    "width": f"a whole number from 1 to {_LARGEST}, or * for what arrives",
    "count": f"a whole number from 1 to {_LARGEST}",
    "extents": f"a whole number from 1 to {_LARGEST}, or one a dim as 3x5",
    "padding": f"a whole number from 0 to {_LARGEST}, or one a dim as 1x2",
    "flag": "true or false",
    "share": "a number between 0 and 1",
}


class Written(NamedTuple):
    """A module as it was written; arguments that are missing have their defaults, a width that arrives is 0."""

    module: Module
    arguments: Arguments
    text: str

    def filled(self, shape: Shape) -> Arguments:
        """Its arguments, with widths that arrive taken from the shape that is read."""
        width = shape[self.module.width_dim] if shape else 0
        return {name: value or width if self.is_width(name) else value for name, value in self.arguments.items()}

    def is_width(self, name: str) -> bool:
        """Whether an argument is a width of what is read."""
        return self.module.arguments[name] == "width"


class Replacement(NamedTuple):
    """Layers by a pattern of their names, and what stands in the place of them: nothing, or modules in a row."""

    pattern: str
    modules: tuple[Written, ...]
    text: str


def parse_replacement(text: str) -> Replacement:
    """A replacement of ``classifier.0=linear(25088,512)``, ``avgpool=none`` or ``fc=linear(*,64)+relu+linear(64,10)``.

    Raises:
        UserError: it does not parse; the message shows what would.
    """
    pattern, given, modules = text.partition("=")
    pattern, modules = pattern.strip(), modules.strip()
    if not pattern or not given or not modules:
        raise UserError(f"--replace {text!r}: write PATTERN=none, or PATTERN=linear(4096,512), of names of layers")
    if modules == NONE:
        return Replacement(pattern, (), text)
    return Replacement(pattern, tuple(_module(part.strip(), text) for part in modules.split("+")), text)


def _module(written: str, text: str) -> Written:
    matched = _WRITTEN.fullmatch(written)
    if matched is None:
        raise UserError(
            f"--replace {text!r}: {written!r} is no module; write as linear(4096,512), several with + between"
        )
    name, inside = matched[1], (matched[2] or "").strip()
    if name == NONE:
        raise UserError(f"--replace {text!r}: none stands alone, not beside other modules")
    if name not in MODULES:
        raise unknown_choice("module of --replace", name, (*MODULES, NONE))
    module = MODULES[name]
    given = _arguments(module, inside, text)
    missing = [argument for argument in module.arguments if argument not in given and argument not in module.optional]
    if missing:
        raise UserError(f"--replace {text!r}: {name} lacks {missing[0]}; write {module.usage}")
    return Written(module, {**module.defaults, **given}, written)


def _arguments(module: Module, inside: str, text: str) -> dict[str, Argument]:
    names, arguments = list(module.arguments), dict[str, Argument]()
    parts = inside.split(",") if inside else []
    for index, part in enumerate(parts):
        named, equals, value = (item.strip() for item in part.rpartition("="))
        name = named if equals else names[index] if index < len(names) else ""
        if name not in names or name in arguments or (not equals and any("=" in before for before in parts[:index])):
            raise UserError(
                f"--replace {text!r}: {module.name} has no place for {part.strip()!r}; write {module.usage}"
            )
        argument = _argument(value, module.arguments[name])
        if argument is None:
            raise UserError(f"--replace {text!r}: {name} is {value!r}, and has to be {_RIGHT[module.arguments[name]]}")
        arguments[name] = argument
    return arguments


def _argument(value: str, sort: Sort) -> Argument | None:
    """The value of an argument; None where it is none of its sort."""
    if sort == "flag":
        return {"true": True, "false": False}.get(value)
    if sort == "share":
        return float(value) if _DECIMAL.fullmatch(value) and float(value) <= 1 else None
    if sort == "width" and value == ARRIVING:
        return 0
    least = 0 if sort == "padding" else 1
    if not (_EXTENTS if sort in ("extents", "padding") else _WHOLE).fullmatch(value):
        return None
    numbers = tuple(map(int, value.split("x")))
    if not all(least <= number <= _LARGEST for number in numbers):
        return None
    return numbers if len(numbers) > 1 else numbers[0]
