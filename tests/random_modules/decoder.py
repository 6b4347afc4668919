"""Descriptions of small language models: embedded tokens, blocks of attention and a perceptron or experts, a head.

What mixes tokens is attention alone, so that sequences can be cut; now and then something else does, which is refused.
"""

from __future__ import annotations

import functools
from random import Random

from random_modules.described import Description
from random_modules.draw import Drawing, trains
from random_modules.operation import SEQUENCE

ATTENTION = {"grouped_attention": 8, "fused_attention": 1, "separate_attention": 1, "multi_head": 0.5}
WIDE = {"perceptron": 6, "mlp": 2, "experts": 6}
BY_TOKEN = {
    **{"token_norm": 4, "scale": 2, "offset": 1, "activation": 1, "in_place": 1, "cap": 1, "residual": 2, "gate": 1},
    **{"residual_in_place": 2, "there_and_back": 1, "linear": 1, "layer_norm": 1, "halves": 0.5, "untracked": 0.5},
    **{"change_features": 0.5, "join": 0.2, "centre": 0.2, "constant": 0.5, "dropout": 0.3},
}
"""What is between: steps by how often they are drawn beside the others."""


def draw_decoder(number: int, attempt: int) -> Description:
    """One description, which may not train."""
    rng = Random(f"decoder {number}.{attempt}")
    tokens, features = rng.choice([4, 6, 8, 8]), rng.choice([8, 8, 12, 16])
    drawing = Drawing(rng, SEQUENCE, (tokens, features))
    if rng.random() < 0.6:
        drawing.add({"positions": 1})
    _between(drawing, 0.15)
    _add_blocks(drawing)
    _between(drawing, 0.15)
    if rng.random() < 0.6:
        drawing.add({"token_norm": 1})
    made = drawing.sight.features
    return {
        "input_shape": [tokens],
        "vocabulary": rng.choice([16, 17, 18]),
        "masked": rng.random() < 0.25,
        "features": features,
        "steps": drawing.steps,
        "head": {"in_features": made},
        "tied": made == features and rng.random() < 0.3,
        "returns": {"form": "tensor", "regularised": False},
    }


def _between(drawing: Drawing, share: float) -> None:
    while drawing.rng.random() < share:
        drawing.add(BY_TOKEN)


def _fill_block(drawing: Drawing) -> None:
    _between(drawing, 0.1)
    drawing.add(ATTENTION)
    _between(drawing, 0.2)
    drawing.add(WIDE)
    _between(drawing, 0.1)


def _add_blocks(drawing: Drawing) -> None:
    """Mostly a sequence of blocks, else their steps one by one."""
    rng, count = drawing.rng, drawing.rng.choice([1, 2, 2, 3])
    if rng.random() < 0.25 or not drawing.add_block([_fill_block] * count):
        for _ in range(count):
            _fill_block(drawing)


@functools.lru_cache(maxsize=4096)
def describe_decoder(number: int) -> Description:
    """The description of a number: the first that trains of those that are drawn for it."""
    return next(found for attempt in range(1000) if trains(found := draw_decoder(number, attempt)))
