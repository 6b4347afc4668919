"""Activation recomputation: segments of a network that keep their inputs alone, and run forward again in backward.

A segment is a module, or a run of children of a ``torch.nn.Sequential`` (``features.3:8``, as slices are written). The
rule reads a network's names, so that a plan knows the segments without the module. ``all`` takes

- from the model down, modules of several operations that a number names (``layer1.0``, ``h.7``: a block of a
  sequence), or that hold at most an eighth of all operations and are no such sequence themselves;
- of a sequence of single operations (VGG's features), about as many runs as each then has operations.

``attention`` takes the innermost modules that call an attention, with the projections that these hold.

What runs in several pieces is no segment, nor what changes in place what it is given, nor what reads a tensor that is
changed in place behind it: what would be computed again from it is something else.

All of a segment is computed again, its communication too, when backward comes to the first of its operations. Where
stages part a segment, each computes its own part again. ZeRO's units that are gathered are whole while backward is in
them, so a segment lies in one of them.

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", sections 4.1 and 4.3; torch.utils.checkpoint.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from paradl_bench.core.errors import UserError
from paradl_bench.core.units import is_whole
from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.network.kinds.kind import layer_kinds
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.axis_planner import Latest
from paradl_bench.plan.compute import operations_of_forward
from paradl_bench.plan.mesh import degree_of, zero_stage
from paradl_bench.plan.settings import RECOMPUTE_ALL, PlanSettings
from paradl_bench.plan.strategy import Strategy

ATTENTION = ("attention",)
_ATTENTIONS = ("attention", "multi_head_attention")
_SMALL = 1 / 8
_GIVEN = -1
"""In the place of a layer's index: what the network reads."""

_MOST_CHILDREN = 1 << 16
"""Of a sequence of modules; a longer run names none."""


class Segment(NamedTuple):
    """What is computed again together.

    Attributes:
        name: as ``--recompute`` takes it.
        module: that holds it: the segment itself, or the sequence that ``children`` (a range) are of.
        layers: indices of its operations in the network.
    """

    name: str
    module: str
    children: range | None
    layers: range


_LATEST: Latest[tuple[Segment, ...]] = Latest()


def segments_of(network: ModelGraph, settings: PlanSettings) -> tuple[Segment, ...]:
    """The segments that ``settings.recompute`` names, in the order of forward.

    Raises:
        UserError: a name that fits no module, one that cannot be computed again, or two that share operations.
    """
    chosen = settings.recompute
    if not chosen or not network.layers:
        return ()
    return _LATEST.get(network, chosen, lambda: _find(network, chosen))


def parts_within(network: ModelGraph, settings: PlanSettings, layers: range) -> tuple[range, ...]:
    """What a stage, a range of layers, computes again: its part of every segment, by index in the network.

    A stage changes in place nothing that it receives: such cuts are refused.

    Raises:
        UserError: what :func:`segments_of` refuses.
    """
    of_segments = (segment.layers for segment in segments_of(network, settings))
    parts = (range(max(segment.start, layers.start), min(segment.stop, layers.stop)) for segment in of_segments)
    return tuple(part for part in parts if part)


def repeated_by_model(network: ModelGraph) -> tuple[range, ...]:
    """Indices of the layers that the model's own ``torch.utils.checkpoint`` runs again, those of each call together."""
    layers_by_call: dict[str, list[int]] = {}
    for i, layer in enumerate(network.layers):
        if layer.repeats:
            layers_by_call.setdefault(layer.repeats_with, []).append(i)
    return tuple(range(layers[0], layers[-1] + 1) for layers in layers_by_call.values())


def check_recomputation(network: ModelGraph, strategy: Strategy, settings: PlanSettings) -> None:
    """Refuse what cannot run.

    Raises:
        UserError: segments that :func:`segments_of` refuses or that the model computes again by itself, or a model that
            does so under a strategy that does not see it.
    """
    _check_own(network, strategy, settings)
    if not settings.recompute:
        return
    for segment in segments_of(network, settings):
        twice = next((network.layers[i].name for i in segment.layers if network.layers[i].repeats), None)
        if twice is not None:
            raise UserError(
                f"--recompute {segment.name}: layer {twice} runs again already, by the model's own"
                " torch.utils.checkpoint; leave one of them out"
            )


