"""Times that grow in the course of a sweep: what was added to them, whatever the kernel.

A sweep of thousands of kernels takes hours, and what surrounds a kernel (caches of plans, a heap, a clock) may change
meanwhile: in a public sweep of convolutions 0.3 ms are added by its end to kernels that take from 0.06 ms. Shapes come
in random order, so that no regressor on shapes can learn it; it is estimated from the order of measuring.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from paradl_bench.core.statistics import Floats

KNOTS = 9
_ROUNDS = 3
_REWEIGHTINGS = 30


def hats(order: Floats) -> Floats:
    """Of each place in the sweep (0 to 1) the shares of the two knots that it lies between."""
    knots = np.linspace(0, 1, KNOTS)
    return np.column_stack([np.interp(order, knots, np.eye(KNOTS)[knot]) for knot in range(KNOTS)])


def fit_drift(order: Floats, seconds: Floats, fit_unseen: Callable[[Floats], Floats]) -> tuple[float, ...]:
    """Seconds added at evenly spaced places of a sweep, 0 at its beginning.

    The regressor, which estimates each kernel unseen, and the drift are fitted in turn, each to what the other leaves.
    """
    shares = hats(order)
    least = float(np.quantile(seconds, 0.005))
    drift: Floats = np.zeros(KNOTS)
    for _ in range(_ROUNDS):
        kernel_s = np.maximum(seconds - shares @ drift, 0.3 * least)
        estimated = fit_unseen(kernel_s)
        drift = _least_absolute(shares, (seconds - estimated) / estimated, 1 / estimated)
        drift = drift - drift[0]
    return tuple(float(value) for value in drift)


def _least_absolute(shares: Floats, relative: Floats, weights: Floats) -> Floats:
    """Drift with the least sum of |relative error|, by reweighted least squares; small kernels tell most."""
    scaled = shares * weights[:, None]
    drift: Floats = np.zeros(shares.shape[1])
    ridge = 1e-9 * np.eye(shares.shape[1]) * float(np.mean(weights**2))
    for _ in range(_REWEIGHTINGS):
        again = 1 / np.maximum(np.abs(relative - scaled @ drift), 1e-2)
        drift = np.asarray(np.linalg.solve((scaled.T * again) @ scaled + ridge, (scaled.T * again) @ relative), float)
    return np.asarray(drift)
