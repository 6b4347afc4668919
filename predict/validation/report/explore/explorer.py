"""What a page of ``predict explore`` is answered: a search, rows of it on changed hardware, one row in full."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from calibrate.profile.profile import Profile, read_profile
from paradl_bench.core.errors import UserError, unknown_choice
from paradl_bench.core.terminal.keywords import ask
from paradl_bench.network.models.language_sizes import size_of
from paradl_bench.network.models.traced_networks import traced_models
from paradl_bench.records.devices.sheet import device_sheets
from predict.costs.cost_model import CostModel
from predict.evaluators import simulate
from predict.prediction.confidence import confidence_in
from predict.prediction.prediction import Prediction, Predictor
from predict.prediction.request import READ_PROFILE, limit_memory, read_model, request_of
from predict.search.command import search_command
from predict.search.following import Followed
from predict.search.search import Row, rows_of, whole_search
from predict.timeline.timeline_run import predict_timeline
from predict.validation.diagnosis.remedies import UNSET, options_found
from predict.validation.report.content import called
from predict.validation.report.explore.state import Asked, Changed, Searched, commands
from predict.validation.report.sections.answer import made_of, ranking
from predict.validation.report.sections.memory import peaks
from predict.validation.report.sections.timeline import bars_of_timeline
from predict.what_if.what_if import changed_hardware
from predict.workload import Configuration

K = TypeVar("K")
V = TypeVar("V")
SHOWN = 8
"""Rows of a search that follow the sliders."""
_KEPT = 16
"""Searches, and hardware, that are remembered."""
_KEPT_WHOLE = 2
"""Searches of all candidates whose estimates are remembered, some 30 bytes for each of millions."""


class _Found(NamedTuple):
    """A search on some hardware.

    Attributes:
        points: the first rows as configurations that can be predicted anew. said: what was searched.
    """

    rows: tuple[Row, ...]
    points: tuple[Configuration, ...]
    memory_bytes_per_rank: float | None
    said: str


class _Whole(NamedTuple):
    """A search of all candidates, which searches on other hardware follow as long as as much memory is there."""

    followed: Followed
    candidates: int
    memory_bytes_per_rank: float | None


class Explorer:
    """Answers for the profiles that were given, and no other file.

    Attributes:
        paths: of the profiles.
        is_left: whether nobody waits for the answer any more; a search asks after each prediction, and leaves off.
    """

    def __init__(self, paths: Sequence[Path], models: Sequence[str] = ()) -> None:
        """Read the profiles.

        Args:
            models: beside those of the profiles and those that come with the tool.

        Raises:
            UserError: a profile is unreadable.
        """
        self.paths = tuple(paths)
        self._profiles: tuple[Profile, ...] = tuple(map(read_profile, paths))
        self._models = tuple(models)
        self.is_left: Callable[[], bool] = lambda: False
        self._read = lru_cache(_KEPT)(self._read_costs)
        self._searches: dict[tuple[Searched, Changed], _Found] = {}
        self._whole: dict[Searched, _Whole] = {}
        self._predictor = lru_cache(_KEPT)(self._changed_predictor)
        self._predicted = lru_cache(_KEPT * SHOWN)(self._predict)

    def choices(self) -> dict[str, Any]:
        """What the page's controls offer."""
        return {
            "profiles": [
                {"name": str(path), "models": self._models_of(number), "dtypes": _dtypes(profile)}
                for number, (path, profile) in enumerate(zip(self.paths, self._profiles, strict=True))
            ],
            "devices": sorted(device_sheets()),
        }

    def search(self, asked: Asked) -> dict[str, Any]:
        """The fastest strategies.

        Raises:
            UserError: whatever is wrong, in one line; or nothing fits, or nobody waits.
        """
        result = self._found(asked.search, asked.found_on, whole=asked.whole)
        return {"rows": [_numbers(row.prediction) for row in result.rows[:SHOWN]], "said": result.said}

    def rows(self, asked: Asked) -> dict[str, Any]:
        """All rows of the search on the changed hardware.

        Raises:
            UserError: the hardware cannot be changed so.
        """
        found = self._found(asked.search, asked.found_on)
        every = (msgspec.structs.replace(asked, row=row) for row in range(len(found.points)))
        return {"rows": [self.row(one) for one in every]}

    def row(self, asked: Asked) -> dict[str, Any]:
        """One row of the search on the changed hardware.

        Raises:
            UserError: the search has no such row, or the hardware cannot be changed so.
        """
        result, point, _ = self._case(asked)
        # On the hardware that the search was for it has predicted its rows.
        known = result.rows[asked.row].prediction if asked.changed == asked.found_on else None
        return _numbers(known or self._predicted(asked.search, asked.changed, point))

    def look(self, asked: Asked) -> dict[str, Any]:
        """All of one row: what it is made of, its memory, its timeline, and what predicts the same elsewhere.

        Raises:
            UserError: as :meth:`row`.
        """
        result, point, predictor = self._case(asked)
        timeline, prediction = predict_timeline(predictor.costs, point)
        bars, left_out = bars_of_timeline(timeline)
        command, python = commands(shlex.split(result.rows[asked.row].predict_command), asked.changed)
        confidence = confidence_in([(prediction.strategy, prediction.provenance)], option="Below are")
        return _numbers(prediction) | {
            "figures": {
                "breakdown": made_of((prediction,)).data,
                "memory": peaks((prediction,), result.memory_bytes_per_rank).data,
                "timeline": bars,
            },
            "said": [confidence.line, *left_out],
            "remarks": confidence.remarks,
            "command": command,
            "python": python,
        }

    def _models_of(self, number: int) -> list[str]:
        held = self._profiles[number].network
        shipped = (name for name in traced_models() if not held or size_of(name) is not None)
        return list(dict.fromkeys((*self._models, *held, *shipped)))

    def _costs_of(self, searched: Searched) -> tuple[CostModel, Mapping[str, Any]]:
        """What searches of a model share, and the options of one.

        Plans, their memory and the measured layers depend on neither ranks, batch nor limit: searches keep them.
        """
        if searched.profile >= len(self._profiles):
            raise UserError(f"profile {searched.profile}: give a number below {len(self._profiles)}")
        if searched.model not in (known := self._models_of(searched.profile)):
            raise unknown_choice("model", searched.model, known)
        options = self._options(searched)
        return self._read(searched.profile, searched.model, searched.dtype), options

    def _options(self, searched: Searched) -> Mapping[str, Any]:
        path = str(self.paths[searched.profile])
        asked = ask(search_command, "predict search", ["--from-profile", path], searched.options())
        return asked.options | {READ_PROFILE: self._profiles[searched.profile], "pareto": True}

    def _read_costs(self, profile: int, model: str, dtype: str) -> CostModel:
        any_search = Searched(profile=profile, model=model, ranks=1, batch=1, dtype=dtype)
        return read_model(self._options(any_search), simulate.EVALUATOR)

    def _found(self, searched: Searched, changed: Changed, *, whole: bool = False) -> _Found:
        key = searched, changed
        if whole or key not in self._searches:
            _keep(self._searches, key, self._search(searched, changed, whole=whole), _KEPT)
        return self._searches[key]

    def _search(self, searched: Searched, changed: Changed, *, whole: bool) -> _Found:
        costs, options = self._costs_of(searched)
        predictor = self._predictor(searched, changed)
        limit = limit_memory(predictor.costs, options["memory"])
        known = None if whole else self._whole.get(searched)
        same_limit = known is not None and known.memory_bytes_per_rank == limit
        exact = known.followed.rank(predictor.costs, predictor, SHOWN, self._go_on) if known and same_limit else []
        if known and exact:
            rows = rows_of(exact, options)[0]
            looked_at = f"{len(known.followed.fastest):,} families of candidates looked at again"
            said = f"{looked_at}, {len(exact):,} candidates predicted in full. "
            said += f"The button Search looks at all {known.candidates:,}."
        else:
            rows, said = self._search_all(searched, options, predictor.costs)
        free = {**options, **UNSET}
        requests = (request_of(costs, simulate.EVALUATOR, options_found(row.prediction, free)) for row in rows[:SHOWN])
        return _Found(rows, tuple(request.points[0] for request in requests), limit, said)

    def _search_all(
        self, searched: Searched, options: Mapping[str, Any], costs: CostModel
    ) -> tuple[tuple[Row, ...], str]:
        answer, (ranker,) = whole_search(options, self._go_on, costs=costs)
        (account,) = answer.searched
        whole = _Whole(Followed.by(ranker), account.candidates, answer.memory_bytes_per_rank)
        _keep(self._whole, searched, whole, _KEPT_WHOLE)
        said = f"{account.candidates:,} candidates, {account.predicted:,} predicted in full"
        return answer.rows, f"{said}, {account.open:,} left open." if account.open else f"{said}."

    def _go_on(self) -> None:
        if self.is_left():
            raise UserError("nobody waits for this search")

    def _changed_predictor(self, searched: Searched, changed: Changed) -> Predictor:
        costs, options = self._costs_of(searched)
        there = costs.on(changed_hardware(costs, changed.setting()))
        limit_memory(there, options["memory"])
        return Predictor(there, simulate.EVALUATOR)

    def _case(self, asked: Asked) -> tuple[_Found, Configuration, Predictor]:
        result = self._found(asked.search, asked.found_on)
        if asked.row >= len(result.points):
            raise UserError(f"row {asked.row}: the search has {len(result.points)}")
        return result, result.points[asked.row], self._predictor(asked.search, asked.changed)

    def _predict(self, searched: Searched, changed: Changed, point: Configuration) -> Prediction:
        return self._predictor(searched, changed).predict(point)


def _keep(kept: dict[K, V], key: K, value: V, most: int) -> None:
    """Keep a value, and of all values so many that were kept last."""
    kept.pop(key, None)
    kept[key] = value
    while len(kept) > most:
        kept.pop(next(iter(kept)), None)


def _dtypes(profile: Profile) -> list[str]:
    times = *(row.dtype for row in profile.layer_times), *(row.dtype for row in profile.model_times)
    return list(dict.fromkeys((*times, *(model.dtype for model in profile.kernel_models))))


def _numbers(prediction: Prediction) -> dict[str, Any]:
    return {
        "label": called(prediction),
        "strategy": prediction.strategy,
        "iteration_s": prediction.iteration_s,
        "interval_s": prediction.time.interval_s,
        "samples_per_s": prediction.time.samples_per_s,
        "efficiency": prediction.use.efficiency,
        "memory_bytes": prediction.memory.memory_bytes,
        "fits": prediction.memory.fits,
        "ranking": ranking((prediction,)).data["rows"][0],
    }
