"""The least that candidates can hold, for many at once: rules out what surely does not fit, before anything is planned.

Held throughout are parameters, the optimizer's state, exchange buckets, and what stages receive into; gradients stay to
the update, which makes tensors of its own; the first rank of a pipeline has the activations of as many micro-batches as
its schedule has under way, and those of a backward beside all but one. From the second backward on gradients are beside
them. Where nothing is let go of, what was sent is there to the end. What an axis of p shares counts as 1/p of it, and
what else memory goes to is left out.

Of a mesh whose parameters alone are too many nothing else is looked at.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from calibrate.profile.profile import Profile
from paradl_bench.core.cache_keys import Answers
from paradl_bench.network.graph import DTYPE_BYTES, ModelGraph
from paradl_bench.network.kinds.autocast import KEPT_DTYPE, as_held, computed_in, given_dtype, has_masters, widths_of
from paradl_bench.network.kinds.kind import layer_kinds
from paradl_bench.network.optimizers import optimizer_named
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.compute import copies_of_state
from paradl_bench.plan.schedules.catalog import schedule_of
from paradl_bench.strategies.memory.gpu_kernels import layers_on_gpu
from paradl_bench.strategies.memory.ledger import Gradient, Ledger, Storage
from paradl_bench.strategies.memory.liveness import Liveness
from paradl_bench.strategies.memory.peak import MemoryUse, framework_of, kept_copies, run_again
from paradl_bench.strategies.memory.rank_operations import RankRun, shares_input
from paradl_bench.strategies.passes.recomputation import parts_within
from paradl_bench.strategies.pipeline.axis import PipelineOptions
from paradl_bench.strategies.pipeline.crossings import data_flow, elements
from paradl_bench.strategies.pipeline.stage_shards import widths_inside
from paradl_bench.strategies.pipeline.stages import first_stage, stage_bounds
from predict.costs.cost_model import CostModel
from predict.costs.memory_estimate import with_factor
from predict.costs.sourced import Floats, Ints
from predict.search.candidates.mesh import Mesh, alike
from predict.search.candidates.space import Space
from predict.search.pricing.shared_work import SharedWork, SharedWorks


class _Activations(NamedTuple):
    """Bytes of activations of one sample and of every other: after forward, and when they are most in backward."""

    kept: tuple[float, float] = (0.0, 0.0)
    most: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def of(cls, network: ModelGraph, run: RankRun) -> _Activations:
        """Of a network, or of a pipeline's first stage."""
        one, two = (_walked(network, replace(run, samples=samples)) for samples in (1, 2))
        # A peak is the largest of sums that grow straight with the batch, and so grows ever faster.
        return cls(*((a, max(b - a, 0.0)) for a, b in zip(one, two, strict=True)))


class _Stages(NamedTuple):
    """What the ranks of a pipeline hold; arrays by rank.

    Attributes:
        parameters: bytes.
        received, sent: bytes a sample of what stages receive into, and of what they make and send.
        active: whole activations of the first stage.
    """

    parameters: Floats
    received: Floats
    sent: Floats
    active: _Activations = _Activations()


@dataclass(slots=True)
class _MostActivations(Ledger):
    """A ledger that notes when activations alone are largest."""

    most: int = 0

    def mark(self, more: int = 0, gradients: int = 0) -> None:
        """Note the moment."""
        self.most = max(self.most, self.activations + more)


_ENOUGH = 4
"""A schedule that has not begun to go backward after so many micro-batches a rank does all forwards first."""


