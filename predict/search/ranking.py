"""From estimates of all candidates to exact predictions of those that may be the best.

Candidates are predicted in the order of their corrected estimates, first those that differ in more than the size of
buckets, then what lies next to the best; one is done with when its estimate, uncorrected, is not below the best
prediction. Each of the strategies next in order is predicted with its best settings by estimate, up to as many rows as
were asked for. Then come some that hold less than any so far, from the fastest to the smallest.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paradl_bench.core.errors import UserError
from paradl_bench.core.units import format_bytes
from predict.costs.cost_model import CostModel
from predict.costs.memory_estimate import EstimatedMemory, tensors_within
from predict.costs.sourced import Floats, Ints
from predict.prediction.interval import Timed
from predict.prediction.prediction import Prediction, Predictor
from predict.search.account import Searched
from predict.search.candidates.ruled_out import sweep_command
from predict.search.candidates.space import Space, hold_activations_of
from predict.search.chances import steps
from predict.search.contrast import Contrast, contrast_of
from predict.search.pricing.corrections import Corrections, next_to
from predict.search.pricing.estimate import Estimates
from predict.search.pricing.memory_bound import bounds_of
from predict.simulation.input_tasks import ahead_bytes
from predict.workload import Configuration

_REFINING = 3
"""One of so many predictions goes to settings next to the best ones'."""
_FOR_ROWS = 10
"""Predictions that are left for strategies next in order, at most half of all."""
_LEAN = 4
"""Candidates that hold less than any before, at most."""
_LEAN_WALKS = 8
"""Plans whose memory is walked through to find them."""
_LEAN_LAYERS = 10_000
"""Layers times micro-batches of one of them, at most: a walk and a prediction take as long as there are of these."""
_MEMORY_FOR_EACH = 8
"""Plans whose memory is walked through, for each that may be predicted."""
_LEAST_TRIED = 6
"""Plans whose memory is walked through to say what fits least badly."""


class Exact(NamedTuple):
    """A candidate, predicted; ``layers`` are what its ranks run, for errors that others share."""

    candidate: int
    prediction: Prediction
    timed: Timed
    estimate_s: float
    layers: Hashable


