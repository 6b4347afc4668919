"""Tensor parallel layers: columns, rows, and what lies between on this rank's heads and features (Megatron-LM).

The module's code runs as it is: where it asks for the shape of a part it is told the whole one, and the sizes that it
gives to views, whole ones too, are cut before they get there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only

from paradl_bench.core.errors import WorkError
from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.network.partition import Interval, cut
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Axis
from paradl_bench.strategies.running.autocast import as_product_reads_it
from paradl_bench.strategies.running.group_functions import Group, reduce, reduce_gradient
from paradl_bench.strategies.running.nested_sharding import one_inside
from paradl_bench.strategies.running.own_randomness import OwnRandomness
from paradl_bench.strategies.running.parameters import replace_parameter
from paradl_bench.strategies.running.sharded_module import Call, Rule, Sharding, beside, functions_of, instead
from paradl_bench.strategies.running.summed_gradients import SummedGradients
from paradl_bench.strategies.splitting.channel_shards import with_parameter_shapes
from paradl_bench.strategies.splitting.grouped_products import GROUPED, ends_given, rows_given, with_ends, with_rows
from paradl_bench.strategies.splitting.options import SplitOptions
from paradl_bench.strategies.tensor.cuts import Cut
from paradl_bench.strategies.tensor.linear import function_of
from paradl_bench.strategies.tensor.pairs import WHOLE_OUTPUT, Pairs, Piece, find_pairs
from paradl_bench.strategies.tensor.plan import Ranges, parameter_ranges
from paradl_bench.strategies.tensor.sequence.module import SequenceRun
from paradl_bench.strategies.tensor.sequence.on_tokens import whole_shape_of_tokens
from paradl_bench.strategies.tensor.sequence.options import SequenceOptions
from paradl_bench.strategies.tensor.sequence.parts import SEQUENCE, find_parts
from paradl_bench.strategies.tensor.sequence.sorted_rows import ends_of_all
from paradl_bench.strategies.tensor.vocabulary.module import LookUp, PartedEntropy

_MARK = "_paradl_part"


class TensorRunner:
    """Replaces weights by this rank's columns or rows of them.

    Outputs, input gradients and the gradients of all parameters are those of the serial model.
    """

    name = "tensor"

    def shard(
        self, module: torch.nn.Module, network: ModelGraph, axis: Axis, group: Group, settings: PlanSettings
    ) -> Sharding:
        """See :class:`~paradl_bench.strategies.running.axis_runners.AxisRunner`."""
        pairs = find_pairs(network, settings.of(SplitOptions).split)
        shapes = {}
        for name, (dim, ranges) in parameter_ranges(network, pairs, group.size, group.rank).items():
            held = _take(module.get_parameter(name), dim, ranges)
            replace_parameter(module, name, held)
            shapes[name] = tuple(held.shape)
        return _sharding(network, with_parameter_shapes(network, shapes), pairs, group, settings)


RUNNER = TensorRunner()


def _sharding(
    network: ModelGraph, held: ModelGraph, pairs: Pairs, group: Group, settings: PlanSettings, cut_before: int = 1
) -> Sharding:
    """How a module with this rank's weights runs.

    Args:
        held: the network with this rank's shapes. cut_before: in how many parts another axis cuts the sequence first.
    """
    last_of = {piece.leader: index for index, piece in pairs.pieces.items()}
    on, random = settings.of(SequenceOptions).on, OwnRandomness(group)
    sequence = SequenceRun(find_parts(network, pairs), group, random, cut_before) if on else None
    summed = sequence.scattered if sequence else partial(reduce, group=group)
    inputs = {leader: _SharedInput(network.layers[leader], group, sequence) for leader in last_of}
    rules, parts = {}, {}
    for index, piece in pairs.pieces.items():
        layer = network.layers[index]
        part = parts[index] = Part(layer, piece, cut(piece.atoms, group.size)[group.rank])
        run: Any = _Row(layer, summed, sequence)
        if piece.part == "table":
            run = LookUp(layer, part.own, summed)
        elif piece.part == "loss":
            run = PartedEntropy(layer, part.own, group)
        elif piece.part == "column":
            run = _Column(part, inputs[piece.leader], sequence, last=last_of[piece.leader] == index)
        elif piece.part != "row":
            run = _Inside(part, random)
            if piece.part == "inside" and (piece.whole or layer.parameters):
                run = SummedGradients(group, run, _is_part)
        rules[index] = Rule(functions_of(layer), run)
    rules |= sequence.sums(network, frozenset(parts)) if sequence else {}
    on_tokens = sequence.rules(network) if sequence else {}

    def receive(index: int, number: int, tensor: torch.Tensor) -> torch.Tensor:
        if index in parts and parts[index].piece.part not in WHOLE_OUTPUT:
            marked: torch.Tensor = parts[index].mark(tensor, number)
            return marked
        return sequence.received(index, tensor) if sequence else tensor

    return Sharding(
        one_inside(rules, on_tokens) if cut_before == 1 else rules,
        held,
        whole_shape=partial(_whole_shape, sequence),
        receive=receive,
        forget=partial(_forget, tuple(inputs.values())),
        randomness=(random,),
        own_part=partial(_own_part, sequence),
        within=partial(_sharding, network, held, pairs, group, settings) if sequence else None,
        inside=on_tokens,
    )


def _is_part(tensor: torch.Tensor) -> bool:
    return getattr(tensor, _MARK, None) is not None


def _take(tensor: torch.Tensor, dim: int, ranges: Ranges) -> torch.Tensor:
    parts = [tensor.narrow(dim, interval.start, interval.extent) for interval in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class Part(NamedTuple):
    """What this rank holds of a layer's output: ``own`` of the pieces that its block is cut into."""

    layer: Layer
    piece: Piece
    own: Interval

    def shorter(self, extent: int) -> int:
        """Positions that it holds of ``extent`` along the dim that is cut."""
        return extent * self.own.extent // self.piece.atoms

    def mark(self, result: Any, first: int = 0) -> Any:
        """The result, so that the module's code is told whole shapes of it.

        Args:
            first: which of the layer's outputs the first tensor is.

        Raises:
            WorkError: it is not the part that was planned.
        """
        tensors = result if isinstance(result, (tuple, list)) else (result,)
        dim, shapes = self.piece.cut.dim, self.layer.output_shapes
        for number, tensor in enumerate(tensors, first):
            # Parts of a projection may be unequal; networks of older files have the first one's shape alone.
            expected = shapes[min(number, len(shapes) - 1)][dim:]
            # Another axis may leave a rank some tokens of it.
            shape = whole_shape_of_tokens(tensor) or tensor.shape
            # Several samples may share the dim, one after the other.
            if shape[dim] % self.shorter(expected[0]) or tuple(shape[dim:][1:]) != expected[1:]:
                raise WorkError(
                    f"layer {self.layer.name} made {'x'.join(map(str, tensor.shape))} of its part, which is none of"
                    f" {'x'.join(map(str, self.layer.output_shape))}: tensor parallelism cannot run it; leave it whole"
                )
            setattr(tensor, _MARK, self)
        return result

    def take(self, tensor: torch.Tensor, cut_dim: Cut) -> torch.Tensor:
        """This rank's part of a whole tensor."""
        return _take(tensor, tensor.dim() + cut_dim.dim, cut_dim.of(tuple(tensor.shape), self.own, self.piece.atoms))


