"""What crosses each cut of a network into stages, and which cuts no pipeline can run. Torch-free.

What a later stage reads of an earlier one crosses every cut between them: a skip connection is passed on, as torch's
stages send to the next one alone. Every tensor crosses by itself: an operation may return several, and code may hold a
tensor and a view of it.

Constants do not cross: each stage that reads them makes them again. They are made from nothing (position ids, masks),
or from buffers that no layer changes (the frequencies of rotary embeddings), which all these stages hold. Nor do the
outputs of layers that do nothing cross, which are their inputs.

A network may be cut where

- every tensor that crosses gets a gradient;
- no layer behind the cut works in place on the memory of what crosses, which it would have received, not made;
- no buffer is used on both sides. Parameters may be: each stage that uses one holds it (:func:`users_of_parameters`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from paradl_bench.core.cache_keys import Same
from paradl_bench.network.graph import RETURNS_INPUT, Layer, ModelGraph
from paradl_bench.plan.compute import backward_layers, layers_with_gradient, operations_of_forward

_Named = TypeVar("_Named", int, str)
_RANDOM = frozenset(
    {
        *("bernoulli", "dropout", "exponential", "multinomial", "normal", "rand_like", "randint_like", "randn_like"),
        *("random", "uniform"),
    }
)
_INPUT = -1


class Crossing(NamedTuple):
    """A tensor: the index of the layer that returned it last, and which of its outputs it is."""

    layer: int
    output: int = 0


def elements(network: ModelGraph, value: Crossing) -> int:
    """Elements of a tensor per sample."""
    return math.prod(network.layers[value.layer].output_shapes[value.output])


def untouched(network: ModelGraph) -> frozenset[int]:
    """Indices of the layers whose output is their input."""
    return frozenset(i for i, layer in enumerate(network.layers) if layer.attributes.get(RETURNS_INPUT))


def constants(network: ModelGraph) -> frozenset[int]:
    """Indices of the layers that are made from nothing, from buffers that no layer changes, or from such layers alone,
    and hold nothing else later.
    """
    layers = list(enumerate(network.layers))
    written = [(i, {name for name, _ in layer.values_written}) for i, layer in layers]
    other: set[str] = set()
    fixed = {buffer.name for buffer in network.buffers}
    while True:
        indices = _made_from_nothing(network, other, fixed)
        names = {network.layers[i].name for i in indices}
        # Whoever makes a constant again must not find in it what only another stage has written there.
        changed = names.intersection(name for i, values in written if i not in indices for name in values)
        # Nor may a buffer be another stage's alone: what reads it beside constants may change it.
        used = fixed.intersection(name for i, layer in layers if i not in indices for name in _held_by(layer))
        if not changed and not used:
            return frozenset(indices)
        other |= changed
        fixed -= used


def _held_by(layer: Layer) -> tuple[str, ...]:
    return (*layer.parameters, *layer.state)


def _made_from_nothing(network: ModelGraph, other: set[str], fixed: set[str]) -> dict[int, None]:
    made_names: set[str] = set()
    indices: dict[int, None] = {}
    for i, layer in enumerate(network.layers):
        held = _held_by(layer)
        reads_more = not fixed.issuperset(held) or (held and layer.attributes.get("in_place", False))
        random = str(layer.attributes.get("function")) in _RANDOM or layer.kind == "dropout"
        made_of = (layer.inputs or held) and not reads_more and not random and made_names.issuperset(layer.inputs)
        if layer.name not in other and (made_of or (layer.kind == "constant" and not layer.inputs)):
            made_names.add(layer.name)
            indices[i] = None
    return indices


class DataFlow:
    """Which layer reads and changes which tensors, by index."""

    def __init__(self, network: ModelGraph) -> None:
        index = {layer.name: i for i, layer in enumerate(network.layers)} | {"input": _INPUT}

        def of(values: Iterable[tuple[str, int]]) -> tuple[Crossing, ...]:
            return tuple(Crossing(index[name], output) for name, output in values)

        self.network = network
        self.reads = [of(layer.values_read) for layer in network.layers]
        self.made_again = constants(network)
        self.last_read: dict[Crossing, int] = {}
        self._writers: dict[Crossing, list[int]] = {}
        for i, layer in enumerate(network.layers):
            self.last_read.update(dict.fromkeys(self.reads[i], i))
            for value in of(layer.values_written):
                self._writers.setdefault(value, []).append(i)

    def made_again_in(self, layers: range) -> frozenset[int]:
        """The constants that a stage of these layers makes: all made from nothing, and others that it reads."""
        wanted = [i for i in layers if i in self.made_again]
        wanted += [value.layer for i in layers for value in self.reads[i]]
        made: set[int] = set()
        while wanted:
            index = wanted.pop()
            if index in self.made_again and index not in made:
                made.add(index)
                wanted += [value.layer for value in self.reads[index]]
        return self._made_anywhere | made

    @functools.cached_property
    def _made_anywhere(self) -> frozenset[int]:
        """Constants that no buffer is needed for."""
        of_buffers: set[int] = set()
        for i in sorted(self.made_again):
            if _held_by(self.network.layers[i]) or any(value.layer in of_buffers for value in self.reads[i]):
                of_buffers.add(i)
        return self.made_again - of_buffers

    @functools.cached_property
    def crossing(self) -> list[tuple[Crossing, ...]]:
        """What crosses, for every cut from the one before the first layer on.

        A cut is the index of the first layer behind it. What crosses are the tensors that layers before it have
        returned and layers behind it read, constants excepted.
        """
        ends: dict[int, list[Crossing]] = {}
        for value in self.last_read:
            if value.layer not in self.made_again:
                ends.setdefault(value.layer, []).append(value)
        alive: list[Crossing] = []
        crossing: list[tuple[Crossing, ...]] = []
        for cut in range(len(self.network.layers) + 1):
            alive = [value for value in alive if self.last_read[value] >= cut]
            crossing.append(tuple(alive))
            alive += sorted(ends.get(cut, ()))
        return crossing

    def made_by(self, value: Crossing, cut: int) -> int:
        """The layer before the cut that changed a tensor last, or returned it."""
        writers = self._writers.get(value, ())
        return max([value.layer, *(writer for writer in writers if writer < cut)]) if writers else value.layer

    def overwritten(self) -> Iterator[tuple[int, int, int]]:
        """Spans in which a cut parts a tensor from a layer that changes its memory: first layer, last, and that one."""
        for value, writers in self._writers.items():
            if value.layer in self.made_again:
                continue
            for writer in writers:
                yield value.layer, min(writer, self.last_read.get(value, writer)), writer


# Plans, their check and their memory all ask for the same.
@functools.lru_cache(maxsize=16)
def _flow(same: Same[ModelGraph]) -> DataFlow:
    return DataFlow(same.thing)


def data_flow(network: ModelGraph) -> DataFlow:
    """The data flow of a network, worked out once."""
    return _flow(Same(network))


def refusals(network: ModelGraph) -> Mapping[int, str]:
    """Cuts inside the model that are not allowed, and why; found once."""
    return _refusals(Same(network))


# The cuts themselves ask, and how many stages there can be.
@functools.lru_cache(maxsize=16)
def _refusals(same: Same[ModelGraph]) -> dict[int, str]:
    network = same.thing
    flow = data_flow(network)
    layers, passed_back = network.layers, frozenset(backward_layers(network, layers_with_gradient(network)))
    reads_input = flow.last_read.get(Crossing(_INPUT), 0)
    spans = buffer_spans(network)
    shared_at = _first_across((first, last, name) for name, (first, last) in spans.items())
    writer_at = _first_across(flow.overwritten())
    using = users_of_parameters(network)
    # Its gradient would be waited for in a stage where it never comes.
    half_used = {name: uses for name, uses in using.items() if 0 < len(passed_back.intersection(uses)) < len(uses)}
    half_used_at = _first_across((uses[0], uses[-1], name) for name, uses in half_used.items())
    crossed = flow.crossing

    def has_gradient(value: Crossing, made_by: int) -> bool:
        # What autograd says of a tensor it says of the operation that returned it last.
        returned = made_by != value.layer or value.output not in layers[made_by].without_gradient
        return made_by in passed_back and returned

    reasons = {}
    for cut in range(1, operations_of_forward(network)):
        shared, writer = shared_at.get(cut), writer_at.get(cut)
        value = next((v for v in crossed[cut] if not has_gradient(v, flow.made_by(v, cut))), None)
        if shared is not None:
            reasons[cut] = f"{shared} is used on both sides, by {users(network, spans[shared])}"
        elif (name := half_used_at.get(cut)) is not None:
            by = " and ".join(layers[i].name for i in half_used[name])
            reasons[cut] = f"{name} is used on both sides, by {by}, and not all of these have a gradient"
        elif cut <= reads_input:
            reasons[cut] = "the model's own input is read behind it"
        elif writer is not None:
            reasons[cut] = f"{network.layers[writer].name} works in place on what crosses"
        elif value is not None:
            reasons[cut] = f"the output of {network.layers[value.layer].name} crosses, and has no gradient"
    return reasons


def _first_across(spans: Iterable[tuple[int, int, _Named]]) -> dict[int, _Named]:
    """Per cut that parts a span of layers (first, last, what it is of), the first such span's."""
    first_across: dict[int, _Named] = {}
    for first, last, name in spans:
        for cut in range(first + 1, last + 1):
            first_across.setdefault(cut, name)
    return first_across


