"""Options of a command that belong together, as one argument of a type of its own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

Command = Callable[..., None]


def collected(**types: Callable[..., Any]) -> Callable[[Command], Command]:
    """Right above a command's function: its options by the names of a type's fields make one argument of that type.

    Args:
        types: by the argument's name, a struct, tuple or dataclass whose fields are options of the command.
    """
    fields = {name: tuple(inspect.signature(of).parameters) for name, of in types.items()}

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def call(*arguments: Any, **options: Any) -> None:
            made = {name: of(**{field: options.pop(field) for field in fields[name]}) for name, of in types.items()}
            command(*arguments, **made, **options)

        return call

    return decorate
