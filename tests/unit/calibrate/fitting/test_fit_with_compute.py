"""Slow-downs of compute and a collective beside each other come back from samples alone and beside."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from synthetic_measurements import CollectivesSpec, with_compute_samples

from calibrate.fitting.contexts.context_fit import fit_contexts
from calibrate.fitting.reading import Placed
from calibrate.profile.collectives.contexts import InContext
from calibrate.profile.profile import read_profile
from paradl_bench.core.errors import UserError
from paradl_bench.plan.collectives.catalog import operations
from paradl_bench.records.contexts.context import ContextSamples
from paradl_bench.records.contexts.older import read_contexts

SPEC = CollectivesSpec(slowdowns=(1.6, 2.1), noise=0.05)
ROOT = Path(__file__).parents[4]
COMMITTED = ROOT / "results/emulation/2026-11-23-db62732/4-a-node/1x4"


def fitted(records: list[ContextSamples]) -> tuple[InContext, ...]:
    entries, notes = fit_contexts([Placed(0, record) for record in records], (), operations())
    assert notes == ()
    return entries


def test_both_slowdowns_come_back() -> None:
    records = with_compute_samples(SPEC)
    (entry,) = fitted(records)
    assert entry.neighbour_factor == pytest.approx(1.6, rel=0.02)
    for size in (65536, 1048576):
        assert entry.slowdown(size * 1e-9)[0] == pytest.approx(2.1, rel=0.05)
    assert entry.bytes_range == (65536, 1048576)
    assert entry.neighbours == ("conv", "elementwise")
    assert 0.03 < entry.neighbour_sd < 0.2


def test_seconds_added_by_sharing_are_told_from_its_factor() -> None:
    small = with_compute_samples(CollectivesSpec(slowdowns=(1.1, 5.0), noise=0.01), sizes=(10_000,))
    large = with_compute_samples(CollectivesSpec(slowdowns=(1.1, 2.0), noise=0.01), sizes=(1_000_000,))
    (entry,) = fitted([*small, *large])
    assert entry.slowdown(10e-6)[0] == pytest.approx(5.0, rel=0.05)
    assert entry.slowdown(1e-3)[0] == pytest.approx(2.0, rel=0.05)


def test_interference_beside_ghosts_is_fitted_apart_from_compute() -> None:
    ghosts = with_compute_samples(CollectivesSpec(slowdowns=(1.05, 1.4), noise=0.01))
    ghosts = [msgspec.structs.replace(record, neighbour="ghosts") for record in ghosts]
    entries = fitted([*with_compute_samples(SPEC), *ghosts])
    assert [entry.neighbours for entry in entries] == [("conv", "elementwise"), ("ghosts",)]
    assert [entry.neighbour_factor for entry in entries] == pytest.approx([1.6, 1.05], rel=0.02)


def test_nothing_gets_faster_side_by_side() -> None:
    (entry,) = fitted(with_compute_samples(CollectivesSpec(slowdowns=(0.8, 0.9))))
    assert (entry.neighbour_factor, entry.added_s, entry.factor) == (1, 0, 1)


def test_numbers_of_ranks_are_kept_apart() -> None:
    entries = fitted(with_compute_samples(CollectivesSpec(ranks=(2, 4), slowdowns=(1.5, 1.5))))
    assert [entry.ranks for entry in entries] == [(2, 2), (4, 4)]


# Older files and profiles


@pytest.mark.parametrize(
    ("sweep", "name", "context", "idle", "beside"),
    [
        ("sweep-layers", "behind.jsonl", "after-compute", "back_to_back_s", "end_s"),
        ("sweep-layers", "beside_all_reduce.jsonl", "with-all-reduce", "apart_end_s", "end_s"),
        ("sweep-beside", "interference.jsonl", "with-compute", "communication_alone_s", "communication_beside_s"),
    ],
)
def test_committed_sweeps_of_before_are_read_as_contexts(
    sweep: str, name: str, context: str, idle: str, beside: str
) -> None:
    rows = [json.loads(line) for line in (COMMITTED / sweep / name).read_text().splitlines()]
    found = [record for record in read_contexts(COMMITTED / sweep) if record.context == context]
    assert len(found) == len(rows) > 0
    for record, row in zip(found, rows, strict=True):
        assert (record.operation, record.message_bytes) == (row["operation"], row["message_bytes"])
        np.testing.assert_array_equal(np.ravel(record.idle_end_s), np.ravel(row[idle]))
        np.testing.assert_array_equal(np.ravel(record.end_s), np.ravel(row[beside]))


def test_a_wrong_row_of_an_older_file_is_named(tmp_path: Path) -> None:
    row = json.loads((COMMITTED / "sweep-layers/behind.jsonl").read_text().splitlines()[0])
    row["end_s"] = [[0.0] * len(each) for each in row["end_s"]]
    (tmp_path / "behind.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=r"behind\.jsonl line 1: .* ends before it starts"):
        read_contexts(tmp_path)


def test_the_committed_profile_of_before_holds_the_same_slowdowns() -> None:
    path = ROOT / "results/cpu-2core/2026-11-21-ffbe79c/accuracy/profile.json"
    older = json.loads(path.read_text())["interference"]
    entries = read_profile(path).contexts
    assert len(entries) == len(older) > 0
    for entry, before in zip(entries, older, strict=True):
        assert entry.context == "with-compute"
        assert entry.ranks == (before["ranks"],) * 2
        assert entry.bytes_range == tuple(before["message_bytes"])
        assert (entry.factor, entry.neighbour_factor) == (before["communication_slowdown"], before["compute_slowdown"])
        assert entry.factor_sd == pytest.approx(before["communication_slowdown_iqr"] / 1.349, rel=1e-4)
        assert entry.neighbour_sd == pytest.approx(before["compute_slowdown_iqr"] / 1.349, rel=1e-4)
