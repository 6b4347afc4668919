"""Peak memory of one rank in an iteration, and what it consists of.

Held throughout: parameters, buffers, optimizer state (of parameters that get a gradient), the input and its targets,
exchange buckets (DDP holds gradients a second time; ``gradient_as_bucket_view`` is off by default), and what a
pipeline's stages receive into. Activations and gradients come and go as :mod:`paradl_bench.strategies.memory.liveness`
walks the plan's layers; gradients of parameters stay until the weight update, which releases them (``zero_grad``).
Adam's update makes tensors of its own, unless it is fused: two of the size of the largest parameter on a CPU, where it
goes through parameters one by one, one of the size of all of them on a GPU. A state that lies in host memory is on the
device in the update alone; on a CPU, whose memory is the host's, what lies there between updates is counted nowhere.

Where ranks differ, the one that needs most is the answer. Pipelines are put together in
``pipeline/memory.py``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from paradl_bench.core.cache_keys import Answers
from paradl_bench.network.graph import DTYPE_BYTES, ModelGraph, Tensor
from paradl_bench.network.kinds.autocast import KEPT_DTYPE, given_dtype, has_masters
from paradl_bench.network.optimizers import optimizer_named
from paradl_bench.network.partition import box_elements, cut_box
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.compute import LayerShard, gradient_order
from paradl_bench.plan.mesh import axes_apart, degree_of, group_axes
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Axis, Strategy
from paradl_bench.strategies.frameworks.framework_memory import ADDED_IN_KERNEL, GROUPED, FrameworkMemory
from paradl_bench.strategies.frameworks.presets import framework_of
from paradl_bench.strategies.memory.ledger import Ledger, Moment, Moments
from paradl_bench.strategies.memory.liveness import Liveness
from paradl_bench.strategies.memory.rank_operations import RankRun
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.passes.lower_precision import settings_of_update
from paradl_bench.strategies.passes.recomputation import repeated_by_model, segments_of
from paradl_bench.strategies.passes.weight_update import copies_of_state

_WALKED = Answers(16)
"""Moments of walks by all that these depend on: plans of a search that hold other parts walk alike."""


class PartedState(Protocol):
    """What ranks hold that hold parts of what replicas else hold alike."""

    def held(self, network: ModelGraph) -> ModelGraph | None:
        """The network as the rank with most of it holds it; None where parameters are whole."""

    def walk(self, moments: Moments, network: ModelGraph, run: RankRun) -> Liveness:
        """The walk of a rank where parameters are not whole, which is the same whatever part of them it holds."""

    def count_held(self, ledger: Ledger, network: ModelGraph, device: str, passes: Sequence[Sequence[Moment]]) -> None:
        """Count what a rank holds at the moments of that walk, micro-batch after micro-batch."""

    def updated(self, network: ModelGraph, *, evenly: bool = False) -> tuple[Tensor, ...] | None:
        """The parameters whose optimizer state the rank with most keeps; None for all that it holds.

        Args:
            evenly: whether parts are equal, and cut through parameters.
        """

    def gather(self, ledger: Ledger, network: ModelGraph) -> None:
        """Hold what a rank gathers for the micro-batches of its stages, which are the network, one behind the other."""

    def reduce(self, ledger: Ledger, network: ModelGraph) -> None:
        """Leave the gradients that a rank keeps of those of all its micro-batches."""


@runtime_checkable
class AxisMemory(Protocol):
    """``MEMORY`` of the ``memory.py`` in the folder of an axis along which ranks hold the same parameters."""

    def state(
        self, strategy: Strategy, axis: Axis, settings: PlanSettings, apart: frozenset[str]
    ) -> PartedState | None:
        """What ranks hold in parts; None for nothing. ``apart`` are parameters that fewer ranks hold alike."""


class MemoryUse(NamedTuple):
    """Bytes of one rank at the peak, and what they consist of."""

    peak_bytes: int
    parts_bytes: dict[str, int]


def memory_use(parts_bytes: dict[str, int]) -> MemoryUse:
    """The sum of parts."""
    return MemoryUse(sum(parts_bytes.values()), parts_bytes)


def most_needed(uses: Iterable[MemoryUse], within: float) -> MemoryUse:
    """The use of the largest peak, or the first beyond ``within``: what comes behind that is not looked at."""
    most = MemoryUse(-1, {})
    for use in uses:
        most = max(most, use, key=lambda either: either.peak_bytes)
        if use.peak_bytes > within:
            break
    return most


def per_phase_memory(
    network: ModelGraph,
    local_batch: int,
    settings: PlanSettings,
    *,
    exchanged: bool,
    alone: frozenset[str] = frozenset(),
    dtype: str = "fp32",
    device: str = "cpu",
    shards: Mapping[int, LayerShard] = MappingProxyType({}),
    block_elements: int = 0,
    parted: PartedState | None = None,
    micro_batches: int = 1,
    recomputed: Sequence[range] = (),
) -> MemoryUse:
    """Peak over forward, backward and weight update on one rank.

    Args:
        network: with the shapes that parameters have on the rank.
        settings: of the weight update: :func:`~paradl_bench.strategies.passes.lower_precision.settings_of_update`.
        exchanged: whether gradients are exchanged, which holds them a second time. alone: parameters whose are not,
            since no other rank holds them.
        device, shards, recomputed: as in :class:`~paradl_bench.strategies.memory.rank_operations.RankRun`.
        block_elements: of the rank's block of a sample, a copy of which forward holds; 0 where it reads the input.
        parted: what is held in parts.
        micro_batches: that the local batch passes in, one after the other; gradients of the first stay from then on.

    Raises:
        UserError: an optimizer whose state is not known.
    """
    samples, framework = local_batch // micro_batches, framework_of(settings)
    run = RankRun(
        samples=samples, dtype=dtype, device=device, shards=shards, recomputed=recomputed, framework=framework
    )
    ledger = Ledger(gradients=buffer_bytes(network, framework))
    in_parts = parted.held(network) if parted else None
    held = in_parts or network
    # All micro-batches after the first find what the second does.
    times, received_bytes = min(micro_batches, 2), block_elements * samples * DTYPE_BYTES[given_dtype(dtype)]
    if parted and in_parts:
        exchanged = False
        asked = _content(network, run), times, received_bytes
        passes = _WALKED.once(asked, lambda: _passes(parted, network, run, times, received_bytes))
        parted.count_held(ledger, network, device, passes)
    else:
        walk = Liveness(ledger, network, run)
        for _ in range(times):
            _pass(walk, ledger, received_bytes)
    state = optimizer_state(held, settings, device, updated_by_rank(parted, network, framework))
    return memory_use(
        {
            **fixed_parts(held, state, exchanged=exchanged and not framework.gradient_dtype, alone=alone),
            "input": network.input_bytes(local_batch, given_dtype(dtype)) + network.target_bytes(local_batch),
            **moving_parts(ledger, state),
        }
    )


def _pass(walk: Liveness, ledger: Ledger, received_bytes: int) -> None:
    received = ledger.allocate(received_bytes)
    left = walk.forward(received)
    ledger.release(received)
    walk.backward(left)


def _passes(
    parted: PartedState, network: ModelGraph, run: RankRun, times: int, received_bytes: int
) -> list[list[Moment]]:
    """The moments of so many micro-batches."""
    moments, passes = Moments(), list[list[Moment]]()
    walk = parted.walk(moments, network, run)
    for _ in range(times):
        _pass(walk, moments, received_bytes)
        passes.append(moments.passed())
    return passes


def _content(network: ModelGraph, run: RankRun) -> Hashable:
    """All that a walk depends on: of layers, which are many, a digest."""
    again = [(layers.start, layers.stop) for layers in run.recomputed]
    told = msgspec.msgpack.encode((network, sorted(run.shards.items()), again))
    return hashlib.sha256(told).digest(), run.samples, run.dtype, run.device, run.framework


class OptimizerState(NamedTuple):
    """Bytes that an optimizer holds on the device: from iteration to iteration, and besides while it updates."""

    kept_bytes: int
    update_bytes: int


def kept_copies(settings: PlanSettings) -> int:
    """Tensors of a parameter's size that an optimizer keeps on the device from iteration to iteration.

    Raises:
        UserError: an optimizer whose state is not known.
    """
    return copies_of_state(settings) if settings.offload == "none" else 0


def optimizer_state(
    network: ModelGraph, settings: PlanSettings, device: str, updated: tuple[Tensor, ...] | None = None
) -> OptimizerState:
    """What an optimizer holds.

    Args:
        network: with the parameters that a rank updates. updated: those whose state it keeps, where these are not
            all.

    Raises:
        UserError: an optimizer whose state is not known.
    """
    masters = has_masters(settings.dtype)

    own = updated_parameters(network) if updated is None else updated
    # State of what has an fp32 copy is as wide as that.
    sizes = [p.elements * DTYPE_BYTES[KEPT_DTYPE] if masters else p.bytes for p in own]
    updated_bytes = sum(sizes)
    kept = kept_copies(settings) * updated_bytes
    # What lies in host memory is on the device for the update.
    update = copies_of_state(settings) * updated_bytes - kept
    # Each gradient is converted before any is let go of, unless a buffer has them all in the copies' dtype.
    update += updated_bytes if masters and framework_of(settings).gradient_dtype != KEPT_DTYPE else 0
    if optimizer_named(settings.optimizer).own_tensors:
        update += 2 * max(sizes, default=0) if device == "cpu" else sum(sizes)
    return OptimizerState(kept, update)


def updated_by_rank(
    parted: PartedState | None, network: ModelGraph, framework: FrameworkMemory
) -> tuple[Tensor, ...] | None:
    """As :meth:`PartedState.updated`, in the parts that the framework makes."""
    return parted.updated(network, evenly=framework.splits_evenly) if parted else None


def buffer_bytes(network: ModelGraph, framework: FrameworkMemory) -> int:
    """Bytes that a framework holds of gradients from iteration to iteration: their buffer, and placeholders.

    Args:
        network: with the parameters that a rank holds.
    """
    if not framework.gradient_dtype:
        return 0
    buffer = sum(p.elements for p in updated_parameters(network)) * DTYPE_BYTES[framework.gradient_dtype]
    if not framework.placeholders:
        return buffer
    kinds = {name: layer.kind for layer in network.layers for name in layer.parameters}
    # Each expert's matrix is a parameter of its own.
    shapes = {
        (p.shape[1:] if kinds[p.name] == GROUPED else p.shape, p.dtype)
        for p in network.parameters
        if kinds.get(p.name) in ADDED_IN_KERNEL and len(p.shape) > 1
    }
    return buffer + sum(math.prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in shapes)


def fixed_parts(
    network: ModelGraph, state: OptimizerState, *, exchanged: bool, alone: frozenset[str] = frozenset()
) -> dict[str, int]:
    """Bytes that a rank holds of a network, or of its stages of it, from iteration to iteration."""
    others = sum(parameter.bytes for parameter in network.parameters if parameter.name not in alone)
    return {
        "parameters": network.parameter_bytes,
        "optimizer": state.kept_bytes,
        "buckets": others if exchanged else 0,
        "buffers": sum(buffer.bytes for buffer in network.buffers),
    }


def moving_parts(ledger: Ledger, state: OptimizerState) -> dict[str, int]:
    """Activations and gradients when they are largest, the weight update included."""
    ledger.mark(state.update_bytes)
    activations, gradients = ledger.peak
    return {"gradients": gradients, "activations": activations}


def planned_memory(
    network: ModelGraph,
    strategy: Strategy,
    settings: PlanSettings,
    *,
    dtype: str = "fp32",
    device: str = "cpu",
    within: float = math.inf,
) -> MemoryUse:
    """The peak of the rank that needs most, of all that shard a replica's layers, or of the first beyond ``within``.

    Raises:
        UserError: a limit is exceeded, or an optimizer whose state is not known.
    """
    of_ranks = (
        per_phase_memory(
            sharded.network,
            settings.batch // degree_of(strategy, Trait.DIVIDES_BATCH),
            settings_of_update(strategy, settings),
            exchanged=degree_of(strategy, Trait.REPLICATES) > 1,
            alone=frozenset() if axes_apart(strategy) else sharded.apart,
            dtype=dtype,
            device=device,
            shards=sharded.shards,
            block_elements=block_of_input(network, strategy),
            parted=parted_state(strategy, settings, sharded.apart),
            micro_batches=settings.accumulate,
            recomputed=run_again(sharded.network, settings),
        )
        for sharded in planner_for(strategy).shards(network, strategy, settings).distinct
    )
    return most_needed(of_ranks, within)


def run_again(network: ModelGraph, settings: PlanSettings) -> list[range]:
    """Layers that backward runs again, in the order of forward, as the settings or the model itself want it."""
    chosen = (segment.layers for segment in segments_of(network, settings))
    return sorted((*chosen, *repeated_by_model(network)), key=lambda layers: layers.start)


def parted_state(strategy: Strategy, settings: PlanSettings, apart: frozenset[str] = frozenset()) -> PartedState | None:
    """What some axis has ranks hold in parts; None for nothing. ``apart`` as of :meth:`AxisMemory.state`."""
    for index in group_axes(strategy, Trait.REPLICATES):
        axis = strategy.axes[index]
        memory = axis.declared.beside("memory", "MEMORY", AxisMemory)  # type: ignore[type-abstract]
        state = memory.state(strategy, axis, settings, apart) if memory else None
        if state is not None:
            return state
    return None


def updated_parameters(network: ModelGraph) -> tuple[Tensor, ...]:
    """Those that get a gradient, which alone the optimizer keeps state of."""
    updated = set(gradient_order(network))
    return tuple(parameter for parameter in network.parameters if parameter.name in updated)


def block_of_input(network: ModelGraph, strategy: Strategy) -> int:
    """Elements of a sample's largest block of positions; 0 where positions are not cut."""
    parts = next((axis.extents for axis in strategy.axes if axis.has(Trait.CUTS_POSITIONS) and axis.degree > 1), None)
    if parts is None:
        return 0
    channels, *extents = network.input_shape
    return channels * max(map(box_elements, cut_box(tuple(extents), parts)))
