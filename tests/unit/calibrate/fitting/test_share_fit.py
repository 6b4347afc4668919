"""Few kernels as one share of the roofline, against a law that is known."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from calibrate.fitting.kernels.kernel_fit import fit_kernels
from calibrate.fitting.kernels.kernel_trial import Timed, timed_shapes
from calibrate.fitting.kernels.share_fit import bound_90, fit_share
from calibrate.kernels.files import write_arrays
from calibrate.kernels.model import KernelModel, estimate
from paradl_bench.network.kernel import KernelSamples, KernelShape

pytest.importorskip("lightgbm")
PEAK, SHARE = 1e12, 0.6


def shape(batch: int) -> KernelShape:
    sizes = {"batch": batch, "in_features": 64, "out_features": 64, "bias": 0}
    flops = 2.0 * batch * 64 * 64
    return KernelShape(kind="linear", stage="FW", sizes=sizes, settings={"function": "linear"}, flops=flops, bytes=1.0)


def law_s(each: KernelShape) -> float:
    return each.flops / PEAK / (SHARE if each.sizes["batch"] % 16 else 1.0)


def timed(count: int, step: float = 1.4) -> Timed:
    shapes = [shape(32 * round(32 * step**number) + 8) for number in range(count)]
    return timed_shapes(shapes, [law_s(each) for each in shapes], "fp32")


def kept(found: tuple[KernelModel, dict[str, np.ndarray]], folder: Path) -> KernelModel:
    model, arrays = found
    sha256 = write_arrays(folder / "a.npz", {f"0/{name.removeprefix('0/')}": array for name, array in arrays.items()})
    return msgspec.structs.replace(model, file=str(folder / "a.npz"), sha256=sha256, arrays="0")


def test_a_share_is_found_and_stays_within_its_interval(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    few = timed(12)
    noisy = np.array(few.seconds) * np.exp(rng.normal(0, 0.1, 12))
    model = kept(fit_share(timed_shapes(few.shapes, noisy.tolist(), "fp32"), "0"), tmp_path)
    assert model.model == "share"
    found = estimate(model, shape(20_000 + 8))
    assert found is not None
    assert found.seconds == pytest.approx(law_s(shape(20_000 + 8)), rel=0.3)
    assert 0.1 < model.interval_log < 0.7


@pytest.mark.parametrize("count", [9, 20, 100])
def test_the_bound_covers_a_further_error(count: int) -> None:
    rng = np.random.default_rng(count)
    drawn = rng.standard_t(3, (4000, count + 1))
    covered = np.mean([abs(row[-1]) <= bound_90(row[:-1]) for row in drawn])
    assert covered == pytest.approx(0.9, abs=0.02) if count > 9 else covered >= 0.88


def test_fewer_than_nine_kernels_give_no_estimate() -> None:
    records = [KernelSamples(shape=each, dtype="fp32", block=0, samples_s=(law_s(each),)) for each in timed(8).shapes]
    fitted = fit_kernels(records)
    assert fitted.models == ()
    assert "8 shapes are too few for an estimate (9)" in fitted.notes[-1]
    records += [KernelSamples(shape=shape(3000), dtype="fp32", block=0, samples_s=(law_s(shape(3000)),))]
    fitted = fit_kernels(records)
    assert [model.model for model in fitted.models] == ["share"]
    assert "9 shapes are too few for a regressor; they give one share of the roofline" in fitted.notes[-1]