def _own_part(
    sequence: SequenceRun | None, tensor: torch.Tensor, whole: torch.Tensor
) -> tuple[torch.Tensor, float] | None:
    part: Part | None = getattr(tensor, _MARK, None)
    if part is not None and sequence and sequence.reorders(part.piece.block):
        return None
    if part is not None:
        return part.take(whole, part.piece.cut), 1.0
    own = sequence.own.own_part(tensor, whole) if sequence else whole
    return None if own is None else (own, 1.0)


def _whole_shape(sequence: SequenceRun | None, tensor: torch.Tensor) -> torch.Size | None:
    part: Part | None = getattr(tensor, _MARK, None)
    if part is None:
        return sequence.own.whole_shape(tensor) if sequence else None
    shape = list(tensor.shape)
    dim = part.piece.cut.dim
    shape[dim] = shape[dim] * part.piece.atoms // part.own.extent
    return torch.Size(shape)


class _SharedInput:
    """What some layers by columns read: its gradient is summed over the group once for all of them."""

    def __init__(self, layer: Layer, group: Group, sequence: SequenceRun | None) -> None:
        # Autocast converts nothing of products of groups.
        self._converts = layer.kind != GROUPED
        self._group, self._sequence = group, sequence
        self._whole: torch.Tensor | None = None
        self._shared: torch.Tensor | None = None

    def __call__(self, whole: torch.Tensor, ends: torch.Tensor | None = None) -> torch.Tensor:
        """Args:
        ends: of rows that are sorted by expert, where each one's end.
        """
        if self._shared is None or self._whole is not whole:
            # Converted once for all of them, so that what is summed is as narrow as what the products make.
            self._whole, read = whole, as_product_reads_it(whole) if self._converts else whole
            if self._sequence and ends is not None:
                self._shared = self._sequence.gathered_rows(read, ends)
            elif self._sequence and self._sequence.own.parted_along(whole) is not None:
                self._shared = self._sequence.gathered(read)
            else:
                self._shared = reduce_gradient(read, self._group)
        return self._shared

    def forget(self) -> None:
        """Let the activations go."""
        self._whole = self._shared = None


