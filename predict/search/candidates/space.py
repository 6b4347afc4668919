"""What ``predict search`` chooses from: every strategy for a number of ranks, in every order, with all its settings.

A *mesh* is what decides the work of a rank: the axes that share layers with their parts, the stages, the replicas. Its
*placements* are the orders of its axes, which decide what level of the cluster each exchange crosses. A *candidate*
is a placement with micro-batches (accumulated without a pipeline), a schedule, a bucket size, and what it computes
again.

Of several axes that share layers, one cuts features, one tokens, one experts: no others have a plan. What else could be
asked for and is left out is said in ``Space.not_searched``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from paradl_bench.core.cache_keys import Answers
from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.schedules.catalog import schedules
from paradl_bench.plan.settings import CHOICES_WITHIN_A_LIMIT, MEMORY_CHOICES, PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.strategies.exchange.options import ExchangeOptions, bucket_limits
from paradl_bench.strategies.pipeline.axis import PipelineOptions
from predict.costs.sourced import Floats, Ints
from predict.search.candidates.choices import Bounds, Choices, unneeded
from predict.search.candidates.finder import Finder
from predict.search.candidates.mesh import Mesh, MeshColumns, Settings, alike, divisors
from predict.search.candidates.parts import Part, Parts, not_searched
from predict.search.candidates.refusals import Held, possible_choices
from predict.search.candidates.ruled_out import RuledOut

_NO_SCHEDULE = "gpipe"
"""What settings without a pipeline say, which is their default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space(Choices):
    """All candidates, as arrays with an entry each.

    Attributes:
        strategies: every placement. meshes: distinct ones; mesh_of: each strategy's index in them.
        caps_mb: of ``bucket_cap_mb``, None for torch's default.
        strategy, micro_batches, schedule, cap, again: per candidate; indices (the last one in ``held``) but for
            micro-batches. Those of strategies ascend.
        impossible: what cannot be, counted. not_searched: what could, and has no candidates.
        placements: strategies, with those of which all candidates are too large. too_large: candidates that hold too
            much, and are left out.
    """

    strategies: tuple[Strategy, ...]
    meshes: tuple[Mesh, ...]
    mesh_of: Ints
    caps_mb: tuple[float | None, ...]
    strategy: Ints
    micro_batches: Ints
    schedule: Ints
    cap: Ints
    again: Ints
    impossible: RuledOut
    not_searched: tuple[str, ...]
    placements: int
    too_large: int = 0
    found: Answers = field(default_factory=Answers)
    """What follows from the candidates alone."""

    def __len__(self) -> int:
        return len(self.strategy)

    @property
    def plans(self) -> tuple[Ints, Ints]:
        """The first candidate of each plan, and the plan of each candidate.

        Those of one plan hold the same: they differ in the order of axes, or in buckets alone.
        """
        columns = self.mesh_of[self.strategy], self.micro_batches, self.schedule, self.again
        return self.found.once("plans", lambda: alike(*columns))

    @property
    def columns(self) -> MeshColumns:
        """The meshes as arrays."""
        return self.found.once("columns", lambda: MeshColumns.of(self.meshes))

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
        return unneeded(self.held, (self.strategy, self.micro_batches, self.schedule, self.cap), self.again, may_fit)

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
    bounding: Callable[[Choices], Bounds] | None = None,
    within: float = np.inf,
) -> Space:
    """Every candidate, or those that may fit; where none does, the leanest.

    Args:
        settings: of the batch and of whatever is not searched. caps_mb: tried beside torch's default.
        held: choices of what a device keeps, None for all; where there are several, those that the network has nothing
            for are left out.
        computed_in: dtype and kernel settings that are trained in.
        like: per spatial dim, the first that is like it, of blocks that are predicted alike; none where all differ.
        bounding: from choices to what candidates with these hold at least. within: bytes that a rank has.

    Raises:
        UserError: no candidate at all is possible; the message says why.
    """
    impossible = RuledOut()
    names = tuple(sorted(schedules(), key=lambda name: (name != _NO_SCHEDULE, name)))
    caps: tuple[float | None, ...] = (None, *caps_mb)
    held = possible_choices(network, settings, held_choices() if held is None else held, impossible, computed_in[0])
    choices = Choices(settings=settings, schedules=names, held=held)
    finder = Finder(network, settings, ranks, names, caps, held, impossible, like)
    finding = Parts(choices, finder, computed_in, bounding(choices) if bounding else None, within)
    parts = finding.of(divisors(ranks))
    for part in parts:
        impossible.add_all(part.impossible)
    if not any(part.placements for part in parts):
        why = impossible.why_none(settings.batch, ranks)
        raise UserError(f"no strategy of {network.name} on {ranks} ranks with batch {settings.batch}: {why}")
    if not any(part.meshes for part in parts):
        wider = 2 * max(within, 1.0)
        return find_space(network, settings, ranks, caps_mb, held, computed_in, like, bounding, wider)
    several = len({choice["recompute"] for choice in held}) > 1
    blocks = ("recomputing only some blocks (--recompute)",) if several else ()
    return _joined(parts, finding, caps, impossible, (*not_searched(parts), *blocks, *finder.left_out))


