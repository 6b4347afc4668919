"""A network with some of its equal blocks left out, and the whole one that follows from it.

Transformers run the same block many times over. Traced with a few of them, the network tells what any further one would
be: the layers of the block in the middle, under other names. That holds where its two neighbours are what it is, which
is looked at; where they are not, nothing follows. What takes time for each layer can leave blocks out in turn.
Torch-free.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import msgspec

from paradl_bench.core.cache_keys import Same
from paradl_bench.network.graph import Layer, ModelGraph, Tensor

Rename = Callable[[str], str]
_INDEX = re.compile(r"\.(\d+)(?![^.#])")
"""Behind a list's path in a name."""
KEPT = 5
"""Blocks of a run that are traced: the first two, the one that stands for all between, and the last two."""
TEMPLATE = 2
"""Which of them stands for those that are left out."""


class Stretch(NamedTuple):
    """Blocks that are left out.

    Attributes:
        path: of the list of blocks in the model. template: index in what is left of the list of the block that they
            equal. extra: how many they are.
    """

    path: str
    template: int
    extra: int


class FewBlocks(NamedTuple):
    """A network without those of its equal blocks that others stand for; itself where there are none.

    Attributes:
        layers, parameters: of each layer, and each parameter, of the whole network, the index of the one here that it
            equals.
    """

    network: ModelGraph
    layers: tuple[int, ...]
    parameters: tuple[int, ...]


class _Unlike(Exception):
    """Blocks are not as equal as they look."""


def with_all_blocks(network: ModelGraph, stretches: Sequence[Stretch]) -> ModelGraph | None:
    """The network of the whole model.

    Args:
        network: traced from the model without the blocks of ``stretches``.

    Returns:
        None where the blocks beside a template are not what it is.
    """
    try:
        for stretch in stretches:
            _check_neighbours(network, stretch, stretches)
        return _extended(network, stretches)
    except _Unlike:
        return None


def without_equal_blocks(network: ModelGraph) -> FewBlocks:
    """What :func:`with_all_blocks` makes the network of."""
    return _without_equal_blocks(Same(network))


# A search asks for every way to share layers.
@functools.lru_cache(maxsize=8)
def _without_equal_blocks(same: Same[ModelGraph]) -> FewBlocks:
    network = few = same.thing
    stretches: list[Stretch] = []
    for path, count in _lists(network):
        tried = [*stretches, Stretch(path, TEMPLATE, count - KEPT)]
        try:
            fewer = _trimmed(network, tried)
            is_same = with_all_blocks(fewer, tried) == network
        except ValueError:
            # What is left reads what is not.
            continue
        if is_same:
            stretches, few = tried, fewer
    renames = _Renames(stretches)
    layers, parameters = (
        tuple(at for at, _ in renames.several([item.name for item in items])) for items in (few.layers, few.parameters)
    )
    return FewBlocks(few, layers, parameters)


def _lists(network: ModelGraph) -> list[tuple[str, int]]:
    """Lists of more blocks than are kept: their paths, and how many blocks each has."""
    indices: dict[str, set[int]] = {}
    for layer in network.layers:
        matched = _INDEX.search(layer.name)
        if matched:
            indices.setdefault(layer.name[: matched.start()], set()).add(int(matched.group(1)))
    return [(path, len(of)) for path, of in indices.items() if len(of) > KEPT and of == set(range(len(of)))]


