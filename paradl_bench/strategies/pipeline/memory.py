"""Memory of a pipeline's ranks: each holds its own stages, and the activations of the micro-batches under way in them.

Held throughout: parameters, optimizer state, exchange buckets and buffers of the rank's stages, and what torch's stages
receive into: a buffer for every micro-batch and every value that crosses a cut, forward and backward. The first rank
holds the input. What autograd keeps of a micro-batch, and what the stage sends of it, is held from its forward to its
backward, as many at a time as the schedule has under way (GPipe: all of them; 1F1B: as many as stages follow).
Gradients of parameters are complete after the first backward; the others make theirs beside them, and add them.
torch holds what it has sent until it is done with the message (``Schedule.drops_messages``). What the last stage makes
is sent to nobody; 1F1B, which has one name for what forward returns, holds it as long. Where backward runs in two
parts, what autograd keeps is held to the second, and from the first on the gradients that its parameters wait for.
What a stage hands to another one of its rank is no message: it takes the buffer's place, and so is there throughout.
Gradients of parameters that other ranks' stages share are received beside the own ones, when all else is done.

Where an axis shards layers, each rank holds its parts of its stages, and what crosses cuts as it holds it.
What replicas share out of a stage (ZeRO stages 2 and 3) is whole from the first forward until its gradients are
reduced at the end.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from paradl_bench.core.cache_keys import Answers
from paradl_bench.network.graph import DTYPE_BYTES, ModelGraph
from paradl_bench.network.kinds.autocast import given_dtype
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.axis_planner import samples_at_once
from paradl_bench.plan.compute import operations_of_forward
from paradl_bench.plan.mesh import axes_apart, degree_of, zero_stage
from paradl_bench.plan.schedules.catalog import schedule_of
from paradl_bench.plan.schedules.schedule import Action
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.strategies.frameworks.framework_memory import FrameworkMemory
from paradl_bench.strategies.frameworks.presets import framework_of
from paradl_bench.strategies.memory.ledger import Ledger, Storage, hold
from paradl_bench.strategies.memory.paradl import paradl_memory
from paradl_bench.strategies.memory.parted_liveness import PartedLiveness
from paradl_bench.strategies.memory.peak import (
    MemoryUse,
    block_of_input,
    buffer_bytes,
    fixed_parts,
    memory_use,
    most_needed,
    moving_parts,
    optimizer_state,
    parted_state,
    updated_by_rank,
)
from paradl_bench.strategies.memory.rank_operations import RankRun
from paradl_bench.strategies.memory.repeated_passes import RepeatedPasses, Walks
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.passes.lower_precision import settings_of_update
from paradl_bench.strategies.pipeline.axis import PipelineOptions, micro_batches
from paradl_bench.strategies.pipeline.stage_shards import StageShard, likeness, message_bytes, shard_stage
from paradl_bench.strategies.pipeline.stages import cut_into_stages, places_of_shared, sent_to_places

_LATEST = Answers(32)
"""Walks over stages by all that these depend on, of all plans; each plan keeps its own, however many these are."""


def pipelined_memory(
    network: ModelGraph,
    strategy: Strategy,
    settings: PlanSettings,
    *,
    dtype: str = "fp32",
    device: str = "cpu",
    within: float = math.inf,
) -> MemoryUse:
    """The peak of the rank that needs most, or of the first that needs more bytes than ``within``.

    Raises:
        UserError: a limit is exceeded, or an optimizer whose state is not known.
    """
    ranks = degree_of(strategy, Trait.STAGES)
    shards = planner_for(strategy).shards(network, strategy, settings)
    stages = cut_into_stages(network, ranks, settings)
    shared = places_of_shared(network, stages)
    walks = _WalksOfStages(samples_at_once(strategy, settings), dtype, device, framework_of(settings))
    apart = shards.distinct[0].apart

    def of_ranks() -> Iterator[MemoryUse]:
        for rank in range(ranks):
            of_rank = [stage for stage in stages if stage.rank == rank]
            alike: list[list[StageShard]] = []
            for sharded in shards.distinct:
                rank_shards = [shard_stage(network, stage, sharded, settings) for stage in of_rank]
                if rank_shards not in alike:
                    alike.append(rank_shards)
                    parts = _parts(rank_shards, rank, shared, network, strategy, settings, dtype, device, walks, apart)
                    yield memory_use(parts)

    return most_needed(of_ranks(), within)


def _parts(
    rank_shards: Sequence[StageShard],
    rank: int,
    shared: dict[str, tuple[int, ...]],
    network: ModelGraph,
    strategy: Strategy,
    settings: PlanSettings,
    dtype: str,
    device: str,
    walks: _WalksOfStages,
    apart: frozenset[str],
) -> dict[str, int]:
    """What the ranks at one place of the pipeline hold that run alike shards of its stages.

    Args:
        apart: as of :class:`~paradl_bench.plan.axis_planner.ShardedLayers`.
    """
    ranks, micro_batch = degree_of(strategy, Trait.STAGES), samples_at_once(strategy, settings)
    count, schedule = micro_batches(settings, ranks), schedule_of(settings.of(PipelineOptions).schedule)
    parted = parted_state(strategy, settings, apart)
    whole = _held(network, rank_shards, with_layers=_needs_layers(strategy, settings))
    in_parts = parted.held(whole) if parted else None
    held = in_parts or whole
    framework = framework_of(settings)
    ledger = Ledger(gradients=buffer_bytes(whole, framework))
    samples = count * micro_batch
    block = block_of_input(network, strategy) * micro_batch * DTYPE_BYTES[given_dtype(dtype)]
    passes = {
        # Forward of the first stage copies the rank's block of a micro-batch.
        shard.stage.index: RepeatedPasses(ledger, walks.of(shard, 0 if shard.stage.index else block))
        for shard in rank_shards
    }
    if parted:
        parted.gather(ledger, whole)
    drops = framework.drops_messages
    actions = schedule.order(rank, ranks, count)
    twice = {} if framework.gradient_dtype else _added_to_others(rank_shards)
    unsent = () if schedule.drops_messages or drops else (schedule.placement.stages(ranks) - 1,)
    in_one = _run(ledger, passes, actions, twice, unsent, drops_messages=not unsent, into_buffers=not drops)
    if parted:
        parted.reduce(ledger, whole)
    sizes = {parameter.name: parameter.bytes for parameter in held.parameters}
    ledger.mark(sum(sizes[name] for names in sent_to_places(shared, rank).values() for name in names))
    updated = updated_by_rank(parted, held, framework)
    state = optimizer_state(held, settings_of_update(strategy, settings), device, updated)
    exchanged = degree_of(strategy, Trait.REPLICATES) > 1 and in_parts is None and not framework.gradient_dtype
    # What no other rank holds needs no buckets.
    alone = frozenset() if axes_apart(strategy) else apart
    return {
        **fixed_parts(held, state, exchanged=exchanged, alone=alone),
        # Every rank makes the targets, as `train` does, though the last alone reads them.
        "input": (0 if rank else network.input_bytes(samples, given_dtype(dtype))) + network.target_bytes(samples),
        "communication": 0 if drops else count * _received_bytes(rank_shards, micro_batch) - in_one,
        **moving_parts(ledger, state),
    }


def _received_bytes(rank_shards: Sequence[StageShard], micro_batch: int) -> int:
    """Of one micro-batch, what a rank's stages receive, gradients of what they send too."""
    own = {shard.stage.index for shard in rank_shards}
    received = 0
    for shard in rank_shards:
        stage, sent = shard.stage, message_bytes(shard.sends, micro_batch)
        received += sum(message_bytes(shard.receives, micro_batch)) + sum(sent)
        if stage.index + 1 in own:
            # What it hands on as it came lies where it came to.
            received -= sum(size for made, size in zip(stage.made, sent, strict=True) if made not in stage.layers)
    return received


