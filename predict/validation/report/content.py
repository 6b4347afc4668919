"""What a report is made from, and what its sections are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from calibrate.profile.profile import Profile
from paradl_bench.core.units import format_bytes
from paradl_bench.strategies.exchange.options import bucket_limits
from predict.prediction.prediction import Prediction
from predict.prediction.scaling import Sweep
from predict.search.search import Answer
from predict.timeline.timeline import IterationTimeline
from predict.validation.diagnosis.diagnosis import Case
from predict.validation.diagnosis.findings import Diagnosis
from predict.validation.shown.cells import Table
from predict.validation.validation_report import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The same strategy on other numbers of ranks, and where its efficiency falls."""

    predictions: tuple[Prediction, ...] = ()
    sweeps: tuple[Sweep, ...] = ()
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """All that a report says, as the other commands compute it.

    Attributes:
        command: that makes the page. run: what is looked into is this run; None where it is a prediction.
        predictions: the best first. answer: of a search; None where the strategies were given.
        case, timeline, diagnosis: of the configuration that is looked into; a run's diagnosis is held against it.
    """

    command: str
    profile_path: str
    profile: Profile
    predictions: tuple[Prediction, ...]
    case: Case
    timeline: IterationTimeline
    diagnosis: Diagnosis
    answer: Answer | None = None
    scaling: Scaling = Scaling()
    validation: Report | None = None
    run: str | None = None
    left_out: tuple[str, ...] = ()

    @property
    def prediction(self) -> Prediction:
        """Of the configuration that is looked into."""
        return self.case.prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A chart, and the table that says the same.

    Attributes:
        name: of the script's function that draws it, and of its data in the page.
        shows: what a reader who can't see it has to know.
        data: what is drawn, for JSON.
    """

    name: str
    title: str
    shows: str
    table: Table
    data: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the page.

    Attributes:
        lines: said first. tables: by title. commands: ready to be run. further: lines that open on request, by title.
        documents: JSON that can be taken out, by name.
    """

    name: str
    title: str
    lines: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Mapping[str, Table] = field(default_factory=dict)
    commands: Sequence[str] = ()
    further: Mapping[str, Sequence[str]] = field(default_factory=dict)
    documents: Mapping[str, Any] = field(default_factory=dict)


def called(prediction: Prediction) -> str:
    """A configuration in a few words: its strategy, batch, and settings that are not the defaults."""
    told = [f"{name.replace('_', ' ')} {text}" for name, text in prediction.options.items()]
    cap = prediction.bucket_cap_bytes
    told += [f"buckets of {format_bytes(cap)}"] if cap != bucket_limits(None)[1] else []
    return ", ".join([f"{prediction.strategy} on batch {prediction.batch}", *told])