def _joined(
    parts: Sequence[Part],
    finding: Parts,
    caps_mb: tuple[float | None, ...],
    impossible: RuledOut,
    not_searched: tuple[str, ...],
) -> Space:
    """All candidates in the order of sharings, and of stages."""
    fitting = (each for part in parts for each in part.fitting(finding.sharings))
    meshes: list[Mesh] = []
    strategies: list[Strategy] = []
    mesh_of: list[int] = []
    columns: list[Settings] = []
    least_bytes: list[Floats] = []
    for _, mesh, rows, least in sorted(fitting, key=lambda each: (each[0], each[1].stages)):
        orders = [Strategy(axes=order) for order in mesh.orders]
        numbers = np.arange(len(strategies), len(strategies) + len(orders), dtype=rows.dtype)
        columns.append(np.column_stack([np.repeat(numbers, len(rows)), np.tile(rows, (len(orders), 1))]))
        least_bytes.append(np.tile(least, len(orders)))
        mesh_of += [len(meshes)] * len(orders)
        strategies += orders
        meshes.append(mesh)
    strategy, micro_batches, schedule, cap, again = np.concatenate(columns).T
    space = Space(
        settings=finding.choices.settings,
        schedules=finding.choices.schedules,
        held=finding.choices.held,
        strategies=tuple(strategies),
        meshes=tuple(meshes),
        mesh_of=np.array(mesh_of),
        caps_mb=caps_mb,
        strategy=strategy,
        micro_batches=micro_batches,
        schedule=schedule,
        cap=cap,
        again=again,
        impossible=impossible,
        not_searched=not_searched,
        placements=sum(part.placements for part in parts),
        too_large=sum(part.too_large for part in parts),
    )
    if finding.bounds is not None:
        space.found.once(("bounds", finding.within), lambda: np.concatenate(least_bytes))
    return space


def hold_activations_of(space: Space, candidate: int) -> NDArray[np.bool_]:
    """Candidates that hold no fewer activations than this one: of the same shards, on as many samples at once.

    What replicas share out of parameters, gradients and state changes none of them. Of a pipeline there are none.
    """
    own_mesh = space.mesh(candidate)
    alike_meshes = [own_mesh.stages == mesh.stages == 1 and mesh.sharing == own_mesh.sharing for mesh in space.meshes]
    recomputed = [choice.get("recompute") for choice in space.held]
    kept_alike = [choice == recomputed[space.again[candidate]] for choice in recomputed]
    mesh_of = space.mesh_of[space.strategy]
    at_once = space.settings.batch // space.columns.samplers[mesh_of] // space.micro_batches
    same_shards = np.array(alike_meshes)[mesh_of] & np.array(kept_alike)[space.again]
    return np.asarray(same_shards & (at_once >= at_once[candidate]))


def held_choices(given: Held | None = None, *, limited: bool = False) -> tuple[Held, ...]:
    """Every choice of what a device keeps, but for what is given; ``limited``: whether its memory is known."""
    values = {**MEMORY_CHOICES, **(CHOICES_WITHIN_A_LIMIT if limited else {})}
    values.update((name, (value,)) for name, value in (given or {}).items())
    return tuple(dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values()))
