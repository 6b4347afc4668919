"""A network's stages: the cuts that a user names, and the cut that balances best. Torch-free.

A stage is a contiguous range of layers in forward order. The loss belongs to the last stage. Where a network may be
cut, and what crosses there: :mod:`paradl_bench.strategies.pipeline.crossings`.

Several stages may use a parameter, as an embedding that is the output layer too. Every rank whose stages do holds it,
and updates it alike. Once its own backwards are done, it sends what it has of the gradient to each of the other ranks
that hold the parameter. It receives theirs, and adds all of them up in the order of ranks. Between two ranks that is an
all-reduce: as many bytes each way, and the same sum, to the bit, on both. Where ranks also exchange gradients with
replicas, that comes first: means of replicas add up as gradients do.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from paradl_bench.core.cache_keys import Same
from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import Layer, ModelGraph, Tensor, Value
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.compute import (
    INPUT,
    backward_layers,
    gradient_order,
    layers_with_gradient,
    operations_of_forward,
)
from paradl_bench.plan.mesh import degree_of, zero_stage
from paradl_bench.plan.schedules.catalog import schedule_of
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.strategies.pipeline.axis import PipelineOptions
from paradl_bench.strategies.pipeline.crossings import (
    Crossing,
    buffer_spans,
    buffers_of_constants,
    data_flow,
    elements,
    refusals,
    users_of_parameters,
)
from paradl_bench.strategies.pipeline.even_cuts import EvenCuts


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a pipeline.

    Attributes:
        index: in the order of forward. rank: the place along the pipeline that holds it.
        layers: indices in the network.
        receives, sends: the tensors that cross its cuts, ascending.
        made: per tensor that is sent, the layer that made what it holds, by index in the network.
        network: the stage's layers, parameters and buffers; what it receives is called ``input``.
        shared: parameters that other stages use too.
        made_again: constants that the stage makes for itself, by index in the network.
    """

    index: int
    rank: int
    layers: range
    receives: tuple[Crossing, ...]
    sends: tuple[Crossing, ...]
    made: tuple[int, ...]
    network: ModelGraph
    shared: frozenset[str] = frozenset()
    made_again: frozenset[int] = frozenset()

    @property
    def outputs(self) -> tuple[int, ...]:
        """Indices, in the stage's own network, of what is sent; of its last layer where nothing is: the loss.

        What is passed on from an earlier stage is made by no layer of this one.
        """
        made = tuple(dict.fromkeys(index - self.layers.start for index in self.made if index in self.layers))
        return made if self.sends else (len(self.layers) - 1,)


def cut_into_stages(network: ModelGraph, ranks: int, settings: PlanSettings) -> tuple[Stage, ...]:
    """The stages of a pipeline over ``ranks`` ranks.

    Raises:
        UserError: the network can't be cut into so many, or not where the settings ask for.
    """
    places = stage_ranks(ranks, settings)
    return _stages(Same(network), stage_bounds(network, ranks, settings), places, range(len(places)))


def first_stage(network: ModelGraph, ranks: int, settings: PlanSettings) -> Stage:
    """The first of :func:`cut_into_stages`, without the others."""
    places = stage_ranks(ranks, settings)
    return _stages(Same(network), stage_bounds(network, ranks, settings), places, range(1))[0]


def stage_bounds(network: ModelGraph, ranks: int, settings: PlanSettings) -> tuple[int, ...]:
    """Index of the first layer of each stage of :func:`cut_into_stages`, and of the end; raises as that does."""
    options = settings.of(PipelineOptions)
    return _bounds(Same(network), schedule_of(options.schedule).placement.stages(ranks), options.stages)


def stage_ranks(ranks: int, settings: PlanSettings) -> tuple[int, ...]:
    """Per stage, the place along a pipeline over ``ranks`` ranks that holds it."""
    return schedule_of(settings.of(PipelineOptions).schedule).placement.ranks_of_stages(ranks)


# Comparing two networks layer by layer takes longer than to cut one.
@functools.lru_cache(maxsize=64)
def _bounds(same: Same[ModelGraph], count: int, first_layers: tuple[str, ...]) -> tuple[int, ...]:
    network = same.thing
    cuts = given_cuts(network, first_layers, count) if first_layers else balanced_cuts(network, count)
    return (0, *cuts, len(network.layers))


