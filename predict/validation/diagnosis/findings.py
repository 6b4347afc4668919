"""What a diagnosis says of each limitation: whether it is there, what it takes, what says so, and what would help."""

from __future__ import annotations

from typing import Literal

import msgspec

from predict.validation.diagnosis.limitations import Limitation

State = Literal["present", "possible", "not present", "not measured", "does not apply"]


class Remedy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A configuration that suffers less from a limitation.

    Attributes:
        change: what is other than in what was diagnosed, in words.
        command: that predicts it.
        iteration_s: predicted. gain: samples/s over those of what was diagnosed, less 1; below 0 where less memory
            costs time. gain_interval: 90%.
        memory_bytes: peak of a rank, predicted.
    """

    change: str
    command: str
    iteration_s: float
    gain: float
    gain_interval: tuple[float, float]
    memory_bytes: int


class Finding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One limitation of a configuration.

    Attributes:
        state: present where the low end of ``share_interval`` reaches the threshold, possible where the high end does.
        seconds_s, share, share_interval: of the iteration, or of the measured one where there is a run; of the peak for
            ``redundant memory``, which has no seconds. None where nothing says.
        predicted_s: beside a run, what was predicted. basis: measured, predicted or neither.
        evidence: what says so; where nothing does, what would.
        remedies: the best settings of the same strategy and the best other strategy, of those that help.
    """

    limitation: Limitation
    state: State
    evidence: str
    seconds_s: float | None = None
    share: float | None = None
    share_interval: tuple[float, float] | None = None
    predicted_s: float | None = None
    basis: Literal["measured", "predicted", ""] = ""
    remedies: tuple[Remedy, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether it is there."""
        return self.state == "present"


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All limitations of a configuration, those that take most first.

    Attributes:
        iteration_s: as measured where there is a run, else as predicted. at_least: the share from which on a limitation
            is present.
        run: the directory that was held against; empty for none.
        sources, extrapolated, notes: of the prediction.
        said: of the run, and what remedies could not be tried. remedies_tried: whether any were.
    """

    model: str
    strategy: str
    ranks: int
    batch: int
    iteration_s: float
    at_least: float
    findings: tuple[Finding, ...]
    run: str = ""
    sources: dict[str, float] = {}
    extrapolated: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    remedies_tried: bool = False
