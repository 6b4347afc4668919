"""A network's stages: the cuts that a user names, and the cut that balances best. Torch-free.

A stage is a contiguous range of layers in forward order. The loss belongs to the last stage. Where a network may be
cut, and what crosses there: :mod:`paradl_bench.strategies.pipeline.crossings`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from paradl_bench.core.cache_keys import Same
from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import Layer, ModelGraph, Tensor
from paradl_bench.network.models.language_sizes import UNTIED, language_model_names
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.compute import gradient_order, operations_of_forward
from paradl_bench.plan.mesh import degree_of
from paradl_bench.plan.schedules.catalog import schedule_of
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.strategies.pipeline.axis import PipelineOptions
from paradl_bench.strategies.pipeline.crossings import Crossing, data_flow, elements, refusals, shared_spans, users
from paradl_bench.strategies.pipeline.even_cuts import cut_evenly


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a pipeline.

    Attributes:
        index: in the order of forward.
        layers: indices in the network.
        receives, sends: the tensors that cross its cuts, ascending.
        made: per tensor that is sent, the layer that made what it holds, by index in the network.
        network: the stage's layers, parameters and buffers; what it receives is called ``input``.
    """

    index: int
    layers: range
    receives: tuple[Crossing, ...]
    sends: tuple[Crossing, ...]
    made: tuple[int, ...]
    network: ModelGraph

    @property
    def outputs(self) -> tuple[int, ...]:
        """Indices, in the stage's own network, of what is sent; of its last layer where nothing is: the loss.

        What is passed on from an earlier stage is made by no layer of this one.
        """
        own = tuple(dict.fromkeys(index - self.layers.start for index in self.made if index in self.layers))
        return own if self.sends else (len(self.layers) - 1,)


def cut_into_stages(network: ModelGraph, ranks: int, settings: PlanSettings) -> tuple[Stage, ...]:
    """The stages of a pipeline over ``ranks`` ranks.

    Raises:
        UserError: the network can't be cut into so many, or not where the settings ask for.
    """
    # Comparing two networks layer by layer takes longer than to cut one.
    options = settings.of(PipelineOptions)
    return _cut(Same(network), schedule_of(options.schedule).stages(ranks), options.stages)


# A plan's check, the plan and its memory all ask for the same.
@functools.lru_cache(maxsize=16)
def _cut(same: Same[ModelGraph], count: int, first_layers: tuple[str, ...]) -> tuple[Stage, ...]:
    network = same.thing
    cuts = given_cuts(network, first_layers, count) if first_layers else balanced_cuts(network, count)
    bounds = (0, *cuts, len(network.layers))
    names = {layer.name: i for i, layer in enumerate(network.layers)}
    owners, flow = _owners(network, bounds), data_flow(network)
    crossed = flow.crossing()
    sends = [crossed[bounds[stage + 1]] if stage + 1 < count else () for stage in range(count)]
    return tuple(
        Stage(
            index=stage,
            layers=range(bounds[stage], bounds[stage + 1]),
            receives=crossed[bounds[stage]] if stage else (),
            sends=sends[stage],
            made=tuple(flow.made_by(value, bounds[stage + 1]) for value in sends[stage]),
            network=_part(network, range(bounds[stage], bounds[stage + 1]), names, owners, stage),
        )
        for stage in range(count)
    )


def balanced_stages(
    network: ModelGraph, strategy: Strategy, settings: PlanSettings, weights: Sequence[float]
) -> tuple[str, ...]:
    """First layers of the stages that balance the weights, seconds of every layer, as :func:`given_cuts` takes them.

    Raises:
        UserError: the network can't be cut into so many.
    """
    count = schedule_of(settings.of(PipelineOptions).schedule).stages(degree_of(strategy, Trait.STAGES))
    return tuple(network.layers[cut].name for cut in balanced_cuts(network, count, weights))