# A plan's check, the plan and its memory all ask for the same.
@functools.lru_cache(maxsize=16)
def _stages(
    same: Same[ModelGraph], bounds: tuple[int, ...], places: tuple[int, ...], chosen: range
) -> tuple[Stage, ...]:
    network, count = same.thing, len(bounds) - 1
    names = {layer.name: i for i, layer in enumerate(network.layers)}
    flow = data_flow(network)
    made_again = [flow.made_again_in(range(*span)) for span in itertools.pairwise(bounds)]
    owners, crossed = _owners(network, bounds, made_again), flow.crossing
    trained = [parameter.name for parameter in network.parameters]
    sends = [crossed[bounds[stage + 1]] if stage + 1 < count else () for stage in range(count)]
    return tuple(
        Stage(
            index=stage,
            rank=places[stage],
            layers=range(bounds[stage], bounds[stage + 1]),
            receives=crossed[bounds[stage]] if stage else (),
            sends=sends[stage],
            made=tuple(flow.made_by(value, bounds[stage + 1]) for value in sends[stage]),
            network=_part(network, range(bounds[stage], bounds[stage + 1]), names, owners, stage),
            shared=frozenset(name for name in trained if stage in owners[name] and len(owners[name]) > 1),
            made_again=made_again[stage],
        )
        for stage in chosen
    )


def balanced_stages(
    network: ModelGraph, strategy: Strategy, settings: PlanSettings, weights: Sequence[float]
) -> tuple[str, ...]:
    """First layers of the stages that balance the weights, seconds of every layer, as :func:`given_cuts` takes them.

    Raises:
        UserError: the network can't be cut into so many.
    """
    count = schedule_of(settings.of(PipelineOptions).schedule).placement.stages(degree_of(strategy, Trait.STAGES))
    return tuple(network.layers[cut].name for cut in balanced_cuts(network, count, weights))


def cut_names(network: ModelGraph, strategy: Strategy, settings: PlanSettings) -> tuple[str, ...]:
    """First layers of a pipeline's stages but the first, whatever they were cut by; none without a pipeline."""
    ranks = degree_of(strategy, Trait.STAGES)
    return first_layers(network, cut_into_stages(network, ranks, settings)) if ranks > 1 else ()


def first_layers(network: ModelGraph, stages: Sequence[Stage]) -> tuple[str, ...]:
    """Names of the first layer of every stage but the first, as :func:`given_cuts` takes them."""
    return tuple(network.layers[stage.layers.start].name for stage in stages[1:])


def _owners(
    network: ModelGraph, bounds: Sequence[int], made_again: Sequence[frozenset[int]]
) -> dict[str, frozenset[int]]:
    """The stages that hold every parameter and buffer: those that use it; the last one what no layer uses."""
    stage_of = [stage for stage in range(len(bounds) - 1) for _ in range(bounds[stage], bounds[stage + 1])]
    first = {name: frozenset({stage_of[span[0]]}) for name, span in buffer_spans(network).items()}
    using = {name: frozenset(stage_of[i] for i in layers) for name, layers in users_of_parameters(network).items()}
    last = frozenset({len(bounds) - 2})
    holders: dict[str, set[int]] = {}
    owners = {parameter.name: using.get(parameter.name, last) for parameter in network.parameters}
    of_modules = {buffer.name: first.get(buffer.name.rpartition(".")[0], last) for buffer in network.buffers}
    of_buffers = {name: first.get(name, of_module) for name, of_module in of_modules.items()}
    for stage, constants in enumerate(made_again):
        for name in buffers_of_constants(network, constants):
            holders.setdefault(name, set()).add(stage)
    return owners | of_buffers | {name: frozenset(stages) for name, stages in holders.items()}


def _part(
    network: ModelGraph, layers: range, names: dict[str, int], owners: Mapping[str, frozenset[int]], stage: int
) -> ModelGraph:
    def owned(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in tensors if stage in owners[tensor.name])

    def renamed(layer: Layer) -> Layer:
        inputs = dict.fromkeys(name if names.get(name, -1) in layers else "input" for name in layer.inputs)
        # Tensors are told apart in the whole network alone.
        return msgspec.structs.replace(layer, inputs=tuple(inputs), reads=(), writes=None)

    return msgspec.structs.replace(
        network,
        layers=tuple(renamed(network.layers[i]) for i in layers),
        parameters=owned(network.parameters),
        buffers=owned(network.buffers),
        gradient_order=_arriving_in(network, layers, owners, stage),
        # Every rank holds these, and exchanges none of them.
        frozen=(),
        registered=(),
    )


