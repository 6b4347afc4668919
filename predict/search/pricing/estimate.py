"""Seconds of every candidate, estimated from below with arrays: to choose which of them to predict exactly.

The inequalities, with f_i and b_i forward and backward of a micro-batch on rank i, S micro-batches, t what is sent over
a cut, u_i all that a rank sends of a micro-batch, and X_i the last backward with the exchange that it hides
(docs/model/search.md):

    E_i = sum over j < i of (f_j + t_j) + S (f_i + b_i)
    iteration >= max over i of [E_i - b_i + X_i + WU_i],  and  max over i of [E_i + sum over j < i of (b_j + t_j)] + ...
    iteration >= max over i of [sum over j < i of (f_j + t_j) + f_i + S u_i]
    X_i = max(b_i + last bucket, backward until the first bucket is full + all buckets)

Schedules that part backward send back before its second half: of the second maximum they take forward and messages.
It is an estimate where shards were not measured, which may keep more or less of a layer's efficiency than their share
of its FLOPs. Candidates that differ in bucket sizes alone are one row of the arrays, and rows of pipelines cut alike
are computed together: a call of numpy for each strategy would take longer than all of them.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from paradl_bench.core.cache_keys import numbered
from paradl_bench.network.kinds.autocast import as_held, widths_of
from paradl_bench.plan.compute import backward_layers, layers_with_gradient
from paradl_bench.plan.schedules.catalog import schedule_of
from paradl_bench.plan.schedules.placement import ONE_STAGE, Placement
from paradl_bench.strategies.pipeline.axis import PipelineOptions
from paradl_bench.strategies.pipeline.crossings import data_flow, elements
from paradl_bench.strategies.pipeline.stages import stage_bounds
from predict.costs.cost_model import CostModel
from predict.costs.input.input_closed_form import iteration_seconds
from predict.costs.input.input_terms import refuse_unknown
from predict.costs.input.shared_cores import reading_seconds
from predict.costs.sourced import Floats, Ints
from predict.search.candidates.mesh import alike
from predict.search.candidates.space import Space
from predict.search.pricing.exchange import Buckets, Exchanges
from predict.search.pricing.groups import GroupCosts
from predict.search.pricing.layer_seconds import ComputedAgain, WholeLayers, computed_again
from predict.search.pricing.links import KINDS, Cut, LinkFinder, Links
from predict.search.pricing.shared_work import SharedWorks
from predict.search.pricing.waits import Sent
from predict.simulation.input_tasks import terms_of

_AT_ONCE = 500_000
"""Elements of an array at most: many for a call of numpy, and few for a cache."""


class _Rows(NamedTuple):
    """Candidates that differ in bucket sizes alone: arrays with an entry each.

    Attributes:
        strategy, mesh, again: indices in the space. shared: number of what their ranks share of layers.
        turns: micro-batches, of so many samples. placement: its number. in_parts: whether the schedule parts backward.
        sent: number of the links that activations go over. exchanged, exchanged_apart: links that gradients go over,
            and those of parameters that are held apart.
        waits: number of what compute waits for; once that has its seconds, index of these.
    """

    strategy: Ints
    mesh: Ints
    shared: Ints
    again: Ints
    turns: Ints
    samples: Ints
    placement: Ints
    in_parts: Ints
    sent: Ints
    exchanged: Ints
    exchanged_apart: Ints
    waits: Ints

    def take(self, chosen: Ints) -> _Rows:
        """Some of them."""
        return _Rows(*(column[chosen] for column in self))


class _Work(NamedTuple):
    """Seconds of layers: arrays of shape (rows, layers), and by rows of the weight update of the whole network."""

    forward: Floats
    backward: Floats
    update: Floats


class Estimates:
    """Estimates of a space's candidates, on one cost model."""

    def __init__(self, costs: CostModel, space: Space, shared: SharedWorks) -> None:
        self._costs, self._space, self._shared = costs, space, shared
        self._groups = costs.communication.found.once("groups", lambda: GroupCosts(costs.communication))
        self._ranks = space.strategies[0].ranks
        schedules = (schedule_of(name).placement for name in space.schedules)
        self._placements = list(dict.fromkeys((ONE_STAGE, *schedules)))
        self._whole = WholeLayers(costs, self._ranks)
        # Layers that take as long on every rank, of which the first stands for all: blocks repeat theirs.
        operations = [layer.operation for layer in costs.network.layers]
        run = np.isin(np.arange(len(operations)), backward_layers(costs.network, layers_with_gradient(costs.network)))
        _, kinds = numbered(operations)
        self._few, self._layer = alike(shared.places, np.array(kinds), run.astype(np.int64))
        self._finder = LinkFinder(space, self._groups, shared)
        self._columns = space.columns
        self._parted = np.array((space.columns.parted, space.columns.parted_apart))
        self._again: dict[tuple[int, tuple[int, Placement]], ComputedAgain] = {}
        self._cuts: dict[tuple[int, Placement], Cut] = {}
        self._widths = widths_of(as_held(costs.network, costs.dtype), costs.dtype, costs.device_kind)

    def seconds(self, wanted: NDArray[np.bool_] | None = None) -> Floats:
        """Of every candidate; infinite where the network has no such cut, or the profile lacks what the strategy needs.

        What it lacks is added to what the space counts as impossible.

        Args:
            wanted: candidates to estimate, None for all; others are estimated as if they took no time.
        """
        of_all = np.zeros(len(self._space))
        chosen = np.arange(len(of_all)) if wanted is None else np.flatnonzero(wanted)
        if len(chosen):
            of_all[chosen] = self._of(chosen)
        return of_all

    def _of(self, chosen: Ints) -> Floats:
        """Of some candidates."""
        space = self._space
        rows, row = self._rows(chosen)
        # Few strategies wait for unlike messages, and every cut of a pipeline has of the same.
        first, waits = alike(rows.waits, rows.samples)
        layers = int(self._shared.places.max()) + 1
        self._sent = self._finder.waits.seconds(rows.waits[first], rows.samples[first], layers)
        rows = rows._replace(waits=waits)
        seconds = np.full((len(rows.strategy), len(space.caps_mb)), np.inf)
        works = [self._shared.of(sharing) for sharing in self._finder.sharings]
        self._share = np.array([work.share[self._few] for work in works]).reshape(-1, len(self._few))
        gradient_bytes, of_all = (
            np.array([getattr(work, name) for work in works], np.int64).reshape(-1, len(self._layer))
            for name in ("gradient_bytes", "bytes_alike")
        )
        kinds = of_all, gradient_bytes - of_all
        self._buckets = [Buckets(self._groups, of_kind, space.caps_mb) for of_kind in kinds]
        self._whole_bytes = max(self._shared.of_all.gradient_bytes.sum(), 1)
        stages = self._columns.stages[rows.mesh]
        sharded = (self._columns.zero[rows.mesh] > 1) & (stages == 1)
        possible = self._found.possible[rows.strategy]
        for key in self._cuts:
            alike_cut = possible & ~sharded & (stages == key[0]) & (rows.placement == self._placements.index(key[1]))
            for some, estimates in self._of_cut(self._cuts[key], rows, np.flatnonzero(alike_cut)):
                seconds[some] = estimates
        some = np.flatnonzero(possible & sharded)
        step = max(_AT_ONCE // len(self._layer), 1)
        for start in range(0, len(some), step):
            part = some[start : start + step]
            seconds[part] = self._sharded(rows.take(part))[:, None]
        return self._fed(np.asarray(seconds[row, space.cap[chosen]]), space.strategy[chosen])

    def _fed(self, seconds: Floats, of_strategy: Ints) -> Floats:
        """What the mini-batches make of iterations of so many seconds, each of a strategy."""
        costs, space = self._costs, self._space
        ranks_on_host = costs.place(space.strategies[0], 1).ranks_on_host
        of_strategies = []
        for strategy, mesh in zip(space.strategies, space.mesh_of, strict=True):
            terms = terms_of(costs, strategy, space.settings.batch // space.meshes[mesh].samplers, ranks_on_host)
            if not terms.known:
                refuse_unknown(costs.input_options)
                return seconds
            of_strategies.append((*terms.costs.seconds, terms.process_s))
        reading, copying, process_s = np.array(of_strategies)[of_strategy].T
        if terms.fetch.ahead and costs.profile.environments:
            cores = costs.profile.environments[0].device_count
            reading = np.asarray(reading_seconds(reading, seconds, process_s, ranks_on_host, cores))
        return np.asarray(iteration_seconds(terms.fetch, reading, copying, seconds))

    def _rows(self, chosen: Ints) -> tuple[_Rows, Ints]:
        """The rows of some candidates, and the row of each of these."""
        space = self._space
        columns = (space.strategy, space.micro_batches, space.schedule, space.again)
        strategy, turns, schedule, again = (column[chosen] for column in columns)
        schedules = [schedule_of(name) for name in space.schedules]
        meshes = space.mesh_of[strategy]
        piped = self._columns.stages[meshes] > 1
        # The estimate knows which stages a rank has, whether backward has parts, and nothing else of a schedule.
        placed = np.array([self._placements.index(each.placement) for each in schedules])
        placement = np.where(piped, placed[schedule], 0)
        in_parts = piped & np.array([each.splits_backward for each in schedules])[schedule]
        first, row = alike(strategy, turns, placement, in_parts, again)
        strategy, mesh, turns = strategy[first], meshes[first], turns[first]
        local = space.settings.batch // self._columns.samplers[mesh]
        samples, placement = local // turns, placement[first]
        self._found = found = self._links(np.unique(strategy), mesh, samples, placement)
        links = found.sent, found.exchanged, found.exchanged_apart, found.waits
        settings = again[first], turns, samples, placement, in_parts[first]
        return _Rows(strategy, mesh, found.sharing[strategy], *settings, *(link[strategy] for link in links)), row

    def _links(self, strategies: Ints, mesh: Ints, samples: Ints, placement: Ints) -> Links:
        """Of the rows' strategies; whatever of estimates may be impossible is looked up."""
        cuts: defaultdict[int, list[int]] = defaultdict(list)
        numbers: defaultdict[int, list[int]] = defaultdict(list)
        for of_mesh, column in (cuts, placement), (numbers, samples):
            first, _ = alike(mesh, column)
            for index, value in zip(mesh[first].tolist(), column[first].tolist(), strict=True):
                of_mesh[index].append(value)

        def prepare(index: int) -> None:
            stages = self._space.meshes[index].stages
            for number in cuts[index]:
                self._cut(stages, self._placements[number])
            self._whole.learn(numbers[index], alone=stages > 1)

        return self._finder.links(strategies, prepare)

    def _of_cut(self, cut: Cut, rows: _Rows, chosen: Ints) -> Iterator[tuple[Ints, Floats]]:
        """Of the chosen rows, whose pipelines are all cut so, some at a time."""
        if not len(chosen):
            return
        ranks, cut_rows = cut.key[0], rows.take(chosen)
        links = cut_rows.exchanged, cut_rows.exchanged_apart
        first, which = alike(cut_rows.shared, *links)
        # One exchange takes as long by itself at least as beside the other.
        exchanges = [
            buckets.exchanges(cut.bounds[: ranks + 1], cut_rows.shared[first], of_kind[first])
            for buckets, of_kind in zip(self._buckets, links, strict=True)
            if buckets is self._buckets[0] or of_kind.any()
        ]
        crossing, crosses = self._crossing(cut, cut_rows)
        # Whatever the settings, a strategy's ranks update as much, and send as much of that.
        strategies, strategy = alike(cut_rows.strategy)
        updated, sent = self._updated(cut, cut_rows.take(strategies))
        # What computes alike stands together, and is computed once.
        kinds, kind = alike(cut_rows.mesh, cut_rows.samples, cut_rows.waits, cut_rows.again)
        order = np.argsort(kind, kind="stable")
        elements = max(len(self._layer) * len(kinds) / len(kind), ranks * len(self._space.caps_mb))
        step = max(int(_AT_ONCE / elements), 1)
        for start in range(0, len(chosen), step):
            some = order[start : start + step]
            of_strategies = updated[strategy[some]], sent[strategy[some]]
            turns = cut_rows.take(some), crossing[crosses[some]], *of_strategies
            yield chosen[some], self._of_turns(cut, *turns, exchanges, which[some])

    def _of_turns(
        self,
        cut: Cut,
        rows: _Rows,
        crossing: Floats,
        updated: Floats,
        parts: Floats,
        exchanges: Sequence[Exchanges],
        which: Ints,
    ) -> Floats:
        """Of shape (rows, bucket sizes).

        Args:
            crossing: seconds over each cut. updated, parts: see :meth:`_updated`.
        """
        ranks = cut.key[0]
        # Rows differ in their links, or in whether backward is in parts, and compute alike.
        first, kind = alike(rows.mesh, rows.samples, rows.waits, rows.again)
        work = self._work(cut, rows.take(first), alone=ranks > 1)
        # Of shape (rows, stages a rank, ranks).
        forward, backward = (
            np.add.reduceat(layer_s, cut.bounds[:-1], axis=1)[:, cut.own][kind]
            for layer_s in (work.forward, work.backward)
        )
        # What each rank but the last sends forward at first.
        sent = np.pad(crossing[:, : ranks - 1], ((0, 0), (0, 1)))
        in_front, behind = (_before(stage_s[:, 0] + sent) for stage_s in (forward, backward))
        done = in_front + rows.turns[:, None] * (forward + backward).sum(axis=1)
        last = backward[:, 0]
        exchanged = functools.reduce(np.maximum, [each.seconds(work.backward, kind, which) for each in exchanges])
        # ZeRO's messages, which nothing hides, stand in front of a rank's first forward or behind its last backward.
        update = work.update[kind, None] * updated + parts
        of_ranks = ((done - last + update)[:, None, :] + exchanged).max(axis=2)
        first = ((done + behind).max(axis=1) - last[:, 0] + update[:, 0])[:, None] + exchanged[:, :, 0]
        # What a stage sends back does not wait for all of a backward in parts, and how much of it is not known here:
        # the way back is that of the messages alone.
        parted = (in_front + rows.turns[:, None] * forward.sum(axis=1) + _before(sent)).max(axis=1) + update[:, 0]
        longest = np.maximum(of_ranks, np.where(rows.in_parts[:, None], parted[:, None], first))
        sending = in_front + forward[:, 0] + rows.turns[:, None] * self._sent_each_turn(cut, crossing) + parts
        return np.asarray(np.maximum(longest, sending.max(axis=1)[:, None]))

    def _updated(self, cut: Cut, rows: _Rows) -> tuple[Floats, Floats]:
        """What each rank updates, as a part of all bytes, and seconds of what ZeRO sends of it; of shape (rows, ranks).

        Args:
            rows: one for each strategy.
        """
        held = self._bytes_held(cut.bounds[: cut.key[0] + 1], rows)
        links, parted = self._found.parts[rows.strategy], self._parted[:, rows.mesh]
        sharings = list(self._finder.sharings)
        sent = [
            self._finder.zero_messages.in_parts(
                sharings,
                rows.shared,
                cut.bounds,
                cut.stage_ranks,
                links[:, int(kind)],
                parted[int(kind)],
                part,
                of_apart=kind,
            )
            for kind, part in zip(KINDS, held, strict=True)
        ]
        return held.sum(axis=0) / self._whole_bytes, np.asarray(sum(sent))

    def _bytes_held(self, bounds: Ints, rows: _Rows) -> Floats:
        """What a rank updates of stages: of what all ranks hold, and of what is held apart; (2, rows, stages)."""
        of_kinds = zip(self._buckets, self._parted[:, rows.mesh], strict=True)
        return np.array([buckets.stage_bytes(bounds)[rows.shared] / parted[:, None] for buckets, parted in of_kinds])

    def _work(self, cut: Cut, rows: _Rows, *, alone: bool) -> _Work:
        """Layers on a rank, with what their compute waits for, in backward what is computed again too."""
        forward, backward, update = self._whole.seconds(rows.samples, self._few, alone=alone)
        straggler = self._whole.stragglers(self._space.meshes, rows.mesh, rows.samples)
        share = self._share[rows.shared] * straggler[:, None]
        places = self._shared.places[self._few]
        sent = Sent(*(each[rows.waits].take(places, axis=1) for each in self._sent))
        # Rounds of messages beside compute take as long as all of either at least.
        forward = np.maximum(forward * share, sent.beside_forward) + sent.forward
        backward = np.maximum(backward * share, sent.beside_backward) + sent.backward
        forward, backward = forward.take(self._layer, axis=1), backward.take(self._layer, axis=1)
        for which in np.unique(rows.again).tolist():
            chosen = rows.again == which
            backward[chosen] = self._computed_again(which, cut).added(forward[chosen], backward[chosen])
        return _Work(forward, backward, update * straggler)

    def _computed_again(self, which: int, cut: Cut) -> ComputedAgain:
        if (key := (which, cut.key)) not in self._again:
            settings = msgspec.structs.replace(self._space.settings, **self._space.held[which])
            self._again[key] = computed_again(self._costs.network, settings, cut.bounds.tolist())
        return self._again[key]

    def _cut(self, ranks: int, placement: Placement) -> Cut:
        key = ranks, placement
        if key not in self._cuts:
            network = self._costs.network
            if ranks == 1:
                self._cuts[key] = Cut.of(*key, [0, len(network.layers)], [0.0])
                return self._cuts[key]
            schedule = next(name for name in self._space.schedules if schedule_of(name).placement == placement)
            bounds = stage_bounds(network, ranks, self._space.settings.changed(PipelineOptions, schedule=schedule))
            crossed = data_flow(network).crossing
            sent = [
                sum(elements(network, at) * self._widths[at.layer].runs for at in crossed[end]) for end in bounds[1:-1]
            ]
            self._cuts[key] = Cut.of(*key, bounds, [*sent, 0.0])
        return self._cuts[key]

    def _sent_each_turn(self, cut: Cut, crossing: Floats) -> Floats:
        """Seconds of all that each rank sends of a micro-batch, of each of its stages and both ways; (rows, ranks)."""
        # Each stage but the last sends forward what the next one reads, and that one as much of gradients back.
        of_stages = np.pad(crossing, ((0, 0), (0, 1))) + np.pad(crossing, ((0, 0), (1, 0)))
        return np.asarray(of_stages[:, cut.own].sum(axis=1))

    def _crossing(self, cut: Cut, rows: _Rows) -> tuple[Floats, Ints]:
        """Seconds of a micro-batch's message over each cut, of each kind of rows; and the kind of each row."""
        # A block of positions sends its part; of other shards what crosses is whole, or at least their part.
        parts = self._columns.sharers[rows.mesh]
        first, row = alike(rows.samples, parts, rows.sent)
        if len(cut.bounds) == 2:
            return np.zeros((len(first), 0)), row
        # Blocks repeat, and so does what crosses cuts between them.
        distinct, place = np.unique(cut.sent_bytes[:-1], return_inverse=True)
        sizes = rows.samples[first, None] * distinct / parts[first, None]
        hops = self._finder.hops
        links = np.array([hops[number][cut.hop] for number in rows.sent[first].tolist()])
        # The first link takes no time.
        links = np.where(cut.hop >= 0, links, 0)
        return self._groups.seconds_over(links, np.rint(sizes)[:, place]), row

    def _sharded(self, rows: _Rows) -> Floats:
        """ZeRO stages 2 and 3: compute, or reducing and gathering (once, or again for backward) where that is more.

        Where a process waits for what it calls, it is both.
        """
        work = self._work(self._cut(1, ONE_STAGE), rows, alone=False)
        computed = work.forward.sum(axis=1) + work.backward.sum(axis=1)
        sent = self._found.zero_s[rows.strategy]
        together = computed + sent if self._space.settings.blocking else np.maximum(computed, sent)
        held = self._bytes_held(np.array([0, len(self._layer)]), rows).sum(axis=(0, 2))
        return np.asarray(rows.turns * together + work.update * held / self._whole_bytes)


def _before(seconds: Floats) -> Floats:
    """Per rank, the sum over those in front of it; of shape (rows, ranks)."""
    return np.asarray(np.cumsum(seconds, axis=1) - seconds)
