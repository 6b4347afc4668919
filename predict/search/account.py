"""What became of the candidates of a search."""

from __future__ import annotations

import msgspec

from predict.search.contrast import Contrast


class Searched(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What became of the candidates of one number of ranks.

    Attributes:
        candidates: strategies with their settings, of those that the network, the batch and the schedules allow.
        predicted: of these, exactly. too_slow: with an estimate that is not below the best prediction.
        too_large: that do not fit. open: below it and not predicted; open_from_s: the lowest of their estimates.
        estimates_off: predictions over estimates less 1, the least and the most.
        impossible: strategies that there are not, as a whole or with some settings, counted by why. not_searched: those
            that there are, and of which no candidate was made.
        uneven_replicas: numbers of replicas that no candidate has, since the mini-batch does not split evenly over
            them.
        not_compared: kinds of axes that no candidate has, since a collective was not measured, with that collective.
        measure_command: that measures what is lacking; null where nothing is.
        best_s: the best prediction, of the candidate ``best``. of_predicted: how that compares with what was predicted,
            all of which fits. of_all: with all that memory does not rule out, by estimates where not predicted.
    """

    ranks: int
    candidates: int
    strategies: int
    predicted: int
    too_slow: int
    too_large: int
    open: int
    open_from_s: float | None
    estimates_off: tuple[float, float]
    impossible: dict[str, int]
    not_searched: tuple[str, ...]
    uneven_replicas: tuple[int, ...] = ()
    not_compared: dict[str, str] = {}
    measure_command: str | None = None
    best: str
    best_s: float
    of_predicted: Contrast
    of_all: Contrast
