"""Rates that kernels of a sweep reached: lower bounds of what the device can do, where nothing else says them."""

from __future__ import annotations

from collections.abc import Iterable

from paradl_bench.network.kernel import KernelSamples


def kernel_rates(records: Iterable[KernelSamples]) -> tuple[float | None, float | None]:
    """Best FLOP/s of any kernel, and best bytes/s of kernels with at most one FLOP a byte.

    Forward alone says bytes: backward may pass a gradient on, and copies wait for a link. As of layers
    (:func:`calibrate.fitting.layer_fit.rates_reached`), rates are of fp32 where any was measured, and bytes/s of
    kernels that move at least half of what the largest of them moves, since small ones live in a cache.
    """
    timed = [(record, min(record.samples_s)) for record in records]
    timed = [(record, seconds) for record, seconds in timed if seconds > 0]
    timed = [(record, seconds) for record, seconds in timed if record.dtype == "fp32"] or timed
    flops = [record.shape.flops / seconds for record, seconds in timed if record.shape.flops]
    moved = [
        (record.shape.bytes, seconds)
        for record, seconds in timed
        if 0 < record.shape.bytes >= record.shape.flops and record.shape.stage == "FW"
    ]
    largest = max((size for size, _ in moved), default=0.0)
    rates = [size / seconds for size, seconds in moved if size >= largest / 2]
    return max(flops, default=None), max(rates, default=None)
