"""Plan of data parallelism with ZeRO stages, as torch runs them.

Stage 1 is DistributedDataParallel (:mod:`~paradl_bench.strategies.exchange.gradients`) with torch's
ZeroRedundancyOptimizer: each rank updates the parameters that are its own and then broadcasts them, all in one message.

Stages 2 and 3 are torch's ``fully_shard`` (FSDP2) on the units of :mod:`~paradl_bench.strategies.data.zero.units`. Each
rank holds rows of every parameter, padded to equal numbers. A unit's parameters are gathered before its forward, and
copied out of what was received; its gradients are copied in, and reduced and scattered, when backward has left the
unit, or at the end of backward where its input needs no gradient. Stage 3 frees a unit after forward and gathers it
again for backward, each unit while the one behind it computes; stage 2, and the whole model's own parameters in both,
are kept.

Where collectives have streams of their own (``PlanSettings.blocking`` is false) a gather of forward waits for the
copy-out of the unit before the last, one of backward for the last copy-out, and the next copy-in of gradients for the
last reduce-scatter: two gathered buffers are there at most, and one of gradients. Gathers and reduce-scatters share a
communicator, which runs them in the order of their calls. Else the process waits for each where it calls it, as FSDP2
does on a CPU.

One role stands for all ranks: that with the largest shard of parameters, which the others wait for.

Micro-batches whose gradients are accumulated each gather and reduce as if they were alone, which is torch's default;
the sum of shards is not priced.

Not modelled: mixed precision, offloading, accumulation without reduction, explicit prefetching.

Source: torch/distributed/fsdp/_fully_shard (_fsdp_param_group.py, _fsdp_collectives.py), torch/distributed/optim/
zero_redundancy_optimizer.py (torch 2.13).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.plan.compute import (
    NetworkCompute,
    add_weight_update,
    gradient_order,
    layers_with_gradient,
    operations_of_forward,
)
from paradl_bench.plan.mesh import zero_stage
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import BucketCopy, Collective, Phase, Role, RoleBuilder, Setup, Stream, WeightUpdate
from paradl_bench.strategies.data.zero.units import Unit, optimizer_parts, shard_bytes, shard_elements, units_of
from paradl_bench.strategies.exchange.buckets import total_bytes
from paradl_bench.strategies.passes.recomputation import segments_of

_EMPTY_BUCKET_BYTES = 4
"""What torch broadcasts for a rank that has no parameter to update: one number."""


def check_zero(network: ModelGraph, strategy: Strategy, settings: PlanSettings) -> None:
    """Refuse what torch's ZeRO cannot run, or not to the byte.

    Raises:
        UserError: a nesting; one rank; under stages 2 and 3 synchronised batch norm, a parameter that is frozen, has no
            dims, or is changed in forward, work in place on a view that a unit returns, and segments computed again
            that lie in several units.
    """
    stage, ranks = zero_stage(strategy), strategy.ranks
    if len(strategy.axes) > 1:
        plain = "".join(str(msgspec.structs.replace(axis, prefix=0)) for axis in strategy.axes)
        raise UserError(f"strategy {strategy}: ZeRO stages nest with no other axis; write {plain}, or z{stage}d{ranks}")
    if ranks == 1:
        raise UserError(f"strategy {strategy}: one rank has nothing to shard; d1 is the same")
    if stage == 1:
        return
    if settings.batch_norm == "sync":
        raise UserError(f"strategy {strategy}: synchronised batch norm runs with d{ranks} and z1d{ranks}, not with it")
    trained = {parameter.name for parameter in network.parameters}
    for parameter in network.parameters:
        if not parameter.shape:
            raise UserError(f"strategy {strategy}: parameter {parameter.name} has no dim to shard; give it one")
    for layer in network.layers:
        frozen = [name for name in layer.parameters if name not in trained]
        if frozen:
            raise UserError(
                f"strategy {strategy}: parameter {frozen[0]} of {layer.name} is frozen, which z1d{ranks} allows"
            )
        changed = next((name for name in _changed(layer) if name in trained), None)
        if changed is not None:
            raise UserError(
                f"strategy {strategy}: {layer.name} changes parameter {changed} in forward, of which ranks hold rows;"
                f" z1d{ranks} allows that"
            )
    if stage == 3:
        _check_views(network, strategy)
    _check_segments(network, strategy, settings)


def _check_segments(network: ModelGraph, strategy: Strategy, settings: PlanSettings) -> None:
    """Refuse segments that are computed again and run a unit's hooks once more."""
    for segment in segments_of(network, settings):
        inside = {unit.name: unit for unit in units_of(network)[:-1] if not set(unit.layers).isdisjoint(segment.layers)}
        parted = next((name for name, unit in inside.items() if not set(segment.layers) <= set(unit.layers)), None)
        if parted is not None:
            raise UserError(
                f"strategy {strategy}: --recompute {segment.name} runs {parted} again, whose parameters are gathered by"
                f" themselves; name {parted} or modules inside of it, or take z1d{strategy.ranks}"
            )


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
                    f" torch's fully_shard loses sight of; do that out of place, or take z1d{strategy.ranks}"
                )


