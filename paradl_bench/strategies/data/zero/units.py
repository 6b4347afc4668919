"""Which parameters are sharded, gathered and reduced together: the units of torch's ``fully_shard``.

The rule reads a network's names alone, so that a plan knows the units without the module:

- From the model down, a module is a unit if it has parameters of its own, or holds at most an eighth of all
  parameters, or at most half of them where a number names it (``layer4.1``, ``h.7``: a block of a sequence). Others are
  parted into their children. So is what has numbered children alone (Sequential, ModuleList); a module with parameters
  that several operations read, or one outside of it, and one whose operations read parameters from outside (tied
  weights, which torch takes in one group alone); one that runs in several pieces; one that changes in place what it
  is given, which torch refuses; and one without operations, since names do not tell whether it is called all the same.
- The whole model is the last unit, with the parameters that are then in no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

import msgspec

from paradl_bench.network.graph import DTYPE_BYTES, ModelGraph, Tensor
from paradl_bench.plan.axis_planner import Latest
from paradl_bench.plan.compute import layers_with_gradient

_NAMES = 1 << 16
"""Names whose modules are remembered: shards of a network, of which a search makes hundreds, have the same names."""
_SMALL = 1 / 8
_BLOCK = 1 / 2


class Unit(NamedTuple):
    """Parameters that are communicated together.

    Attributes:
        name: of the module; empty for the whole model.
        layers: indices of the operations inside of it; of the whole model's, those in none of the others.
    """

    name: str
    parameters: tuple[Tensor, ...]
    layers: tuple[int, ...]


_LATEST: Latest[tuple[Unit, ...]] = Latest()
"""The plan and the memory model ask for the units of one network, with every number of micro-batches."""


def units_of(network: ModelGraph) -> tuple[Unit, ...]:
    """The units in registration order, the whole model last; that one may have no parameters."""
    return _LATEST.get(network, None, lambda: _find_units(network))


def _find_units(network: ModelGraph) -> tuple[Unit, ...]:
    units = list(_units_below(_Modules(network), ""))
    taken = {parameter.name for unit in units for parameter in unit.parameters}
    inside = {layer for unit in units for layer in unit.layers}
    rest = tuple(parameter for parameter in network.parameters if parameter.name not in taken)
    outside = tuple(i for i in range(len(network.layers)) if i not in inside)
    return (*units, Unit("", rest, outside))


class _Modules:
    """What belongs to each module: indices of parameters and operations; and which operations read each parameter."""

    def __init__(self, network: ModelGraph) -> None:
        self.network = network
        # Every module is compared with it, and it is a sum over all parameters.
        self.parameter_bytes = network.parameter_bytes
        self.parameters = _by_module(parameter.name for parameter in network.parameters)
        self.layers = _by_module(layer.name for layer in network.layers)
        self.readers: dict[str, list[int]] = {}
        for i, layer in enumerate(network.layers):
            for name in set(layer.parameters):
                self.readers.setdefault(name, []).append(i)

    def parameters_of(self, module: str) -> tuple[Tensor, ...]:
        """In registration order."""
        return tuple(self.network.parameters[i] for i in self.parameters.get(module, ()))


def _by_module(names: Iterable[str]) -> dict[str, list[int]]:
    """Indices of names, by every module that they belong to; ``#2`` marks an operation's second call."""
    indices: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        for module in _modules_of(name):
            indices.setdefault(module, []).append(i)
    return indices


@lru_cache(_NAMES)
def _modules_of(name: str) -> tuple[str, ...]:
    ends = (*(at for at, sign in enumerate(name) if sign in ".#"), len(name))
    return tuple(name[:end] for end in ends)


def _units_below(modules: _Modules, module: str) -> Iterator[Unit]:
    for child in _children(modules.network, module):
        unit = _unit(modules, child) if _has_right_size(modules, child) else None
        if unit is None:
            yield from _units_below(modules, child)
        else:
            yield unit