def reads_of_received(network: ModelGraph, stage: Stage) -> dict[int, tuple[Value, ...]]:
    """What layers of a stage read that read something received, by index in the stage's network.

    What is received is called ``input``, with its place among :attr:`Stage.receives`. Constants are left out, which no
    gradient comes back from.
    """
    number, layers = {value: place for place, value in enumerate(stage.receives)}, stage.layers
    reads: dict[int, tuple[Value, ...]] = {}
    for index, values in enumerate(data_flow(network).reads[layers.start : layers.stop]):
        if not number.keys().isdisjoint(values):
            reads[index] = tuple(
                (INPUT, number[value]) if value in number else (network.layers[value.layer].name, value.output)
                for value in values
                if value in number or value.layer in layers
            )
    return reads


def _arriving_in(
    network: ModelGraph, layers: range, owners: Mapping[str, frozenset[int]], stage: int
) -> tuple[str, ...]:
    """Parameters of a stage in the order in which their gradients arrive there.

    Where other stages use a parameter too, its gradient here is complete with the first layer of this stage that reads
    it and that backward runs.
    """
    reached = _reached(Same(network))
    first: dict[str, int] = {}
    for i in (i for i in layers if i in reached):
        for name in network.layers[i].parameters:
            first.setdefault(name, i)
    arriving = [name for name in network.gradient_order if owners[name] == {stage}]
    for name in (name for name in network.gradient_order if stage in owners[name] and len(owners[name]) > 1):
        behind = (at for at, other in enumerate(arriving) if first.get(other, layers.start) < first[name])
        arriving.insert(next(behind, len(arriving)), name)
    return tuple(arriving)


@functools.lru_cache(maxsize=4)
def _reached(same: Same[ModelGraph]) -> frozenset[int]:
    return frozenset(backward_layers(same.thing, layers_with_gradient(same.thing)))


def given_cuts(network: ModelGraph, first_layers: Sequence[str], stages: int) -> tuple[int, ...]:
    """Cuts before the layers of these names, or before the first layer of the modules of these names.

    Raises:
        UserError: another number of them than the stages take, an unknown layer, layers out of order, or a cut that is
            not allowed.
    """
    if len(first_layers) != stages - 1:
        raise UserError(
            f"--stages names {len(first_layers)} layers; {stages} stages take {stages - 1}:"
            " the first layer of every stage but the first"
        )
    refused = refusals(network)
    cuts = []
    for name in first_layers:
        cut = _find(network, name)
        if cut in refused:
            raise UserError(f"--stages {name}: {network.name} cannot be cut there: {refused[cut]}")
        cuts.append(cut)
    if sorted(set(cuts)) != cuts:
        raise UserError(f"--stages {','.join(first_layers)}: layers have to follow each other as forward runs them")
    trains = _trains(network)
    for cut, after, name in zip((0, *cuts), (*cuts, len(network.layers)), ("", *first_layers), strict=True):
        if not any(trains[cut:after]):
            where = f"that starts at {name}" if name else "before the first cut"
            raise UserError(f"--stages {','.join(first_layers)}: the stage {where} has no parameter to train")
    return tuple(cuts)


def _find(network: ModelGraph, name: str) -> int:
    inside = network.layers[: operations_of_forward(network)]
    exact = [i for i, layer in enumerate(inside) if i and layer.name == name]
    of_module = [i for i, layer in enumerate(inside) if i and layer.name.startswith(f"{name}.")]
    # A layer may have the name of a module that calls others before it, as batch norm does to count.
    cuts = [*exact, *of_module[:1]]
    if cuts:
        allowed = set(allowed_cuts(network))
        return next((i for i in cuts if i in allowed), min(cuts))
    examples = ", ".join(network.layers[i].name for i in allowed_cuts(network)[:6])
    raise UserError(
        f"--stages {name}: {network.name} has no such layer behind its first; it can be cut at {examples}, ..."
    )


