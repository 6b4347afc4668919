"""What ``predict search`` chooses from: every strategy for a number of ranks, in every order, with all its settings.

A *mesh* is what decides the work of a rank: the axes that share layers with their parts, the stages, the replicas. Its
*placements* are the orders of its axes, which decide what level of the cluster each exchange crosses. A *candidate*
is a placement with micro-batches (accumulated without a pipeline), a schedule, a bucket size, and what it computes
again.

Of two axes that share layers, one cuts features and the other tokens: no others have a plan. What else could be asked
for and is left out is said in ``Space.not_searched``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from paradl_bench.core.cache_keys import Answers
from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.axes.registry import kinds_with
from paradl_bench.plan.schedules.catalog import schedules
from paradl_bench.plan.settings import CHOICES_WITHIN_A_LIMIT, MEMORY_CHOICES, PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.strategies.exchange.options import ExchangeOptions, bucket_limits
from paradl_bench.strategies.nesting.nested_plan import check_nesting
from paradl_bench.strategies.passes.lower_precision import check_dtype, check_kernel_settings
from paradl_bench.strategies.pipeline.axis import PipelineOptions
from paradl_bench.strategies.pipeline.stages import most_stages
from predict.costs.sourced import Ints
from predict.search.candidates.mesh import Mesh, divisors, placements
from predict.search.candidates.refusals import Held, Refusals, possible_choices
from predict.search.candidates.ruled_out import RuledOut, batch_refusal
from predict.search.candidates.shared_axes import SharedAxes

MOST_TRIED_MICRO_BATCHES = 512

_NO_SCHEDULE = "gpipe"
"""What settings without a pipeline say, which is their default."""


def _zero_stages() -> range:
    prefix = kinds_with(Trait.DIVIDES_BATCH)[0].prefix
    return range(1, prefix.most + 1) if prefix else range(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """All candidates, as arrays with an entry each.

    Attributes:
        strategies: every placement. meshes: distinct ones; mesh_of: each strategy's index in them.
        schedules: by name. caps_mb: of ``bucket_cap_mb``, None for torch's default.
        held: choices of what a device keeps.
        strategy, micro_batches, schedule, cap, again: per candidate; indices (the last one in ``held``) but for
            micro-batches. Those of strategies ascend.
        impossible: what cannot be, counted. not_searched: what could, and has no candidates.
    """

    settings: PlanSettings
    strategies: tuple[Strategy, ...]
    meshes: tuple[Mesh, ...]
    mesh_of: Ints
    schedules: tuple[str, ...]
    caps_mb: tuple[float | None, ...]
    held: tuple[Held, ...]
    strategy: Ints
    micro_batches: Ints
    schedule: Ints
    cap: Ints
    again: Ints
    impossible: RuledOut
    not_searched: tuple[str, ...]
    found: Answers = field(default_factory=Answers)
    """What follows from the candidates alone."""

    def __len__(self) -> int:
        return len(self.strategy)

    def counted_anew(self) -> Space:
        """The same for another search, which counts what it finds impossible by itself."""
        return replace(self, impossible=self.impossible.copy())

    def of_strategy(self, index: int) -> Ints:
        """The candidates of a strategy."""
        return np.arange(*np.searchsorted(self.strategy, (index, index + 1)))

    def settings_of(self, candidate: int) -> PlanSettings:
        """A plan's settings of a candidate."""
        first, cap = bucket_limits(self.caps_mb[self.cap[candidate]])
        count, pipelined = int(self.micro_batches[candidate]), self.is_pipelined(candidate)
        buckets = msgspec.structs.replace(
            self.settings.of(ExchangeOptions), first_bucket_bytes=first, bucket_cap_bytes=cap
        )
        turns = msgspec.structs.replace(
            self.settings.of(PipelineOptions),
            micro_batches=count if pipelined else None,
            schedule=self.schedules[self.schedule[candidate]],
        )
        return msgspec.structs.replace(
            self.settings.having(buckets, turns, *self.mesh(candidate).chosen),
            accumulate=1 if pipelined else count,
            **self.held[self.again[candidate]],
        )

    def unneeded(self, may_fit: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Candidates with a choice that is made within a limit alone, which may fit without it."""
        chosen = np.zeros(len(self.held), bool)
        for name, (without, *_) in CHOICES_WITHIN_A_LIMIT.items():
            if len({choice.get(name) for choice in self.held}) > 1:
                chosen |= np.array([choice[name] != without for choice in self.held])
        has_choice = chosen[self.again]
        # A candidate follows the one that differs from it in that choice alone.
        return np.asarray(has_choice & np.append(False, may_fit[:-1]))

    def is_pipelined(self, candidate: int) -> bool:
        """Whether the candidate has stages."""
        return self.mesh(candidate).stages > 1

    def mesh(self, candidate: int) -> Mesh:
        """What its ranks work on."""
        return self.meshes[int(self.mesh_of[self.strategy[candidate]])]


def find_space(
    network: ModelGraph,
    settings: PlanSettings,
    ranks: int,
    caps_mb: Sequence[float],
    held: Sequence[Held] | None = None,
    computed_in: tuple[str, str] = ("fp32", ""),
    like: tuple[int, ...] = (),
) -> Space:
    """Every candidate.

    Args:
        settings: of the batch and of whatever is not searched. caps_mb: tried beside torch's default.
        held: choices of what a device keeps, None for all; where there are several, those that the network has nothing
            for are left out.
        computed_in: dtype and kernel settings that are trained in.
        like: per spatial dim, the first that is like it, of blocks that are predicted alike; none where all differ.

    Raises:
        UserError: no candidate at all is possible; the message says why.
    """
    impossible = RuledOut()
    names = tuple(sorted(schedules(), key=lambda name: (name != _NO_SCHEDULE, name)))
    caps: tuple[float | None, ...] = (None, *caps_mb)
    held = possible_choices(network, settings, held_choices() if held is None else held, impossible, computed_in[0])
    finder = _Finder(network, settings, ranks, names, caps, held, impossible, like)
    strategies: list[Strategy] = []
    meshes: list[Mesh] = []
    mesh_of: list[int] = []
    rows = []
    for mesh in finder.meshes():
        combinations = finder.combinations(mesh) if finder.trains_in(mesh, *computed_in) else ()
        if not len(combinations):
            continue
        for order in mesh.orders:
            rows.append(np.insert(combinations, 0, len(strategies), axis=1))
            strategies.append(Strategy(axes=order))
            mesh_of.append(len(meshes))
        meshes.append(mesh)
    if not rows:
        why = impossible.why_none(settings.batch, ranks)
        raise UserError(f"no strategy of {network.name} on {ranks} ranks with batch {settings.batch}: {why}")
    columns = np.concatenate(rows).T
    return Space(
        settings=settings,
        strategies=tuple(strategies),
        meshes=tuple(meshes),
        mesh_of=np.array(mesh_of),
        schedules=names,
        caps_mb=caps,
        held=held,
        strategy=columns[0],
        micro_batches=columns[1],
        schedule=columns[2],
        cap=columns[3],
        again=columns[4],
        impossible=impossible,
        not_searched=(*_left_out(settings, meshes, held), *finder.mirrors),
    )


def _left_out(settings: PlanSettings, meshes: Sequence[Mesh], held: Sequence[Held]) -> Iterator[str]:
    """What could be asked for of the meshes and has no candidates."""
    locally = {settings.batch // mesh.samplers for mesh in meshes}
    if any(divisors(local)[-1] > MOST_TRIED_MICRO_BATCHES for local in locally):
        yield f"more than {MOST_TRIED_MICRO_BATCHES} micro-batches"
    if any(mesh.exchanges and mesh.stages == 1 and mesh.zero < 2 for mesh in meshes):
        yield "gradients exchanged by node leaders or in segments (--exchange)"
    if any(mesh.zero for mesh in meshes):
        yield "replicas inside of shards, or of ZeRO stage 1 (z3d4d2, d2z1d4)"
    if any(mesh.stages > 1 for mesh in meshes):
        yield "pipeline stages that do not balance FLOPs (--stages)"
    if len({choice["recompute"] for choice in held}) > 1:
        yield "recomputing only some blocks (--recompute)"


def held_choices(given: Held | None = None, *, limited: bool = False) -> tuple[Held, ...]:
    """Every choice of what a device keeps, but for what is given; ``limited``: whether its memory is known."""
    values = {**MEMORY_CHOICES, **(CHOICES_WITHIN_A_LIMIT if limited else {})}
    values.update((name, (value,)) for name, value in (given or {}).items())
    return tuple(dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values()))


class _Finder:
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

    @property
    def mirrors(self) -> Iterator[str]:
        """As of :class:`~predict.search.candidates.shared_axes.SharedAxes`, once all meshes are found."""
        return self._shared_axes.mirrors()

    def meshes(self) -> Iterator[Mesh]:
        """Those within the limits of their axes and of the batch."""
        for shared, chosen in (((), ()), *self._shared_axes):
            rest = self._ranks // math.prod(axis.degree for axis in shared)
            for stages in divisors(rest):
                mesh = Mesh(shared, stages, rest // stages, chosen=chosen)
                if self._possible(mesh):
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
            self._impossible.add(batch_refusal(self._settings.batch, f"{mesh.samplers} replicas"), orders)
        else:
            return True
        return False

    def trains_in(self, mesh: Mesh, dtype: str, kernel_settings: str) -> bool:
        """Whether a mesh can be trained in a dtype and with kernel settings; else its placements are counted."""
        try:
            check_nesting(Strategy(axes=mesh.axes))
            check_dtype(Strategy(axes=mesh.axes), self._settings, dtype)
            check_kernel_settings(Strategy(axes=mesh.axes), self._settings, kernel_settings)
        except UserError as error:
            self._impossible.add(str(error), len(mesh.orders))
            return False
        return True

    def _with_zero(self, mesh: Mesh) -> Iterator[Mesh]:
        """A mesh, also with each stage of ZeRO on its replicas, and from stage 2 on with copies of shards."""
        for stage in (0, *(_zero_stages() if mesh.replicas > 1 else ())):
            if self._nests(mesh._replace(zero=stage)):
                for copies in divisors(mesh.replicas)[:-1] if stage > 1 else (1,):
                    yield mesh._replace(zero=stage, copies=copies)

    def _nests(self, mesh: Mesh) -> bool:
        """Whether a stage of ZeRO, and options of the axes that share layers, go with all axes of a mesh."""
        refusal = self._refusals.of(mesh)
        if refusal:
            self._impossible.add(refusal, len(mesh.orders))
        return not refusal

    def combinations(self, mesh: Mesh) -> NDArray[np.int32]:
        """Micro-batches, schedule, bucket size and what is computed again, of a mesh's candidates: a row each."""
        caps = range(len(self._caps)) if mesh.exchanges and mesh.zero < 2 else (0,)
        again = self._computed_again(mesh)
        local = self._settings.batch // mesh.samplers
        if mesh.stages == 1:
            turns = [(count, 0) for count in divisors(local) if count <= MOST_TRIED_MICRO_BATCHES]
        else:
            turns = [
                (count, index)
                for index in range(len(self._schedules))
                for count in divisors(local)
                if self._takes_turns(mesh, index, count)
            ]
        rows = [
            (*turn, cap, which)
            for turn in turns
            for cap in caps
            for which in again
            if not (mesh.stages > 1 and self._parts_backward[turn[1]] and self._held[which]["recompute"])
        ]
        return np.array(rows, np.int32).reshape(-1, 4)

    def _computed_again(self, mesh: Mesh) -> list[int]:
        """What the mesh can have of ``held``; placements that it rules out are counted."""
        possible = []
        for which, chosen in enumerate(self._held):
            refusal = self._refusals.of(mesh, chosen)
            if refusal:
                self._impossible.add_settings(refusal, mesh, len(mesh.orders))
            else:
                possible.append(which)
        if mesh.stages > 1 and any(self._parts_backward) and any(chosen["recompute"] for chosen in self._held):
            names = [schedule.name for schedule in self._schedules if schedule.splits_backward]
            text = f"--schedule {' and '.join(names)} with --recompute, which runs under other schedules"
            self._impossible.add_settings(text, mesh, len(mesh.orders))
        return possible

    def _takes_turns(self, mesh: Mesh, index: int, count: int) -> bool:
        schedule = self._schedules[index]
        if count > MOST_TRIED_MICRO_BATCHES:
            return False
        if schedule.stages(mesh.stages) > self._most_stages:
            text = f"{schedule.name}: {schedule.stages_per_rank} stages a rank, {self._most_stages} are the most"
            self._impossible.add_settings(text, mesh, len(mesh.orders))
        elif schedule.refusal(mesh.stages, count):
            text = f"some numbers of micro-batches, which --schedule {schedule.name} cannot run"
            self._impossible.add_settings(text, mesh, len(mesh.orders))
        else:
            return True
        return False
