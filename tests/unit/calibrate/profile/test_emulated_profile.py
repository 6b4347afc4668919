"""The profile of emulated runs says what differs from the one that is slept, and nothing else."""

from __future__ import annotations

import msgspec
import pytest
from profile_factory import make_network, make_profile, model_times, with_compute

from calibrate.profile.emulated_profile import emulated
from calibrate.profile.profile import encode_profile
from paradl_bench.core.errors import UserError

QUANTILES = (0.9, 1.0, 1.4)
BESIDE = (with_compute(1.3, 1.2), with_compute(1.1, 1.7, neighbours=("ghosts",)))
PROFILE = make_profile(model_times=model_times(make_network(), quantiles=QUANTILES), contexts=BESIDE)
CHANGED = ("devices", "contexts", "model_times")


def test_only_device_interference_and_spread_of_iterations_differ() -> None:
    found = emulated(PROFILE, 3.0)
    assert found.time_factor == 3
    assert PROFILE.time_factor is None
    assert [entry.neighbour_factor for entry in found.contexts] == [1.1]
    assert {time.iteration_relative_quantiles for time in found.model_times} == {(1.0, 1.0)}
    same = {name: getattr(PROFILE, name) for name in CHANGED}
    assert msgspec.structs.replace(found, **same) == PROFILE


def test_drawn_sleeps_keep_the_spread_of_iterations() -> None:
    assert emulated(PROFILE, 3.0, drawn=True).model_times == PROFILE.model_times


def test_a_profile_of_no_device_gets_one_that_sleeps() -> None:
    assert emulated(msgspec.structs.replace(PROFILE, devices=()), 3.0).time_factor == 3


def test_files_of_devices_that_compute_say_nothing_of_a_factor() -> None:
    assert b"time_factor" not in encode_profile(PROFILE)


@pytest.mark.parametrize("dilate", [0.0, -1.0, float("nan"), float("inf")])
def test_no_dilation_that_nothing_can_sleep(dilate: float) -> None:
    with pytest.raises(UserError, match=r"--dilate .* has to be a positive number"):
        emulated(PROFILE, dilate)
