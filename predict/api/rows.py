"""Rows of the DataFrames of predictions. A field is a column: its name has the unit, its type the dtype."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from predict.ledger.ledger import Ledger
from predict.prediction.presentation import PredictedRow, PredictionRow, prediction_row
from predict.search.rows import RankedRow, ranked_row
from predict.validation.shown.rows import PairRow, pair_row
from predict.what_if.rows import ReplacedRow, WhatIfRow, replaced_row, what_if_row

__all__ = [
    "LedgerRow",
    "PairRow",
    "PredictedRow",
    "PredictionRow",
    "RankedRow",
    "ReplacedRow",
    "WhatIfRow",
    "ledger_rows",
    "pair_row",
    "prediction_row",
    "ranked_row",
    "replaced_row",
    "what_if_row",
]


class LedgerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A task of a role, or several equal tasks; its fields are those of :class:`~predict.ledger.ledger.LedgerEntry`.

    Attributes:
        bytes: what it sends or copies; missing for other tasks. group: the axes over which it communicates.
        added_s: seconds that all effects together add to ``base_s``.
    """

    role: str
    role_ranks: int
    name: str
    phase: str
    source: str
    bytes: int | None
    group: str
    count: float
    base_s: float
    added_s: float
    total_s: float
    exposed_s: float
    hidden_s: float
    sd_s: float


def ledger_rows(ledger: Ledger) -> Iterator[LedgerRow]:
    """Each entry of each role, one in each row."""
    for role in ledger.roles:
        for entry in role.entries:
            size, fields = entry.details.get("bytes"), msgspec.structs.asdict(entry)
            yield LedgerRow(
                role=role.role,
                role_ranks=role.ranks,
                bytes=size if isinstance(size, int) else None,
                group=str(entry.details.get("group", "")),
                added_s=entry.total_s - entry.base_s,
                **{name: fields[name] for name in LedgerRow.__struct_fields__ if name in fields},
            )