def _added_to_others(rank_shards: Sequence[StageShard]) -> dict[int, int]:
    """Per stage of a rank, bytes of gradients that its first backward adds to those of a stage behind it.

    Both use the parameter, and each walk makes a gradient of its own.
    """
    made, added = set[str](), dict[int, int]()
    for shard in reversed(rank_shards):
        parameters = shard.network.parameters
        added[shard.stage.index] = sum(parameter.bytes for parameter in parameters if parameter.name in made)
        made.update(parameter.name for parameter in parameters)
    return added


def _needs_layers(strategy: Strategy, settings: PlanSettings) -> bool:
    """Whether more than names and shapes decides what is held of parameters."""
    return zero_stage(strategy) > 1 or framework_of(settings).placeholders


def _held(network: ModelGraph, rank_shards: Sequence[StageShard], *, with_layers: bool) -> ModelGraph:
    """What a rank holds of its stages."""
    return msgspec.structs.replace(
        network,
        # Making a network checks all of its layers, which units of parameters alone are found by.
        layers=tuple(layer for shard in rank_shards for layer in shard.network.layers) if with_layers else (),
        # Two stages of a rank may use one parameter, which it holds once.
        parameters=tuple({p.name: p for shard in rank_shards for p in shard.network.parameters}.values()),
        buffers=tuple(buffer for shard in rank_shards for buffer in shard.network.buffers),
        gradient_order=tuple(dict.fromkeys(name for shard in rank_shards for name in shard.network.gradient_order)),
        outputs=() if with_layers else network.outputs,
    )


