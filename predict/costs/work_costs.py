"""Seconds of the works of a plan, each by what knows of its kind: layers, the model's own times, links, copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from calibrate.profile.profile import Profile
from paradl_bench.core.errors import UserError
from paradl_bench.plan.mesh import degree_of
from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import (
    BucketCopy,
    Collective,
    Compute,
    FrameworkOverhead,
    HaloExchange,
    Plan,
    Transfer,
    Wait,
    WeightUpdate,
    Work,
)
from predict.costs.communication.behind_compute import calls_of
from predict.costs.communication.communication_costs import ALONE_ON_ITS_STREAM, Call, CommunicationCosts
from predict.costs.compute.backward_split import SPLIT_MODE
from predict.costs.compute.copy_costs import alone_over_all, nearest_copy, priced_copy
from predict.costs.compute.layer_costs import LayerCosts
from predict.costs.compute.model_costs import ModelCosts
from predict.costs.emulation import computes
from predict.costs.sourced import Cost, Source
from predict.costs.spread.assembly import Priced


class PricingContext(NamedTuple):
    """What, besides the work itself, decides its seconds."""

    local_batch: int
    ranks: int
    ranks_on_host: int


@dataclass(slots=True, kw_only=True)
class WorkCosts:
    """Prices works of one model's plans.

    Args:
        model_name: of the network. serial: its plan on one rank.
        proportional: a shard takes its share of the whole layer's time, whatever was measured of it.
    """

    profile: Profile
    model_name: str
    serial: Plan
    layers: LayerCosts
    model: ModelCosts
    communication: CommunicationCosts
    proportional: bool
    _operations: dict[str, int] = field(init=False)
    _updated_elements: int = field(init=False)

    def __post_init__(self) -> None:
        times = np.bincount(self.serial.roles[0].work, minlength=len(self.serial.works)).tolist()
        self._operations = _counts_between(self.serial.works, times)
        self._updated_elements = sum(work.elements for work in self.serial.works if isinstance(work, WeightUpdate))

    def of_plan(self, plan: Plan, place: PricingContext, *, as_swept: bool = False) -> list[Priced]:
        """Parts in the order of ``plan.works``; the time between operations is shared out over a phase's tasks.

        Args:
            as_swept: no communication stands behind compute, or beside an all-reduce.

        Raises:
            UserError: a work that the profile has nothing for; the message names the command that would measure it.
        """
        about, counts = self._about(plan, place)
        calls = [ALONE_ON_ITS_STREAM] * len(plan.works) if as_swept else calls_of(plan)
        return [
            self._priced(work, count, about, call) for work, count, call in zip(plan.works, counts, calls, strict=True)
        ]

    def of_computing(self, plan: Plan, place: PricingContext) -> dict[int, Priced]:
        """Parts of what computes of a plan's works (layers, time between them, weight update), by its index."""
        about, counts = self._about(plan, place)
        chosen = [index for index, work in enumerate(plan.works) if computes(work)]
        return {index: self._priced(plan.works[index], counts[index], about, ALONE_ON_ITS_STREAM) for index in chosen}

    def alone_on_host(self, work: Work, place: PricingContext) -> tuple[float, float]:
        """A work's seconds while no other rank of the host computes over those while all do, and their spread.

        1 and 0 for what does not compute.
        """
        on_host = place.ranks_on_host
        if isinstance(work, Compute):
            found = self.layers.alone_on_host(on_host, work.operation, work.way, place.local_batch)
            return (found.value, found.value * found.relative_sd) if found else (1.0, 0.0)
        if isinstance(work, FrameworkOverhead | WeightUpdate):
            phase = "WU" if isinstance(work, WeightUpdate) else work.phase
            return self.model.host_ratio(phase, on_host, 1) or 1.0, 0.0
        if isinstance(work, BucketCopy):
            return alone_over_all(self.profile, work, on_host)
        return 1.0, 0.0

    def _about(self, plan: Plan, place: PricingContext) -> tuple[_About, list[int]]:
        """What a plan's works share, and how often each occurs."""
        # Where roles differ, a work counts as often as in the role that has it most.
        of_roles = [np.bincount(role.work, minlength=len(plan.works)) for role in plan.roles]
        counts = np.max(of_roles, axis=0).tolist()
        # A stage of a pipeline has a part of the model's operations, micro-batches go through them one by one, and
        # what is computed again goes through some of them twice.
        in_parts = degree_of(plan.strategy, "pipeline") > 1 or plan.micro_batches > 1 or plan.recomputes
        about = _About(
            place=place,
            strategy=plan.strategy,
            between=self._operations if in_parts else _counts_between(plan.works, counts),
            shard="" if self.proportional else _shard_of(plan),
            updated_elements=_updated_elements(plan),
        )
        return about, counts

    def _priced(self, work: Work, count: float, about: _About, call: Call) -> Priced:
        batch, on_host, strategy = about.place.local_batch, about.place.ranks_on_host, about.strategy
        if isinstance(work, Compute) and work.phase in ("BW_input", "BW_weight"):
            part = self.layers.part_of_backward(work.operation, work.phase, work.shard, batch, on_host)
            # Both parts share the measurement of the whole, and what one of them takes the other does not.
            return Priced(part.cost, count, (work.operation, "BW", work.shard), modes=((SPLIT_MODE, part.moved_s),))
        if isinstance(work, Compute):
            cost = self.layers.cost(work.operation, work.phase, work.shard, batch, on_host)
            return Priced(cost, count, (work.operation, work.phase, work.shard))
        if isinstance(work, FrameworkOverhead):
            whole = self.model.between(work.phase, batch, on_host, about.shard)
            return Priced(_share(whole, about.between[work.phase]), count, work)
        if isinstance(work, WeightUpdate):
            return Priced(self._weight_update(work, about), count, work)
        if isinstance(work, BucketCopy):
            return self._priced_copy(work, count, on_host)
        if isinstance(work, Wait):
            # Neither compute nor communication; what counts as the latter has no error in common with all compute.
            return Priced(Cost(work.seconds, Source.STATED), count, work, True)
        if isinstance(work, Transfer):
            return self._priced_transfer(work, count, strategy, call)
        if isinstance(work, HaloExchange):
            halo = self.communication.halo_cost(work, strategy, behind_compute=call.behind_compute)
            priced = Priced(halo.cost, count, work, True, halo.modes, congestion=halo.congestion)
            return self._beside(priced, self.communication.halo_operation(work), work, strategy, call)
        # The input joins a plan when that is priced (predict.simulation.input_tasks).
        assert isinstance(work, Collective)
        found = self.communication.cost(work, strategy, call)
        if work.ranks <= 1:
            return Priced(found.cost, count, work, True)
        slowdown = self.communication.slowdown(work, strategy)
        cost = found.cost._replace(remarks=(*found.cost.remarks, *slowdown.remarks))
        priced = Priced(cost, count, work, True, found.modes, slowdown[:2], slowdown[2:4], found.congestion)
        return self._beside(priced, work.operation, work, strategy, call)

    def _beside(
        self, priced: Priced, operation: str, work: Collective | HaloExchange, strategy: Strategy, call: Call
    ) -> Priced:
        """A call as it goes on beside all-reduces in flight, where it may and that was measured."""
        if call.beside is None or not priced.cost.seconds:
            return priced
        spanned = Collective(operation=operation, message_bytes=1, ranks=2, axes=work.axes)
        level, exchange_level = (self.communication.level(each, strategy)[0].name for each in (spanned, call.beside))
        found = self.communication.beside.slowdown(operation, level, exchange_level, priced.cost.seconds)
        cost = priced.cost._replace(remarks=(*priced.cost.remarks, *found.remarks))
        if found.factor is None:
            return priced._replace(cost=cost)
        # Compute stands still while it is waited for: there is nothing else that it is slowed beside.
        return priced._replace(
            cost=cost, slowdown=(1.0, found.factor), slowdown_sd=(0.0, found.factor_sd), awaited=True
        )

    def _weight_update(self, work: WeightUpdate, about: _About) -> Cost:
        batch, on_host = about.place.local_batch, about.place.ranks_on_host
        of_shard = self.model.shard_update(batch, on_host, about.shard)
        if of_shard is not None:
            return _share(of_shard, about.updated_elements / max(work.elements, 1))
        return _share(self.model.weight_update(batch, on_host), self._updated_elements / max(work.elements, 1))

    def _priced_transfer(self, work: Transfer, count: float, strategy: Strategy, call: Call) -> Priced:
        """A send takes the time of its messages one after the other; a receive waits for it and takes none."""
        sent = work.message_bytes if work.direction == "send" else ()
        found = self.communication.halo_cost(
            HaloExchange(sends_bytes=sent, receives_bytes=(), axes=work.axes),
            strategy,
            behind_compute=call.behind_compute,
        )
        if not sent:
            return Priced(found.cost, count, work, True)
        message = Collective(operation="send_recv", message_bytes=sum(sent), ranks=2, axes=work.axes)
        slowdown = self.communication.slowdown(message, strategy)
        cost = found.cost._replace(remarks=(*found.cost.remarks, *slowdown.remarks))
        return Priced(cost, count, work, True, found.modes, slowdown[:2], slowdown[2:4], found.congestion)

    def _priced_copy(self, work: BucketCopy, count: float, ranks_on_host: int) -> Priced:
        copy = nearest_copy(self.profile, work, ranks_on_host)
        if copy is None and not self.profile.model_times:
            return Priced(self.model.unmeasured.copy(work.bytes, work.tensors, ranks_on_host), count, work)
        if copy is None:
            raise UserError(
                "the profile holds no times of copying gradients into and out of buckets; measure a model "
                f"anew: paradl-bench layers {self.model_name} --batch N -o DIR, then calibrate fit"
            )
        return priced_copy(copy, work, count, ranks_on_host)