def _changed(layer: Layer) -> tuple[str, ...]:
    """Names among which are those of the parameters that a layer changes."""
    itself = layer.attributes.get("in_place") and not layer.values_written
    return (*layer.state, *(layer.parameters if itself else ()))


def add_optimizer_broadcasts(
    builder: RoleBuilder, network: ModelGraph, settings: PlanSettings, ranks: int, after: tuple[int, ...]
) -> Setup:
    """Stage 1's weight update and the broadcasts of what it changed; returns those of the first two iterations."""
    parts = optimizer_parts(network, ranks)
    updated = set(gradient_order(network))
    own = [[parameter for parameter in part if parameter.name in updated] for part in parts]
    largest = max(own, key=lambda part: sum(parameter.elements for parameter in part))
    elements = sum(parameter.elements for parameter in largest)
    work = WeightUpdate(optimizer=settings.optimizer, elements=elements, tensors=len(largest))
    update = add_weight_update(builder, work, settings, after)
    sizes = [total_bytes(part) or _EMPTY_BUCKET_BYTES for part in parts]
    for size in sizes:
        sent = Collective(operation="broadcast", message_bytes=size, ranks=ranks)
        builder.add(sent, Phase.WU, Stream.COMMUNICATION, (update,))
    return _in_first_iterations("broadcast", sizes)


def build_sharded_role(network: ModelGraph, strategy: Strategy, settings: PlanSettings, builder: RoleBuilder) -> Role:
    """An iteration of every rank under stages 2 and 3."""
    again = [segment.layers for segment in segments_of(network, settings)]
    compute = NetworkCompute(builder, network, recomputed=again)
    done: tuple[int, ...] = ()
    scattered_bytes: list[int] = []
    for _ in range(settings.accumulate):
        units = _ShardedUnits(
            builder, network, settings, strategy.ranks, compute.backward_layers, reshard=zero_stage(strategy) == 3
        )
        compute.add_forward(done, before_layer=units.before_forward)
        units.end_forward()
        for layer, task in compute.add_backward(before_layer=units.before_backward):
            units.after_backward(layer, task)
        done = units.end_backward()
        scattered_bytes += units.scattered_bytes
    updated = set(gradient_order(network))
    parameters = [parameter for parameter in network.parameters if parameter.name in updated]
    elements = sum(shard_elements(parameter, strategy.ranks) for parameter in parameters)
    work = WeightUpdate(optimizer=settings.optimizer, elements=elements, tensors=len(parameters))
    add_weight_update(builder, work, settings, done)
    return builder.build("replica", strategy.ranks, _in_first_iterations("reduce_scatter", scattered_bytes))


def _in_first_iterations(operation: str, sizes: Sequence[int]) -> Setup:
    """What the first two iterations issue as every later one does (``Role.setup``)."""
    return tuple((when, operation, size, n) for when in ("first", "rebuild") for size, n in Counter(sizes).items())