def cut_names(network: ModelGraph, strategy: Strategy, settings: PlanSettings) -> tuple[str, ...]:
    """First layers of a pipeline's stages but the first, whatever they were cut by; none without a pipeline."""
    ranks = degree_of(strategy, Trait.STAGES)
    return first_layers(network, cut_into_stages(network, ranks, settings)) if ranks > 1 else ()


def first_layers(network: ModelGraph, stages: Sequence[Stage]) -> tuple[str, ...]:
    """Names of the first layer of every stage but the first, as :func:`given_cuts` takes them."""
    return tuple(network.layers[stage.layers.start].name for stage in stages[1:])


def _owners(network: ModelGraph, bounds: Sequence[int]) -> dict[str, int]:
    """The stage of every parameter and buffer; what no layer uses is the last one's."""
    stage_of = [stage for stage in range(len(bounds) - 1) for _ in range(bounds[stage], bounds[stage + 1])]
    first = {name: stage_of[span[0]] for name, span in shared_spans(network).items()}
    last = len(bounds) - 2
    owners = {parameter.name: first.get(parameter.name, last) for parameter in network.parameters}
    of_modules = {buffer.name: first.get(buffer.name.rpartition(".")[0], last) for buffer in network.buffers}
    return owners | {name: first.get(name, of_module) for name, of_module in of_modules.items()}


def _part(network: ModelGraph, layers: range, names: dict[str, int], owners: dict[str, int], stage: int) -> ModelGraph:
    def owned(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in tensors if owners[tensor.name] == stage)

    def renamed(layer: Layer) -> Layer:
        inputs = dict.fromkeys(name if names.get(name, -1) in layers else "input" for name in layer.inputs)
        # Tensors are told apart in the whole network alone.
        return msgspec.structs.replace(layer, inputs=tuple(inputs), reads=(), writes=None)

    return msgspec.structs.replace(
        network,
        layers=tuple(renamed(network.layers[i]) for i in layers),
        parameters=owned(network.parameters),
        buffers=owned(network.buffers),
        gradient_order=tuple(name for name in network.gradient_order if owners[name] == stage),
        # Every rank holds these, and exchanges none of them.
        frozen=(),
        registered=(),
    )


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
    found = [*exact, *of_module[:1]]
    if found:
        allowed = set(allowed_cuts(network))
        return next((i for i in found if i in allowed), min(found))
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
    if weights is None:
        weights = [float(layer.fw_flops + layer.bw_input_flops + layer.bw_weight_flops) for layer in network.layers]
    places = (0, *allowed_cuts(network), len(network.layers))
    crossed = data_flow(network).crossing()
    sent = [sum(elements(network, value) for value in crossed[cut]) for cut in places]
    above, trained = [0.0], [0]
    for trains, weight in zip(_trains(network), weights, strict=True):
        above.append(above[-1] + weight)
        trained.append(trained[-1] + trains)
    cut = cut_evenly(places, np.array(above)[list(places)], np.array(trained)[list(places)], sent, stages)
    if cut is None:
        raise UserError(
            f"{network.name} cannot be cut into {stages} stages that each have a parameter: {most_stages(network)} is"
            f" the most{widest_share(network)}"
        )
    return cut


def _trains(network: ModelGraph) -> list[bool]:
    """Per layer, whether it has a parameter that gets a gradient: a rank without one has nothing to train."""
    arriving = set(gradient_order(network))
    return [not arriving.isdisjoint(layer.parameters) for layer in network.layers]


def widest_share(network: ModelGraph) -> str:
    """Which parameter keeps the most layers together, where one does, and what could be trained instead."""
    trained = {parameter.name for parameter in network.parameters}
    spans = {name: span for name, span in shared_spans(network).items() if name in trained and span[0] < span[1]}
    if not spans:
        return ""
    name = max(spans, key=lambda name: spans[name][1] - spans[name][0])
    untied = f"{network.name}{UNTIED}"
    instead = f"; {untied}, with weights of its own in both places, can be" if untied in language_model_names() else ""
    return f", since {name} is used by {users(network, spans[name])}{instead}"


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
