"""The least that candidates can hold, for many at once: rules out what surely does not fit, before anything is planned.

Held throughout are parameters, the optimizer's state, exchange buckets, and what stages receive into; gradients stay to
the update; the first rank of a pipeline has the activations of as many micro-batches as its schedule has under way, and
those of a backward beside all but one. Where nothing is let go of, what was sent is there to the end. What an axis of p
shares counts as 1/p of it, and what else memory goes to is left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from calibrate.profile.profile import Profile
from paradl_bench.network.graph import DTYPE_BYTES, ModelGraph
from paradl_bench.network.kinds.autocast import KEPT_DTYPE, as_held, computed_in, given_dtype, has_masters, widths_of
from paradl_bench.network.kinds.kind import layer_kinds
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
from predict.search.candidates.mesh import Mesh, Sharing, alike
from predict.search.candidates.refusals import Held
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


class _First(NamedTuple):
    """Stages, and activations of the first one.

    Attributes:
        bounds: the first layer of each stage, and the end.
    """

    bounds: tuple[int, ...]
    active: _Activations = _Activations()


class _Stages(NamedTuple):
    """What the ranks of a pipeline hold; arrays by rank.

    Attributes:
        parameters: bytes.
        received, sent: bytes a sample of what stages receive into, and of what they make and send.
    """

    parameters: Floats
    received: Floats
    sent: Floats
    first: _First


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

    Attributes:
        plan_of: a number for each candidate: those with the same one hold the same, since they differ in the order of
            axes or in buckets alone.
    """

    def __init__(self, costs: CostModel, space: Space, shared: SharedWorks) -> None:
        self._costs, self._space, self._shared = costs, space, shared
        self._masters, self._network = has_masters(costs.dtype), as_held(costs.network, costs.dtype)
        self._framework = framework_of(space.settings)
        settings = msgspec.structs.replace(space.settings, dtype=costs.dtype)
        # State is of fp32 where parameters are not.
        wider = DTYPE_BYTES[KEPT_DTYPE] // DTYPE_BYTES[computed_in(costs.dtype)] if self._masters else 1
        self._states = [wider * kept_copies(msgspec.structs.replace(settings, **chosen)) for chosen in space.held]
        self._known: dict[tuple[int, int, int], _First] = {}
        self._stages: dict[tuple[Sharing, int, int, int], _Stages] = {}
        self._widths = widths_of(self._network, costs.dtype, costs.device_kind, self._framework.fuses)
        kinds = [layer_kinds().get(layer.kind) for layer in costs.network.layers]
        on_device = layers_on_gpu if costs.device_kind != "cpu" else lambda layers, _: layers
        self._aliases = list(map(shares_input, on_device(costs.network.layers, kinds), kinds))
        self._input_bytes = costs.network.input_bytes(1, given_dtype(costs.dtype))
        self._under_way: dict[tuple[str, int, int], int] = {}
        # Where the optimizer's state lies changes no activation: per choice, the first with its activations.
        again = [chosen.get("recompute") for chosen in space.held]
        self._alike = [again.index(own) for own in again]
        whole = {which: self._activations_of_all(space.held[which]) for which in dict.fromkeys(self._alike)}
        self._whole = [whole[which] for which in self._alike]
        mesh_of = space.mesh_of[space.strategy]
        self._first, self.plan_of = alike(mesh_of, space.micro_batches, space.schedule, space.again)

    def bytes(self) -> Floats:
        """Of every candidate."""
        space = self._space
        columns = space.mesh_of[space.strategy], space.micro_batches, space.schedule, space.again
        plans = zip(*(column[self._first].tolist() for column in columns), strict=True)
        plan_bytes = [
            self._of(space.meshes[mesh], count, space.schedules[name], again) for mesh, count, name, again in plans
        ]
        return np.array(plan_bytes)[self.plan_of]

    def _activations_of_all(self, held: Held) -> _Activations:
        """What the whole network has of activations."""
        network, settings = self._network, msgspec.structs.replace(self._space.settings, **held)
        run = RankRun(
            samples=1,
            dtype=self._costs.dtype,
            device=self._costs.device_kind,
            recomputed=run_again(network, settings),
            framework=self._framework,
        )
        return _Activations.of(network, run)

    def _of(self, mesh: Mesh, count: int, schedule: str, again: int) -> float:
        local = self._space.settings.batch // mesh.samplers
        at_once = local // count
        parts = mesh.sharers * mesh.replicas // mesh.samplers
        stages, whole = self._of_stages(mesh, schedule, again), self._whole[again]
        of_all = mesh.stages == 1
        kept, most = (_of_samples(growth, at_once) for growth in (whole if of_all else stages.first.active))
        if of_all:
            kept, most = (self._held_whole(mesh, activations) / parts for activations in (kept, most))
            # Stage 2 gathers all in forward, and frees it as backward goes on.
            active = max(kept + float(stages.parameters[0]), most) if mesh.zero == 2 else most
        else:
            under_way = self._most_under_way(schedule, mesh.stages, count)
            active = ((under_way - 1) * kept + max(kept, most)) / parts
        in_buffers = 0 if self._framework.drops_messages else local
        held = stages.parameters * self._copies(mesh, self._states[again]) + in_buffers * stages.received
        first = float(held[0]) + active + local * self._input_bytes
        gradients = stages.parameters / (mesh.parted if mesh.zero > 1 else 1)
        # When the last backward begins, or the update.
        at_end = gradients + (0.0 if schedule_of(schedule).drops_messages else in_buffers * stages.sent)
        if mesh.zero == 2 and mesh.stages == 1:
            # Gathered from forward to backward.
            at_end = np.maximum(at_end, stages.parameters)
        return max(float((held + at_end).max()), first)

    def _held_whole(self, mesh: Mesh, activations: float) -> float:
        """What a rank that sees samples of its own has of activations, where it may hold a part of the parameters."""
        if mesh.samplers == mesh.replicas:
            return activations
        # Autocast's copies of parameters count as activations, and grow with no sample.
        copies = self._costs.network.parameter_bytes if self._costs.dtype != "fp32" else 0
        return max(activations - copies, activations / mesh.sharers)

    def _copies(self, mesh: Mesh, states: int) -> float:
        """Of parameters, with the optimizer's state and exchange buckets."""
        if mesh.zero > 1:
            # Shards that are fp32 take the place of the optimizer's copies.
            return (states + (not self._masters)) / mesh.parted
        # A bound from below: who holds some parameters alone exchanges the others only.
        has_buckets = mesh.exchanges and not mesh.holds_alone and not self._framework.gradient_dtype
        return 1 + states / mesh.parted + has_buckets

    def _of_stages(self, mesh: Mesh, schedule: str, again: int) -> _Stages:
        """What every rank's stages hold, without what axes beside share of activations."""
        stages_per_rank = schedule_of(schedule).stages_per_rank if mesh.stages > 1 else 1
        key = mesh.sharing, mesh.stages, stages_per_rank, self._alike[again]
        if key not in self._stages:
            shared = self._shared.of(mesh.sharing)
            first = self._first_stage(mesh.stages, schedule, stages_per_rank, again)

            def of_ranks(of_stages: Floats | Ints) -> Floats:
                return np.asarray(of_stages.reshape(-1, mesh.stages).sum(axis=0), float)

            crossing = self._crossing(shared, first.bounds)
            in_front, behind = (np.pad(crossing, ((0, 0), pad)) for pad in ((1, 0), (0, 1)))
            self._stages[key] = _Stages(
                of_ranks(np.add.reduceat(shared.gradient_bytes, first.bounds[:-1])),
                of_ranks(in_front[0] + behind[0]),
                of_ranks(behind[1]),
                first,
            )
        return self._stages[key]

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

    def _first_stage(self, ranks: int, schedule: str, stages_per_rank: int, again: int) -> _First:
        """The first layers of stages, and what the first of them holds."""
        if ranks == 1:
            return _First((0, len(self._costs.network.layers)))
        key = ranks, stages_per_rank, self._alike[again]
        if key not in self._known:
            settings = self._space.settings.changed(PipelineOptions, schedule=schedule)
            settings = msgspec.structs.replace(settings, **self._space.held[again])
            first = first_stage(self._costs.network, ranks, settings)
            recomputed = parts_within(self._costs.network, settings, first.layers)
            run = RankRun(
                samples=1,
                dtype=self._costs.dtype,
                device=self._costs.device_kind,
                outputs=first.outputs,
                kept_outputs=() if self._framework.drops_messages else first.outputs,
                widths=widths_inside(self._costs.network, first, self._widths),
                recomputed=recomputed,
                framework=self._framework,
            )
            bounds = stage_bounds(self._costs.network, ranks, settings)
            self._known[key] = _First(bounds, _Activations.of(first.network, run))
        return self._known[key]

    def _most_under_way(self, schedule: str, ranks: int, count: int) -> int:
        """Micro-batches that the first stage has been forward with, and not backward, at most."""
        looked_at = min(count, _ENOUGH * ranks)
        key = schedule, ranks, looked_at
        if key not in self._under_way:
            now = most = 0
            for action in schedule_of(schedule).order(0, ranks, looked_at):
                if action.stage == 0 and (action.direction == "FW" or action.completes):
                    now += 1 if action.direction == "FW" else -1
                    most = max(most, now)
            self._under_way[key] = most
        most = self._under_way[key]
        return count if most == looked_at else most


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


