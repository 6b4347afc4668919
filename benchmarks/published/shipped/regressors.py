"""Regressors of a device's kernels: of its own tables, of like products, and of another device's tables.

What stands in for another kernel is off by more than its own regressor says. How much more is read where both were
measured: forward products against backward ones of the same device, and one device's kernels against another's. That
enters the interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from shipped.compact_fit import fit_compact
from shipped.tables import Device, addmm_of, of_equal_bytes, products_of, read_kernels

from calibrate.fitting.kernels.kernel_trial import Ints, Timed, timed_kernels, timed_shapes
from calibrate.fitting.kernels.share_fit import bound_90
from calibrate.kernels.files import Arrays
from calibrate.kernels.model import KernelModel, log_times, roofline_s
from paradl_bench.core.statistics import Floats
from paradl_bench.network.kernel import KernelSamples, KernelShape, KernelStage
from paradl_bench.network.kinds.kernel_shape import kernel_shape, layer_of_sizes
from paradl_bench.records.devices.sheet import DeviceSheet, device_sheet

Key = tuple[str, str, tuple[tuple[str, str], ...], str]
"""Kind, stage, settings and dtype."""
_HELD = 100
"""Kernels of a pair of devices that one is held against the other by: every pair counts alike."""
FARTHEST_LOG = math.log(2)
"""Beyond a factor of two, what a table tells is no better than a data sheet."""
_LIKE = ", products of equal extents"


class Regressed(NamedTuple):
    """A regressor, its arrays without a prefix, and the kernels that it was fitted to."""

    model: KernelModel
    arrays: Arrays
    timed: Timed

    def logs(self, timed: Timed) -> Floats:
        """Logs of seconds of kernels of this kind and stage."""
        model = self.model
        base_s = roofline_s(timed.kernels, model.floor_s, model.peak_flops, model.bandwidth_bytes_per_s)
        return log_times(model.model, self.arrays, timed.kernels, model.varied, base_s)

    def of(self, published: str, *, widened_log: float = 0.0) -> Regressed:
        """The same by another name, off by so much more."""
        wider = math.hypot(self.model.interval_log, widened_log)
        return self._replace(model=msgspec.structs.replace(self.model, published=published, interval_log=wider))


Regressors = dict[Key, Regressed]


def key_of(model: KernelModel) -> Key:
    """What a regressor is of."""
    return model.kind, model.stage, tuple(sorted(model.settings.items())), model.dtype


def fitted(records: Sequence[KernelSamples], published: str) -> Regressors:
    """Of every group of kernels that is large enough."""
    found: Regressors = {}
    for timed in timed_kernels(records):
        fit = fit_compact(timed, "")
        if fit is not None:
            model = msgspec.structs.replace(fit[0], published=published)
            arrays = {name.removeprefix("/"): array for name, array in fit[1].items()}
            found[key_of(model)] = Regressed(model, arrays, timed)
    return found


def own_regressors(records: Mapping[str, Sequence[KernelSamples]]) -> tuple[Regressors, Regressors]:
    """Of a device's tables, by publication; and of like products, whose intervals are still those of the tables."""
    own: Regressors = {}
    like: Regressors = {}
    for name, of_table in records.items():
        own |= fitted(of_table, name)
        linear = [each for each in of_table if each.shape.kind == "linear"]
        products = products_of(linear)
        like |= fitted([*products, *addmm_of([*linear, *products])], f"{name}{_LIKE}")
        like |= fitted(of_equal_bytes(of_table), f"{name}, fp32 kernels of equal bytes")
    return own, {key: each for key, each in like.items() if key not in own or _few(own[key])}


def _few(one: Regressed) -> bool:
    return one.model.model == "share"


def read_records(device: Device, data: Path) -> dict[str, list[KernelSamples]]:
    """Kernels of a device by publication."""
    return {table.name: read_kernels(device, table, data) for table in device.kernels}


def like_product_error(own: Iterable[Regressors], like: Iterable[Regressors]) -> float:
    """How far backward of linear layers is from two forward products of equal extents: 90% of errors' logs."""
    errors: list[float] = []
    for measured, derived in zip(own, like, strict=True):
        for key, backward in measured.items():
            halves = [derived.get(("linear", half, key[2], key[3])) for half in ("BW_input", "BW_weight")]
            if key[:2] == ("linear", "BW") and None not in halves and not _few(backward):
                errors += _of_halves(backward.timed, [each for each in halves if each is not None])
    return bound_90(np.array(errors)) if errors else 0.0