def allowed_cuts(network: ModelGraph) -> tuple[int, ...]:
    """Every cut that is allowed, ascending."""
    refused = refusals(network)
    return tuple(cut for cut in range(1, operations_of_forward(network)) if cut not in refused)


def balanced_cuts(network: ModelGraph, stages: int, weights: Sequence[float] | None = None) -> tuple[int, ...]:
    """Cuts that make the largest stage as small as it gets, and then send little; every stage has a parameter.

    Args:
        weights: of every layer: seconds as measured; None takes FLOPs.

    Raises:
        UserError: there are fewer places to cut at.
    """
    cut = (_by_flops(Same(network)) if weights is None else _even_cuts(network, weights)).into(stages)
    if cut is None:
        raise UserError(
            f"{network.name} cannot be cut into {stages} stages that each have a parameter: {most_stages(network)} is"
            " the most"
        )
    return cut


# A search asks for every number of stages.
@functools.lru_cache(maxsize=4)
def _by_flops(same: Same[ModelGraph]) -> EvenCuts:
    layers = same.thing.layers
    return _even_cuts(
        same.thing, [float(layer.fw_flops + layer.bw_input_flops + layer.bw_weight_flops) for layer in layers]
    )


def _even_cuts(network: ModelGraph, weights: Sequence[float]) -> EvenCuts:
    places = (0, *allowed_cuts(network), len(network.layers))
    crossed = data_flow(network).crossing
    sent = [sum(elements(network, value) for value in crossed[cut]) for cut in places]
    above, trained = [0.0], [0]
    for trains, weight in zip(_trains(network), weights, strict=True):
        above.append(above[-1] + weight)
        trained.append(trained[-1] + trains)
    return EvenCuts(places, np.array(above)[list(places)], np.array(trained)[list(places)], sent)


def _trains(network: ModelGraph) -> list[bool]:
    """Per layer, whether it has a parameter that gets a gradient: a rank without one has nothing to train."""
    arriving = set(gradient_order(network))
    return [not arriving.isdisjoint(layer.parameters) for layer in network.layers]


def most_stages(network: ModelGraph) -> int:
    """Into how many stages with a parameter each the network can be cut."""
    count = 0
    pending = False
    places = {*allowed_cuts(network), len(network.layers)}
    for i, trains in enumerate(_trains(network), start=1):
        pending = pending or trains
        if i in places and pending:
            count, pending = count + 1, False
    return max(count, 1)


def places_of_shared(network: ModelGraph, stages: Sequence[Stage]) -> dict[str, tuple[int, ...]]:
    """Per trained parameter that several ranks along the pipeline hold, their places, ascending; in one order."""
    places: dict[str, set[int]] = {}
    for stage in stages:
        for parameter in stage.network.parameters:
            places.setdefault(parameter.name, set()).add(stage.rank)
    arriving = set(gradient_order(network))
    return {name: tuple(sorted(holders)) for name, holders in places.items() if len(holders) > 1 and name in arriving}


def sent_to_places(shared: Mapping[str, tuple[int, ...]], own_place: int) -> dict[int, tuple[str, ...]]:
    """Per other place, ascending, the parameters whose gradients go both ways between it and the own one."""
    names_by_place: dict[int, list[str]] = {}
    for name, places in shared.items():
        for place in places if own_place in places else ():
            if place != own_place:
                names_by_place.setdefault(place, []).append(name)
    return {place: tuple(names_by_place[place]) for place in sorted(names_by_place)}


def check_shared(network: ModelGraph, stages: Sequence[Stage], strategy: Strategy) -> None:
    """Refuse parameters of several ranks' stages that replicas cannot exchange the gradients of.

    Raises:
        UserError: replicas hold rows of one.
    """
    shares_rows = degree_of(strategy, Trait.REPLICATES) > 1 and zero_stage(strategy) > 1
    shared = places_of_shared(network, stages) if shares_rows else {}
    for name, places in shared.items():
        raise UserError(
            f"strategy {strategy}: ranks {places[0]} and {places[-1]} of the pipeline share {name}, whose gradients are"
            f" added up whole, and replicas hold rows of it under stage {zero_stage(strategy)} of ZeRO; take z1, or"
            " untie it"
        )