def bounds_of(costs: CostModel, space: Space) -> Bounded:
    """Bounds of a space's candidates, which searches on other links or devices share."""
    held = tuple(tuple(chosen.items()) for chosen in space.held)
    columns = space.mesh_of, space.strategy, space.micro_batches, space.schedule, space.again
    key = space.settings, space.meshes, space.schedules, held, *(column.tobytes() for column in columns)

    def find() -> Bounded:
        shared = SharedWorks(as_held(costs.network, costs.dtype), space.settings)
        memory_bounds = MemoryBounds(costs, space, shared)
        return Bounded(shared, memory_bounds.bytes(), memory_bounds.plan_of)

    return costs.plans.found.once(("memory bounds", key), find)


def _of_samples(growth: tuple[float, float], samples: int) -> float:
    first, other = growth
    return first + (samples - 1) * other


def tensors_within(profile: Profile, limit_bytes: float) -> float:
    """As many bytes of tensors as a device with that memory holds, by the profile's factor; 0 where none fit."""
    low, high = 0.0, 2.0 * limit_bytes + 1.0
    for _ in range(60):
        middle = (low + high) / 2
        fits = with_factor(profile, MemoryUse(round(middle), {})).peak_bytes <= limit_bytes
        low, high = (middle, high) if fits else (low, middle)
    return high
