"""Changes a document field by field, as its type lists them: every field is reached, also those that it leaves out."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec import inspect

HUGE = 1 << 63
VALUES: tuple[Any, ...] = (
    *(0, -1, 1, 1e300, -1e300, 1e-300, HUGE, -HUGE, 10**30, 2**40, 1_000_003, 0.5),
    *("", "x", "input", "serial", "d4", "fp16", [], [[]], {}, None, True, [0], [-1, 1e300], {"x": 1e300}),
)
"""What a field is set to: the least, the largest, none, nothing, and another type."""
DELETED = "<deleted>"
Place = tuple[Any, ...]


Field = tuple[Place, inspect.Type]


@functools.cache
def type_of(kind: type[msgspec.Struct]) -> inspect.Type:
    """What a type consists of."""
    return inspect.type_info(kind)


def places(kind: type[msgspec.Struct], document: dict[str, Any]) -> list[Field]:
    """Path and type of every field that the type has, at every object of the document; entries of lists too."""
    return list(_places(type_of(kind), document, (), 0))


@functools.lru_cache(maxsize=64)
def _places_of(kind: type[msgspec.Struct], content: bytes) -> list[Field]:
    return places(kind, json.loads(content))


def _places(kind: inspect.Type, value: Any, where: Place, depth: int) -> Iterator[Field]:
    if where:
        yield where, kind
    if depth > 12:
        return
    for key, own, held in _parts(kind, value):
        yield from _places(own, held, (*where, key), depth + 1)


def _parts(kind: inspect.Type, value: Any) -> list[tuple[Any, inspect.Type, Any]]:
    """Key, type and value of what is held: what a struct lacks is as plain as can be."""
    while isinstance(kind, inspect.UnionType):
        kind = next((each for each in kind.types if _fits(each, value)), inspect.AnyType())
    if isinstance(value, dict):
        if isinstance(kind, inspect.StructType):
            names = ((field.encode_name, field.type) for field in kind.fields)
            return [(name, own, value.get(name, sample(own))) for name, own in names]
        return [(key, kind.value_type, held) for key, held in value.items()] if _fits(kind, value) else []
    if isinstance(kind, inspect.TupleType) and isinstance(value, list):
        return [(index, *pair) for index, pair in enumerate(zip(kind.item_types, value, strict=False))]
    return [(index, kind.item_type, held) for index, held in enumerate(value[:2])] if _fits(kind, value) else []


def _fits(kind: inspect.Type, value: Any) -> bool:
    if isinstance(kind, (inspect.StructType, inspect.DictType)):
        return isinstance(value, dict)
    return isinstance(kind, (inspect.VarTupleType, inspect.ListType, inspect.TupleType)) and isinstance(value, list)


def sample(kind: inspect.Type) -> Any:
    """The plainest value of a type, as JSON has it."""
    made: Any = None
    if isinstance(kind, inspect.UnionType):
        made = next((sample(each) for each in kind.types if not isinstance(each, inspect.NoneType)), None)
    elif isinstance(kind, inspect.StructType):
        made = {field.encode_name: sample(field.type) for field in kind.fields}
    elif isinstance(kind, inspect.LiteralType):
        made = kind.values[0]
    elif isinstance(kind, inspect.BoolType):
        made = False
    elif isinstance(kind, inspect.IntType):
        made = max(kind.ge or 0, 1)
    elif isinstance(kind, inspect.FloatType):
        made = min(max(kind.ge or 0.0, 1.0), 1.0 if kind.le is None else kind.le)
    elif isinstance(kind, inspect.StrType):
        made = "x"
    elif isinstance(kind, inspect.TupleType):
        made = [sample(each) for each in kind.item_types]
    elif isinstance(kind, (inspect.VarTupleType, inspect.ListType)):
        made = [sample(kind.item_type)]
    elif isinstance(kind, inspect.DictType):
        made = {}
    return made


def within(kind: inspect.Type, generator: random.Random) -> Any:
    """A number that the type's bounds allow: an end, or any between; None where the type is no number."""
    if isinstance(kind, inspect.UnionType):
        return within(generator.choice(kind.types), generator)
    if isinstance(kind, inspect.IntType):
        low, high = kind.ge or 0, kind.le if kind.le is not None else (kind.lt or 1) - 1
        return generator.choice((low, high, low + 1, min(high, int(10 ** generator.uniform(0, 18)))))
    if isinstance(kind, inspect.FloatType):
        bottom, top = kind.ge or 0.0, kind.le or 1.0
        return generator.choice((bottom, top, 0.0, min(top, max(bottom, 10.0 ** generator.uniform(-18, 18)))))
    return None


def with_value(document: Any, where: Place, value: Any, kind: type[msgspec.Struct]) -> Any:
    """The document with one field set, or left out; objects on the way that are not there are made plain."""
    holder, own = document, type_of(kind)
    for key in where[:-1]:
        own = _inside(own, holder, key)
        if isinstance(holder, dict) and key not in holder:
            holder[key] = sample(own)
        if not isinstance(holder[key], (dict, list)) or (isinstance(holder, list) and key >= len(holder)):
            return document
        holder = holder[key]
    if value == DELETED:
        if isinstance(holder, list) or where[-1] in holder:
            del holder[where[-1]]
    elif isinstance(holder, dict) or where[-1] < len(holder):
        holder[where[-1]] = value
    return document


def _inside(kind: inspect.Type, holder: Any, key: Any) -> inspect.Type:
    while isinstance(kind, inspect.UnionType):
        kind = next(each for each in kind.types if _fits(each, holder))
    if isinstance(kind, inspect.StructType):
        return next(field.type for field in kind.fields if field.encode_name == key)
    if isinstance(kind, inspect.DictType):
        return kind.value_type
    return kind.item_types[key] if isinstance(kind, inspect.TupleType) else kind.item_type  # type: ignore[attr-defined, no-any-return]


def field_change(kind: type[msgspec.Struct]) -> Callable[[random.Random, Sequence[bytes]], bytes]:
    """A change of one to three fields of one of the corpus, for the fuzzer; half of the values are within bounds."""

    def change(generator: random.Random, corpus: Sequence[bytes]) -> bytes:
        content = generator.choice(corpus)
        document = json.loads(content)
        for where, own in generator.choices(_places_of(kind, content), k=generator.choice((1, 1, 1, 2, 3))):
            value = within(own, generator) if generator.random() < 0.7 else None
            if value is None:
                value = copy.deepcopy(generator.choice((*VALUES, DELETED)))
            with contextlib.suppress(LookupError, TypeError, StopIteration):
                document = with_value(document, where, value, kind)
        return json.dumps(document).encode()

    return change