class MemoryBounds:
    """Bytes of tensors on the rank that is looked at, at least.

    Args:
        within: bytes that a rank has; of what surely needs more, no tighter bound is looked for.

    Attributes:
        plan_of: a number for each candidate: those with the same one hold the same, since they differ in the order of
            axes or in buckets alone.
    """

    def __init__(self, costs: CostModel, space: Space, shared: SharedWorks, within: float = np.inf) -> None:
        self._costs, self._space, self._shared, self._within = costs, space, shared, within
        self._masters, self._network = has_masters(costs.dtype), as_held(costs.network, costs.dtype)
        self._framework = framework_of(space.settings)
        settings = msgspec.structs.replace(space.settings, dtype=costs.dtype)
        # State is of fp32 where parameters are not.
        wider = DTYPE_BYTES[KEPT_DTYPE] // DTYPE_BYTES[computed_in(costs.dtype)] if self._masters else 1
        choices = [msgspec.structs.replace(settings, **chosen) for chosen in space.held]
        self._states = [wider * kept_copies(choice) for choice in choices]
        # A CPU updates parameters one by one.
        own = optimizer_named(settings.optimizer).own_tensors and costs.device_kind != "cpu"
        # In the update alone: what comes from host memory, and tensors that the optimizer makes.
        self._moved = [wider * (copies_of_state(choice) - kept_copies(choice) + own) for choice in choices]
        self._found = Answers()
        self._widths = widths_of(self._network, costs.dtype, costs.device_kind, self._framework.fuses)
        kinds = [layer_kinds().get(layer.kind) for layer in costs.network.layers]
        on_device = layers_on_gpu if costs.device_kind != "cpu" else lambda layers, _: layers
        self._aliases = list(map(shares_input, on_device(costs.network.layers, kinds), kinds))
        self._input_bytes = costs.network.input_bytes(1, given_dtype(costs.dtype))
        self._under_way: dict[tuple[str, int, int], tuple[int, int]] = {}
        # Where the optimizer's state lies changes no activation: per choice, the first with its activations.
        again = [chosen.get("recompute") for chosen in space.held]
        self._alike = [again.index(own) for own in again]
        mesh_of = space.mesh_of[space.strategy]
        self._first, self.plan_of = alike(mesh_of, space.micro_batches, space.schedule, space.again)

    def bytes(self) -> Floats:
        """Of every candidate."""
        space = self._space
        columns = space.mesh_of[space.strategy], space.schedule, space.again, space.micro_batches
        mesh, name, again, counts = (column[self._first] for column in columns)
        plan_bytes = np.zeros(len(self._first))
        # Those that differ in micro-batches alone are worked out together.
        first, kind = alike(mesh, name, again)
        together = np.split(np.argsort(kind, kind="stable"), np.cumsum(np.bincount(kind))[:-1])
        for one, rows in zip(first.tolist(), together, strict=True):
            plan_bytes[rows] = self._of(space.meshes[mesh[one]], counts[rows], space.schedules[name[one]], again[one])
        return plan_bytes[self.plan_of]

    def _of(self, mesh: Mesh, counts: Ints, schedule: str, again: int) -> Floats:
        """Of plans with so many micro-batches each."""
        least = self._peaks(mesh, counts, schedule, again, self._parameters_alone(mesh, schedule))
        if least.min() > self._within:
            return least
        return self._peaks(mesh, counts, schedule, again, self._of_stages(mesh, schedule, again))

    def _peaks(self, mesh: Mesh, counts: Ints, schedule: str, again: int, stages: _Stages) -> Floats:
        """The larger of what the first rank holds in backward, and of what any does when that is over, or updates."""
        local = self._space.settings.batch // mesh.samplers
        in_buffers = 0 if self._framework.drops_messages else local
        held = stages.parameters * self._copies(mesh, self._states[again]) + in_buffers * stages.received
        parts, piped = mesh.parted if mesh.zero > 1 else 1, mesh.stages > 1
        # What replicas share out of stages is whole from the first forward to the last backward.
        gathered = stages.parameters * (piped and mesh.zero > 1)
        gradients = stages.parameters / (1 if piped else parts)
        # When the last backward begins, or the update.
        at_end = gathered + gradients + (0.0 if schedule_of(schedule).drops_messages else in_buffers * stages.sent)
        if mesh.zero == 2 and not piped:
            # Gathered from forward to backward.
            at_end = np.maximum(at_end, stages.parameters)
        updating = stages.parameters * (1 / parts + self._moved[again] / mesh.parted)
        active = self._active(mesh, counts, schedule, again, stages, float(gradients[0]))
        first = float(held[0] + gathered[0]) + local * self._input_bytes + active
        return np.asarray(np.maximum(first, float((held + np.maximum(at_end, updating)).max())))

    def _active(self, mesh: Mesh, counts: Ints, schedule: str, again: int, stages: _Stages, gradients: float) -> Floats:
        """What the first rank has of activations, and of gradients beside them from the second micro-batch on."""
        at_once = self._space.settings.batch // mesh.samplers // counts
        parts = mesh.sharers * mesh.replicas // mesh.samplers
        of_samples = (np.asarray(first + (at_once - 1) * other, float) for first, other in stages.active)
        kept, most = (self._held_whole(mesh, activations) / parts for activations in of_samples)
        # Where ranks swap samples, those that one has when activations are most are not known beside gradients.
        swaps = any(axis.has(Trait.DIVIDES_BATCH) for axis in mesh.shared)
        gradients = 0.0 if swaps else gradients
        if mesh.stages == 1:
            # Stage 2 gathers all in forward, and frees it as backward goes on.
            whole = float(stages.parameters[0]) if mesh.zero == 2 else 0.0
            return np.asarray(np.maximum(kept + whole, most) + gradients * (counts > 1))
        at_first, later = np.array([self._most_under_way(schedule, mesh.stages, count) for count in counts.tolist()]).T
        one = np.maximum(kept, most)
        beside = np.where(later > 0, (later - 1) * kept + one + gradients, 0.0)
        return np.asarray(np.maximum((at_first - 1) * kept + one, beside))

    def _held_whole(self, mesh: Mesh, activations: Floats) -> Floats:
        """What a rank that sees samples of its own has of activations, where it may hold a part of the parameters."""
        if mesh.samplers == mesh.replicas:
            return activations
        # Autocast's copies of parameters count as activations, and grow with no sample.
        copies = self._costs.network.parameter_bytes if self._costs.dtype != "fp32" else 0
        return np.asarray(np.maximum(activations - copies, activations / mesh.sharers))

    def _copies(self, mesh: Mesh, states: int) -> float:
        """Of parameters, with the optimizer's state and exchange buckets."""
        if mesh.zero > 1:
            # Shards that are fp32 take the place of the optimizer's copies.
            return (states + (not self._masters)) / mesh.parted
        # A bound from below: who holds some parameters alone exchanges the others only.
        has_buckets = mesh.exchanges and not mesh.holds_alone and not self._framework.gradient_dtype
        return 1 + states / mesh.parted + has_buckets

    def _parameters_alone(self, mesh: Mesh, schedule: str) -> _Stages:
        """Parameters of every rank's stages, at least: nobody has to say what an axis does to layers."""
        # Ranks that cut positions or tokens hold all parameters; those that hold experts each, some.
        parts = math.prod(
            axis.degree for axis in mesh.shared if axis.has(Trait.DIVIDES_BATCH) or not axis.has(Trait.REPLICATES)
        )

        def find() -> _Stages:
            whole = _of_ranks(self._shared.of_all.gradient_bytes, self._bounds(mesh.stages, schedule), mesh.stages)
            none = np.zeros(mesh.stages)
            return _Stages(whole / parts, none, none)

        return self._found.once(("parameters", parts, self._stages_of(mesh, schedule)), find)

    def _of_stages(self, mesh: Mesh, schedule: str, again: int) -> _Stages:
        """What every rank's stages hold, without what axes beside share of activations."""
        stages, alike_again = self._stages_of(mesh, schedule), self._alike[again]
        first = mesh.stages, schedule, alike_again

        def find() -> _Stages:
            shared, bounds = self._shared.of(mesh.sharing), self._bounds(mesh.stages, schedule)
            crossing = self._crossing(shared, bounds)
            in_front, behind = (np.pad(crossing, ((0, 0), pad)) for pad in ((1, 0), (0, 1)))
            return _Stages(
                _of_ranks(shared.gradient_bytes, bounds, mesh.stages),
                (in_front[0] + behind[0]).reshape(-1, mesh.stages).sum(axis=0),
                behind[1].reshape(-1, mesh.stages).sum(axis=0),
                self._found.once(("first", stages, alike_again), partial(self._first_stage, *first)),
            )

        return self._found.once((mesh.sharing, stages, alike_again), find)

    def _stages_of(self, mesh: Mesh, schedule: str) -> tuple[int, int]:
        """What decides a pipeline's cuts: its ranks, and stages of each."""
        return mesh.stages, schedule_of(schedule).stages_per_rank if mesh.stages > 1 else 1

    def _bounds(self, ranks: int, schedule: str) -> tuple[int, ...]:
        """The first layer of each stage, and the end."""
        if ranks == 1:
            return 0, len(self._costs.network.layers)
        settings = self._space.settings.changed(PipelineOptions, schedule=schedule)
        return stage_bounds(self._costs.network, ranks, settings)

    def _crossing(self, shared: SharedWork, bounds: Sequence[int]) -> Floats:
        """Bytes a sample that cross each cut, and those of tensors that the stage in front has made; (2, cuts)."""
        network, flow = self._costs.network, data_flow(self._costs.network)
        crossing = np.zeros((2, len(bounds) - 2))
        for cut, (start, end) in enumerate(itertools.pairwise(bounds[:-1])):
            for value in flow.crossing[end]:
                layer = network.layers[value.layer]
                share = shared.held[value.layer]
                # Further outputs may be cut smaller, and what holds no batch does not grow with it.
                if layer.batchless or (value.output and share < 1):
                    continue
                size = share * elements(network, value) * self._widths[value.layer].runs
                made = flow.made_by(value, end) == value.layer >= start
                crossing[:, cut] += size, size * (made and not value.output and not self._aliases[value.layer])
        return crossing

    def _first_stage(self, ranks: int, schedule: str, again: int) -> _Activations:
        """What the first of a pipeline's stages has of activations; the whole network on one rank."""
        network, held = self._costs.network, self._space.held[again]
        settings = msgspec.structs.replace(self._space.settings.changed(PipelineOptions, schedule=schedule), **held)
        run = RankRun(samples=1, dtype=self._costs.dtype, device=self._costs.device_kind, framework=self._framework)
        if ranks == 1:
            return _Activations.of(self._network, replace(run, recomputed=run_again(self._network, settings)))
        first = first_stage(network, ranks, settings)
        run = replace(
            run,
            outputs=first.outputs,
            kept_outputs=() if self._framework.drops_messages else first.outputs,
            widths=widths_inside(network, first, self._widths),
            recomputed=parts_within(network, settings, first.layers),
        )
        return _Activations.of(first.network, run)

    def _most_under_way(self, schedule: str, ranks: int, count: int) -> tuple[int, int]:
        """Micro-batches that the first stage has been forward with, and not backward, at most.

        Until a backward is done, and while another one is; 0 where there is none.
        """
        looked_at = min(count, _ENOUGH * ranks)
        key = schedule, ranks, looked_at
        if key not in self._under_way:
            now = at_first = later = done = 0
            for action in schedule_of(schedule).order(0, ranks, looked_at):
                if action.stage == 0 and action.direction == "FW":
                    now += 1
                elif action.stage == 0 and action.completes:
                    at_first, later = (at_first, max(later, now)) if done else (now, later)
                    now, done = now - 1, done + 1
            self._under_way[key] = at_first, later
        at_first, later = self._under_way[key]
        # What has gone forward with all that was looked at does so with all that there are.
        return (count, count - 1) if at_first == looked_at else (at_first, later)


