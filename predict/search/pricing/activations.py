"""Bytes of activations of a network, or of a pipeline's first stage: by whose tensors they are, at two moments.

What a rank holds of them, where axes share the layers, follows from its part of each layer's tensors. So one walk over
whole layers serves all ways to share these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from paradl_bench.core.cache_keys import Answers
from paradl_bench.network.equal_blocks import without_equal_blocks
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.schedules.catalog import schedule_of
from paradl_bench.strategies.memory.casts import Casts
from paradl_bench.strategies.memory.ledger import Gradient, Ledger, Storage
from paradl_bench.strategies.memory.liveness import Liveness, Pass
from paradl_bench.strategies.memory.rank_operations import RankRun
from predict.costs.sourced import Floats, Ints
from predict.search.pricing.held_parts import CONVERTED, COPIED, KINDS, MADE

_ROUNDED = 2
"""Times that bytes are rounded down which were watched of a layer: for its part, and for the width of its elements."""


_ENOUGH = 4
"""A schedule that has not begun to go backward after so many micro-batches a rank does all forwards first."""


class Bytes(NamedTuple):
    """Of the first sample, and of every other."""

    first: float = 0.0
    other: float = 0.0


class Activations(NamedTuple):
    """Bytes after forward, and when they are most in backward."""

    kept: Bytes = Bytes()
    most: Bytes = Bytes()


class ActivationsByLayer(NamedTuple):
    """What a walk over whole layers holds of activations.

    Attributes:
        whole: all of it.
        kept, most: of the first sample and of every other by whose tensors they are, of shape (2, 3, kinds of layers),
            without gradients; rows as those of :func:`~predict.search.pricing.held_parts.held_parts`.
        layers: how many there are of each kind.
    """

    whole: Activations
    kept: Floats
    most: Floats
    layers: Ints

    @classmethod
    def of(cls, network: ModelGraph, run: RankRun, places: Ints) -> ActivationsByLayer:
        """Of a network, or of a pipeline's first stage.

        Args:
            run: with the widths of the layers.
            places: the kind of each layer of the whole network, which begins with these.
        """
        few = _few_layers(network, run)
        two = _walked(few, samples=2)
        one = _walked(few, samples=1, looked_at=two.at)
        # A peak is the largest of sums that grow straight with the batch, and so grows ever faster.
        pairs = ((one.left, two.left), (one.most, two.most))
        whole = Activations(*(Bytes(first, max(both - first, 0.0)) for first, both in pairs))
        moments = (one.after_forward, two.after_forward), (one.at_most, two.at_most)
        kinds, kind = int(places.max()) + 1, places[few.first]
        kept, most = (
            np.array([[np.bincount(kind, row, kinds) for row in held] for held in (first, both - first)])
            for first, both in moments
        )
        return cls(whole, kept, most, np.bincount(places[: len(network.layers)], minlength=kinds))

    def in_parts(self, parts: Floats) -> Activations:
        """At least on a rank that has so much of each kind of layer; ``parts`` of shape (3, kinds of layers)."""
        rounded = _ROUNDED * int(self.layers[parts[MADE] < 1].sum())
        sums = ((moment * parts).sum(axis=(1, 2)).tolist() for moment in (self.kept, self.most))
        return Activations(*(Bytes(first - rounded, other) for first, other in sums))


class UnderWay:
    """Micro-batches whose activations the first stage of a pipeline has: forward was with them, and backward was not.

    Meshes have the same numbers of micro-batches again and again.
    """

    def __init__(self) -> None:
        self._found = Answers()

    def most(self, schedules: Sequence[str], schedule: Ints, ranks: int, counts: Ints) -> Ints:
        """At most, of so many each: until a backward is done, and while another one is, 0 where none is; (2, counts).

        Args:
            schedule: of each count, index of its schedule's name.
        """
        under_way = np.empty((2, len(counts)), np.int64)
        for at, name in enumerate(schedules):
            own = schedule == at
            under_way[:, own] = self._of_schedule(name, ranks, counts[own])
        return under_way

    def _of_schedule(self, name: str, ranks: int, counts: Ints) -> Ints:
        def find() -> Ints:
            return np.array([self._most_of(name, ranks, count) for count in counts.tolist()], np.int64).T

        return self._found.once((name, ranks, counts.tobytes()), find)

    def _most_of(self, schedule: str, ranks: int, count: int) -> tuple[int, int]:
        looked_at = min(count, _ENOUGH * ranks)
        at_first, later = self._found.once(
            (schedule, ranks, looked_at), lambda: _most_under_way(schedule, ranks, looked_at)
        )
        # What has gone forward with all that was looked at does so with all that there are.
        return (count, count - 1) if at_first == looked_at else (at_first, later)


def _most_under_way(schedule: str, ranks: int, count: int) -> tuple[int, int]:
    now = at_first = later = done = 0
    for action in schedule_of(schedule).order(0, ranks, count):
        if action.stage == 0 and action.direction == "FW":
            now += 1
        elif action.stage == 0 and action.completes:
            at_first, later = (at_first, max(later, now)) if done else (now, later)
            now, done = now - 1, done + 1
    return at_first, later


class _FewLayers(NamedTuple):
    """A network without those of its equal blocks that others stand for, and how a rank runs it.

    Attributes:
        first: of each layer, the first in the whole network that it stands for. copies: for how many it does.
        behind: the last layer of the blocks beside it that stand for as many, or itself.
    """

    network: ModelGraph
    run: RankRun
    first: Ints
    copies: Ints
    behind: Ints

    def of_whole(self, held: Floats, at: int) -> Floats:
        """What the whole network holds where this one holds so much of each layer, when backward comes to a layer."""
        return np.asarray(held * np.where(self.behind < at, self.copies, 1))


def _few_layers(network: ModelGraph, run: RankRun) -> _FewLayers:
    few = without_equal_blocks(network)
    places = np.array(few.layers, np.int64)
    _, first, copies = np.unique(places, return_index=True, return_counts=True)
    again = Counter((int(places[part.start]), int(places[part.stop - 1]) + 1) for part in run.recomputed)
    repeats = all(set(copies[slice(*part)].tolist()) == {count} for part, count in again.items())
    as_long = sum(count * (stop - start) for (start, stop), count in again.items()) == sum(map(len, run.recomputed))
    widths = [run.widths[at] for at in first.tolist()]
    alike = all(width == widths[at] for width, at in zip(run.widths, few.layers, strict=True))
    if not (repeats and as_long and alike and (copies[places[np.array(run.outputs, np.int64)]] == 1).all()):
        every = np.arange(len(places))
        return _FewLayers(network, run, every, np.ones(len(places), np.int64), every)
    ends = np.flatnonzero(np.append(np.diff(copies) != 0, True))
    fewer = replace(
        run,
        widths=widths,
        outputs=[few.layers[at] for at in run.outputs],
        kept_outputs=[few.layers[at] for at in run.kept_outputs],
        recomputed=sorted((range(*part) for part in again), key=lambda part: part.start),
    )
    return _FewLayers(few.network, fewer, first, copies, ends[np.searchsorted(ends, np.arange(len(copies)))])


class _Walked(NamedTuple):
    """One walk.

    Attributes:
        left, most: bytes of activations after forward, and when they are most. after_forward, at_most: tensors, by
            whose they are. at: the layer whose backward that is.
    """

    left: float
    most: float
    after_forward: Floats
    at_most: Floats
    at: int


@dataclass(slots=True, eq=False)
class _Owned(Storage):
    """Memory that is of one kind of a layer's tensors."""

    owner: int = 0


