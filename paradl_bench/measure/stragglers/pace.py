"""Ranks and nodes that hold the others up, and spells in which all were slow: what a summary says of them; torch-free.

Ranks that do like work are compared iteration by iteration, or call by call, with the median of the others, so that
what slows all at once slows no comparison. In training a rank is slow that computes longer. In a collective the rank
that comes late spends the least time in the call, and the others wait for it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from paradl_bench.core.registry import lookup
from paradl_bench.core.statistics import Floats
from paradl_bench.core.units import format_seconds
from paradl_bench.measure.stragglers.arrivals import Arrival, arrivals_after_compute, arrivals_in_training, host_of
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.collectives.catalog import operations
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.records.contexts.context import ContextSamples
from paradl_bench.records.hosts.host_clocks import HostClocks, HostDrift, drift_lines
from paradl_bench.records.hosts.host_record import RankHost, last_of_each
from paradl_bench.records.samples import CollectiveSamples
from paradl_bench.records.training.training_record import TrainingIterations, TrainingRun

SLOW = 0.10
"""By how much more than its peers' median a rank has to take, and a spell than the whole, to be called slow."""
CHANCE = 0.05
"""Probability, over all ranks of a run, with which ranks that are slow as often as fast may be named for being slow."""
_SYMMETRIC = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""Operations in which every rank waits for all others; a root or a sender may go on early."""


class RankPace(msgspec.Struct, frozen=True, kw_only=True):
    """One rank against others that do the same work.

    Attributes:
        ratio: median over iterations of the time that it computed, over the median of its peers' in that iteration.
        slow_share: of iterations in which that was over 1.1.
        beyond_chance: whether that is more often than a rank would be that is slow as often as it is fast.
    """

    rank: int
    host: str
    ratio: float
    slow_share: float
    beyond_chance: bool = False


class TrainingPace(msgspec.Struct, frozen=True, kw_only=True):
    """How evenly a run went.

    Attributes:
        ranks: those that have peers.
        slow_nodes: hosts on which every rank is slow against peers, where there are several hosts.
        affected_share: of iterations in which any rank was slow against its peers.
        slow_spells: (first iteration, iterations, times the run's median) of chunks that were slow on all ranks.
        arrivals: at the end of backward, by stamps on one clock; empty for pipelines, whose stages take turns.
    """

    ranks: tuple[RankPace, ...] = ()
    slow_nodes: tuple[str, ...] = ()
    affected_share: float = 0.0
    slow_spells: tuple[tuple[int, int, float], ...] = ()
    slow_spell_share: float = 0.0
    arrivals: tuple[Arrival, ...] = ()
    clocks: tuple[HostDrift, ...] = ()

    def lines(self) -> list[str]:
        """What is worth saying, one line each; empty for a run in which all ranks kept pace."""
        lines = []
        for node in self.slow_nodes:
            paces = [pace for pace in self.ranks if pace.host == node]
            ratio, share = np.median([pace.ratio for pace in paces]), np.mean([pace.slow_share for pace in paces])
            lines.append(
                f"node {node} is slow: its {len(paces)} ranks compute {ratio:.2f} times as long as their peers,"
                f" in {share:.0%} of iterations"
            )
        slow = [pace for pace in self.ranks if pace.ratio > 1 + SLOW or (pace.slow_share > SLOW and pace.beyond_chance)]
        for pace in slow:
            if pace.host not in self.slow_nodes:
                where = f" on {pace.host}" if pace.host else ""
                lines.append(
                    f"rank {pace.rank}{where} computes {pace.ratio:.2f} times as long as its peers (median), over"
                    f" {1 + SLOW:g} times as long in {pace.slow_share:.0%} of iterations"
                )
        if lines:
            lines.append(f"{self.affected_share:.0%} of iterations had a rank that its peers waited for")
        # One that computes longer comes late for that reason, and has been named.
        named = {pace.rank for pace in slow}
        late = [arrival for arrival in self.arrivals if arrival.late and arrival.rank not in named]
        lines += [arrival.line("the end of backward", "what is computed before it") for arrival in late]
        if self.slow_spells:
            first, count, times = max(self.slow_spells, key=lambda spell: spell[2])
            lines.append(
                f"{self.slow_spell_share:.0%} of iterations fell into slow spells; the worst, iterations {first} to"
                f" {first + count - 1}, took {times:.2f} times the run's median"
            )
        return lines + drift_lines(self.clocks)


def training_pace(run: TrainingRun, records: Sequence[TrainingIterations], noted: Sequence[RankHost]) -> TrainingPace:
    """Compare the ranks of a run, and its chunks; ``noted`` is what ``hosts.jsonl`` holds.

    Peers are ranks at the same place along a pipeline: other axes part work evenly, as far as sizes allow.
    """
    hosts, clocks = last_of_each(noted), HostClocks(noted)
    computed, whole = _by_rank(records)
    peers = _peers(run, sorted(computed))
    paces, slow_rows = [], []
    for rank, others in peers.items():
        if not others:
            continue
        count = min(len(computed[peer]) for peer in (rank, *others))
        against = np.median([computed[other][:count] for other in others], axis=0)
        ratios = computed[rank][:count] / np.maximum(against, 1e-12)
        slow, fast = ratios > 1 + SLOW, ratios < 1 / (1 + SLOW)
        slow_rows.append(slow)
        paces.append(
            RankPace(
                rank=rank,
                host=host_of(rank, hosts),
                ratio=float(np.median(ratios)),
                slow_share=float(np.mean(slow)),
                beyond_chance=_by_chance(int(slow.sum()), int(fast.sum())) < CHANCE / len(peers),
            )
        )
    shortest = min((len(row) for row in slow_rows), default=0)
    affected = float(np.mean(np.any([row[:shortest] for row in slow_rows], axis=0))) if shortest else 0.0
    spells, share = _spells(records, whole)
    in_turns = any(record.pipeline_idle_s for record in records)
    return TrainingPace(
        ranks=tuple(paces),
        slow_nodes=_whole_nodes((pace.host, pace.ratio > 1 + SLOW) for pace in paces),
        affected_share=affected,
        slow_spells=spells,
        slow_spell_share=share,
        arrivals=() if in_turns else arrivals_in_training(records, peers, clocks, hosts),
        clocks=clocks.drifts(),
    )


def _by_chance(slow: int, fast: int) -> float:
    """Probability of at least so many slow iterations among those that are slow or fast, both being as likely.

    The sign test: on a host that others use, two like ranks are slow against each other in turn, and neither is named.
    """
    count = slow + fast
    ways = sum(math.comb(count, more) for more in range(slow, count + 1))
    return ways / (1 << count)


def _by_rank(records: Iterable[TrainingIterations]) -> tuple[dict[int, Floats], dict[int, Floats]]:
    """Seconds of every iteration that a rank computed, without communication of layers, and in all."""
    computed, whole = defaultdict(list), defaultdict(list)
    for record in sorted(records, key=lambda record: (record.rank, record.first_iteration)):
        busy = np.sum([record.fw_s, record.bw_s, record.wu_s], axis=0)
        waited = [*record.fw_communication_s.values(), *record.bw_communication_s.values()]
        computed[record.rank].append(busy - (np.sum(waited, axis=0) if waited else 0.0))
        whole[record.rank].append(np.asarray(record.iteration_s, float))
    return (
        {rank: np.concatenate(parts) for rank, parts in computed.items()},
        {rank: np.concatenate(parts) for rank, parts in whole.items()},
    )


def _peers(run: TrainingRun, ranks: Sequence[int]) -> dict[int, list[int]]:
    strategy = parse_strategy(run.strategy)

    def stage(rank: int) -> tuple[int, ...]:
        along = zip(strategy.axes, strategy.coordinates(rank), strict=True)
        return tuple(coordinate for axis, coordinate in along if axis.has(Trait.STAGES))

    return {rank: [other for other in ranks if other != rank and stage(other) == stage(rank)] for rank in ranks}


def _whole_nodes(ranks: Iterable[tuple[str, bool]]) -> tuple[str, ...]:
    """Of several hosts, those of which every rank is late or slow."""
    by_host: dict[str, list[bool]] = defaultdict(list)
    for host, slow in ranks:
        by_host[host].append(slow)
    return tuple(host for host, slow in by_host.items() if host and len(by_host) > 1 and all(slow))


def _spells(
    records: Sequence[TrainingIterations], whole: Mapping[int, Floats]
) -> tuple[tuple[tuple[int, int, float], ...], float]:
    """Chunks of the first rank whose median is over the run's; ranks wait for each other, so that one tells of all."""
    if not whole:
        return (), 0.0
    first = min(whole)
    median = float(np.median(whole[first]))
    chunks = [
        (record.first_iteration, len(record.iteration_s), float(np.median(record.iteration_s)) / median)
        for record in records
        if record.rank == first
    ]
    slow = tuple(chunk for chunk in sorted(chunks) if chunk[2] > 1 + SLOW)
    return slow, sum(count for _, count, _ in slow) / len(whole[first])


class LateRank(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a sweep that the others may wait for.

    Attributes:
        lag_s: median over calls of the time by which the others, in the median, spent longer in the call.
        late_share: of calls in which that was over a tenth of the call.
        points: of operations and sizes in which that holds for most calls; all_points: that were compared.
    """

    rank: int
    host: str
    lag_s: float
    late_share: float
    points: int
    all_points: int

    @property
    def late(self) -> bool:
        """Whether it is late at most operations and sizes: leaving a barrier costs short calls alone."""
        return 2 * self.points > self.all_points


class SweepPace(msgspec.Struct, frozen=True, kw_only=True):
    """How evenly a sweep went.

    Attributes:
        ranks: of one group at a time, over operations in which all ranks wait for all.
        slow_nodes: hosts of which every rank is late, where there are several.
        slow_blocks: (block, times the median of all blocks) of blocks that were slow, over all operations and sizes.
        arrivals: at collectives after compute, by stamps on one clock.
    """

    ranks: tuple[LateRank, ...] = ()
    slow_nodes: tuple[str, ...] = ()
    slow_blocks: tuple[tuple[int, float], ...] = ()
    blocks: int = 0
    arrivals: tuple[Arrival, ...] = ()
    clocks: tuple[HostDrift, ...] = ()

    def lines(self) -> list[str]:
        """What is worth saying, one line each; empty for a sweep that went evenly."""
        lines = []
        for node in self.slow_nodes:
            lags = [rank.lag_s for rank in self.ranks if rank.host == node]
            lines.append(
                f"node {node} is late: the ranks of other nodes wait for its {len(lags)} ranks,"
                f" {format_seconds(float(np.median(lags)))} a call (median)"
            )
        for rank in self.ranks:
            if rank.late and rank.host not in self.slow_nodes:
                where = f" on {rank.host}" if rank.host else ""
                lines.append(
                    f"the others wait for rank {rank.rank}{where}: {format_seconds(rank.lag_s)} a call (median), over a"
                    f" tenth of the call in {rank.late_share:.0%} of calls"
                )
        lines += [arrival.line("calls after compute", "that compute") for arrival in self.arrivals if arrival.late]
        if self.slow_blocks:
            block, times = max(self.slow_blocks, key=lambda pair: pair[1])
            lines.append(
                f"{len(self.slow_blocks)} of {self.blocks} blocks were slow; the worst, block {block}, took"
                f" {times:.2f} times the median of all"
            )
        return lines + drift_lines(self.clocks)


def sweep_pace(
    records: Iterable[CollectiveSamples],
    noted: Sequence[RankHost],
    contexts: Iterable[ContextSamples] = (),
) -> SweepPace:
    """Compare the ranks of a group of a sweep, and its blocks; groups that share links and means of calls are left out.

    ``noted`` is what ``hosts.jsonl`` holds.
    """
    hosts, clocks = last_of_each(noted), HostClocks(noted)
    alone = [r for r in records if r.concurrent == 1 and r.calls_per_sample == 1]
    symmetric = [r for r in alone if r.operation in _SYMMETRIC and len(r.samples_s) == r.ranks > 1]
    every_rank = sorted({r.first_rank + row for r in symmetric for row in range(r.ranks)})
    ranks = tuple(_late_rank(rank, symmetric, hosts) for rank in every_rank)
    blocks = _block_times(alone)
    return SweepPace(
        ranks=ranks,
        slow_nodes=_whole_nodes((rank.host, rank.late) for rank in ranks),
        slow_blocks=tuple((block, times) for block, times in sorted(blocks.items()) if times > 1 + SLOW),
        blocks=len(blocks),
        arrivals=arrivals_after_compute([record.aligned(clocks) for record in contexts], hosts),
        clocks=clocks.drifts(),
    )


def _late_rank(rank: int, records: Sequence[CollectiveSamples], hosts: Mapping[int, RankHost]) -> LateRank:
    lags: list[Floats] = []
    late: dict[tuple[str, int], list[NDArray[np.bool_]]] = defaultdict(list)
    for record in records:
        row = rank - record.first_rank
        if not 0 <= row < record.ranks:
            continue
        times = np.asarray(record.samples_s, float)
        lag = np.median(np.delete(times, row, axis=0), axis=0) - times[row]
        lags.append(lag)
        late[record.operation, record.message_bytes].append(lag > SLOW * times.max(axis=0))
    points = [np.concatenate(flags) for flags in late.values()]
    return LateRank(
        rank=rank,
        host=host_of(rank, hosts),
        lag_s=float(np.median(np.concatenate(lags))),
        late_share=float(np.mean(np.concatenate(points))),
        points=sum(float(np.mean(flags)) > 0.5 for flags in points),
        all_points=len(points),
    )


def _block_times(records: Sequence[CollectiveSamples]) -> dict[int, float]:
    """By block, the median over operations and sizes of its time over that of all blocks."""
    medians: dict[tuple[str, int, int], dict[int, float]] = defaultdict(dict)
    for record in records:
        seconds = lookup(operations(), record.operation, "collective").call_seconds(record.samples_s)
        key = record.operation, record.message_bytes, record.first_rank
        medians[key][record.block] = float(np.median(seconds))
    ratios: dict[int, list[float]] = defaultdict(list)
    for of_blocks in medians.values():
        typical = float(np.median(list(of_blocks.values())))
        for block, value in of_blocks.items():
            ratios[block].append(value / typical if typical else 1.0)
    return {block: float(np.median(values)) for block, values in ratios.items()}
