"""Options of axes: one struct a concern, declared by the kinds that it is for; what commands show of it. Light."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import msgspec


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """An option as commands show it, and its way into the struct and back.

    Attributes:
        name: of the parameter; ``--`` in front and dashes within are added.
        value: ``str``, ``int`` or ``float``; ignored where there are ``choices``.
        default: that help shows; None where the help says what happens.
        least, most: of a number.
        searched: what ``predict search`` does in the place of taking it; empty where it holds for all candidates.
        read: from what was given to fields of the struct; None for the field of that name, as it is.
        write: from the struct to what would be given for it, None for nothing; the text of the field without it.
    """

    name: str
    help: str
    metavar: str | None = None
    value: type = str
    choices: tuple[str, ...] = ()
    default: str | None = None
    least: int | None = None
    most: int | None = None
    searched: str = ""
    read: Callable[[Any], Mapping[str, Any]] | None = None
    write: Callable[[Any], str | None] | None = None

    @property
    def flag(self) -> str:
        """As it is typed."""
        return f"--{self.name.replace('_', '-')}"

    def fields(self, given: object) -> Mapping[str, Any]:
        """Fields of the struct, from what was given."""
        return {self.name: given} if self.read is None else self.read(given)

    def text(self, options: AxisOptions) -> str | None:
        """What would be given for a struct; None where nothing need be."""
        if self.write is not None:
            return self.write(options)
        value = getattr(options, self.name)
        if value is None or value == ():
            return None
        return ",".join(value) if isinstance(value, tuple) else str(value)


class AxisOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, cache_hash=True):
    """Options that one or several kinds of axes have; every field has a default.

    Attributes:
        shown: what commands show. of_shards: whether they decide what ranks run of layers that they shard.
        unsaid: fields that the words for a plan's settings leave out.
        tried: shown options, each with choices, all of which a search tries.
    """

    shown: ClassVar[tuple[Shown, ...]] = ()
    of_shards: ClassVar[bool] = False
    unsaid: ClassVar[tuple[str, ...]] = ()
    tried: ClassVar[tuple[str, ...]] = ()

    def placed(self, on_node: Callable[[], int | None]) -> Self:
        """With what follows from how many ranks lie on a node, which ``on_node`` says."""
        return self

    def settled(self, degree: int) -> dict[str, str]:
        """In words, what two runs of an axis of this degree have to share beyond what is not the default."""
        return {}

    @property
    def words(self) -> dict[str, str]:
        """Fields that are not the default, in words."""
        default = type(self)()
        return {
            name: ",".join(value) if isinstance(value, tuple) else str(value)
            for name in self.__struct_fields__
            if name not in self.unsaid and (value := getattr(self, name)) != getattr(default, name)
        }
