"""Seconds of every candidate, estimated from below with arrays: to choose which of them to predict exactly.

With f_i and b_i forward and backward of a micro-batch on rank i of p (layers' seconds by the share of their FLOPs,
times the least lag of the last rank, and what compute waits for; what is computed again is backward's), S
micro-batches, t what is sent over a cut, and X_i the last backward with the exchange of gradients that it hides,

    E_i = sum over j < i of (f_j + t_j) + S (f_i + b_i)
    iteration >= max over i of [E_i - b_i + X_i + WU_i],  and  max over i of [E_i + sum over j < i of (b_j + t_j)] + ...
    X_i = max(b_i + last bucket, backward until the first bucket is full + all buckets)

Rank i cannot begin before the first micro-batch has come through those in front of it, has all its work to do, and
exchanges one bucket after the other: no schedule that keeps the two halves of backward together is faster. One that
parts them sends back before the second half, and takes the first maximum alone. What is left
out only adds: interference, waiting within a schedule, latency behind compute. It is an estimate where shards were not
measured, which may keep more or less of a layer's efficiency than their share of its FLOPs.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from paradl_bench.schedules.catalog import schedule_of
from paradl_bench.spec.errors import UserError
from paradl_bench.spec.network import DTYPE_BYTES
from paradl_bench.spec.plan import bucket_limits
from paradl_bench.spec.strategy import Strategy
from paradl_bench.strategies.pipeline.stages import cut_into_stages
from predict.cost_model import CostModel, Place
from predict.costs import Floats, Ints
from predict.search.groups import Group, GroupCosts, group_along
from predict.search.layer_seconds import LayerSeconds, computed_again, layer_seconds, least_lag, least_of
from predict.search.shared_work import SharedWork, SharedWorks
from predict.search.space import Mesh, Space
from predict.stragglers import RankSpread

_ELEMENT_BYTES = DTYPE_BYTES["fp32"]
_SMALLEST_BYTES = 4.0


class Cut(NamedTuple):
    """Stages of a pipeline over so many ranks.

    Attributes:
        key: ranks, and stages of each. bounds: index of each stage's first layer, and of the end.
        sent_bytes: a sample, behind each stage.
    """

    key: tuple[int, int]
    bounds: Ints
    sent_bytes: Floats


class _Work(NamedTuple):
    """Seconds of layers: arrays of shape (numbers of samples, layers), and of the weight update by samples."""

    forward: Floats
    backward: Floats
    update: Floats


class Estimates:
    """Estimates of a space's candidates, on one cost model."""

    def __init__(self, model: CostModel, space: Space, shared: SharedWorks) -> None:
        self._model, self._space, self._shared = model, space, shared
        self._groups = GroupCosts(model.communication)
        self._ranks = space.strategies[0].ranks
        self._rows: dict[Place, LayerSeconds] = {}
        self._spreads: dict[Place, RankSpread] = {}
        self._works: dict[tuple[object, ...], _Work] = {}
        self._filled: dict[tuple[object, ...], Ints] = {}
        self._exchanges: dict[tuple[object, ...], tuple[Floats, Floats]] = {}
        self._stages_per_rank = np.array([schedule_of(name).stages_per_rank for name in space.schedules])
        self._splits_backward = np.array([schedule_of(name).splits_backward for name in space.schedules])
        self._again = [
            computed_again(model.network, msgspec.structs.replace(space.settings, recompute=chosen))
            for chosen in space.recomputed
        ]
        self._cuts: dict[tuple[int, int], Cut] = {}

    def seconds(self) -> Floats:
        """Of every candidate; infinite where the network has no such cut, or the profile lacks what the strategy needs.

        What it lacks is added to what the space counts as impossible.
        """
        space = self._space
        found = np.full(len(space), np.inf)
        # Candidates of a strategy stand together.
        starts = np.searchsorted(space.strategy, np.arange(len(space.strategies) + 1))
        for index, strategy in enumerate(space.strategies):
            at = slice(starts[index], starts[index + 1])
            mesh = space.meshes[space.mesh_of[index]]
            try:
                found[at] = self._of_strategy(mesh, strategy, at)
            except UserError as error:
                space.impossible.add(str(error))
        return found

    def _of_strategy(self, mesh: Mesh, strategy: Strategy, at: slice) -> Floats:
        """Of a strategy's candidates, which stand there."""
        space = self._space
        counts, schedules, caps, again = space.micro_batches[at], space.schedule[at], space.cap[at], space.again[at]
        local = space.settings.batch // mesh.replicas
        if mesh.zero > 1:
            turns, turn = np.unique(counts, return_inverse=True)
            return self._sharded(mesh, strategy, turns, local // turns)[turn]
        found = np.empty(len(counts))
        sizes, size = np.unique(caps, return_inverse=True)
        # The estimate knows how many stages a rank has, whether backward has parts, and nothing else of a schedule.
        piped = mesh.stages > 1
        stages = self._stages_per_rank[schedules] if piped else np.ones(len(counts), np.int64)
        split = self._splits_backward[schedules] & piped
        kinds = zip(stages.tolist(), split.tolist(), again.tolist(), strict=True)
        for stages_per_rank, in_parts, which in sorted({*kinds}):
            own = (stages == stages_per_rank) & (split == in_parts) & (again == which)
            turns, turn = np.unique(counts[own], return_inverse=True)
            cut = self._cut(mesh.stages, stages_per_rank)
            work = self._work(mesh, strategy, local // turns, which)
            each = self._of_turns(mesh, strategy, cut, work, turns, tuple(sizes.tolist()), in_parts=in_parts)
            found[own] = each[turn, size[own]]
        return found

    def _of_turns(
        self,
        mesh: Mesh,
        strategy: Strategy,
        cut: Cut,
        work: _Work,
        turns: Ints,
        caps: tuple[int, ...],
        *,
        in_parts: bool,
    ) -> Floats:
        """Of shape (numbers of micro-batches, bucket sizes)."""
        # Of shape (turns, stages a rank, ranks): the stages of a rank are as many ranks apart.
        shape = len(turns), -1, mesh.stages
        forward, backward = (
            np.add.reduceat(own, cut.bounds[:-1], axis=1).reshape(shape) for own in (work.forward, work.backward)
        )
        sent = self._transfers(mesh, strategy, cut, self._space.settings.batch // mesh.replicas // turns)
        in_front, behind = (_before(own[:, 0] + sent) for own in (forward, backward))
        done = in_front + turns[:, None] * (forward + backward).sum(axis=1)
        last = backward[:, 0]
        gradients = self._stage_gradients(mesh, cut)
        update = work.update[:, None] * (gradients / max(gradients.sum(), 1))
        exchanged = self._exchanged(mesh, strategy, cut, work.backward, caps)
        of_ranks = ((done - last + update)[:, None, :] + exchanged).max(axis=2)
        if in_parts:
            # What a stage sends back does not wait for all of its backward, and how much of it is not known here.
            return np.asarray(of_ranks + self._after(mesh, strategy))
        first = (done + behind).max(axis=1) - last[:, 0] + update[:, 0]
        found = np.maximum(of_ranks, first[:, None] + exchanged[:, :, 0])
        return np.asarray(found + self._after(mesh, strategy))

    def _work(self, mesh: Mesh, strategy: Strategy, samples: Ints, again: int) -> _Work:
        """Layers on a rank of the mesh, with what their compute waits for, in backward what is computed again too."""
        group = group_along(strategy, mesh.shared.kind) if mesh.shared else Group(1, 1, 1, 1)
        key = mesh.shared, mesh.zero, mesh.stages, group, tuple(samples.tolist()), again
        if key not in self._works:
            forward, backward, update, lag = self._whole(samples, mesh)
            shared = self._shared.of(mesh.shared)
            share = shared.share * lag[:, None]
            update = update * lag * (shared.gradient_bytes.sum() / max(self._shared.of(None).gradient_bytes.sum(), 1))
            sent_forward, sent_backward = self._waits(shared, group, samples)
            forward = forward * share + sent_forward
            backward = self._again[again].added(forward, backward * share + sent_backward)
            self._works[key] = _Work(forward, backward, update / self._ranks if mesh.zero else update)
        return self._works[key]

    def _whole(self, samples: Ints, mesh: Mesh) -> tuple[Floats, Floats, Floats, Floats]:
        """Forward and backward of whole layers, of shape (numbers of samples, layers); weight update and lag."""
        on_host = min(self._ranks, self._model.communication.cluster.ranks_per_node)
        rows, lags = [], []
        for number in samples.tolist():
            place = Place(number, self._ranks, on_host)
            # A stage may compute while the other ranks of its host wait.
            rows.append(
                least_of(self._row(place), self._row(Place(number, 1, 1))) if mesh.stages > 1 else self._row(place)
            )
            if place not in self._spreads:
                self._spreads[place] = self._model.rank_spread(place)
            lags.append(least_lag(self._spreads[place], self._ranks, mesh))
        forward, backward = np.array([row.forward for row in rows]), np.array([row.backward for row in rows])
        return forward, backward, np.array([row.update for row in rows]), np.array(lags)

    def _row(self, place: Place) -> LayerSeconds:
        if place not in self._rows:
            self._rows[place] = layer_seconds(self._model, place)
        return self._rows[place]

    def _waits(self, shared: SharedWork, group: Group, samples: Ints) -> tuple[Floats, Floats]:
        """Seconds that layers communicate forward and backward; of shape (numbers of samples, layers)."""
        found = {phase: np.zeros((len(shared.share), len(samples))) for phase in ("FW", "BW")}
        for phase, operation in {(message.phase, message.operation) for message in shared.messages}:
            own = [message for message in shared.messages if (message.phase, message.operation) == (phase, operation)]
            sizes = np.outer([message.bytes_per_sample for message in own], samples)
            seconds = self._groups.seconds(operation, group, np.rint(sizes))
            np.add.at(found[phase], [message.layer for message in own], seconds)
        return found["FW"].T, found["BW"].T

    def _cut(self, ranks: int, stages_per_rank: int) -> Cut:
        key = ranks, stages_per_rank
        if key not in self._cuts:
            network = self._model.network
            if ranks == 1:
                self._cuts[key] = Cut(key, np.array([0, len(network.layers)]), np.zeros(1))
                return self._cuts[key]
            schedule = next(name for name in self._space.schedules if schedule_of(name).stages_per_rank == key[1])
            stages = cut_into_stages(network, ranks, msgspec.structs.replace(self._space.settings, schedule=schedule))
            sent = [sum(network.layers[i].output_elements for i in stage.sends) for stage in stages]
            bounds = np.array([*(stage.layers.start for stage in stages), len(network.layers)])
            self._cuts[key] = Cut(key, bounds, np.array(sent, float) * _ELEMENT_BYTES)
        return self._cuts[key]

    def _transfers(self, mesh: Mesh, strategy: Strategy, cut: Cut, samples: Ints) -> Floats:
        """Seconds of what each rank but the last sends of a micro-batch; of shape (numbers of samples, ranks)."""
        found = np.zeros((len(samples), mesh.stages))
        if mesh.stages > 1:
            # A block of positions sends its part; of other shards what crosses is whole, or at least their part.
            parts = mesh.shared.degree if mesh.shared else 1
            sizes = np.outer(samples, cut.sent_bytes[: mesh.stages - 1]) / parts
            found[:, :-1] = self._groups.seconds("send_recv", group_along(strategy, "pipeline"), np.rint(sizes))
        return found

    def _stage_gradients(self, mesh: Mesh, cut: Cut) -> Floats:
        """Bytes of gradients of each rank's first stage."""
        of_stages = np.add.reduceat(self._shared.of(mesh.shared).gradient_bytes, cut.bounds[:-1])
        return np.asarray(of_stages[: mesh.stages], float)

    def _exchanged(self, mesh: Mesh, strategy: Strategy, cut: Cut, backward: Floats, caps: tuple[int, ...]) -> Floats:
        """Seconds from the start of the last backward of a rank to the end of its exchange.

        Args:
            backward: seconds of layers, of shape (turns, layers).

        Returns:
            Of shape (turns, bucket sizes, ranks).
        """
        before = np.concatenate([np.zeros((len(backward), 1)), np.cumsum(backward, axis=1)], axis=1)
        ends = cut.bounds[1 : mesh.stages + 1]
        last = before[:, ends] - before[:, cut.bounds[: mesh.stages]]
        found = np.repeat(last[:, None, :], len(caps), axis=1)
        if not mesh.exchanges:
            return found
        filled = self._filled_by(mesh, cut, caps)
        ready = before[:, ends][:, None, :] - before[:, filled]
        every, final = self._buckets(mesh, strategy, cut, caps)
        return np.asarray(np.maximum(found + final, ready + every))

    def _filled_by(self, mesh: Mesh, cut: Cut, caps: tuple[int, ...]) -> Ints:
        """The layer whose backward fills the first bucket, or ends the stage; of shape (bucket sizes, ranks)."""
        key = mesh.shared, cut.key, caps
        if key not in self._filled:
            gradients = self._shared.of(mesh.shared).gradient_bytes
            first = [bucket_limits(self._space.caps_mb[cap])[0] for cap in caps]
            found = np.empty((len(caps), mesh.stages), np.int64)
            for rank in range(mesh.stages):
                start, end = cut.bounds[rank], cut.bounds[rank + 1]
                place = np.searchsorted(np.cumsum(gradients[start:end][::-1]), first)
                found[:, rank] = end - 1 - np.minimum(place, end - start - 1)
            self._filled[key] = found
        return self._filled[key]

    def _buckets(self, mesh: Mesh, strategy: Strategy, cut: Cut, caps: tuple[int, ...]) -> tuple[Floats, Floats]:
        """Seconds of all buckets of a rank's first stage, and of the last of them; of shape (bucket sizes, ranks)."""
        group = group_along(strategy, "data", "spatial")
        key = mesh.shared, cut.key, caps, group
        if key not in self._exchanges:
            sizes = self._stage_gradients(mesh, cut)
            limits = np.array([bucket_limits(self._space.caps_mb[cap]) for cap in caps], float)
            count, each, final = _bucket_bytes(sizes, limits)
            of_one = np.stack([each, np.maximum(final, _SMALLEST_BYTES)])
            seconds = np.where(sizes > 0, self._groups.seconds("all_reduce", group, np.rint(of_one)), 0.0)
            self._exchanges[key] = count * seconds[0], seconds[1]
        return self._exchanges[key]

    def _after(self, mesh: Mesh, strategy: Strategy) -> float:
        """What follows the update: under ZeRO's first stage each rank broadcasts what it changed."""
        if mesh.zero != 1:
            return 0.0
        part = np.array([self._shared.of(None).gradient_bytes.sum() / self._ranks])
        group = group_along(strategy, "data")
        return float(self._ranks * self._groups.seconds("broadcast", group, np.floor(part))[0])

    def _sharded(self, mesh: Mesh, strategy: Strategy, turns: Ints, samples: Ints) -> Floats:
        """ZeRO stages 2 and 3: compute, or reducing and gathering (once, or again for backward) where that is more."""
        # What these stages hold is never computed again.
        work = self._work(mesh, strategy, samples, self._space.recomputed.index(()))
        part = np.array([self._shared.of(None).gradient_bytes.sum() / self._ranks])
        group = group_along(strategy, "data")
        gathered, reduced = (
            float(self._groups.seconds(name, group, np.floor(part))[0]) for name in ("all_gather", "reduce_scatter")
        )
        computed = turns * (work.forward.sum(axis=1) + work.backward.sum(axis=1))
        sent = turns * ((mesh.zero - 1) * gathered + reduced)
        return np.asarray(np.maximum(computed, sent) + work.update)


def _before(seconds: Floats) -> Floats:
    """Per rank, the sum over those in front of it; of shape (turns, ranks)."""
    return np.asarray(np.cumsum(seconds, axis=1) - seconds)


def _bucket_bytes(sizes: Floats, limits: Floats) -> tuple[Floats, Floats, Floats]:
    """Number of buckets, bytes of one on average and of the last one; each of shape (bucket sizes, ranks)."""
    first, cap = limits[:, :1], limits[:, 1:]
    behind = np.maximum(sizes - first, 0.0)
    more = np.ceil(behind / cap)
    return 1 + more, sizes / (1 + more), np.where(more > 0, behind - (more - 1) * cap, sizes)