def users(network: ModelGraph, span: tuple[int, int]) -> str:
    """The first and the last layer of a span, in words."""
    return " and by ".join(network.layers[i].name for i in span)


def buffer_spans(network: ModelGraph) -> Mapping[str, tuple[int, int]]:
    """First and last layer that use each buffer, or the buffers of each module, constants excepted."""
    spans: dict[str, tuple[int, int]] = {}
    buffers = {buffer.name for buffer in network.buffers}
    with_buffers = {name.rpartition(".")[0] for name in buffers}
    made_again = data_flow(network).made_again
    for i, layer in enumerate(network.layers):
        if i in made_again:
            continue
        layer_buffers = buffers.intersection(layer.parameters)
        for name in (*layer_buffers, *layer.state, *_modules_of(layer, with_buffers)):
            spans[name] = (spans.get(name, (i, i))[0], i)
    return spans


def users_of_parameters(network: ModelGraph) -> Mapping[str, tuple[int, ...]]:
    """Indices of the layers that use each parameter, ascending."""
    users_by_name: dict[str, list[int]] = {}
    for i, layer in enumerate(network.layers):
        for name in dict.fromkeys(layer.parameters):
            users_by_name.setdefault(name, []).append(i)
    return {name: tuple(layers_using) for name, layers_using in users_by_name.items()}


def buffers_of_constants(network: ModelGraph, made_again: Iterable[int]) -> frozenset[str]:
    """Buffers that these constants are made from."""
    return frozenset(name for i in made_again for name in _held_by(network.layers[i]))


def _modules_of(layer: Layer, modules: set[str]) -> set[str]:
    """Those of the modules that a layer belongs to: ``bn1`` of ``bn1`` and of ``bn1.num_batches_tracked.add``."""
    if not modules:
        return set()
    name = layer.name.partition("#")[0]
    parts = name.split(".")
    return {".".join(parts[:i]) for i in range(1, len(parts) + 1)} & modules