class _ShardedUnits:
    """Adds what the units communicate to a role, as ``fully_shard``'s hooks do round modules.

    Attributes:
        scattered_bytes: of each reduce-scatter, in order.
    """

    def __init__(
        self,
        builder: RoleBuilder,
        network: ModelGraph,
        settings: PlanSettings,
        ranks: int,
        backward_layers: Sequence[int],
        *,
        reshard: bool,
    ) -> None:
        self._builder, self._ranks, self._reshard = builder, ranks, reshard
        self._blocking = settings.blocking
        self._units = units_of(network)
        self._root = self._units[-1]
        self._unit_of = {layer: unit for unit in self._units[:-1] for layer in unit.layers}
        self._model_layers = operations_of_forward(network)
        self._updated = set(gradient_order(network))
        late = _units_that_reduce_late(network, self._units)
        self._reduced_with = {
            min(own): unit
            for unit in self._units[:-1]
            if unit.name not in late and (own := set(unit.layers) & set(backward_layers))
        }
        # The order in which forward leaves units; the whole model is left last, where it has parameters.
        called = sorted((unit for unit in self._units[:-1] if unit.layers), key=lambda unit: unit.layers[0])
        self._order = [*called, *([self._root] if self._root.parameters else [])]
        self._entered: set[str] = set()
        self._gathers: dict[str, int] = {}
        self._whole: set[str] = set()
        self._copied_out: list[int] = []
        self._reduced: dict[str, int] = {}
        self._awaited: list[int] = []
        self.scattered_bytes: list[int] = []

    def before_forward(self, layer: int) -> tuple[int, ...]:
        """Gather what a layer's unit needs; returns what the layer waits for."""
        for unit in (self._root, self._unit_of.get(layer)):
            if unit is not None and unit.name not in self._entered:
                self._entered.add(unit.name)
                # The streams of a gather of forward wait for the copy-out of the unit before the last.
                self._gather(unit, Phase.FW, tuple(self._copied_out[-2:-1]))
                self._copy_out(unit, Phase.FW)
        return self._take_awaited()

    def end_forward(self) -> None:
        """Free what stage 3 frees: all but the whole model's own parameters."""
        self._entered.clear()
        if self._reshard:
            self._whole &= {self._root.name}

    def before_backward(self, layer: int) -> tuple[int, ...]:
        """Gather what backward of a layer's unit needs, and the unit in front of it; returns what the layer awaits."""
        for unit in (self._root, self._unit_of.get(layer)) if layer < self._model_layers else ():
            if unit is None or unit.name in self._entered or not unit.parameters:
                continue
            self._entered.add(unit.name)
            # The streams of gathers wait for the last copy-out from the end of forward on.
            self._gather(unit, Phase.BW, tuple(self._copied_out[-1:]))
            self._copy_out(unit, Phase.BW)
            position = self._order.index(unit)
            if position:
                self._gather(self._order[position - 1], Phase.BW, tuple(self._copied_out[-1:]))
        return self._take_awaited()

    def after_backward(self, layer: int, task: int) -> None:
        """Reduce a unit's gradients once backward has left it."""
        if layer in self._reduced_with:
            self._reduce(self._reduced_with[layer], task)

    def end_backward(self) -> tuple[int, ...]:
        """Reduce what is left; returns what the weight update waits for."""
        last = len(self._builder.phase) - 1
        for unit in (self._root, *self._units[:-1]):
            if unit.name not in self._reduced:
                self._reduce(unit, last)
        return (*list(self._reduced.values())[-1:], *self._take_awaited())

    def _take_awaited(self) -> tuple[int, ...]:
        """What the next task of the compute stream waits for."""
        awaited = tuple(self._awaited)
        self._awaited.clear()
        return awaited

    def _call(self, work: Collective, phase: Phase, after: tuple[int, ...]) -> int:
        """A collective; where calls block, all that the process computes next waits for it."""
        task = self._builder.add(work, phase, Stream.COMMUNICATION, after)
        if self._blocking:
            self._awaited.append(task)
        return task

    def _gather(self, unit: Unit, phase: Phase, after: tuple[int, ...]) -> None:
        if not unit.parameters or unit.name in self._gathers or unit.name in self._whole:
            return
        size = shard_bytes(unit.parameters, self._ranks)
        copy = BucketCopy(direction="into", bytes=size, tensors=len(unit.parameters))
        stream = Stream.COMPUTE if self._blocking else Stream.COPY
        copied = self._builder.add(copy, phase, stream, (*after, *self._take_awaited()))
        work = Collective(operation="all_gather", message_bytes=size, ranks=self._ranks)
        self._gathers[unit.name] = self._call(work, phase, (copied,))

    def _copy_out(self, unit: Unit, phase: Phase) -> None:
        if unit.name not in self._gathers:
            return
        size = self._ranks * shard_bytes(unit.parameters, self._ranks)
        work = BucketCopy(direction="out", bytes=size, tensors=len(unit.parameters))
        waits = (self._gathers.pop(unit.name), *self._take_awaited())
        self._copied_out.append(self._builder.add(work, phase, Stream.COMPUTE, waits))
        self._awaited.append(self._copied_out[-1])
        self._whole.add(unit.name)

    def _reduce(self, unit: Unit, after: int) -> None:
        parameters = tuple(parameter for parameter in unit.parameters if parameter.name in self._updated)
        if not parameters:
            return
        size = shard_bytes(parameters, self._ranks)
        copy = BucketCopy(direction="into", bytes=self._ranks * size, tensors=len(parameters))
        # torch keeps one buffer of gradients at a time: the next is filled when the last has been sent.
        waits = (after, *list(self._reduced.values())[-1:], *self._take_awaited())
        copied = self._builder.add(copy, Phase.GE, Stream.COMPUTE, waits)
        work = Collective(operation="reduce_scatter", message_bytes=size, ranks=self._ranks)
        self._reduced[unit.name] = self._call(work, Phase.GE, (copied,))
        self.scattered_bytes.append(size)


def _units_that_reduce_late(network: ModelGraph, units: tuple[Unit, ...]) -> set[str]:
    """Units whose backward nothing leaves: no operation before them that they read has a gradient."""
    has_gradient = layers_with_gradient(network)
    index = {layer.name: i for i, layer in enumerate(network.layers)}
    found = {""}
    for unit in units[:-1]:
        read = {index[name] for i in unit.layers for name in network.layers[i].inputs if name in index}
        if not any(has_gradient[i] for i in read - set(unit.layers)):
            found.add(unit.name)
    return found
