"""Regimes of an algorithm that cuts the message: where a protocol changes by the bytes of one step."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from profile_factory import make_network, make_profile

from calibrate.fitting.collectives.communication_curve import Point
from calibrate.fitting.collectives.communication_fit import fit_points
from calibrate.fitting.collectives.communication_spread import Asked, MeasuredPoints, error_modes
from calibrate.profile.collectives.communication import CommunicationFit
from calibrate.profile.collectives.communication_time import communication_seconds, nearest_fit
from paradl_bench.plan.collectives.catalog import operations
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Collective
from predict.costs.communication.communication_costs import CommunicationCosts

ALL_REDUCE = operations()["all_reduce"]
SIZES = tuple(1024 * 4**power for power in range(9))
COUNTS = (4, 8, 16, 32)
EAGER_BYTES = 32768


def ring_s(ranks: int, message_bytes: float) -> float:
    """A ring of messages that are eager below a size, and ask first from there on: another latency and bandwidth."""
    part = message_bytes / ranks
    step_s = 1e-5 + 2e-10 * part if part < EAGER_BYTES else 6e-5 + 8e-10 * part
    return 2 * (ranks - 1) * step_s


def by_whole_s(ranks: int, message_bytes: float) -> float:
    """A ring whose library looks at the bytes of the whole."""
    alpha_s, beta = (1e-5, 2e-10) if message_bytes < 1 << 20 else (6e-5, 8e-10)
    return 2 * (ranks - 1) * (alpha_s + beta * message_bytes / ranks)


def fitted(truth: object, counts: tuple[int, ...] = COUNTS, noise: float = 0.005) -> list[CommunicationFit]:
    generator = np.random.default_rng(0)
    points = [
        Point(p, m, tuple(truth(p, m) * np.exp(noise * generator.standard_normal((4, 6)))))  # type: ignore[operator]
        for p in counts
        for m in SIZES
    ]
    fits, _ = fit_points(("mpi", "all_reduce", "system"), points, ALL_REDUCE)
    return fits


FITS = fitted(ring_s)


def test_a_change_of_protocol_moves_with_the_ranks() -> None:
    """Left to ranges of the whole message, 4 MiB on 256 ranks (16 KiB a step) would be as 4 MiB on 32 (128 KiB)."""
    assert all(fit.step_bytes_range is not None for fit in FITS)
    below, above = (fit.regime_range for fit in FITS)
    assert below[1] < EAGER_BYTES <= above[0] <= 2 * EAGER_BYTES
    assert [fit.regime for fit in FITS] == [f"<={below[1]:.0f} a step", f">={above[0]:.0f} a step"]
    for ranks in (64, 256, 1024):
        sizes = [size for size in SIZES if not 0.5 < size / ranks / EAGER_BYTES < 2]
        wanted = [ring_s(ranks, size) for size in sizes]
        np.testing.assert_allclose(communication_seconds(ALL_REDUCE, FITS, ranks, sizes), wanted, rtol=0.03)


def test_what_changes_with_the_whole_message_stays_there() -> None:
    fits = fitted(by_whole_s)
    assert [fit.step_bytes_range for fit in fits] == [None, None]
    assert fits[0].bytes_range[1] < 1 << 20 <= fits[1].bytes_range[0]


def test_one_rank_count_tells_no_step_from_the_whole() -> None:
    assert all(fit.step_bytes_range is None for fit in fitted(ring_s, counts=(8,)))


def test_time_runs_straight_between_two_regimes_at_any_rank_count() -> None:
    for ranks in (8, 256):
        low, high = (FITS[0].regime_range[1] * ranks, FITS[1].regime_range[0] * ranks)
        sizes = np.linspace(low, high, 5)
        seconds = communication_seconds(ALL_REDUCE, FITS, ranks, sizes)
        np.testing.assert_allclose(np.diff(seconds), np.diff(seconds).mean(), rtol=1e-6)
        below = communication_seconds(ALL_REDUCE, FITS[:1], ranks, low)
        assert seconds[0] == pytest.approx(float(below))


def test_the_spread_is_that_of_the_regime_of_the_step() -> None:
    # 4 MiB: 1 MiB a step of 4 ranks, 16 KiB of 256.
    assert nearest_fit(ALL_REDUCE, FITS, 4, 1 << 22) is FITS[1]
    assert nearest_fit(ALL_REDUCE, FITS, 256, 1 << 22) is FITS[0]
    seconds = float(communication_seconds(ALL_REDUCE, FITS, 256, 1 << 22))
    names = [name for name, _ in error_modes(ALL_REDUCE, MeasuredPoints(FITS), Asked(256, 1 << 22), seconds)]
    assert names[0].startswith(f"fit of all_reduce at system {FITS[0].regime}")


def test_a_prediction_reads_the_profiles_regimes_by_steps() -> None:
    kept = msgspec.json.decode(msgspec.json.encode(FITS), type=tuple[CommunicationFit, ...])
    assert kept == tuple(FITS)
    costs = CommunicationCosts(make_profile(make_network(), communication=kept), None, "mpi")
    work = Collective(operation="all_reduce", message_bytes=1 << 22, ranks=256)
    cost = costs.cost(work, parse_strategy("d256")).cost
    assert cost.seconds == pytest.approx(ring_s(256, 1 << 22), rel=0.03)


@pytest.mark.parametrize("wrong", [(2.0, 1.0), (3.0, 2.0)])
def test_a_range_of_steps_rises(wrong: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="step_bytes_range has to rise"):
        msgspec.structs.replace(FITS[0], step_bytes_range=wrong)
