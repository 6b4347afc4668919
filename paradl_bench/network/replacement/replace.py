"""A network with some of its layers replaced (OSF, layer replacement): what a trace of the changed model would give.

Layers behind are taken over with their parameters, on the shapes that reach them. Where these do not fit, the network
is refused. Beside the new layers nothing is held longer than its last reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import NEXT_FORWARD, Layer, ModelGraph, Tensor, Value
from paradl_bench.network.kinds.check import check_layers
from paradl_bench.network.replacement.inserted import Inserted, insert, module_names
from paradl_bench.network.replacement.modules import Misfit, Shape, shape_text
from paradl_bench.network.replacement.reshaped import reshaped
from paradl_bench.network.replacement.runs import Run, find_runs
from paradl_bench.network.replacement.written import Replacement

_T = TypeVar("_T")


class Replaced(NamedTuple):
    """A network with layers replaced.

    Attributes:
        removed, inserted, reshaped: names of layers that are gone, that are new, and that read other shapes.
    """

    network: ModelGraph
    removed: tuple[str, ...]
    inserted: tuple[str, ...]
    reshaped: tuple[str, ...]


def replace_layers(network: ModelGraph, replacements: Sequence[Replacement]) -> Replaced:
    """The network with the layers of each pattern replaced.

    Raises:
        UserError: layers cannot be taken out, or something does not take what then reaches it; the message names the
            layer, what it gets and what it takes.
    """
    walk = _Walk(network, find_runs(network, replacements))
    try:
        for layer in network.layers:
            walk.pass_on(layer)
        changed = walk.network()
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"--replace: {error}") from None
    check_layers(changed, f"--replace: network {network.name!r}")
    return Replaced(changed, tuple(walk.removed), tuple(walk.inserted_names), tuple(walk.reshaped_names))


class _Walk:
    """Goes through a network's layers in forward order, and puts the changed one together."""

    def __init__(self, network: ModelGraph, runs: Sequence[Run]) -> None:
        self._old = network
        self._run_of = {run.layers[0].name: run for run in runs}
        self.removed = dict.fromkeys(layer.name for run in runs for layer in run.layers)
        self._layers: list[Layer] = []
        self.inserted_names: list[str] = []
        self.reshaped_names: list[str] = []
        self._inserted: list[tuple[Run, Inserted]] = []
        self._now: dict[str, str] = {}
        self._shapes: dict[Value, Shape] = {("input", 0): network.input_shape}
        self._before: dict[Value, Shape] = {("input", 0): network.input_shape}
        self._parameter_shapes = {tensor.name: tensor.shape for tensor in network.held_parameters}

    def pass_on(self, layer: Layer) -> None:
        """Take a layer over, with what stands in its place where it is the first of a run."""
        self._before |= {(layer.name, index): shape for index, shape in enumerate(layer.output_shapes)}
        if layer.name in self._run_of:
            self._insert(self._run_of[layer.name])
        elif layer.name not in self.removed and not self._counts_for_removed(layer):
            self._keep(layer)

    def _insert(self, run: Run) -> None:
        value = self._value(run.layers[0].values_read[0])
        source, shape = value[0], self._reaching(run.layers[0], value)
        if value[1]:
            raise UserError(f"--replace {run.replacement.text!r}: {run.named} reads a further output of {source}")
        if source == "input" and self._old.input_dtype != "fp32" and run.replacement.modules:
            raise UserError(f"--replace {run.replacement.text!r}: {run.named} reads token ids, which no module takes")
        inserted = Inserted()
        names = module_names(run.layers[0].name, run.replacement.modules)
        for name, written in zip(names, run.replacement.modules, strict=True):
            try:
                inserted = inserted.then(made := insert(written, name, source, shape))
            except Misfit as error:
                raise UserError(
                    f"--replace {run.replacement.text!r}: {written.text} instead of {run.named} gets"
                    f" {shape_text(shape)} of {source}, it takes {error}"
                ) from None
            source, shape = name, made.layers[-1].output_shape
        self._inserted.append((run, inserted))
        self._layers += inserted.layers
        self.inserted_names += [layer.name for layer in inserted.layers]
        self._shapes[source, 0] = shape
        self._now |= dict.fromkeys((layer.name for layer in run.layers), source)

    def _reaching(self, layer: Layer, value: Value) -> Shape:
        """The shape that a layer reads of a value; as it was, unless it changed before: other tools leave views out."""
        shape = self._shapes[value]
        return layer.input_shapes[0] if layer.input_shapes and shape == self._before[layer.values_read[0]] else shape

    def _keep(self, layer: Layer) -> None:
        values = tuple(map(self._value, layer.values_read))
        kept = msgspec.structs.replace(
            layer,
            inputs=tuple(self._names(layer.inputs)),
            reads=tuple(map(self._value, layer.reads)),
            writes=None if layer.writes is None else tuple(map(self._value, layer.writes)),
            held_until=layer.held_until if layer.held_until == NEXT_FORWARD else self._now_named(layer.held_until),
            repeats_with=self._now_named(layer.repeats_with),
        )
        if any(self._shapes[now] != self._before[was] for now, was in zip(values, layer.values_read, strict=True)):
            kept = self._reshape(kept, layer, values)
            self.reshaped_names.append(layer.name)
        self._layers.append(kept)
        self._shapes |= {(layer.name, index): shape for index, shape in enumerate(kept.output_shapes)}

    def _reshape(self, kept: Layer, layer: Layer, values: Sequence[Value]) -> Layer:
        of_values = [self._shapes[value] for value in values]
        shapes = list(layer.input_shapes)
        if len(of_values) == len(shapes):
            shapes = of_values
        elif len(of_values) == 1:
            # One tensor that is read several times, or beside others that no layer made: targets.
            was = self._before[layer.values_read[0]]
            shapes = [of_values[0] if shape == was else shape for shape in shapes]
        try:
            return reshaped(kept, tuple(shapes), self._parameter_shapes)
        except Misfit as error:
            gets = " and ".join(
                f"{shape_text(shape)} of {name}" for shape, (name, _) in zip(of_values, values, strict=True)
            )
            raise UserError(
                f"--replace: layer {layer.name} ({layer.kind}) gets {gets}, it takes {error}; replace it as well, or"
                " return what it takes"
            ) from None

    def _counts_for_removed(self, layer: Layer) -> bool:
        """Whether an operation works on buffers of removed layers alone, as that which counts a norm's batches."""
        owners = {name.rpartition(".")[0] for name in layer.state}
        return not layer.values_read and bool(owners) and owners <= self.removed.keys()

    def _value(self, value: Value) -> Value:
        return (self._now[value[0]], 0) if value[0] in self._now else value

    def _names(self, names: Iterable[str]) -> Iterable[str]:
        return dict.fromkeys(self._now.get(name, name) for name in names)

    def _now_named(self, name: str) -> str:
        """A layer that something is held until; a removed one's is what stands in its place, if that is a layer."""
        if name not in self.removed:
            return name
        first = next(run for run in self._run_of.values() if any(layer.name == name for layer in run.layers))
        names = module_names(first.layers[0].name, first.replacement.modules)
        return names[-1] if names else ""

    def network(self) -> ModelGraph:
        """The changed network; a ValueError where names or sizes are impossible."""
        old = self._old
        new = frozenset(self.inserted_names)
        read = {name for layer in self._layers if layer.name not in new for name in layer.parameters}
        taken = [layer for layer in old.layers if layer.name in self.removed or self._counts_for_removed(layer)]
        # A layer that reads another's weights may have some of its own beside them.
        owned = {tensor.name for tensor in old.held_parameters if tensor.name.rpartition(".")[0] in self.removed}
        gone = owned.union(*(layer.parameters for layer in taken)) - read
        gone |= {name for layer in taken for name in layer.state}
        splice = _Splice(old.layers, self._inserted, frozenset(gone))
        return msgspec.structs.replace(
            old,
            layers=tuple(self._layers),
            parameters=splice.tensors(old.parameters, [made.parameters for _, made in self._inserted]),
            buffers=splice.tensors(old.buffers, [made.buffers for _, made in self._inserted]),
            gradient_order=splice.arrival(old.gradient_order) if old.gradient_order else (),
            outputs=tuple(self._names(old.outputs)),
            frozen=tuple(tensor for tensor in old.frozen if tensor.name not in gone),
            registered=splice.registered(old.registered) if old.registered else (),
        )