@dataclass(slots=True)
class _ByOwner(Ledger):
    """A ledger that notes whose activations are held, and when these alone are most.

    Attributes:
        owner: whose is what is allocated now; the last is nobody's.
        looked_at: the layer in whose backward that is noted; below 0 for the one with most activations.
        besides: per layer whose backward runs, bytes of blocks that others stand for; empty in forward. beside: now.
        differentiated: the layer whose backward begins; below 0 at other times.
    """

    held: list[int] = field(default_factory=list)
    owner: int = -1
    looked_at: int = -1
    differentiated: int = -1
    besides: list[float] = field(default_factory=list)
    beside: float = 0.0
    most: float = 0.0
    noted: list[int] = field(default_factory=list)
    noted_bytes: float = -1.0
    noted_at: int = -1

    def allocate(self, size: int) -> Storage:
        """New memory of whoever is at work, held once."""
        self.activations += size
        self.held[self.owner] += size
        return _Owned(size, 1, self.owner)

    def release(self, storage: Storage) -> None:
        """One holder less."""
        storage.holders -= 1
        if not storage.holders:
            assert isinstance(storage, _Owned)
            self.activations -= storage.size
            self.held[storage.owner] -= storage.size

    def mark(self, more: int = 0, gradients: int = 0) -> None:
        """Note the moment."""
        activations = self.activations + self.beside
        self.most = max(self.most, activations + more)
        layer, self.differentiated = self.differentiated, -1
        if layer >= 0 and (layer == self.looked_at if self.looked_at >= 0 else activations > self.noted_bytes):
            self.noted, self.noted_bytes, self.noted_at = self.held.copy(), activations, layer