class _WalksOfStages:
    """Walks over a pipeline's stages, which mostly are alike: so many blocks each."""

    def __init__(self, micro_batch: int, dtype: str, device: str, framework: FrameworkMemory) -> None:
        self._micro_batch, self._dtype, self._device, self._framework = micro_batch, dtype, device, framework
        self._known = Answers()

    def of(self, shard: StageShard, block_bytes: int) -> Walks:
        """Those of a stage, or of one like it.

        Args:
            block_bytes: of the rank's block of the input, which forward of the first stage copies.
        """
        drops = self._framework.drops_messages
        received_bytes = block_bytes + (sum(message_bytes(shard.receives, self._micro_batch)) if drops else 0)
        sent = message_bytes(shard.sends, self._micro_batch)
        key = likeness(shard), received_bytes, sent, self._micro_batch, self._dtype, self._device, self._framework

        def find() -> Walks:
            walk = functools.partial(_walk, shard.network, self._run_of(shard))
            return Walks(walk, received_bytes, sent, into_buffers=not drops)

        return self._known.once(key, lambda: _LATEST.once(key, find))

    def _run_of(self, shard: StageShard) -> RankRun:
        stage = shard.stage
        kept = stage.outputs if stage.sends else (operations_of_forward(shard.network) - 1,)
        return RankRun(
            samples=self._micro_batch,
            dtype=self._dtype,
            device=self._device,
            shards=shard.shards,
            widths=shard.widths,
            # What a stage passes on is made by an earlier one.
            outputs=stage.outputs if stage.sends else (),
            kept_outputs=() if self._framework.drops_messages else kept,
            input_has_gradient=bool(stage.receives),
            reads=shard.reads,
            recomputed=shard.recomputed,
            framework=self._framework,
        )


def _walk(network: ModelGraph, run: RankRun, ledger: Ledger) -> PartedLiveness:
    return PartedLiveness(ledger, network, run)