class _Splice:
    """Puts what is new between what is there, where that of removed layers stood, else behind that of layers before."""

    def __init__(self, layers: Sequence[Layer], inserted: Sequence[tuple[Run, Inserted]], gone: frozenset[str]) -> None:
        self._inserted, self._gone = inserted, gone
        of = {layer.name: {*layer.parameters, *layer.state} for layer in layers}
        place = {layer.name: index for index, layer in enumerate(layers)}
        self._own = [set().union(*(of[layer.name] for layer in run.layers)) for run, _ in inserted]
        self._before = [
            set().union(*(of[layer.name] for layer in layers[: place[run.layers[0].name]])) for run, _ in inserted
        ]

    def tensors(self, old: Sequence[Tensor], new: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """In registration order."""
        places = self._places([tensor.name for tensor in old])
        return tuple(_merged(old, new, places, lambda tensor: tensor.name not in self._gone))

    def registered(self, old: Sequence[str]) -> tuple[str, ...]:
        """Names in registration order."""
        new = [tuple(tensor.name for tensor in made.parameters) for _, made in self._inserted]
        return tuple(_merged(old, new, self._places(old), lambda name: name not in self._gone))

    def arrival(self, old: Sequence[str]) -> tuple[str, ...]:
        """Names in the order in which backward finishes their gradients: the last layers' first."""
        backwards = self._places(old[::-1])
        places = [len(old) - place for place in backwards]
        # Of two runs at one place the later arrives first.
        new = [made.arrival for _, made in reversed(self._inserted)]
        return tuple(_merged(old, new, places[::-1], lambda name: name not in self._gone))

    def _places(self, names: Sequence[str]) -> list[int]:
        """Index of the old name before which each run's are put."""
        places = []
        for replaced, before in zip(self._own, self._before, strict=True):
            removed = (index for index, name in enumerate(names) if name in replaced)
            behind = max((index + 1 for index, name in enumerate(names) if name in before), default=0)
            places.append(next(removed, behind))
        return places


def _merged(
    old: Sequence[_T], new: Sequence[tuple[_T, ...]], places: Sequence[int], stays: Callable[[_T], bool]
) -> Iterator[_T]:
    for index in range(len(old) + 1):
        for items, place in zip(new, places, strict=True):
            if place == index:
                yield from items
        if index < len(old) and stays(old[index]):
            yield old[index]
