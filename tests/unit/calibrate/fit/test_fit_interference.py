"""Slow-downs come back from samples alone and beside; sizes are kept apart only where that predicts better."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from synthetic_measurements import CollectivesSpec, interference_samples

from calibrate.fit.contexts.interference_fit import fit_interference
from calibrate.fit.reading import Placed
from paradl_bench.core.errors import UserError
from paradl_bench.records.samples import InterferenceSamples

SPEC = CollectivesSpec(slowdowns=(1.6, 2.1), noise=0.05)


def placed(records: list[InterferenceSamples]) -> list[Placed[InterferenceSamples]]:
    return [Placed(0, record) for record in records]


def test_slowdowns_are_medians_over_sizes_kernels_ranks_and_blocks() -> None:
    records = interference_samples(SPEC)
    (entry,), notes = fit_interference(placed(records))
    assert entry.compute_slowdown == pytest.approx(1.6, rel=0.02)
    assert entry.communication_slowdown == pytest.approx(2.1, rel=0.02)
    assert entry.message_bytes == (65536, 1048576)
    assert entry.kernels == ("conv", "elementwise")
    assert entry.samples == len(records) * SPEC.calls
    assert 0.05 < entry.compute_slowdown_iqr < 0.3
    assert notes == ()


def test_what_is_beside_ghosts_stands_apart_from_what_is_beside_compute() -> None:
    ghosts = interference_samples(CollectivesSpec(slowdowns=(1.05, 1.4), noise=0.01))
    ghosts = [msgspec.structs.replace(record, kernel="ghosts") for record in ghosts]
    entries, _ = fit_interference(placed([*interference_samples(SPEC), *ghosts]))
    assert [entry.kernels for entry in entries] == [("conv", "elementwise"), ("ghosts",)]
    assert [round(entry.communication_slowdown, 1) for entry in entries] == [2.1, 1.4]


def test_nothing_gets_faster_side_by_side() -> None:
    (entry,), _ = fit_interference(placed(interference_samples(CollectivesSpec(slowdowns=(0.8, 0.9)))))
    assert entry.compute_slowdown == entry.communication_slowdown == 1


def test_sizes_that_differ_clearly_get_entries_of_their_own() -> None:
    small = interference_samples(CollectivesSpec(slowdowns=(1.1, 1.2), noise=0.05), sizes=(4096,))
    large = interference_samples(SPEC, sizes=(1048576,))
    entries, _ = fit_interference(placed([*small, *large]))
    assert [entry.message_bytes for entry in entries] == [(4096, 4096), (1048576, 1048576)]
    assert [round(entry.compute_slowdown, 1) for entry in entries] == [1.1, 1.6]


def test_a_dependence_on_the_kernel_is_said() -> None:
    records = [
        msgspec.structs.replace(record, compute_beside_s=tuple(2 * value for value in record.compute_beside_s))
        if record.kernel == "elementwise"
        else record
        for record in interference_samples(SPEC)
    ]
    entries, notes = fit_interference(placed(records))
    assert len(entries) == 1
    assert notes[0].startswith("gloo all_reduce node on 2 ranks: slow-down depends on the kernel (compute: conv 1.6")


def test_too_few_blocks_show_no_dependence() -> None:
    one = CollectivesSpec(slowdowns=(1.1, 1.2), blocks=2)
    other = CollectivesSpec(slowdowns=(2.1, 2.2), blocks=2)
    records = interference_samples(one, sizes=(4096,)) + interference_samples(other, sizes=(8192,))
    entries, _ = fit_interference(placed(records))
    assert len(entries) == 1


def test_noise_shows_no_dependence() -> None:
    found = [fit_interference(placed(interference_samples(dataclasses.replace(SPEC, seed=seed)))) for seed in range(20)]
    assert sum(len(entries) > 1 for entries, _ in found) <= 2
    assert sum(bool(notes) for _, notes in found) <= 2


def test_ranks_and_operations_are_kept_apart() -> None:
    records = interference_samples(CollectivesSpec(ranks=(2, 4), slowdowns=(1.5, 1.5)))
    entries, _ = fit_interference(placed(records))
    assert [entry.ranks for entry in entries] == [2, 4]


def test_a_time_alone_of_zero_is_refused() -> None:
    record = interference_samples(SPEC)[0]
    broken = msgspec.structs.replace(record, communication_alone_s=(0.0, *record.communication_alone_s[1:]))
    with pytest.raises(UserError, match="interference of all_reduce of 65536 bytes with conv: a time alone of 0"):
        fit_interference(placed([broken]))
