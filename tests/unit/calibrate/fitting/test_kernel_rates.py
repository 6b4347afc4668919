"""What kernels reached stands for a device that nobody measured otherwise: in fp32, and not of what lies in a cache."""

from __future__ import annotations

import pytest

from calibrate.fitting.kernels.kernel_rates import kernel_rates
from paradl_bench.network.kernel import KernelSamples, KernelShape, KernelStage


def kernel(flops: float, moved: float, seconds: float, dtype: str = "fp32", stage: KernelStage = "FW") -> KernelSamples:
    shape = KernelShape(kind="linear", stage=stage, sizes={"batch": 1}, flops=flops, bytes=moved)
    return KernelSamples(shape=shape, dtype=dtype, block=0, samples_s=(seconds, 2 * seconds))


def test_the_best_of_large_kernels_counts() -> None:
    product, copy, cached = kernel(1e12, 1e9, 0.1), kernel(1e8, 1e9, 0.01), kernel(1e5, 1e6, 1e-6)
    assert kernel_rates([product, copy, cached]) == (pytest.approx(1e13), pytest.approx(1e11))
    assert kernel_rates([product]) == (pytest.approx(1e13), None), "products say nothing of memory"
    assert kernel_rates([]) == (None, None)


def test_lower_precision_counts_where_there_is_no_other() -> None:
    full, half = kernel(1e12, 1e9, 0.1), kernel(1e12, 1e9, 0.01, "fp16")
    assert kernel_rates([full, half])[0] == pytest.approx(1e13)
    assert kernel_rates([half])[0] == pytest.approx(1e14)


def test_copies_from_the_host_say_nothing_of_the_device() -> None:
    assert kernel_rates([kernel(0, 1e9, 0.1, stage="H2D"), kernel(0, 1e9, 1.0, stage="D2D")]) == (None, None)