class _OwnedCasts(Casts):
    """Conversions whose copies of parameters are told from what a layer makes."""

    def parameters(self, i: int) -> list[Storage]:
        """Copies of a layer's parameters that its backward needs, each held for it."""
        ledger = self._ledger
        assert isinstance(ledger, _ByOwner)
        with _owned(ledger, i, COPIED):
            return super().parameters(i)


class _OwnedLiveness(Liveness):
    """A walk over whole layers that tells a ledger whose is what it holds."""

    def __init__(self, ledger: _ByOwner, network: ModelGraph, run: RankRun) -> None:
        super().__init__(ledger, network, run)
        self._owners = ledger
        self._casts = _OwnedCasts(ledger, network, run.dtype, run.device, run.widths)
        self._begun = -1

    def _run(self, i: int, read: Sequence[Storage], saved: list[Storage]) -> Storage:
        with _owned(self._owners, i, MADE):
            return super()._run(i, read, saved)

    def _convert_inputs(self, i: int, read: Sequence[Storage]) -> tuple[Sequence[Storage], list[Storage]]:
        with _owned(self._owners, i, CONVERTED):
            return super()._convert_inputs(i, read)

    def _compute_again(self, layers: range, left: Pass, which: int) -> None:
        self._owners.beside = self._owners.besides[layers.start]
        super()._compute_again(layers, left, which)

    def _differentiate(self, i: int, arrived: Sequence[Gradient], saved: list[Storage]) -> list[tuple[int, Gradient]]:
        # Outputs that run backward apart each come here.
        self._owners.differentiated, self._begun = i if i != self._begun else -1, i
        self._owners.beside = self._owners.besides[i]
        return super()._differentiate(i, arrived, saved)


@contextmanager
def _owned(ledger: _ByOwner, layer: int, kind: int) -> Iterator[None]:
    """Whatever is allocated meanwhile is of one kind of a layer's tensors."""
    before, ledger.owner = ledger.owner, layer * KINDS + kind
    yield
    ledger.owner = before


def _walked(few: _FewLayers, *, samples: int, looked_at: int = -1) -> _Walked:
    network, run = few.network, replace(few.run, samples=samples)
    ledger = _ByOwner(held=[0] * (KINDS * len(network.layers) + 1), looked_at=looked_at)
    walk = _OwnedLiveness(ledger, network, run)
    left = walk.forward(ledger.allocate(0))
    after_forward, last = _by_layer(ledger.held), len(network.layers)
    # Of blocks that others stand for, what is there until backward has come to these.
    besides = (few.of_whole(after_forward, last) - after_forward).sum(axis=0)
    ledger.besides = [float(besides[few.behind < at].sum()) for at in range(last)]
    kept = float(ledger.activations + besides.sum())
    # What is sent back lies in a buffer that counts elsewhere.
    sent = left.outputs if run.kept_outputs or not run.outputs else _outputs_of(network, run)
    walk.backward(left, [Gradient(ledger.allocate(0), output.size) for output in sent] if run.outputs else ())
    noted = _by_layer(ledger.noted) if ledger.noted else after_forward
    at_most = few.of_whole(noted, ledger.noted_at if ledger.noted else last)
    return _Walked(kept, float(ledger.most), few.of_whole(after_forward, last), at_most, ledger.noted_at)


def _by_layer(held: Sequence[int]) -> Floats:
    """Of shape (3, layers)."""
    return np.array(held[:-1], float).reshape(-1, KINDS).T


def _outputs_of(network: ModelGraph, run: RankRun) -> list[Storage]:
    """What a stage passes on, where nobody keeps it."""
    ledger = Ledger()
    return Liveness(ledger, network, replace(run, kept_outputs=run.outputs)).forward(ledger.allocate(0)).outputs