def _check_own(network: ModelGraph, strategy: Strategy, settings: PlanSettings) -> None:
    """Refuse the model's own ``torch.utils.checkpoint`` where the layers that it runs again are sharded or exchanged.

    Its second forward is run by autograd, which knows nothing of what a strategy does in the place of layers.
    """
    layer = next((layer for layer in network.layers if layer.repeats), None)
    if layer is None:
        return
    where = f"strategy {strategy}: layer {layer.name} runs inside of the model's own torch.utils.checkpoint"
    cutting = (axis for axis in strategy.axes if axis.has(Trait.SHARDS_LAYERS) or axis.has(Trait.STAGES))
    sharding = next((axis for axis in cutting if axis.degree > 1), None)
    if sharding is not None:
        raise UserError(
            f"{where}, whose second forward is not {sharding.kind} parallel; leave that out, and give --recompute"
            " instead"
        )
    replicas = degree_of(strategy, Trait.DIVIDES_BATCH)
    again = (layer for layer in network.layers if layer.repeats and layer.kind == "batch_norm")
    norm = next((layer for layer in again if layer.attributes["training"]), None)
    if norm is not None and replicas > 1 and settings.batch_norm == "sync":
        raise UserError(
            f"strategy {strategy}: layer {norm.name} runs inside of the model's own torch.utils.checkpoint, whose"
            " second forward is not synchronised; leave that out, and give --recompute instead"
        )
    if replicas > 1 and any(layer.repeats == "reentrant" for layer in network.layers):
        _check_reentrant(network, strategy, where)


def _check_reentrant(network: ModelGraph, strategy: Strategy, where: str) -> None:
    if zero_stage(strategy) > 1:
        raise UserError(f"{where}, whose backward would gather parameters once more; give it use_reentrant=False")
    unused = [p.name for p in network.parameters if network.gradient_order and p.name not in network.gradient_order]
    if unused:
        raise UserError(
            f"{where}, and parameter {unused[0]} gets no gradient: DistributedDataParallel runs the two together with"
            " use_reentrant=False alone; give it that"
        )
    readers = Counter(name for layer in network.layers for name in set(layer.parameters))
    again = (name for layer in network.layers if layer.repeats == "reentrant" for name in layer.parameters)
    shared = next((name for name in again if readers[name] > 1), None)
    if shared is not None:
        raise UserError(
            f"{where}, and several layers read parameter {shared}, whose gradient may come several times:"
            " DistributedDataParallel takes that with use_reentrant=False alone; give it that"
        )


def _find(network: ModelGraph, chosen: Sequence[str]) -> tuple[Segment, ...]:
    modules = _Modules(network)
    if tuple(chosen) == RECOMPUTE_ALL:
        segments = list(modules.blocks())
        if not segments:
            raise UserError(
                f"model {network.name} has no blocks that can be computed again; name modules, as layer1,head"
            )
    elif tuple(chosen) == ATTENTION and not modules.has(*ATTENTION):
        segments = list(modules.attentions())
    else:
        segments = [segment for text in chosen for segment in modules.named(text)]
    segments = sorted(dict.fromkeys(segments), key=lambda segment: segment.layers.start)
    for one, other in itertools.pairwise(segments):
        if other.layers.start < one.layers.stop:
            raise UserError(f"--recompute: {one.name} and {other.name} share operations; name one of them")
    return tuple(segments)