def _trimmed(network: ModelGraph, stretches: Sequence[Stretch]) -> ModelGraph:
    """The network without the blocks behind each template.

    Raises:
        ValueError: what is left reads what is not there.
    """
    place, extra = _placing(stretches), {stretch.path: stretch.extra for stretch in stretches}

    def moved(path: str, index: int) -> int:
        return index - extra[path] if index >= TEMPLATE + extra[path] else index

    def stays(name: str) -> bool:
        placed = place(name)
        return placed is None or not TEMPLATE < placed[1] <= TEMPLATE + extra[placed[0]]

    def beside(own: str) -> Rename:
        # What stands before those that are left out reads what stands beside it.
        return _moving(place, lambda path, index: index if path == own else moved(path, index))

    rename, early = _moving(place, moved), {path: beside(path) for path in extra}

    def renamed(layer: Layer) -> Layer:
        path, index = place(layer.name) or ("", 0)
        return _renamed(layer, early[path] if path and index <= TEMPLATE else rename)

    def tensors(of: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(msgspec.structs.replace(tensor, name=rename(tensor.name)) for tensor in of if stays(tensor.name))

    return msgspec.structs.replace(
        network,
        layers=tuple(renamed(layer) for layer in network.layers if stays(layer.name)),
        gradient_order=tuple(rename(name) for name in network.gradient_order if stays(name)),
        parameters=tensors(network.parameters),
        buffers=tensors(network.buffers),
        frozen=tensors(network.frozen),
        registered=tuple(rename(name) for name in network.registered if stays(name)),
        outputs=tuple(map(rename, network.outputs)),
    )


def _extended(network: ModelGraph, stretches: Sequence[Stretch]) -> ModelGraph:
    renames = _Renames(stretches)

    def tensors(of: Sequence[Tensor]) -> tuple[Tensor, ...]:
        items = renames.several([tensor.name for tensor in of])
        return tuple(msgspec.structs.replace(of[item], name=rename(of[item].name)) for item, rename in items)

    layers, order = network.layers, network.gradient_order
    return msgspec.structs.replace(
        network,
        layers=tuple(_renamed(layers[at], rename) for at, rename in renames.several([layer.name for layer in layers])),
        gradient_order=tuple(rename(order[at]) for at, rename in renames.several(order, backwards=True)),
        parameters=tensors(network.parameters),
        buffers=tensors(network.buffers),
        frozen=tensors(network.frozen),
        registered=tuple(rename(network.registered[at]) for at, rename in renames.several(network.registered)),
        outputs=tuple(map(renames.outside, network.outputs)),
    )


class _Renames:
    """How names in the trimmed network are called in the whole one, by the block that they are written in."""

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self._place = _placing(stretches)
        self._of_block: dict[tuple[str, int], list[Rename]] = {}
        for stretch in stretches:
            copies = [_renaming(stretches, stretch, copy) for copy in range(stretch.extra + 1)]
            self._of_block[stretch.path, stretch.template] = copies
            # What stands beside a template reads its first copy, or its last.
            self._of_block[stretch.path, stretch.template - 1] = copies[:1]
            self._of_block[stretch.path, stretch.template + 1] = copies[-1:]
        self.outside = _renaming(stretches)

    def several(self, names: Sequence[str], *, backwards: bool = False) -> list[tuple[int, Rename]]:
        """Per item of the whole network, which of these it is made of, and how it is renamed; the last copy comes first
        where blocks stand backwards.
        """
        renamed: list[tuple[int, Rename]] = []
        for place, run in groupby(range(len(names)), lambda index: self._place(names[index])):
            items = list(run)
            renames = self._of_block.get(place, [self.outside]) if place else [self.outside]
            for rename in reversed(renames) if backwards else renames:
                renamed += [(item, rename) for item in items]
        return renamed


def _check_neighbours(network: ModelGraph, stretch: Stretch, stretches: Sequence[Stretch]) -> None:
    """Hold the blocks before and after a template to being the template under their own names.

    Raises:
        _Unlike: they are not, or what a block runs or trains does not stand together.
    """
    place = _placing(stretches)

    def block(names: Sequence[str], index: int) -> range:
        indices = [at for at, name in enumerate(names) if place(name) == (stretch.path, index)]
        span = range(indices[0], indices[-1] + 1) if indices else range(0)
        if len(span) != len(indices):
            raise _Unlike
        return span

    layers = [layer.name for layer in network.layers]
    order = network.gradient_order
    blocks = [stretch.template + step for step in (-1, 0, 1)]
    spans, orders = [block(layers, at) for at in blocks], [block(order, at) for at in blocks]
    forward = all(one.stop == other.start for one, other in pairwise(spans))
    backward = all(other.stop == one.start for one, other in pairwise(orders))
    if not (forward and backward):
        raise _Unlike
    for step in (-1, 1):
        shift = _shifting(stretch, place, step)
        shifted = [_renamed(network.layers[at], shift) for at in spans[1]]
        arriving = [shift(order[at]) for at in orders[1]]
        if shifted != [network.layers[at] for at in spans[1 + step]] or arriving != [
            order[at] for at in orders[1 + step]
        ]:
            raise _Unlike


def _placing(stretches: Sequence[Stretch]) -> Callable[[str], tuple[str, int] | None]:
    """A function that tells in which block of which list a name stands; None for one in none."""
    paths = list(dict.fromkeys(stretch.path for stretch in stretches))

    @functools.cache
    def place(name: str) -> tuple[str, int] | None:
        for path in paths:
            matched = _INDEX.match(name, len(path)) if name.startswith(path) else None
            if matched:
                return path, int(matched.group(1))
        return None

    return place


def _moving(place: Callable[[str], tuple[str, int] | None], moved: Callable[[str, int], int]) -> Rename:
    """A renaming by a function from a list and an index in it to another index."""

    @functools.cache
    def rename(name: str) -> str:
        placed = place(name)
        if placed is None:
            return name
        path, index = placed
        return f"{path}.{moved(path, index)}{name[len(f'{path}.{index}') :]}"

    return rename


def _shifting(stretch: Stretch, place: Callable[[str], tuple[str, int] | None], step: int) -> Rename:
    def moved(path: str, index: int) -> int:
        near = path == stretch.path and abs(index - stretch.template) <= 1
        return index + step if near else index

    return _moving(place, moved)


def _renaming(stretches: Sequence[Stretch], of: Stretch | None = None, copy: int = 0) -> Rename:
    """From names in the trimmed network to those in the whole one.

    Args:
        of: the names stand in a copy of this template, or beside one; None where they do not.
    """

    def moved(path: str, index: int) -> int:
        if of is not None and path == of.path and abs(index - of.template) <= 1:
            return (
                index
                + copy
                + sum(stretch.extra for stretch in stretches if stretch.path == path and stretch.template < of.template)
            )
        if any(stretch.path == path and stretch.template == index for stretch in stretches):
            # Of which copy is read here, nothing tells.
            raise _Unlike
        return index + sum(stretch.extra for stretch in stretches if stretch.path == path and stretch.template < index)

    return _moving(_placing(stretches), moved)


def _renamed(layer: Layer, rename: Rename) -> Layer:
    def values(of: Sequence[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
        return tuple((rename(name), output) for name, output in of)

    return msgspec.structs.replace(
        layer,
        name=rename(layer.name),
        inputs=tuple(map(rename, layer.inputs)),
        parameters=tuple(map(rename, layer.parameters)),
        state=tuple(map(rename, layer.state)),
        reads=values(layer.reads),
        writes=None if layer.writes is None else values(layer.writes),
        repeats_with=rename(layer.repeats_with),
        held_until=rename(layer.held_until),
    )
