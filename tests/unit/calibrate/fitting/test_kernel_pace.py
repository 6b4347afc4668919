"""Times of a sweep on a host that changes its speed, brought to its usual one."""

from __future__ import annotations

import threading

import msgspec
import numpy as np
import pytest

from calibrate.fitting.kernels.kernel_pace import medians_at_usual_pace, usual_reference_s
from calibrate.fitting.kernels.kernel_trial import timed_kernels
from paradl_bench.measure.kernels.host_pace import HostPace
from paradl_bench.network.kernel import KernelSamples, KernelShape
from paradl_bench.ranks.clocks import CpuClock, ThreadClock

REFERENCE_S = 3e-4


def sweep(share: float, *, kernels: int = 60) -> tuple[list[list[KernelSamples]], list[float]]:
    """Kernels of 2 to 8 ms that share a part of the reference's slowing, and what they take at speed 1."""
    generator = np.random.default_rng(0)
    times = generator.uniform(2e-3, 8e-3, kernels)
    swept = []
    for number, alone_s in enumerate(times):
        shape = KernelShape(kind="linear", stage="FW", sizes={"batch": number + 1}, flops=1.0, bytes=1.0)
        records = []
        for block in range(3):
            slower = np.exp(generator.choice([-0.2, 0.2], 2))
            records.append(
                KernelSamples(
                    shape=shape,
                    dtype="fp32",
                    block=block,
                    samples_s=tuple(alone_s * slower**share * np.exp(0.01 * generator.standard_normal(2))),
                    reference_s=tuple(REFERENCE_S * slower),
                )
            )
        swept.append(records)
    return swept, list(times)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_what_kernels_share_of_the_hosts_slowing_is_taken_out(share: float) -> None:
    swept, times = sweep(share)
    found = medians_at_usual_pace(swept, REFERENCE_S)
    errors = [abs(np.log(value / alone_s)) for blocks, alone_s in zip(found, times, strict=True) for value in blocks]
    assert np.mean(errors) < 0.02


def test_without_a_reference_times_stay_medians() -> None:
    swept, _ = sweep(1.0)
    bare = [[msgspec.structs.replace(record, reference_s=()) for record in records] for records in swept]
    assert usual_reference_s([r for k in bare for r in k]) == 0.0
    expected = [[float(np.median(r.samples_s)) for r in k] for k in bare]
    assert medians_at_usual_pace(bare, 0.0) == expected
    assert medians_at_usual_pace(bare, REFERENCE_S) == expected


def test_too_few_samples_leave_times_without_pace_correction() -> None:
    swept, _ = sweep(1.0, kernels=3)
    assert medians_at_usual_pace(swept, REFERENCE_S) == [[float(np.median(r.samples_s)) for r in k] for k in swept]


def test_regressors_are_given_times_at_the_usual_pace() -> None:
    swept, times = sweep(1.0)
    (timed,) = timed_kernels(r for k in swept for r in k)
    usual_s = usual_reference_s([r for k in swept for r in k])
    np.testing.assert_allclose(timed.seconds, np.array(times) * usual_s / REFERENCE_S, rtol=0.04)


@pytest.mark.parametrize("references", [(1e-4,), (1e-4, 0.0), (1e-4, -1.0)])
def test_a_reference_belongs_to_every_sample(references: tuple[float, ...]) -> None:
    shape = {"kind": "linear", "stage": "FW", "sizes": {"batch": 1}}
    row = {"shape": shape, "dtype": "fp32", "block": 0, "samples_s": (1.0, 2.0), "reference_s": references}
    with pytest.raises(msgspec.ValidationError, match="reference_s"):
        msgspec.convert(row, KernelSamples)


def test_waiting_counts_on_the_wall_clock_alone() -> None:
    walls, own = CpuClock(), ThreadClock()
    at_wall, at_own = walls.stamp(), own.stamp()
    threading.Event().wait(0.05)
    waited_s, worked_s = walls.seconds(at_wall, walls.stamp()), own.seconds(at_own, own.stamp())
    assert worked_s < 0.5 * waited_s


def test_each_sample_lies_between_two_references() -> None:
    pace = HostPace(ThreadClock())
    pace.taken_s = [1.0, 2.0, 4.0, 8.0, 16.0]
    assert pace.around(samples=2, stages=2) == [(1.5, 6.0), (3.0, 12.0)]
    pace.taken_s.clear()
    pace.take()
    assert pace.taken_s[0] > 0