class _Modules:
    """A network's modules, as the names of its operations tell them."""

    def __init__(self, network: ModelGraph) -> None:
        self._network = network
        kinds = layer_kinds()
        index = {layer.name: i for i, layer in enumerate(network.layers)}
        buffers = tuple(f"{buffer.name}." for buffer in network.buffers)
        self._counts = [not layer.name.startswith(buffers) for layer in network.layers]
        self._reads = [tuple(index.get(name, _GIVEN) for name in layer.inputs) for layer in network.layers]
        # The layer that made the memory which a layer's output lies in.
        self._root: list[int] = []
        for i, layer in enumerate(network.layers):
            kind = kinds.get(layer.kind)
            aliases = (kind is not None and kind.view) or _in_place(layer)
            self._root.append(self._root_of(self._reads[i][0]) if aliases and self._reads[i] else i)
        self._changed = [
            (i, self._root_of(self._reads[i][0]))
            for i, layer in enumerate(network.layers)
            if _in_place(layer) and self._reads[i]
        ]
        # The loss is no module of the model's.
        self._forward = operations_of_forward(network)
        paths = [_paths(layer.name) for layer in network.layers[: self._forward]]
        all_paths = tuple(dict.fromkeys(path for layer_paths in paths for path in layer_paths))
        # A path may be a function's, or a buffer's: modules hold something.
        within = (*(layer.name for layer in network.layers), *(parameter.name for parameter in network.parameters))
        holding = {above for name in within for above in _paths(name)[:-1]} - {
            buffer.name for buffer in network.buffers
        }
        self._paths = {path: None for path in all_paths if path in holding}
        parts: dict[str, list[int]] = {path: [] for path in all_paths}
        for i, layer_paths in enumerate(paths):
            for path in layer_paths:
                parts[path].append(i)
        self._inside = parts

    def _root_of(self, layer: int) -> int:
        return layer if layer == _GIVEN else self._root[layer]

    def _operations(self, layers: Sequence[int]) -> int:
        """Operations among layers, counters of batches left out."""
        return sum(self._counts[i] for i in layers)

    def named(self, text: str) -> Iterator[Segment]:
        """The segments of one name, pattern or slice."""
        module, _, ends = text.rpartition(".")
        first, colon, last = ends.partition(":")
        if colon:
            if not (is_whole(first) and is_whole(last) and int(first) < int(last) <= _MOST_CHILDREN):
                raise UserError(f"--recompute {text}: write a run of a sequence's children as features.3:8")
            segments = [self._run(module, range(int(first), int(last)))]
        else:
            # A module's own name is no pattern.
            fitting = [text] if self.has(text) else [path for path in self._paths if fnmatchcase(path, text)]
            segments = [self._module(path) for path in fitting if not set(_paths(path)[:-1]) & set(fitting)]
        if not segments or not all(segment.layers for segment in segments):
            known = ", ".join([path for path in self._paths if self._operations(self._inside[path]) > 1][:5])
            raise UserError(f"--recompute {text}: {self._network.name} has no such module; it has {known}, ...")
        for segment in segments:
            why = self._obstacle(segment)
            if why:
                raise UserError(f"--recompute {segment.name}: it cannot be computed again, since {why}")
            yield segment

    def has(self, name: str) -> bool:
        """Whether a module has this name."""
        return name in self._paths

    def attentions(self) -> Iterator[Segment]:
        """Those of ``attention``."""
        calls = [layer.name for layer in self._network.layers[: self._forward] if layer.kind in _ATTENTIONS]
        holding = [next((path for path in reversed(_paths(name)) if self.has(path)), "") for name in calls]
        if not all(holding) or not holding:
            raise UserError(
                f"--recompute attention: {self._network.name} has no modules that call an attention of torch; name"
                " modules, as layer1,head"
            )
        for path in dict.fromkeys(holding):
            yield from self.named(path)

    def blocks(self, module: str = "") -> Iterator[Segment]:
        """Those of ``all`` below a module."""
        children = self._children(module)
        single = all(self._operations(self._inside[child]) == 1 for child in children)
        if module and single and len(children) > 1 and _is_sequence(children):
            yield from self._runs(module, len(children))
            return
        for child in children:
            is_list = _is_sequence(self._children(child))
            small = len(self._inside[child]) <= _SMALL * len(self._network.layers)
            chosen = child in self._paths and (child.rpartition(".")[2].isdigit() or (small and not is_list))
            segment = self._module(child)
            if chosen and self._can_be(segment):
                yield segment
            else:
                yield from self.blocks(child)

    def _runs(self, module: str, count: int) -> Iterator[Segment]:
        """A sequence of single operations in runs that can be segments; what none can take is left out."""
        runs = math.isqrt(count - 1) + 1
        starts = [0]
        for cut in (round(i * count / runs) for i in range(1, runs)):
            after = [
                n
                for n in range(max(cut, starts[-1] + 1), count)
                if not self._obstacle(self._run(module, range(n, n + 1)))
            ]
            starts += after[:1]
        for start, stop in zip(starts, [*starts[1:], count], strict=True):
            segment = self._run(module, range(start, stop))
            if self._can_be(segment):
                yield segment

    def _children(self, module: str) -> list[str]:
        depth = module.count(".") + 2 if module else 1
        inside = self._inside[module] if module else range(self._forward)
        paths = (_paths(self._network.layers[i].name) for i in inside)
        return list(dict.fromkeys(path[depth - 1] for path in paths if len(path) >= depth))

    def _can_be(self, segment: Segment) -> bool:
        return self._operations(segment.layers) > 1 and not self._obstacle(segment)

    def _module(self, path: str) -> Segment:
        inside = self._inside[path]
        return Segment(path, path, None, range(inside[0], inside[-1] + 1))

    def _run(self, module: str, children: range) -> Segment:
        inside = [i for n in children for i in self._inside.get(f"{module}.{n}", ())]
        layers = range(min(inside), max(inside) + 1) if inside else range(0)
        return Segment(f"{module}.{children.start}:{children.stop}", module, children, layers)

    def _obstacle(self, segment: Segment) -> str:
        """Why a segment cannot be computed again; empty where it can."""
        layers, names = segment.layers, self._network.layers
        modules = [segment.module] if segment.children is None else [f"{segment.module}.{n}" for n in segment.children]
        inside = {i for path in modules for i in self._inside.get(path, ())}
        other = next((i for i in layers if i not in inside), None)
        if other is not None:
            return f"{names[other].name} runs in between"
        read = {self._root_of(source) for i in layers for source in self._reads[i] if source not in layers}
        for i, root in self._changed:
            if i in layers and root not in layers:
                return f"{names[i].name} changes in place what it is given"
            if i >= layers.stop and root in read:
                return f"{names[i].name} changes in place what it reads"
        return ""


def _is_sequence(children: Sequence[str]) -> bool:
    """Whether numbers name all of them, from 0 on."""
    numbers = [child.rpartition(".")[2] for child in children]
    return bool(numbers) and numbers == [str(n) for n in range(len(numbers))]


def _in_place(layer: Layer) -> bool:
    return bool(layer.attributes.get("in_place", False))


def _paths(name: str) -> list[str]:
    """A name, and what holds it, from the outermost: ``a``, ``a.b`` of ``a.b#2``, whose number counts its calls."""
    parts = name.partition("#")[0].split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]
