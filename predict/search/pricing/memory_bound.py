"""The least that candidates can hold, for many at once: rules out what surely does not fit, before anything is planned.

Held throughout are parameters, the optimizer's state and exchange buckets; gradients stay to the update; the first rank
of a pipeline has the activations of as many micro-batches as its schedule has under way, other ranks those of one. What
an axis of p shares counts as 1/p of it, and what else memory goes to is left out.
"""

from __future__ import annotations

import msgspec
import numpy as np

from calibrate.profile.profile import Profile
from paradl_bench.network.kinds.autocast import kept_dtype, widths_of
from paradl_bench.plan.schedules.catalog import schedule_of
from paradl_bench.plan.strategy import Strategy
from paradl_bench.strategies.exchange.options import ExchangeOptions
from paradl_bench.strategies.memory.ledger import Ledger
from paradl_bench.strategies.memory.liveness import Liveness
from paradl_bench.strategies.memory.peak import MemoryUse, kept_copies
from paradl_bench.strategies.memory.rank_operations import RankRun
from paradl_bench.strategies.passes.recomputation import parts_within
from paradl_bench.strategies.pipeline.axis import PipelineOptions
from paradl_bench.strategies.pipeline.stage_shards import widths_inside
from paradl_bench.strategies.pipeline.stages import Stage, first_stage, stage_bounds
from predict.costs.cost_model import CostModel
from predict.costs.memory_estimate import with_factor
from predict.costs.sourced import Floats, Ints
from predict.search.candidates.mesh import Mesh, Sharing, alike
from predict.search.candidates.space import Held, Space
from predict.search.pricing.shared_work import SharedWorks

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
        self._states = [kept_copies(msgspec.structs.replace(space.settings, **chosen)) for chosen in space.held]
        self._kept: dict[tuple[int, int, int], tuple[Ints, float]] = {}
        self._stages: dict[tuple[Sharing, int, int, int], tuple[Floats, float]] = {}
        self._input_bytes = costs.network.input_bytes(1, kept_dtype(costs.dtype))
        self._under_way: dict[tuple[str, int, int], int] = {}
        self._whole = [self._activations_of_all(chosen) for chosen in space.held]
        mesh_of = space.mesh_of[space.strategy]
        self._first, self.plan_of = alike(mesh_of, space.micro_batches, space.schedule, space.again)

    def bytes(self) -> Floats:
        """Of every candidate."""
        space = self._space
        columns = space.mesh_of[space.strategy], space.micro_batches, space.schedule, space.again
        plans = zip(*(column[self._first].tolist() for column in columns), strict=True)
        found = [
            self._of(space.meshes[mesh], count, space.schedules[name], again) for mesh, count, name, again in plans
        ]
        return np.array(found)[self.plan_of]

    def _activations_of_all(self, held: Held) -> tuple[float, float]:
        """Bytes of activations when most are held: of one sample, and of every other."""
        network, settings = self._costs.network, self._space.settings
        peaks = []
        for batch in (1, 2):
            own = msgspec.structs.replace(settings.changed(ExchangeOptions, exchange="flat"), batch=batch, **held)
            use = self._costs.plans.memory(Strategy(), own)
            moving = use.parts_bytes["activations"] + use.parts_bytes["gradients"]
            peaks.append(float(moving - network.parameter_bytes))
        # A peak is the largest of sums that grow straight with the batch, and so grows ever faster.
        return peaks[0], max(peaks[1] - peaks[0], 0.0)

    def _of(self, mesh: Mesh, count: int, schedule: str, again: int) -> float:
        local = self._space.settings.batch // mesh.samplers
        parts = mesh.shared.degree * mesh.replicas // mesh.samplers if mesh.shared else 1
        parameters, kept = self._of_stages(mesh, schedule, again)
        if mesh.stages == 1:
            first, other = self._whole[again]
            active = max(first + (local // count - 1) * other, 0.0) / parts
        else:
            active = self._most_under_way(schedule, mesh.stages, count) * (local // count) * kept / parts
        copies = self._copies(mesh, self._states[again])
        gradients = 1 / (mesh.replicas if mesh.zero > 1 else 1)
        active += local * self._input_bytes
        return max(float(parameters.max()) * (copies + gradients), float(parameters[0]) * copies + active)

    def _copies(self, mesh: Mesh, states: int) -> float:
        """Of parameters, with the optimizer's state and exchange buckets."""
        if mesh.zero > 1:
            return (1 + states) / mesh.replicas
        # A bound from below: who holds some parameters alone exchanges the others only.
        return 1 + states / (mesh.replicas if mesh.zero else 1) + (mesh.exchanges and not mesh.holds_alone)

    def _of_stages(self, mesh: Mesh, schedule: str, again: int) -> tuple[Floats, float]:
        """Bytes of parameters of every rank, and what the first stage keeps of a sample from forward to backward."""
        stages_per_rank = schedule_of(schedule).stages_per_rank if mesh.stages > 1 else 1
        key = mesh.sharing, mesh.stages, stages_per_rank, again
        if key not in self._stages:
            gradient_bytes = self._shared.of(mesh.sharing).gradient_bytes
            bounds, kept = self._first_stage(mesh.stages, schedule, stages_per_rank, again)
            of_stages = np.add.reduceat(gradient_bytes, bounds).reshape(-1, mesh.stages)
            self._stages[key] = of_stages.sum(axis=0).astype(float), kept
        return self._stages[key]

    def _first_stage(self, ranks: int, schedule: str, stages_per_rank: int, again: int) -> tuple[Ints, float]:
        """The first layers of stages, and what the first of them keeps of a sample."""
        if ranks == 1:
            return np.zeros(1, np.int64), 0.0
        key = ranks, stages_per_rank, again
        if key not in self._kept:
            settings = self._space.settings.changed(PipelineOptions, schedule=schedule)
            settings = msgspec.structs.replace(settings, **self._space.held[again])
            first = first_stage(self._costs.network, ranks, settings)
            recomputed = parts_within(self._costs.network, settings, first.layers)
            bounds = stage_bounds(self._costs.network, ranks, settings)
            self._kept[key] = np.array(bounds[:-1]), self._kept_by(first, recomputed)
        return self._kept[key]

    def _kept_by(self, stage: Stage, recomputed: tuple[range, ...]) -> float:
        """Bytes of activations of one sample after its forward through the first stage."""
        ledger = Ledger()
        costs = self._costs
        widths = widths_inside(costs.network, stage, widths_of(costs.network, costs.dtype, costs.device_kind))
        run = RankRun(
            samples=1,
            dtype=costs.dtype,
            device=costs.device_kind,
            outputs=stage.outputs,
            widths=widths,
            recomputed=recomputed,
        )
        walk = Liveness(ledger, stage.network, run)
        received = ledger.allocate(0)
        walk.forward(received)
        return float(ledger.activations)

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


def tensors_within(profile: Profile, limit_bytes: float) -> float:
    """As many bytes of tensors as a device with that memory holds, by the profile's factor; 0 where none fit."""
    low, high = 0.0, 2.0 * limit_bytes + 1.0
    for _ in range(60):
        middle = (low + high) / 2
        fits = with_factor(profile, MemoryUse(round(middle), {})).peak_bytes <= limit_bytes
        low, high = (middle, high) if fits else (low, middle)
    return high
