"""How far predictions can be trusted, in one line; ``--why`` lists every remark behind it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from paradl_bench.core.units import counted
from paradl_bench.records.hosts.host_load import ON_BUSY_HOST
from predict.costs.compute.host_dispatch import HOST_BOUND
from predict.costs.compute.unmeasured_costs import TAKEN_AS_NONE

_MOST_TOPICS = 5
_TOPICS = (
    ("parts of different machines", re.compile(r"no machine is known|different machines")),
    ("parts taken as none", re.compile(TAKEN_AS_NONE)),
    ("ranks beyond", re.compile(r"beyond (?:the )?(\d+) ranks|measured cluster's (\d+):")),
    ("ranks below", re.compile(r"below (\d+) ranks")),
    ("local batch", re.compile(r"at local batch (\d+): scaled")),
    ("messages beyond", re.compile(r"^\w+ beyond ([\d.]+ [KMGT]?i?B)")),
    ("messages below", re.compile(r"^\w+ below ([\d.]+ [KMGT]?i?B)")),
    ("groups at once", re.compile(r"contention|at once")),
    ("calls beside compute", re.compile(r"compute: |-compute|interference|overlap")),
    ("links", re.compile(r"links of level|level '[^']*'|\breduce\b")),
    ("ranks on the host", re.compile(r"is scaled to \d+ by|ranks? on the host")),
    ("unmeasured layers", re.compile(r"roofline|operation of the kind|regress|by FLOPs|other models|not measured")),
)
"""A word for each kind of remark, and what tells it; a group's number stands behind the word."""
_BESIDE_PUBLISHED = (
    ("regressed", "fitted to your own measurements"),
    ("published", "published by others"),
    ("data_sheet", "of data sheets"),
    ("scaled", "scaled beyond these"),
)
_WHOSE = (("stated", "assumed or stated"), ("scaled_by_roofline", "scaled to another device"))
"""Sources beside what was measured, in words; those of a profile that others' measurements made come first."""
_TOLD_SHARE = 0.005
"""A smaller share is no percent, and is left out."""


class Predicted(Protocol):
    """What is asked of a prediction, or of a what-if."""

    @property
    def sources(self) -> Mapping[str, float]:
        """Shares of all predicted seconds."""

    @property
    def extrapolated(self) -> Sequence[str]:
        """What lies beyond measurement."""

    @property
    def notes(self) -> Sequence[str]:
        """All other remarks."""


class Rests(NamedTuple):
    """What is asked of one that says it elsewhere, or not at all."""

    sources: Mapping[str, float]
    extrapolated: Sequence[str]
    notes: Sequence[str] = ()


class Confidence(NamedTuple):
    """What rows of a table rest on.

    Attributes:
        line: the share that was measured, and what was extrapolated, in a few words.
        remarks: all of them, each once, with the rows that it is about where it isn't about all.
    """

    line: str
    remarks: tuple[str, ...]

    def lines(self, *, why: bool) -> list[str]:
        """What to print."""
        numbered = [f"{number}  {remark}" for number, remark in enumerate(self.remarks, 1)]
        return [self.line, *(numbered if why else [])]


def confidence_in(rows: Sequence[tuple[str, Predicted]], *, option: str = "--why lists") -> Confidence:
    """What is to be said of rows, each with its name.

    Args:
        option: what lists the remarks, and how.
    """
    told: dict[str, dict[str, None]] = {}
    for name, row in rows:
        for text in (*(f"extrapolated: {line}" for line in row.extrapolated), *row.notes):
            told.setdefault(text, {})[name] = None
    every = len({name for name, _ in rows})
    remarks = tuple(text + (f" ({', '.join(names)})" if len(names) < every else "") for text, names in told.items())
    of = " of layers" if any(TAKEN_AS_NONE in line for _, row in rows for line in row.extrapolated) else ""
    parts = [f"{_shares(rows, 'measured')}{of} measured"]
    published = any(row.sources.get("published") or row.sources.get("data_sheet") for _, row in rows)
    for source, words in (*(_BESIDE_PUBLISHED if published else ()), *_WHOSE):
        if any(row.sources.get(source, 0.0) >= _TOLD_SHARE for _, row in rows):
            parts.append(f"{_shares(rows, source)} {words}")
    bound = [text for text in remarks if HOST_BOUND in text]
    parts += [text[text.index(HOST_BOUND) :] for text in bound]
    busy = any(note.startswith(ON_BUSY_HOST) for _, row in rows for note in row.notes)
    parts += ["measurements on a busy host"] if busy else []
    beyond = topics(line for _, row in rows for line in row.extrapolated)
    parts += [f"extrapolated: {', '.join(beyond)}"] if beyond else []
    line = "; ".join(parts) + "."
    return Confidence(line + (f" {option} {counted(len(remarks), 'remark')}." if remarks else ""), remarks)


def _shares(rows: Sequence[tuple[str, Predicted]], source: str) -> str:
    """The smallest and the largest share of a source."""
    shares = sorted(row.sources.get(source, 0.0) for _, row in rows)
    return " to ".join(dict.fromkeys(f"{share:.0%}" for share in (shares[0], shares[-1])))


def topics(extrapolated: Iterable[str]) -> list[str]:
    """What is extrapolated, in a few words each: ``ranks beyond 2``, ``local batch 1``."""
    numbers_of: dict[str, dict[str, None]] = {}
    for line in extrapolated:
        for word, pattern in _TOPICS:
            match = pattern.search(line)
            if match:
                numbers = numbers_of.setdefault(word, {})
                numbers |= dict.fromkeys(filter(None, match.groups()))
                break
        else:
            numbers_of.setdefault("other", {})
    order = [*(word for word, _ in _TOPICS if word in numbers_of), *(["other parts"] if "other" in numbers_of else [])]
    said = [
        " ".join([word, *([" and ".join(numbers_of.get(word, ()))] if numbers_of.get(word) else [])]) for word in order
    ]
    return said[:_MOST_TOPICS] + (["more"] if len(said) > _MOST_TOPICS else [])