def _forget(inputs: tuple[_SharedInput, ...]) -> None:
    for shared in inputs:
        shared.forget()


_ARGUMENTS = {
    "linear": ("input", "weight", "bias"),
    "addmm": ("bias", "input", "weight"),
    "matmul": ("input", "weight"),
    "mm": ("input", "weight"),
}
_KEYWORDS = {"mat1": "input", "mat2": "weight", "other": "weight"}


class _Given(NamedTuple):
    input: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None


def _bind(layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Given:
    names = _ARGUMENTS[function_of(layer)]
    given = dict(zip(names, args, strict=False)) | {_KEYWORDS.get(name, name): kwargs[name] for name in kwargs}
    if function_of(layer) == "addmm" and "input" in kwargs:
        # torch calls what is added the input.
        given["bias"] = kwargs["input"]
        given["input"] = kwargs["mat1"] if "mat1" in kwargs else args[0]
    if set(given) - set(_Given._fields) or not isinstance(given["weight"], torch.nn.Parameter):
        raise WorkError(f"layer {layer.name} is called with {', '.join(given)}: tensor parallelism cannot run it so")
    return _Given(given["input"], given["weight"], given.get("bias"))


def _multiply(layer: Layer, function: Call, given: _Given) -> torch.Tensor:
    multiply: Call = F.linear if function_of(layer) == "linear" else torch.matmul
    product: torch.Tensor = instead(function, multiply)(given.input, given.weight)
    return product


class _Column:
    """Some of the output's features, from all of the input; backward all-reduces the input's gradient."""

    def __init__(self, part: Part, shared: _SharedInput, sequence: SequenceRun | None, *, last: bool) -> None:
        self._part, self._shared, self._sequence, self._last = part, shared, sequence, last

    def __call__(self, function: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._part.layer.kind == GROUPED:
            return self._of_groups(function, args, kwargs)
        given = _bind(self._part.layer, args, kwargs)
        shared = given._replace(input=self._shared(given.input))
        if self._last:
            self._shared.forget()
        if function_of(self._part.layer) == "linear":
            return self._part.mark(instead(function, F.linear)(*shared))
        if shared.bias is None:
            return self._part.mark(instead(function, torch.matmul)(shared.input, shared.weight))
        return self._part.mark(instead(function, torch.addmm)(shared.bias, shared.input, shared.weight))

    def _of_groups(self, function: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ends = ends_given(args, kwargs)
        args, kwargs = with_rows(args, kwargs, self._shared(rows_given(args, kwargs), ends))
        if self._sequence:
            args, kwargs = with_ends(args, kwargs, ends_of_all(ends))
        if self._last:
            self._shared.forget()
        return self._part.mark(function(*args, **kwargs))


class _Row:
    """All of the output's features, from some of the input; forward all-reduces the sums, then adds the bias."""

    def __init__(
        self, layer: Layer, summed: Callable[[torch.Tensor], torch.Tensor], sequence: SequenceRun | None
    ) -> None:
        self._layer, self._summed, self._sequence = layer, summed, sequence

    def __call__(self, function: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        if self._layer.kind == GROUPED and self._sequence:
            ends = ends_given(args, kwargs)
            args, kwargs = with_ends(args, kwargs, ends_of_all(ends))
            return self._sequence.scattered_rows(function(*args, **kwargs), ends)
        if self._layer.kind == GROUPED:
            return self._summed(function(*args, **kwargs))
        given = _bind(self._layer, args, kwargs)
        made = self._summed(_multiply(self._layer, function, given))
        if given.bias is None:
            return made
        bias = self._sequence.bias(given.bias) if self._sequence else given.bias
        # A product and its bias are of one dtype, as in the layer that is whole.
        added: torch.Tensor = beside(function, torch.add)(made, bias.to(made.dtype))
        if self._sequence:
            self._sequence.own.mark(added, SEQUENCE)
        return added


class _Inside:
    """An operation on this rank's part of what it reads."""

    def __init__(self, part: Part, random: OwnRandomness) -> None:
        self._part, self._random = part, random
        self._layer = part.layer
        self._sized = _SIZED.get(function_of(part.layer)) if part.layer.kind == "view" else None

    def __call__(self, function: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._part.piece.takes:
            args, kwargs = self._taken(args, kwargs)
        if self._sized is not None:
            args, kwargs = self._sized(self._part, args, kwargs)
        if not self._draws(args, kwargs):
            return self._part.mark(function(*args, **kwargs))
        with self._random.used(args[0] if args else next(iter(kwargs.values()))):
            return self._part.mark(function(*args, **kwargs))

    def _draws(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self._layer.kind == "dropout":
            return bool(self._layer.attributes["training"])
        return self._layer.kind == "attention" and bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))

    def _taken(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with this rank's part in the place of constants, which are there whole."""
        cuts = iter(self._part.piece.inputs)

        def part_of(tensor: torch.Tensor) -> torch.Tensor:
            cut_dim = next(cuts, None)
            return tensor if cut_dim is None or getattr(tensor, _MARK, None) else self._part.take(tensor, cut_dim)

        taken: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(torch.Tensor, part_of, (args, kwargs))
        return taken


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _shorten(part: Part, sizes: list[int], at: int) -> list[int]:
    """Sizes of a view with that of the dim that is cut, if it is among them, cut too; -1 finds itself."""
    if 0 <= at < len(sizes) and sizes[at] != -1:
        sizes[at] = part.shorter(sizes[at])
    return sizes


def _whole_view(part: Part, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """view, reshape, expand: sizes of all dims."""
    given = args[1:] or tuple(kwargs.values())
    sizes = list(given[0] if isinstance(given[0], (tuple, list)) else given)
    if any(not isinstance(size, int) for size in sizes):
        # A view as another dtype.
        return args, kwargs
    return (args[0], _shorten(part, sizes, len(sizes) + part.piece.cut.dim)), {}


def _unflattened(part: Part, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """unflatten: the dim, and the sizes that it is parted into."""
    given = dict(zip(("input", "dim", "sizes"), args, strict=False)) | kwargs
    tensor, dim, sizes = given["input"], given["dim"] % given["input"].dim(), list(given["sizes"])
    dims = tensor.dim() - 1 + len(sizes)
    return (tensor, dim, _shorten(part, sizes, dims + part.piece.cut.dim - dim)), {}


def _split(part: Part, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """split: the size of the parts, or that of each, along a dim that may be the one that is cut."""
    given = dict(zip(("tensor", "sizes", "dim"), args, strict=False)) | {
        {"split_size": "sizes", "split_size_or_sections": "sizes"}.get(name, name): kwargs[name] for name in kwargs
    }
    tensor, sizes, dim = given["tensor"], given["sizes"], given.get("dim", 0)
    if dim % tensor.dim() == tensor.dim() + part.piece.cut.dim:
        sizes = part.shorter(sizes) if isinstance(sizes, int) else [part.shorter(size) for size in sizes]
    return (tensor, sizes, dim), {}


_SIZED = {
    "view": _whole_view,
    "reshape": _whole_view,
    "expand": _whole_view,
    "unflatten": _unflattened,
    "split": _split,
}
