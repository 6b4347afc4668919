"""Seconds of collectives: the profile's fit at the level that the group spans, and what overlap costs.

A cluster file may state alpha and beta of a level, and contention, which multiplies beta; what it leaves out comes from
the profile's fit at the level of that name, else at the outermost measured level, which is said. What surrounds a call
changes its seconds as was measured (:mod:`predict.costs.communication.context_costs`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import msgspec

from calibrate.fitting.collectives.communication_spread import Asked, MeasuredPoints, error_modes, other_level_mode
from calibrate.profile.collectives.communication import CommunicationFit
from calibrate.profile.collectives.communication_residuals import SizeRatios
from calibrate.profile.collectives.contexts import InContext
from calibrate.profile.profile import Profile
from paradl_bench.core.cache_keys import Answers
from paradl_bench.core.registry import lookup
from paradl_bench.plan.collectives.catalog import operations
from paradl_bench.plan.cost_terms.terms import CollectiveOperation
from paradl_bench.plan.mesh import members_of, ranks_along
from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import Collective, HaloExchange
from paradl_bench.records.cluster import Cluster, Level
from predict.costs.communication.backends import DEFAULT_BACKENDS, choose_backend
from predict.costs.communication.collective_times import CollectiveTimes, beyond_remarks, published_remarks, times_on
from predict.costs.communication.contention_costs import ContentionCosts, Sharing
from predict.costs.communication.context_costs import ContextCosts, Slowdown, Wanted, assumed_beside, between_them
from predict.costs.communication.context_costs import error_modes as context_modes
from predict.costs.communication.hops import span_of_hop
from predict.costs.hardware.what_if_hardware import AS_MEASURED, Hardware, changed_fit, changed_level
from predict.costs.sourced import CONTENTION, Cost, Remark, Source, UnmeasuredCollective


class CommunicationCost(NamedTuple):
    """Cost of a collective, and what one standard deviation of each of its modes adds."""

    cost: Cost
    modes: tuple[tuple[str, float], ...]


class Call(NamedTuple):
    """How a plan calls a collective.

    Attributes:
        after_compute: compute comes right before it and waits for it (:mod:`predict.costs.communication.calls`).
        taking_part: share of the ranks that call such a one at all.
        beside: all-reduces of gradients that may be in flight while it is waited for; None where none may.
        span: ranks side by side that hold both ends of a message, where fewer than along its axis do.
    """

    after_compute: bool = False
    taking_part: float = 1.0
    beside: Collective | None = None
    span: int = 0


ALONE_ON_ITS_STREAM = Call()
"""Not after compute, called by all ranks."""


class CommunicationCosts:
    """Costs of collectives through one library on one cluster.

    Args:
        cluster: from a cluster file; None takes the profile's own, beyond whose ranks its outermost level goes on.
        backend: library; None takes the one that suits the profile's device.

    Raises:
        UserError: the library was not measured, or the cluster lacks a level of ``hardware``.
    """

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster | None,
        backend: str | None,
        hardware: Hardware = AS_MEASURED,
    ) -> None:
        self._profile = profile
        self._given = cluster is not None
        self.cluster = self._stated = hardware.of_cluster(cluster or profile.cluster, given=self._given)
        self._hardware = hardware
        hardware.check_levels(self.cluster)
        self.backend = choose_backend(profile, backend)
        self._contexts = ContextCosts(profile, self.backend)
        self._message_costs: dict[tuple[int, tuple[int, ...], Strategy, str, int], CommunicationCost] = {}
        self._call_costs: dict[Hashable, CommunicationCost] = {}
        self._between: dict[tuple[str, str, tuple[int, int]], SizeRatios] = {}
        # Lists of fits are kept as long as this is, so that which list it is says which fits these are.
        self._times, self._changed, self._measured = Answers(), Answers(), Answers()
        # What else follows from links alone, whatever the device is.
        self.found = Answers()
        self._no_fits: list[CommunicationFit] = []
        self._fits: dict[tuple[str, str], list[CommunicationFit]] = {}
        known = [fit for fit in profile.communication if fit.library == self.backend]
        for fit in known:
            self._fits.setdefault((fit.operation, fit.level), []).append(fit)
        self.contention = ContentionCosts(self._contexts, self.cluster, known, given=self._given, swept=profile.cluster)

    def anew(self) -> CommunicationCosts:
        """The same, with all that was found, and with as much memory as the cluster states."""
        other = copy.copy(self)
        other.cluster = self._stated
        return other

    def cost(self, work: Collective, strategy: Strategy, call: Call = ALONE_ON_ITS_STREAM) -> CommunicationCost:
        """Seconds of a collective.

        Raises:
            UserError: the profile holds no fit of the operation and the cluster states none, or the cluster given holds
                fewer ranks.
        """
        if work.ranks <= 1:
            return CommunicationCost(Cost(0.0, Source.MEASURED), ())
        asked = work
        work, remarks = self._measurable(work)
        level, more = self.level(work, strategy, call.span)
        per_node = self._ranks_per_node(work, strategy)
        sharing = self.contention.sharing(asked, level, strategy, per_node, call.taking_part)
        # Strategies differ in much that no single call knows of.
        asked_of = asked.operation, work.ranks, work.message_bytes, work.scope != "group"
        key = asked_of, level, more, per_node, sharing, call.after_compute
        if key not in self._call_costs:
            self._call_costs[key] = self._cost_of_call(work, level, (*remarks, *more), per_node, sharing, call)
        return self._call_costs[key]

    def _cost_of_call(
        self, work: Collective, level: Level, remarks: tuple[Remark, ...], per_node: int, sharing: Sharing, call: Call
    ) -> CommunicationCost:
        """Of one whose level, ranks that share a node, and contention are known."""
        fits, more = self._fits_at(work, level)
        remarks += more
        measured_level, measured_fits = level, fits
        level, fits, changed = self._on_links(level, fits)
        remarks += changed
        collective = lookup(operations(), work.operation, "collective")
        stated = level.alpha_s is not None and level.beta_s_per_byte is not None

        def seconds_of(message_bytes: int, phi: float = sharing.factor) -> float:
            return self._times_on(collective, fits, level, phi).seconds_of_one(work.ranks, message_bytes, per_node)

        seconds = seconds_of(work.message_bytes)
        beyond = () if stated else beyond_remarks(work, fits)
        of_others = () if stated else published_remarks(fits, work.operation)
        fitted = Source.PUBLISHED if of_others else Source.REGRESSED
        source = Source.STATED if stated else Source.SCALED if beyond or changed else fitted
        modes: tuple[tuple[str, float], ...] = ()
        if not stated:
            measured = self._measured.once(id(fits), lambda: MeasuredPoints(fits))
            asked = Asked(work.ranks, work.message_bytes, per_node)
            modes = error_modes(collective, measured, asked, seconds, contention=sharing.factor)
            modes += other_level_mode(collective, fits, level.name, work.message_bytes, seconds)
        if sharing.factor_sd:
            shift = seconds_of(work.message_bytes, sharing.factor + sharing.factor_sd) - seconds
            modes += ((f"contention at {level.name}", shift),)
        cost = Cost(seconds, source, remarks=(*remarks, *of_others, *sharing.remarks, *beyond))
        if changed or sharing.factor != 1:
            swept = self._times_on(collective, measured_fits, measured_level, 1.0)
            swept_s = swept.seconds_of_one(work.ranks, work.message_bytes, per_node)
            links_s = seconds if sharing.factor == 1 else seconds_of(work.message_bytes, 1.0)
            cost = cost._replace(seconds=swept_s).adjusted("links", links_s).adjusted(CONTENTION, seconds)
        alone = CommunicationCost(cost, modes)
        if call.after_compute:
            return self._after_compute(alone, work, level, (work.message_bytes,), seconds_of)
        if work.scope != "group":
            # One of several in turn: it finds what the one before has left.
            return self._in_turn(alone, work, level, seconds_of)
        return alone

    def _in_turn(
        self, alone: CommunicationCost, work: Collective, level: Level, seconds_of: Callable[[int], float]
    ) -> CommunicationCost:
        """The cost of one of several calls in turn, where calls between others were measured of its own operation."""
        entry, _ = self._contexts.likest(Wanted("after-compute", work.operation, level.name, ranks=work.ranks))
        if entry is None or (entry.operation, entry.level) != (work.operation, level.name):
            return alone
        size = min(work.message_bytes, entry.bytes_range[1])
        ratio = math.exp(self._between_calls_after(entry, level).log_ratio(size))
        more_s = max(0.0, ratio - 1) * seconds_of(size)
        return alone._replace(cost=alone.cost.adjusted("after the call before", alone.cost.seconds + more_s))

    def _after_compute(
        self,
        alone: CommunicationCost,
        work: Collective,
        level: Level,
        messages: Sequence[int],
        seconds_of: Callable[[int], float],
    ) -> CommunicationCost:
        """The cost with what compute before it adds: latency once, the factor to each message."""
        entry, remarks = self._contexts.likest(Wanted("after-compute", work.operation, level.name, ranks=work.ranks))
        cost = alone.cost._replace(remarks=(*alone.cost.remarks, *remarks))
        if entry is None:
            return alone._replace(cost=cost)
        between = self._between_calls_after(entry, level)
        sizes = [min(size, entry.bytes_range[1]) for size in messages]
        between_s = sum(math.exp(between.log_ratio(size)) * seconds_of(size) for size in sizes)
        # Beyond the largest size what was added at it stays: caches that compute has emptied are filled once. And no
        # call takes less than a sweep's, from which the search's estimates from below are made.
        extra_s = max(0.0, between_s + entry.extra_s(between_s) - sum(map(seconds_of, sizes)))
        cost = cost.adjusted("after compute", cost.seconds + extra_s)
        return alone._replace(cost=cost, modes=(*alone.modes, *context_modes(entry, between_s)))

    def _between_calls_after(self, entry: InContext, level: Level) -> SizeRatios:
        """:func:`~.context_costs.between_them`; nothing where its sweep is unknown, or the level states alpha."""
        key = entry.operation, entry.level, entry.ranks
        if key[:2] not in self._fits or level.alpha_s is not None or level.beta_s_per_byte is not None:
            return SizeRatios()
        if key not in self._between:
            # On the links that were measured, whatever links are asked for.
            known = times_on(lookup(operations(), entry.operation, "collective"), self._fits[key[:2]], level, 1.0)
            of_node = self.cluster.ranks_per_node
            self._between[key] = between_them(
                entry, lambda ranks, size: known.seconds_of_one(ranks, size, min(ranks, of_node))
            )
        return self._between[key]

    def halo_cost(self, work: HaloExchange, strategy: Strategy, call: Call = ALONE_ON_ITS_STREAM) -> CommunicationCost:
        """Seconds of messages to and from neighbours: of those sent, or received, one after the other if that is more.

        Where messages go both ways, as exchanges, if those were measured.
        """
        messages = max((work.sends_bytes, work.receives_bytes), key=sum)
        operation = self.halo_operation(work)
        costs = [self._message_cost(size, work.axes, strategy, operation, call.span) for size in messages]
        modes: dict[str, float] = {}
        for message_cost in costs:
            for name, shift in message_cost.modes:
                modes[name] = modes.get(name, 0.0) + shift
        total = Cost(
            sum(message_cost.cost.seconds for message_cost in costs),
            max((message_cost.cost.source for message_cost in costs), default=Source.MEASURED),
            remarks=tuple(dict.fromkeys(remark for message_cost in costs for remark in message_cost.cost.remarks)),
            adjustments=tuple(change for message_cost in costs for change in message_cost.cost.adjustments),
        )
        alone = CommunicationCost(total, tuple(modes.items()))
        if not (call.after_compute and messages):
            return alone
        message = Collective(
            operation=operation, message_bytes=1, ranks=ranks_along(strategy, work.axes), axes=work.axes
        )
        level, _ = self.level(message, strategy, call.span)
        return self._after_compute(
            alone,
            message,
            level,
            messages,
            lambda size: self._message_cost(size, work.axes, strategy, operation, call.span).cost.seconds,
        )

    def halo_operation(self, work: HaloExchange) -> str:
        """The operation whose measurements price a halo's messages: both ways at once, where there are any of that."""
        both = bool(work.sends_bytes and work.receives_bytes)
        return "exchange" if both and any(name == "exchange" for name, _ in self._fits) else "send_recv"

    def _message_cost(
        self, size_bytes: int, axes: tuple[int, ...], strategy: Strategy, operation: str, span: int
    ) -> CommunicationCost:
        key = size_bytes, axes, strategy, operation, span
        if key not in self._message_costs:
            # Of an exchange as many ranks were swept, where that makes a difference.
            ranks = ranks_along(strategy, axes) if operation == "exchange" else 2
            message = Collective(operation=operation, message_bytes=size_bytes, ranks=ranks, axes=axes)
            self._message_costs[key] = self.cost(message, strategy, Call(span=span))
        return self._message_costs[key]

    def times(self, operation: str, level: Level, contention: float) -> CollectiveTimes:
        """What gives an operation's seconds at a level, for any ranks and bytes, under so much contention."""
        known, _ = self._fits_at(Collective(operation=operation, message_bytes=1, ranks=2), level)
        level, fits, _ = self._on_links(level, known)
        return self._times_on(lookup(operations(), operation, "collective"), fits, level, contention)

    def _times_on(
        self, collective: CollectiveOperation, fits: list[CommunicationFit], level: Level, contention: float
    ) -> CollectiveTimes:
        """:func:`~.collective_times.times_on`, found once for fits that are kept here."""
        key = collective.name, id(fits), level, contention
        return self._times.once(key, lambda: times_on(collective, fits, level, contention))

    def level_of_span(self, span: int) -> Level:
        """The level that so many ranks side by side span; a UserError where the cluster that was given holds fewer."""
        outermost = self.cluster.levels[-1]
        return outermost if span > outermost.ranks and not self._given else self.cluster.level_of(span)

    def span_of_hop(self, ranks: int, group: tuple[int, int], places: tuple[int, int]) -> int:
        """:func:`~.hops.span_of_hop` on these levels."""
        asked = ranks, group, places
        return self.found.once(("hop", *asked), lambda: span_of_hop(self.cluster.levels, *asked))

    def level(self, work: Collective, strategy: Strategy, span: int = 0) -> tuple[Level, tuple[Remark, ...]]:
        """The level that the group spans: an axis strides over the ranks of the axes inside it."""
        span = span or math.prod(axis.degree for axis in strategy.axes[min(work.axes) :])
        if work.scope == "node":
            members = members_of(strategy, work, 0)
            span = members[-1] - members[0] + 1
        level = self.level_of_span(span)
        if span <= level.ranks:
            return level, ()
        text = f"more ranks than the measured cluster's {level.ranks}: its level {level.name!r} is taken to hold them"
        return level, (Remark(text, True),)

    def _on_links(
        self, level: Level, fits: list[CommunicationFit]
    ) -> tuple[Level, list[CommunicationFit], tuple[Remark, ...]]:
        """The level and its fits as they are on links that are faster or slower than those known."""
        between, inside = self._hardware.links(level.name), self._hardware.links(self.cluster.levels[0].name)
        changes = between != (1.0, 1.0) or (inside != (1.0, 1.0) and any(fit.inner for fit in fits))
        if not changes:
            return level, fits, ()

        def find() -> tuple[Level, list[CommunicationFit], tuple[Remark, ...]]:
            times = f"{1 / between.beta:.3g} times the bandwidth, {between.alpha:.3g} times the latency"
            remark = Remark(f"links of level {level.name!r} that were not measured: {times}", True)
            return changed_level(level, between), [changed_fit(fit, between, inside) for fit in fits], (remark,)

        return self._changed.once((level, id(fits)), find)

    def _ranks_per_node(self, work: Collective, strategy: Strategy) -> int:
        """How many ranks of the group share a node: its members stride over the ranks of the axes inside."""
        if work.scope != "group":
            of_node = self.cluster.ranks_per_node
            return sum(rank < of_node for rank in members_of(strategy, work, 0))
        stride = math.prod(axis.degree for axis in strategy.axes[max(work.axes) + 1 :])
        return max(1, min(work.ranks, self.cluster.ranks_per_node // stride))

    @property
    def measured_operations(self) -> frozenset[str]:
        """Collectives that the profile holds fits of, at any level."""
        return frozenset(operation for operation, _ in self._fits)

    @property
    def interferes(self) -> bool:
        """Whether it was measured what compute and collectives of the library cost each other."""
        return self._contexts.has("with-compute")

    def with_compute(
        self, work: Collective, strategy: Strategy, idle_s: float, span: int = 0
    ) -> tuple[Slowdown, tuple[Remark, ...]]:
        """What compute and the collective cost each other; with a remark where it was not measured of such a one."""
        work, _ = self._measurable(work)
        level, _ = self.level(work, strategy, span)
        wanted = Wanted("with-compute", work.operation, level.name, ranks=work.ranks, message_bytes=work.message_bytes)
        devices = self._profile.devices
        on_gpu = devices[0].kind == "cuda" if devices else self.backend == DEFAULT_BACKENDS["cuda"]
        return self._contexts.with_compute(wanted, idle_s, of_gpu=on_gpu)

    def with_all_reduce(
        self, work: Collective, beside: Collective, strategy: Strategy, idle_s: float
    ) -> tuple[tuple[float, float] | None, tuple[Remark, ...]]:
        """How many times longer a call takes beside an all-reduce, and the deviation of that; None where it queues."""
        level, spanned = (self.level(collective, strategy)[0].name for collective in (work, beside))
        wanted = Wanted("with-all-reduce", work.operation, level, spanned, ranks_along(strategy, work.axes))
        entry, remarks = self._contexts.likest(wanted)
        if entry is None:
            return assumed_beside(shares_links=level == spanned), remarks
        return (None if entry.waits else entry.slowdown(idle_s)), remarks

    def _measurable(self, work: Collective) -> tuple[Collective, tuple[Remark, ...]]:
        """The collective whose measurements price this one: a reduce that was not measured goes as a broadcast.

        That is a reduce the other way round where both are trees. gloo's is none: it scatters sums and gathers them.
        A broadcast that nobody published goes as an all-reduce, and so does a reduce that would go as a broadcast.
        """
        lacks_reduce = work.operation == "reduce" and all(operation != "reduce" for operation, _ in self._fits)
        if not lacks_reduce and (work.operation != "broadcast" or not self._stands_for_broadcast):
            return work, ()
        if self._stands_for_broadcast:
            text = (
                f"no {work.operation} was published: it is taken as an all-reduce, which moves at least as many bytes"
            )
            return msgspec.structs.replace(work, operation="all_reduce"), (Remark(text, True),)
        lacks = "reduce was not measured: it is taken as a broadcast, without the time of its sums; measure it:"
        text = f"{lacks} paradl-bench collectives --ops reduce"
        return msgspec.structs.replace(work, operation="broadcast"), (Remark(text, True),)

    @property
    def _stands_for_broadcast(self) -> bool:
        """Whether published all-reduces stand for broadcasts, which nobody published or measured."""
        published = [fit for (operation, _), fits in self._fits.items() for fit in fits if operation == "all_reduce"]
        return "broadcast" not in self.measured_operations and any(fit.published for fit in published)

    def _fits_at(self, work: Collective, level: Level) -> tuple[list[CommunicationFit], tuple[Remark, ...]]:
        fits = self._fits.get((work.operation, level.name))
        if fits:
            return fits, ()
        if level.alpha_s is not None and level.beta_s_per_byte is not None:
            return self._no_fits, ()
        order = {known.name: index for index, known in enumerate(self._profile.cluster.levels)}
        others = [name for operation, name in self._fits if operation == work.operation]
        if not others:
            raise UnmeasuredCollective(work.operation, self.backend)
        outermost = max(others, key=lambda name: order.get(name, -1))
        text = f"{work.operation} at level {level.name!r} was not measured: its times at level {outermost!r} are used"
        return self._fits[work.operation, outermost], (Remark(text, True),)
