"""What a decoded file is, in words, where another one was wanted; and which field was meant where one is unknown."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator, Sequence

import msgspec

_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `([^`]*)`(?: - at `\$([^`]*)`)?")
_UNKNOWN_WORD = re.compile(r"Invalid enum value '(.{0,200})' - at `\$([^`]*)`")
_STEP = re.compile(r"\.([A-Za-z_][A-Za-z0-9_]*)|\[[^\[\]]*\]")

_KINDS: tuple[tuple[frozenset[str], str, str], ...] = (
    (frozenset({"schema_version", "devices", "sources"}), "profile", "a profile: give it by --from-profile"),
    (
        frozenset({"schema_version", "kind", "environment"}),
        "measurement",
        "the manifest of a measurement: give its directory to calibrate fit",
    ),
    (frozenset({"layers", "input_shape"}), "network", "a network of paradl-bench describe: give it by --network"),
    (frozenset({"levels", "name"}), "cluster", "a cluster file: give it by --cluster"),
    (
        frozenset({"traceEvents"}),
        "trace",
        "a trace: paradl-bench import kineto FILE -o DIR reads it, and calibrate fit DIR makes a profile",
    ),
    (frozenset({"pairs", "overall"}), "report", "a report of predict validate, which no command reads"),
    (frozenset({"rows", "searched"}), "search", "the answer of predict search, which no command reads"),
)
"""By the keys that tell them: kinds of files, and where each goes."""


def foreign_document(value: object, wanted: str) -> str:
    """What a decoded document is, where that is known and not what was wanted (``profile``); else nothing."""
    if isinstance(value, list) and value and all(isinstance(row, dict) and "iteration_s" in row for row in value):
        return "predictions, which no command reads"
    keys = frozenset(value) if isinstance(value, dict) else frozenset()
    known = next(((kind, words) for told, kind, words in _KINDS if told <= keys), None)
    return known[1] if known is not None and known[0] != wanted else ""


def places(document: object) -> Iterator[tuple[str, object]]:
    """Everything that a decoded document holds, in its order, with its path: ``$.layers[0].name``."""
    pending: list[tuple[str, object]] = [("$", document)]
    while pending:
        where, item = pending.pop()
        yield where, item
        if isinstance(item, dict):
            pending += [(f"{where}.{key}", part) for key, part in reversed(item.items())]
        elif isinstance(item, (list, tuple)):
            pending += [(f"{where}[{index}]", part) for index, part in reversed(list(enumerate(item)))]


def validation_text(error: Exception, of: object) -> str:
    """A message of msgspec's on reading a type, with what was meant where a field or a word is none of its."""
    from difflib import get_close_matches

    text = str(error)
    if unknown := _UNKNOWN_FIELD.search(text):
        struct = _struct_in(_type_at(of, unknown.group(2) or ""))
        names: Sequence[str] = () if struct is None else struct.__struct_fields__
    elif unknown := _UNKNOWN_WORD.fullmatch(text):
        names = _words_in(_type_at(of, unknown.group(2)))
    if unknown is None or not names:
        return text
    given = unknown.group(1)
    near = get_close_matches(given, names, n=1, cutoff=0.5)
    near = near or [name for name in names if name.startswith(given) or given.startswith(name)][:1]
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{text}: {hint}choices are {', '.join(names)}"


def _type_at(of: object, path: str) -> object:
    """The type of what stands at a path as msgspec writes it, ``.levels[0]``."""
    for step in _STEP.finditer(path):
        struct = _struct_in(of)
        if step.group(1) is None:
            of = _inside(of)
        elif struct is not None:
            of = typing.get_type_hints(struct).get(step.group(1))
    return of


def _words_in(of: object) -> tuple[str, ...]:
    """What a field takes that takes one of some words."""
    if typing.get_origin(of) is typing.Literal:
        return typing.get_args(of)
    return tuple(word for part in typing.get_args(of) for word in _words_in(part))


def _struct_in(of: object) -> type[msgspec.Struct] | None:
    """A struct's type, also where it may be left out."""
    if isinstance(of, type) and issubclass(of, msgspec.Struct):
        return of
    if isinstance(of, types.UnionType) or typing.get_origin(of) is typing.Union:
        return next((struct for argument in typing.get_args(of) if (struct := _struct_in(argument)) is not None), None)
    return None


def _inside(of: object) -> object:
    """What a sequence or a mapping holds."""
    return next((argument for argument in reversed(typing.get_args(of)) if argument is not Ellipsis), None)