def _run(
    ledger: Ledger,
    passes: Mapping[int, RepeatedPasses],
    actions: Sequence[Action],
    twice: Mapping[int, int],
    unsent: Sequence[int],
    *,
    drops_messages: bool,
    into_buffers: bool,
) -> int:
    """Run the actions of a rank; returns bytes of what stages hand back as one tensor for several that they were given.

    Args:
        twice: as of :func:`_added_to_others`, where gradients are tensors of their own.
        unsent: stages whose outputs are let go of when backward is done, since nobody is sent them.
        into_buffers: whether what a stage hands to the next one of its rank, and the gradient that comes back, take the
            place of those of the iteration before, as torch's do: they are counted with what the rank receives.
    """
    handing = {stage for stage in passes if stage + 1 in passes and into_buffers}
    in_one = 0
    outputs: dict[tuple[int, int], list[Storage]] = {}
    messages = _Messages(ledger, actions, drops_messages)
    for number, action in enumerate(actions):
        key = action.stage, action.micro_batch
        if action.direction == "FW":
            outputs[key] = passes[action.stage].forward()
            now = [] if action.stage in (*handing, *unsent) else [hold(storage) for storage in outputs[key]]
            ledger.activations -= _bytes_of(outputs[key]) if action.stage in handing else 0
        else:
            # The gradient of what was sent is received into a buffer that is there already.
            of_micro_batch = outputs.pop(key) if action.completes else outputs[key]
            now = passes[action.stage].backward(action.direction, of_micro_batch)
            if action.completes and not action.micro_batch:
                ledger.gradients -= twice.get(action.stage, 0)
            if action.stage in handing and action.completes:
                ledger.activations += _bytes_of(of_micro_batch)
            if action.stage - 1 in handing:
                in_one += sum(storage.size for storage in now) - _bytes_of(now)
                for storage in now:
                    ledger.release(storage)
                now = []
        messages.add(number, now)
    messages.release_all()
    return in_one


def _bytes_of(storages: Sequence[Storage]) -> int:
    return sum({id(storage): storage.size for storage in storages}.values())


class _Messages:
    """What torch holds because it has sent it."""

    def __init__(self, ledger: Ledger, actions: Sequence[Action], drops: bool) -> None:
        self._ledger, self._actions, self._drops = ledger, actions, drops
        self._held: dict[str, list[Storage]] = {"FW": [], "BW": [], "warm-up": []}
        directions = [action.way for action in actions]
        # 1F1B remembers the last forward message that it did not send together with a receive, to the last forward.
        self._warm_up = directions.index("BW") - 2
        self._last_forward = len(directions) - 1 - directions[::-1].index("FW")

    def add(self, number: int, now: list[Storage]) -> None:
        """The messages of an action, by its number; those that are done are let go of."""
        direction = "warm-up" if number == self._warm_up else self._actions[number].way
        if self._drops and direction != "warm-up":
            self._release(direction)
        self._held[direction] += now
        if self._drops and number == self._last_forward + 1:
            self._release("warm-up")

    def release_all(self) -> None:
        """At the end of the iteration."""
        for direction in self._held:
            self._release(direction)

    def _release(self, direction: str) -> None:
        for storage in self._held[direction]:
            self._ledger.release(storage)
        self._held[direction].clear()


def _papers_sum(
    network: ModelGraph, strategy: Strategy, settings: PlanSettings, *, dtype: str, rho: float
) -> MemoryUse:
    options, ranks = settings.of(PipelineOptions), degree_of(strategy, Trait.STAGES)
    given = options.stages if schedule_of(options.schedule).placement.stages_per_rank == 1 else ()
    settings = settings.changed(PipelineOptions, schedule="gpipe", stages=given)
    local_batch = settings.batch // degree_of(strategy, Trait.DIVIDES_BATCH)
    stages = cut_into_stages(network, ranks, settings)
    uses = [paradl_memory(stage.network, local_batch, dtype=dtype, rho=rho) for stage in stages]
    return max(uses, key=lambda use: use.peak_bytes)


class PipelineMemory:
    """See :class:`~paradl_bench.strategies.memory.of_plan.StagesMemory`."""

    peak = staticmethod(pipelined_memory)
    papers_sum = staticmethod(_papers_sum)


MEMORY = PipelineMemory()