class _About(NamedTuple):
    """What the works of a plan share.

    Attributes:
        between: how many operations each phase has time between.
        shard: what every rank runs of the model (``f2``), a pipeline's its stages of that; empty for the whole.
        updated_elements: parameters that ranks at one place along that axis hold, over all stages; the mean of places.
    """

    place: PricingContext
    strategy: Strategy
    between: Mapping[str, int]
    shard: str
    updated_elements: float


def _updated_elements(plan: Plan) -> float:
    elements = np.array([work.elements if isinstance(work, WeightUpdate) else 0 for work in plan.works])
    of_roles = [role.multiplicity * int(elements[role.work].sum()) for role in plan.roles]
    return sum(of_roles) * degree_of(plan.strategy, "pipeline") / plan.strategy.ranks


def _shard_of(plan: Plan) -> str:
    found = {work.shard for work in plan.works if isinstance(work, Compute) and work.shard}
    return found.pop() if len(found) == 1 else ""


def _counts_between(works: Sequence[Work], counts: Sequence[int]) -> dict[str, int]:
    """How many operations each phase has time between."""
    return {work.phase: count for work, count in zip(works, counts, strict=True) if isinstance(work, FrameworkOverhead)}


def _share(cost: Cost, parts: float) -> Cost:
    return cost._replace(
        seconds=cost.seconds / parts,
        independent_sd_s=cost.independent_sd_s / parts,
        batch_sd_s=cost.batch_sd_s / parts,
        method_sd_s=cost.method_sd_s / parts,
    )
