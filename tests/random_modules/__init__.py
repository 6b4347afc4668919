"""Modules as users write them, drawn by number: ``load_model("random_modules:module7")`` is the seventh.

``random_modules:decoder7`` is the seventh of small language models, which come with experts or without.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[[], Any]:
    number = re.fullmatch(r"(module|decoder)(\d+)", name)
    if number is None:
        raise AttributeError(name)
    from random_modules.decoder import describe_decoder
    from random_modules.described import Described
    from random_modules.draw import describe

    describes = {"module": describe, "decoder": describe_decoder}[number[1]]
    return functools.partial(Described, describes(int(number[2])))