def _has_right_size(modules: _Modules, module: str) -> bool:
    """Whether sizes and parameters of its own make a module a unit."""
    network, below = modules.network, modules.parameters_of(module)
    if any(parameter.name.rpartition(".")[0] == module for parameter in below):
        return True
    numbered = module.rpartition(".")[2].isdigit()
    small = sum(parameter.bytes for parameter in below) <= (_BLOCK if numbered else _SMALL) * modules.parameter_bytes
    return small and not all(name.rpartition(".")[2].isdigit() for name in _children(network, module))


def _unit(modules: _Modules, module: str) -> Unit | None:
    """The module as a unit; None where its operations are no one piece, or share parameters or memory with others."""
    network, parameters = modules.network, modules.parameters_of(module)
    layers = tuple(modules.layers.get(module, ()))
    inside = {network.layers[i].name for i in layers}
    parameter_names = {parameter.name for parameter in parameters}
    reads = [modules.readers.get(name, []) for name in parameter_names]
    in_one_piece = bool(layers) and layers[-1] - layers[0] + 1 == len(layers)
    tied = not parameter_names.issuperset(name for i in layers for name in network.layers[i].parameters)
    alone = not tied and all(len(readers) <= 1 and set(readers) <= set(layers) for readers in reads)
    changes_given = not inside.issuperset(name for i in layers for name, _ in network.layers[i].values_written)
    return Unit(module, parameters, layers) if in_one_piece and alone and not changes_given else None


def _children(network: ModelGraph, module: str) -> list[str]:
    """Modules with parameters right below one, in registration order."""
    prefix = f"{module}." if module else ""
    paths = (p.name.removeprefix(prefix).split(".") for p in network.parameters if p.name.startswith(prefix))
    return list(dict.fromkeys(prefix + path[0] for path in paths if len(path) > 1))


def shard_elements(parameter: Tensor, ranks: int, dim: int = 0) -> int:
    """Elements of a parameter that each rank sends: rows of a dim, as many as the rank with most has."""
    rows = -(-parameter.shape[dim] // ranks)
    return rows * (parameter.elements // max(parameter.shape[dim], 1))


def shard_bytes(parameters: tuple[Tensor, ...], ranks: int) -> int:
    """Bytes of the ranks' equal, padded shards of parameters."""
    return sum(shard_elements(parameter, ranks) * DTYPE_BYTES[parameter.dtype] for parameter in parameters)


def as_reduced(parameters: tuple[Tensor, ...], reduce_dtype: str) -> tuple[Tensor, ...]:
    """Parameters with the dtype that their gradients are reduced in."""
    if reduce_dtype == "own":
        return parameters
    return tuple(msgspec.structs.replace(parameter, dtype=reduce_dtype) for parameter in parameters)


def optimizer_parts(parameters: Iterable[Tensor], ranks: int) -> tuple[tuple[Tensor, ...], ...]:
    """Whose optimizer state each rank keeps under stage 1, of parameters in registration order.

    Largest first, each to the rank with fewest elements (torch's ZeroRedundancyOptimizer, ``_partition_parameters``).
    """
    parts: list[list[Tensor]] = [[] for _ in range(ranks)]
    elements = [0] * ranks
    for parameter in sorted(parameters, key=lambda p: p.elements, reverse=True):
        rank = elements.index(min(elements))
        parts[rank].append(parameter)
        elements[rank] += parameter.elements
    return tuple(map(tuple, parts))


def units_that_reduce_late(network: ModelGraph, units: tuple[Unit, ...]) -> set[str]:
    """Names of units whose backward nothing leaves: no operation before them that they read has a gradient."""
    has_gradient = layers_with_gradient(network)
    index = {layer.name: i for i, layer in enumerate(network.layers)}
    late = {""}
    for unit in units[:-1]:
        read = {index[name] for i in unit.layers for name in network.layers[i].inputs if name in index}
        if not any(has_gradient[i] for i in read - set(unit.layers)):
            late.add(unit.name)
    return late