def _of_halves(timed: Timed, halves: Sequence[Regressed]) -> list[float]:
    chosen = timed.at(_sample(len(timed.shapes)))
    total_s = np.zeros(len(chosen.shapes))
    for half in halves:
        stage: KernelStage = half.model.stage
        shapes = [_as_stage(shape, stage, timed.dtype) for shape in chosen.shapes]
        total_s += np.exp(half.logs(timed_shapes(shapes, list(chosen.seconds), chosen.dtype)))
    return list(np.log(total_s / chosen.seconds))


def _as_stage(shape: KernelShape, stage: KernelStage, dtype: str) -> KernelShape:
    made = layer_of_sizes(shape.kind, shape.sizes, {"function": shape.kind})
    found = kernel_shape(made.layer, stage, made.batch, dtype)
    assert found is not None
    return found


def _sample(count: int) -> Ints:
    return np.sort(np.random.default_rng(0).permutation(count)[:_HELD])


def moved(one: Regressed, sheet: DeviceSheet, to: DeviceSheet) -> Regressed:
    """A regressor on another device: the same share of the roofline, by both data sheets."""
    model = one.model
    compute = to.peak(model.dtype) / sheet.peak(model.dtype)
    memory = to.memory_bandwidth_bytes_per_s / sheet.memory_bandwidth_bytes_per_s
    rates = {"peak_flops": compute * model.peak_flops, "bandwidth_bytes_per_s": memory * model.bandwidth_bytes_per_s}
    return one._replace(model=msgspec.structs.replace(model, **rates))


def transfer_errors(devices: Mapping[str, tuple[Device, Regressors]]) -> dict[str, list[float]]:
    """By kind, logs of errors of one device's regressors on another's kernels, where both have tables."""
    errors: dict[str, list[float]] = {}
    for name, (device, own) in devices.items():
        for other, (target, of_target) in devices.items():
            if other == name:
                continue
            sheets = device_sheet(device.sheet), device_sheet(target.sheet)
            for key in sorted(own.keys() & of_target.keys(), key=str):
                timed = of_target[key].timed
                timed = timed.at(_sample(len(timed.shapes)))
                found = moved(own[key], *sheets).logs(timed) - np.log(timed.seconds)
                errors.setdefault(key[0], []).extend(found.tolist())
    return errors


def combined(own: Regressors, like: Regressors, like_error: float) -> Regressors:
    """A device's own regressors, and those of like products where they tell more."""
    found = dict(own)
    for key, each in like.items():
        wider = each.of(str(each.model.published), widened_log=like_error)
        if key not in found or wider.model.interval_log < found[key].model.interval_log:
            found[key] = wider
    # Backward as its two products, where few kernels tell it as one.
    whole = [key for key in found if key[1] == "BW" and _few(found[key])]
    for kind, _, settings, dtype in whole:
        halves = [found.get((kind, half, settings, dtype)) for half in ("BW_input", "BW_weight")]
        if None not in halves:
            del found[kind, "BW", settings, dtype]
    return {key: each for key, each in found.items() if each.model.interval_log <= FARTHEST_LOG}


def borrowed(
    own: Regressors, device: Device, donor: Device, of_donor: Regressors, errors: Mapping[str, Sequence[float]]
) -> Regressors:
    """Regressors of another device for kernels in a dtype that a device's own tables lack.

    Args:
        errors: of :func:`transfer_errors`; a kind that no two devices have is as far off as all kinds together.
    """
    dtypes = {dtype for dtype, names in device.borrows.items() if donor.name in names}
    everything = np.concatenate([np.asarray(each, float) for each in errors.values()])
    found: Regressors = {}
    for key, each in of_donor.items():
        if key in own or key[3] not in dtypes or any(_answers(have, key) for have in own):
            continue
        widened = bound_90(np.asarray(errors.get(key[0], everything), float))
        there = moved(each, device_sheet(donor.sheet), device_sheet(device.sheet))
        wider = there.of(f"{each.model.published}, of {donor.name}", widened_log=widened)
        if wider.model.interval_log <= FARTHEST_LOG:
            found[key] = wider
    return found


def _answers(have: Key, key: Key) -> bool:
    """Whether a regressor answers for a backward pass that another one takes as a whole, or in halves."""
    return (have[0], *have[2:]) == (key[0], *key[2:]) and have[1][:2] == key[1][:2] == "BW"
