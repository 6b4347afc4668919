"""Modules as users write them, drawn by number: ``load_model("random_modules:module7")`` is the seventh."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[[], Any]:
    number = re.fullmatch(r"module(\d+)", name)
    if number is None:
        raise AttributeError(name)
    from random_modules.described import Described
    from random_modules.draw import describe

    return functools.partial(Described, describe(int(number[1])))
