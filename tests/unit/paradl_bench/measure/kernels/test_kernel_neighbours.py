"""What kernels of nearly the same shape differ by: noise that was put in comes out, and a smooth law is none."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[5] / "benchmarks" / "published"))

from kernel_neighbours import FEWEST_PAIRS, neighbours

from calibrate.fitting.kernels.kernel_trial import Timed, timed_shapes
from paradl_bench.network.kernel import KernelShape

pytest.importorskip("lightgbm")


def sweep(noise: float, *, high: float = 400.0, count: int = 900) -> Timed:
    """Linear kernels at a rate that grows with the rows, each time wrong by a normal deviate in its logarithm."""
    generator = np.random.default_rng(3)
    drawn = np.exp(generator.uniform(np.log(40), np.log(high), (2 * count, 3))).astype(int)
    shapes = [
        KernelShape(
            kind="linear",
            stage="FW",
            sizes={"batch": rows, "in_features": depth, "out_features": columns},
            flops=2 * rows * depth * columns,
            bytes=4 * (rows * depth + depth * columns + rows * columns),
        )
        for rows, depth, columns in list(dict.fromkeys(map(tuple, drawn.tolist())))[:count]
    ]
    seconds = [
        (1e-6 + s.flops / 1e11 * (1 + 20 / s.sizes["batch"])) * np.exp(noise * generator.normal()) for s in shapes
    ]
    return timed_shapes(shapes, seconds, "fp32")


def test_noise_that_was_put_in_is_found_between_neighbours() -> None:
    found = neighbours(sweep(0.10), (), seed=0)
    assert found is not None
    assert found.pairs >= FEWEST_PAIRS
    assert found.re == pytest.approx(0.10 * np.sqrt(2 / np.pi), abs=3 * found.standard_error)
    assert found.re <= found.own_re < 1.3 * found.re
    assert abs(found.correlation) < 0.4


def test_a_smooth_law_leaves_little_between_neighbours() -> None:
    found = neighbours(sweep(0.0), (), seed=0)
    assert found is not None
    assert found.re < 0.01
    assert found.own_re < 0.03


def test_too_few_neighbours_and_nothing_but_neighbours_tell_nothing() -> None:
    assert neighbours(sweep(0.1, high=1e5, count=200), (), seed=0) is None
    assert neighbours(sweep(0.1, high=60.0), (), seed=0) is None
