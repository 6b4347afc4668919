"""Meshes for a number of ranks, and the settings of each: within the limits of axes, batch and schedules."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from paradl_bench.core.cache_keys import Answers
from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.axes.registry import kinds_with
from paradl_bench.plan.schedules.catalog import schedules
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.strategies.nesting.nested_plan import check_nesting
from paradl_bench.strategies.passes.lower_precision import check_dtype, check_kernel_settings
from paradl_bench.strategies.pipeline.stages import most_stages
from predict.search.candidates.mesh import Mesh, Settings, Sharing, divisors, placements
from predict.search.candidates.refusals import Held, Refusals
from predict.search.candidates.ruled_out import RuledOut
from predict.search.candidates.shared_axes import SharedAxes

MOST_TRIED_MICRO_BATCHES = 512


def _zero_stages() -> range:
    prefix = kinds_with(Trait.DIVIDES_BATCH)[0].prefix
    return range(1, prefix.most + 1) if prefix else range(0)


class Finder:
    """What strategies for a number of ranks are made of; what cannot be is counted."""

    def __init__(
        self,
        network: ModelGraph,
        settings: PlanSettings,
        ranks: int,
        names: Sequence[str],
        caps: Sequence[float | None],
        held: Sequence[Held],
        impossible: RuledOut,
        like: tuple[int, ...],
    ) -> None:
        self._network, self._settings, self._ranks = network, settings, ranks
        self._names, self._caps, self._held, self._impossible = names, caps, held, impossible
        self._schedules = [schedules()[name] for name in names]
        self._parts_backward = [schedule.splits_backward for schedule in self._schedules]
        self._most_stages = most_stages(network)
        self._refusals = Refusals(network, settings)
        self._shared_axes = SharedAxes(network, settings, ranks, impossible, like)
        # Of meshes with as many stages and replicas: there are a few ways to be that, and thousands of meshes.
        self._found = Answers()

    @property
    def left_out(self) -> Iterator[str]:
        """As of :class:`~predict.search.candidates.shared_axes.SharedAxes`, once all sharings are found."""
        return self._shared_axes.left_out()

    def sharings(self) -> Iterator[Sharing]:
        """Axes that share layers, none first, within their limits."""
        alone: Sharing = (), ()
        return itertools.chain((alone,), self._shared_axes)

    def counting_in(self, impossible: RuledOut) -> Finder:
        """The same, with all that it has found; it counts by itself what cannot be."""
        other = copy.copy(self)
        other._impossible = impossible
        return other

    def meshes(self, sharing: Sharing, stages: int) -> Iterator[Mesh]:
        """Those with such axes and so many stages, within the limits of the batch."""
        shared, chosen = sharing
        replicas, left = divmod(self._ranks // stages, math.prod(axis.degree for axis in shared))
        mesh = Mesh(shared, stages, replicas, chosen=chosen)
        if not left and self._possible(mesh):
            yield from self._with_zero(mesh)

    def _possible(self, mesh: Mesh) -> bool:
        """Whether a mesh is, but for the axes that share layers; else its placements are counted."""
        stages = mesh.stages
        orders = placements(stages, mesh.replicas, len(mesh.shared))
        if stages > 1 and self._settings.batch_norm == "sync":
            self._impossible.add("batch norm is local to a micro-batch in a pipeline, not synchronised", orders)
        elif stages > self._most_stages:
            name = self._network.name
            text = f"p <= {self._most_stages}: places where {name} can be cut into stages that each have a parameter"
            self._impossible.add(f"pipeline: {text}", orders)
        elif self._settings.batch % mesh.samplers:
            self._impossible.add_uneven(self._settings.batch, mesh.samplers, orders)
        else:
            return True
        return False

    def trains_in(self, mesh: Mesh, dtype: str, kernel_settings: str) -> bool:
        """Whether a mesh can be trained in a dtype and with kernel settings; else its placements are counted."""
        strategy = Strategy(axes=mesh.axes)
        try:
            check_nesting(strategy)
            check_dtype(strategy, self._settings, dtype)
            check_kernel_settings(strategy, self._settings, kernel_settings)
        except UserError as error:
            self._impossible.add(str(error), mesh.order_count)
            return False
        return True

    def _with_zero(self, mesh: Mesh) -> Iterator[Mesh]:
        """A mesh, also with each stage of ZeRO on replicas or experts, and from stage 2 on with copies of shards."""
        for stage in (0, *(_zero_stages() if mesh.replicas > 1 or mesh.holds_alone else ())):
            if self._nests(mesh._replace(zero=stage)):
                for copies in divisors(mesh.replicas)[:-1] if stage > 1 and mesh.replicas > 1 else (1,):
                    yield mesh._replace(zero=stage, copies=copies)

    def _nests(self, mesh: Mesh) -> bool:
        """Whether a stage of ZeRO, and options of the axes that share layers, go with all axes of a mesh."""
        refusal = self._refusals.of(mesh)
        if refusal:
            self._impossible.add(refusal, mesh.order_count)
        return not refusal

    def combinations(self, mesh: Mesh) -> Settings:
        """Micro-batches, schedule, bucket size and what is computed again, of a mesh's candidates: a row each."""
        caps = len(self._caps) if mesh.exchanges and mesh.zero < 2 else 1
        again = self._computed_again(mesh)
        local = self._settings.batch // mesh.samplers
        if mesh.stages > 1:
            for text in self._found.once(("refused", mesh.stages, local), lambda: self._refused(mesh.stages, local)):
                self._impossible.add_settings(text, mesh, mesh.order_count)
        key = "rows", mesh.stages, local, caps, again
        return self._found.once(key, lambda: self._rows(mesh.stages, local, caps, again))

    def _rows(self, stages: int, local: int, caps: int, again: tuple[int, ...]) -> Settings:
        """Those of so many stages, with so many samples, sizes of buckets, and choices of what is computed again."""
        rows: list[tuple[int, ...]] = []
        for index in range(len(self._schedules) if stages > 1 else 1):
            kept = stages > 1 and self._parts_backward[index]
            possible = [which for which in again if not (kept and self._held[which]["recompute"])]
            counts = [count for count in _turns(local) if stages == 1 or not self._refusal(stages, index, count)]
            rows += itertools.product(counts, (index,), range(caps), possible)
        return np.array(rows, np.int32).reshape(-1, 4)

    def _computed_again(self, mesh: Mesh) -> tuple[int, ...]:
        """What the mesh can have of ``held``; placements that it rules out are counted."""
        possible = []
        for which, chosen in enumerate(self._held):
            refusal = self._refusals.of(mesh, chosen)
            if refusal:
                self._impossible.add_settings(refusal, mesh, mesh.order_count)
            else:
                possible.append(which)
        if mesh.stages > 1 and any(self._parts_backward) and any(chosen["recompute"] for chosen in self._held):
            names = [schedule.name for schedule in self._schedules if schedule.splits_backward]
            text = f"--schedule {', '.join(names)} with --recompute, which runs under other schedules"
            self._impossible.add_settings(text, mesh, mesh.order_count)
        return tuple(possible)

    def _refused(self, stages: int, local: int) -> tuple[str, ...]:
        """Why schedules cannot run some numbers of micro-batches of so many samples."""
        tried = itertools.product(range(len(self._schedules)), _turns(local))
        refusals = (self._refusal(stages, index, count) for index, count in tried)
        return tuple(dict.fromkeys(filter(None, refusals)))

    def _refusal(self, stages: int, index: int, count: int) -> str:
        schedule = self._schedules[index]
        if schedule.placement.stages(stages) > self._most_stages:
            return (
                f"{schedule.name}: {schedule.placement.stages_per_rank} stages a rank, {self._most_stages} are the most"
            )
        if schedule.refusal(stages, count):
            return f"some numbers of micro-batches, which --schedule {schedule.name} cannot run"
        return ""


def _turns(samples: int) -> list[int]:
    """Numbers of micro-batches that are tried of so many samples."""
    return [count for count in divisors(samples) if count <= MOST_TRIED_MICRO_BATCHES]
