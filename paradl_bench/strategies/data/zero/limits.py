"""What torch's ZeRO cannot run, and what a stage of it does not nest with. Torch-free."""

from __future__ import annotations

import functools
import math

import msgspec

from paradl_bench.core.cache_keys import Same
from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import ranks_along, sharing_axes, zero_stage
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.strategies.data.zero.units import units_of
from paradl_bench.strategies.passes.recomputation import segments_of


def check_zero(network: ModelGraph, strategy: Strategy, settings: PlanSettings) -> None:
    """Refuse what torch's ZeRO cannot run, or not to the byte.

    Raises:
        UserError: a nesting; one rank; under stages 2 and 3 synchronised batch norm, a parameter that is frozen, has no
            dims, or is changed in forward, work in place on a view that a unit returns, and segments computed again
            that lie in several units, or beside an axis that shares layers out.
    """
    stage, whole = zero_stage(strategy), _with_prefix(strategy, 0)
    ranks = ranks_along(strategy, sharing_axes(strategy))
    instead = _with_prefix(strategy, 1)
    if ranks == 1:
        raise UserError(f"strategy {strategy}: one rank has nothing to shard; {whole} is the same")
    _check_beside(strategy, stage)
    _check_dtypes(network, strategy, str(whole))
    if stage == 1:
        return
    if settings.batch_norm == "sync":
        raise UserError(f"strategy {strategy}: synchronised batch norm runs with {whole} and {instead}, not with it")
    for parameter in network.parameters:
        if not parameter.shape:
            raise UserError(f"strategy {strategy}: parameter {parameter.name} has no dim to shard; give it one")
    unsharded = _unsharded(Same(network))
    if unsharded is not None:
        layer, name, is_trained = unsharded
        if not is_trained:
            raise UserError(f"strategy {strategy}: parameter {name} of {layer} is frozen, which {instead} allows")
        raise UserError(
            f"strategy {strategy}: {layer} changes parameter {name} in forward, but ranks hold only rows of it;"
            f" {instead} allows that"
        )
    if stage == 3:
        _check_views(network, strategy)
    _check_segments(network, strategy, settings, instead)


def _check_dtypes(network: ModelGraph, strategy: Strategy, whole: str) -> None:
    """Refuse parameters of several dtypes together, which torch holds in one buffer."""
    stage = zero_stage(strategy)
    together = [("the model", network.parameters)]
    if stage > 1:
        together = [(unit.name or "what is in no other unit", unit.parameters) for unit in units_of(network)]
    for where, parameters in together:
        other = next((parameter for parameter in parameters if parameter.dtype != parameters[0].dtype), None)
        if other is not None:
            raise UserError(
                f"strategy {strategy}: {where} has {parameters[0].name} in {parameters[0].dtype} and {other.name} in"
                f" {other.dtype}, and torch's ZeRO stage {stage} holds them in one buffer; give them one dtype, or take"
                f" {whole}"
            )


def _check_segments(network: ModelGraph, strategy: Strategy, settings: PlanSettings, instead: str) -> None:
    """Refuse segments that are computed again and run a unit's hooks once more."""
    if settings.recompute and not all(axis.has(Trait.DIVIDES_BATCH) for axis in strategy.axes if axis.degree > 1):
        raise UserError(
            f"strategy {strategy}: --recompute runs with this stage of ZeRO beside data parallelism alone; {instead}"
            " allows it"
        )
    units = units_of(network)[:-1] if settings.recompute else ()
    unit_of = {layer: number for number, unit in enumerate(units) for layer in unit.layers}
    for segment in segments_of(network, settings):
        layers = set(segment.layers)
        inside = sorted({unit_of[layer] for layer in layers if layer in unit_of})
        parted = next((units[number].name for number in inside if not layers <= set(units[number].layers)), None)
        if parted is not None:
            raise UserError(
                f"strategy {strategy}: --recompute {segment.name} runs {parted} again, whose parameters are gathered by"
                f" themselves; name {parted} or modules inside of it, or take {instead}"
            )


def _check_beside(strategy: Strategy, stage: int) -> None:
    """Refuse axes that a stage does not nest with.

    Raises:
        UserError: under stages 2 and 3 blocks of positions.
    """
    for axis in strategy.axes:
        if stage > 1 and axis.has(Trait.CUTS_POSITIONS) and axis.degree > 1:
            raise UserError(
                f"strategy {strategy}: {axis.kind} parallelism gathers a block once for all that read it, and under"
                f" ZeRO stage {stage} every unit of torch's fully_shard has tensors of its own; write"
                f" {_with_prefix(strategy, 1)}"
            )


def _with_prefix(strategy: Strategy, stage: int) -> str:
    """The strategy with another stage; without one, its data axes are one, as d2z3d4 is d8."""
    of_data = [axis for axis in strategy.axes if axis.has(Trait.DIVIDES_BATCH) and not axis.has(Trait.SHARDS_LAYERS)]
    parted = next(axis for axis in of_data if axis.prefix)
    if stage:
        axes = [msgspec.structs.replace(axis, prefix=stage) if axis is parted else axis for axis in strategy.axes]
        return "".join(map(str, axes))
    extents = (math.prod(axis.degree for axis in of_data),)
    data = msgspec.structs.replace(parted, prefix=0, extents=extents)
    return "".join(
        str(data if axis is parted else axis) for axis in strategy.axes if axis is parted or axis not in of_data
    )


# A search asks for every mesh.
@functools.lru_cache(maxsize=8)
def _unsharded(same: Same[ModelGraph]) -> tuple[str, str, bool] | None:
    """The first layer that reads a frozen parameter or changes a trained one, with that, and whether it is trained."""
    trained = {parameter.name for parameter in same.thing.parameters}
    for layer in same.thing.layers:
        frozen = [(layer.name, name, False) for name in layer.parameters if name not in trained]
        changed = [(layer.name, name, True) for name in _changed(layer) if name in trained]
        if frozen or changed:
            return (*frozen, *changed)[0]
    return None


def _check_views(network: ModelGraph, strategy: Strategy) -> None:
    """Refuse work in place on a view that a unit returns.

    Autograd then makes the view anew, without the hook by which ``fully_shard`` knows that backward comes to the unit.
    """
    layers = {layer.name: i for i, layer in enumerate(network.layers)}
    unit_of = {i: unit for unit in units_of(network)[:-1] for i in unit.layers}
    for i, layer in enumerate(network.layers):
        for name, _ in layer.values_written:
            made = layers.get(name, i)
            unit = unit_of.get(made)
            if unit is not None and network.layers[made].returns_view and unit_of.get(i) is not unit:
                raise UserError(
                    f"strategy {strategy}: {layer.name} changes in place what {unit.name} returns, a view, which"
                    f" torch's fully_shard loses sight of; do that out of place, or take {_with_prefix(strategy, 1)}"
                )


def _changed(layer: Layer) -> tuple[str, ...]:
    """Names among which are those of the parameters that a layer changes."""
    itself = layer.attributes.get("in_place") and not layer.values_written
    return (*layer.state, *(layer.parameters if itself else ()))