class Ranker:
    """Ranks candidates within a rank's memory, if that is known.

    Args:
        find: from bytes to the candidates that may hold no more. most: predictions. rows: strategies to predict at
            least, where there are so many.
    """

    def __init__(
        self,
        costs: CostModel,
        find: Callable[[float], Space],
        limit_bytes: float | None,
        *,
        most: int,
        rows: int,
    ) -> None:
        self._costs, self._find, self._limit = costs, find, limit_bytes
        self._most, self._rows = most, rows
        self._within = np.inf if limit_bytes is None else tensors_within(costs.profile, limit_bytes)
        self._space = space = find(self._within)
        self._bounds, (_, self._plan_of) = self._bounds_within(self._within), space.plans
        self._mesh_of = space.mesh_of[space.strategy]
        shared = bounds_of(costs, space).shared
        self._estimates = Estimates(costs, space, shared).seconds(self._bounds <= self._within)
        self._unneeded = np.isfinite(self._estimates) & space.unneeded(self._bounds <= self._within)
        self._waiting = np.isfinite(self._estimates) & ~self._unneeded
        self._possible = self._waiting & (self._bounds <= self._within)
        self._corrections = Corrections(space)
        # Those alike but for buckets.
        self._row = space.strategy.astype(np.int64) * len(space) + self._plan_of
        self._memory: dict[int, EstimatedMemory] = {}
        # What does not fit needs no more than one rank to say so.
        self._walked_to = self._within
        self._estimated, self._too_large = int(self._waiting.sum()) + space.too_large, space.too_large
        compared = np.unique(space.strategy[self._waiting]).tolist()
        self._not_compared = space.impossible.uncompared(space.strategies[index] for index in compared)
        self._done: list[Exact] = []
        self._contenders = np.flatnonzero(self._waiting)

    @property
    def space(self) -> Space:
        """All candidates."""
        return self._space

    def corrected(self) -> tuple[Ints, Floats, Corrections]:
        """Candidates that may fit, predicted or not, their corrected estimates, and what these are corrected by."""
        possible, corrections = np.flatnonzero(self._possible), self._corrections.when_tried()
        return possible, corrections.of(self._estimates, possible), corrections

    def rows(self) -> Ints:
        """Of all that was predicted, what is the fastest of its strategy or needs less memory than what is faster."""
        chosen: list[int] = []
        seen: set[int] = set()
        least = np.inf
        for exact in sorted(self._done, key=lambda exact: exact.timed.iteration_s):
            strategy, held = int(self._space.strategy[exact.candidate]), exact.prediction.memory.memory_bytes
            if strategy not in seen or held < least:
                chosen.append(exact.candidate)
            seen.add(strategy)
            least = min(least, held)
        return np.array(chosen, np.int64)

    def rank(self, predictor: Predictor, advance: Callable[[], None] = lambda: None) -> list[Exact]:
        """Predict until none is left that may be the best, or enough were; those predicted, the fastest first.

        Raises:
            UserError: nothing fits; the message says what needs least.
        """
        self._rule_out(self._bounds > self._within)
        # Whatever rows are asked for: the best that is found depends on no number of rows.
        tried = self._most - min(_FOR_ROWS, self._most // 2)
        # What estimates leave out may favour settings next to those that they do: the best ones' are gone through.
        while len(self._done) < tried - tried // _REFINING and self._next(predictor, self._unlike_any()):
            advance()
        while len(self._done) < tried and (self._refine(predictor) or self._next(predictor, self._may_be_best())):
            advance()
        self._done.sort(key=lambda exact: exact.timed.iteration_s)
        while len(self._done) < self._most and len(self._strategies()) < self._rows:
            others = self._waiting & ~np.isin(self._space.strategy, list(self._strategies()))
            if not self._next(predictor, np.flatnonzero(others)):
                break
            advance()
        if not self._done:
            self._predict_leanest(predictor)
            advance()
        for candidate in self._leaner():
            self._predict(predictor, candidate)
            advance()
        return sorted(self._done, key=lambda exact: exact.timed.iteration_s)

    def _rule_out(self, too_large: NDArray[np.bool_]) -> None:
        self._too_large += int((too_large & self._waiting).sum())
        self._waiting &= ~too_large

    def _may_be_best(self) -> Ints:
        """Those that wait and are estimated below the best prediction: who is none of them never is again."""
        best = min((exact.timed.iteration_s for exact in self._done), default=np.inf)
        known = self._contenders
        self._contenders = known[self._waiting[known] & (self._estimates[known] < best)]
        return self._contenders

    def _strategies(self) -> set[int]:
        """Those of the candidates that were predicted."""
        return {int(self._space.strategy[exact.candidate]) for exact in self._done}

    def _unlike_any(self) -> Ints:
        """Those that may be the best and differ from all predictions in more than the size of buckets."""
        known = self._row[[exact.candidate for exact in self._done]]
        may_be_best = self._may_be_best()
        return may_be_best[~np.isin(self._row[may_be_best], known)]

    def _refine(self, predictor: Predictor) -> bool:
        """Predict what differs in one setting from the best of a strategy, the best strategy first; false if none."""
        may_be_best = self._may_be_best()
        seen: set[int] = set()
        for exact in sorted(self._done, key=lambda done: done.timed.iteration_s):
            strategy = int(self._space.strategy[exact.candidate])
            if strategy in seen:
                continue
            seen.add(strategy)
            if self._next(predictor, np.intersect1d(next_to(self._space, exact.candidate), may_be_best)):
                return True
        return False

    def _next(self, predictor: Predictor, chosen: Ints) -> bool:
        """Predict the first of the chosen that fits; false where there is none, or too many were looked at."""
        while True:
            if self._limit is not None and len(self._memory) >= _MEMORY_FOR_EACH * self._most:
                chosen = chosen[np.isin(self._plan_of[chosen], list(self._memory))]
            if not len(chosen):
                return False
            candidate = int(chosen[np.argmin(self._corrections.of(self._estimates, chosen))])
            if self._predict(predictor, candidate):
                return True
            chosen = chosen[self._waiting[chosen]]

    def _predict(self, predictor: Predictor, candidate: int) -> bool:
        space = self._space
        point = self._point(candidate)
        try:
            if self._limit is not None and self._memory_of(candidate).peak_bytes > self._limit:
                self._rule_out(self._plan_of == self._plan_of[candidate])
                if self._memory_of(candidate).parts_bytes["activations"] > self._within:
                    self._rule_out(hold_activations_of(self._space, candidate))
                return False
            prediction, timed = predictor.predict_timed(point)
        except UserError as error:
            self._waiting[candidate] = False
            self._estimated -= 1
            space.impossible.add_settings(str(error), str(point.strategy))
            return False
        self._waiting[candidate] = False
        mesh = int(self._mesh_of[candidate])
        estimate = float(self._estimates[candidate])
        self._corrections.learn(candidate, estimate, timed.iteration_s)
        layers = space.meshes[mesh].sharing, prediction.local_batch // int(space.micro_batches[candidate])
        self._done.append(Exact(candidate, prediction, timed, estimate, layers))
        return True

    def _point(self, candidate: int) -> Configuration:
        space = self._space
        return Configuration(
            strategy=space.strategies[int(space.strategy[candidate])], settings=space.settings_of(candidate)
        )

    def _memory_of(self, candidate: int) -> EstimatedMemory:
        key = int(self._plan_of[candidate])
        if key not in self._memory:
            point = self._point(candidate)
            # A plan's memory is that of one degree of data parallelism, and so of one local batch.
            held = self._costs.memory(point.strategy, point.settings, self._walked_to)
            self._memory[key] = held.beside_batches(ahead_bytes(self._costs, point))
        return self._memory[key]

    def account(self) -> Searched:
        """What became of all candidates, when they are ranked."""
        space, communication = self._space, self._costs.communication
        still = self._may_be_best()
        left_open = len(still)
        ratios = [exact.timed.iteration_s / exact.estimate_s - 1 for exact in self._done]
        sweep = sweep_command(communication.measured_operations, communication.backend)
        best = min(self._done, key=lambda exact: exact.timed.iteration_s)
        return Searched(
            ranks=space.strategies[0].ranks,
            candidates=self._estimated,
            strategies=space.placements,
            predicted=len(self._done),
            too_slow=int(self._waiting.sum()) - left_open,
            too_large=self._too_large,
            open=left_open,
            open_from_s=float(self._estimates[still].min()) if left_open else None,
            estimates_off=(min(ratios), max(ratios)),
            impossible=dict(space.impossible.counts.most_common()),
            not_searched=space.not_searched,
            uneven_replicas=tuple(sorted(space.impossible.uneven_replicas)),
            not_compared=self._not_compared,
            measure_command=sweep if self._not_compared else None,
            best=_described(self._point(best.candidate)),
            best_s=best.timed.iteration_s,
            **self._contrasts(best.timed.iteration_s),
        )

    def _contrasts(self, best_s: float) -> dict[str, Contrast]:
        """Of what was predicted, and of all candidates that are not too large."""
        predicted = np.array([exact.candidate for exact in self._done])
        seconds = self._estimates.copy()
        seconds[predicted] = [exact.timed.iteration_s for exact in self._done]
        left = self._waiting.copy()
        left[predicted] = True

        def contrast(candidates: NDArray[np.integer]) -> Contrast:
            return contrast_of(
                seconds[candidates], best_s, lambda place: _described(self._point(int(candidates[place])))
            )

        return {"of_predicted": contrast(predicted), "of_all": contrast(np.flatnonzero(left))}

    def _leaner(self) -> list[int]:
        """Candidates that hold less than all that were predicted, from the fastest to the smallest."""
        least = min(exact.prediction.memory.memory_bytes for exact in self._done)
        below = tensors_within(self._costs.profile, least)
        quick = self._space.micro_batches * len(self._costs.network.layers) <= _LEAN_LAYERS
        seconds, sizes = np.where(self._waiting & quick, self._estimates, np.inf), self._bounds.copy()
        walked = np.zeros(len(seconds), bool)
        while int(np.unique(self._plan_of[walked]).size) < _LEAN_WALKS:
            on_frontier = steps(seconds, sizes, below)
            unknown = on_frontier[~walked[on_frontier]].tolist()
            if not unknown:
                break
            for candidate in _spread_out(unknown, _LEAN):
                alike = self._plan_of == self._plan_of[candidate]
                walked |= alike
                try:
                    sizes[alike] = tensors_within(self._costs.profile, self._memory_of(candidate).peak_bytes)
                except UserError:
                    sizes[alike] = np.inf
        return _spread_out(steps(seconds, np.where(walked, sizes, np.inf), below).tolist(), _LEAN)

    def _predict_leanest(self, predictor: Predictor) -> None:
        """Predict one of those with the lowest bounds that fits; where none does, a UserError says what needs least."""
        space, network = self._space, self._costs.network
        # What needs least is told apart by the rank that needs most.
        self._walked_to = np.inf
        self._memory.clear()
        # Bounds are from below: what seemed not to need them may fit with these choices alone.
        spared = self._unneeded & (self._bounds <= self._within)
        self._waiting |= spared
        self._contenders = np.flatnonzero(self._waiting)
        self._estimated += int(spared.sum())
        tried: list[tuple[int, str]] = []
        least = np.inf
        seen: set[Hashable] = set()
        for candidate in self._leanest_first():
            # Of a mesh that cannot fit, the leanest says enough.
            may_fit = self._bounds[candidate] <= self._within
            key = int(self._plan_of[candidate]) if may_fit else self._space.mesh(candidate)
            # What comes then holds no less than the least that was found.
            enough = self._bounds[candidate] >= least
            if self._limit is None or len(tried) >= _LEAST_TRIED or enough:
                break
            if key in seen or not np.isfinite(self._estimates[candidate]):
                continue
            seen.add(key)
            try:
                peak = self._memory_of(candidate).peak_bytes
            except UserError:
                continue
            if peak > self._limit:
                tried.append((peak, _described(self._point(candidate))))
                least = min(least, tensors_within(self._costs.profile, peak))
            elif self._waiting[candidate] and self._predict(predictor, candidate):
                return
        where = f"{network.name} on {space.strategies[0].ranks} ranks with batch {space.settings.batch}"
        if not tried or self._limit is None:
            why = space.impossible.why_none(space.settings.batch, space.strategies[0].ranks)
            raise UserError(f"no strategy of {where} can be predicted: {why}")
        needed, leanest = min(tried)
        raise UserError(
            f"no strategy of {where} fits in {format_bytes(self._limit)} a rank: the smallest that was found"
            f" needs {format_bytes(needed)}, {leanest}; give more ranks, a smaller batch or --memory"
        )

    def _leanest_first(self) -> Iterator[int]:
        """Candidates in the order of their bounds, which are tight as far as the caller looks.

        Those that may not fit come from wider spaces.
        """
        below, within = -np.inf, self._within
        while True:
            space = self._space
            # Of those with one bound, what computes again and takes most micro-batches is smallest.
            order = np.lexsort((-space.micro_batches, -space.again, self._bounds))
            sizes = self._bounds[order]
            yield from order[(below < sizes) & (sizes <= within)].tolist()
            if not space.too_large and sizes[-1] <= within:
                return
            # At least to the smallest of these: those that were left out, and hold less, are found then too.
            below, within = within, max(2 * within, 1.0, float(sizes[0]))
            self._widen(within)

    def _widen(self, within: float) -> None:
        """Look at candidates that do not fit as well, none of which waits for its prediction."""
        self._space = space = self._find(within)
        self._bounds, (_, self._plan_of) = self._bounds_within(within), space.plans
        self._mesh_of = space.mesh_of[space.strategy]
        self._estimates, self._waiting = np.zeros(len(space)), np.zeros(len(space), bool)
        self._memory.clear()

    def _bounds_within(self, within: float) -> Floats:
        space = self._space
        return space.found.once(("bounds", within), lambda: bounds_of(self._costs, space).of(space, within))


def _described(point: Configuration) -> str:
    """A strategy and what of its settings decides memory."""
    said = (f"--{name.replace('_', '-')} {text}" for name, text in point.settings.options.items())
    return " ".join([str(point.strategy), *said])


def _spread_out(values: Sequence[int], count: int) -> list[int]:
    """As many as that, evenly from the first to the last."""
    if len(values) <= count:
        return list(values)
    return [values[place] for place in np.linspace(0, len(values) - 1, count).round().astype(int).tolist()]