def hold_activations_of(space: Space, candidate: int) -> NDArray[np.bool_]:
    """Candidates that hold no fewer activations than this one: of the same shards, on as many samples at once.

    What replicas share out of parameters, gradients and state changes none of them. Of a pipeline there are none.
    """
    own_mesh = space.mesh(candidate)
    alike_meshes = [own_mesh.stages == mesh.stages == 1 and mesh.sharing == own_mesh.sharing for mesh in space.meshes]
    recomputed = [choice.get("recompute") for choice in space.held]
    kept_alike = [choice == recomputed[space.again[candidate]] for choice in recomputed]
    mesh_of = space.mesh_of[space.strategy]
    at_once = np.array([space.settings.batch // mesh.samplers for mesh in space.meshes])[mesh_of]
    at_once //= space.micro_batches
    same_shards = np.array(alike_meshes)[mesh_of] & np.array(kept_alike)[space.again]
    return np.asarray(same_shards & (at_once >= at_once[candidate]))


def _walked(network: ModelGraph, run: RankRun) -> tuple[float, float]:
    """Bytes of activations of a network, or of a pipeline's first stage, after forward and when they are most."""
    ledger = _MostActivations()
    walk = Liveness(ledger, network, run)
    left = walk.forward(ledger.allocate(0))
    kept = float(ledger.activations)
    # What is sent back lies in a buffer that counts elsewhere.
    sent = left.outputs if run.kept_outputs or not run.outputs else _outputs_of(network, run)
    walk.backward(left, [Gradient(Storage(0), output.size) for output in sent] if run.outputs else ())
    return kept, float(ledger.most)


def _of_ranks(layer_bytes: Ints, bounds: Sequence[int], ranks: int) -> Floats:
    """Bytes of the stages of each rank, which are as many ranks apart."""
    return np.asarray(np.add.reduceat(layer_bytes, bounds[:-1]).reshape(-1, ranks).sum(axis=0), float)


def _outputs_of(network: ModelGraph, run: RankRun) -> list[Storage]:
    """What a stage passes on, where nobody keeps it."""
    ledger = Ledger()
    return Liveness(ledger, network, replace(run, kept_outputs=run.outputs)).forward(ledger.allocate(0)).outputs


class Bounded(NamedTuple):
    """What no other hardware changes of candidates.

    Attributes:
        bytes, plan_of: of :class:`MemoryBounds`.
    """

    shared: SharedWorks
    bytes: Floats
    plan_of: Ints


def bounds_of(costs: CostModel, space: Space, within: float) -> Bounded:
    """Bounds of a space's candidates, which searches on other links or devices of as much memory share.

    Args:
        within: as of :class:`MemoryBounds`.
    """
    held = tuple(tuple(chosen.items()) for chosen in space.held)
    columns = space.mesh_of, space.strategy, space.micro_batches, space.schedule, space.again
    key = within, space.settings, space.meshes, space.schedules, held, *(column.tobytes() for column in columns)

    def find() -> Bounded:
        shared = SharedWorks(as_held(costs.network, costs.dtype), space.settings)
        memory_bounds = MemoryBounds(costs, space, shared, within)
        return Bounded(shared, memory_bounds.bytes(), memory_bounds.plan_of)

    return costs.plans.found.once(("memory bounds", key), find)


def tensors_within(profile: Profile, limit_bytes: float) -> float:
    """As many bytes of tensors as a device with that memory holds, by the profile's factor; 0 where none fit."""
    low, high = 0.0, 2.0 * limit_bytes + 1.0
    for _ in range(60):
        middle = (low + high) / 2
        fits = with_factor(profile, MemoryUse(round(middle), {})).peak_bytes <= limit_bytes
        low, high = (middle, high) if fits else (low, middle)
    return high
