"""Seconds of layers that nobody measured, from the profile's regressors of kernels.

Regressors were fitted to kernels that ran alone, in a loop. Inside an iteration the same kernel finds other things in
the caches and other ranks beside it; how much longer it takes there is read from the layers that were measured inside
an iteration, of the same kind where there are enough of them, and regressed times are multiplied by it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from calibrate.kernels.model import Estimate, KernelModel, estimate, was_fitted_on
from paradl_bench.core.statistics import MAD_TO_SD
from paradl_bench.network.graph import Layer
from paradl_bench.network.kernel import KernelShape, KernelStage
from paradl_bench.network.kinds.kernel_shape import kernel_shape
from paradl_bench.records.measurement import PhaseName
from predict.costs.sourced import Cost, Remark, Source

_OF_OTHERS = "not measured, regressed from kernels of other shapes"
FEWEST_PAIRS = 3
"""Of a kind's layers, measured and regressed, that say how far the two are apart."""


class Pair(NamedTuple):
    """A layer measured inside an iteration, and its regressed time."""

    kind: str
    regressed_s: float
    measured_s: float


class InSitu(NamedTuple):
    """How much longer kernels take inside an iteration: from which kinds of layers, and how far those spread."""

    ratio: float
    relative_sd: float
    layers: int


class KernelCosts:
    """Regressed times of layers of one dtype; answers are kept."""

    def __init__(self, models: Iterable[KernelModel], dtype: str) -> None:
        self._dtype = dtype
        self._models = {
            (model.kind, model.stage, tuple(sorted(model.settings.items()))): model
            for model in models
            if model.dtype == dtype
        }
        self._known: dict[tuple[str, PhaseName, int, bool], Estimate | None] = {}

    def estimate(self, layer: Layer, phase: PhaseName, batch: int) -> Estimate | None:
        """Seconds of a layer's phase run alone on a local batch; None where :meth:`of_shape` gives None."""
        if not self._models:
            return None
        # Whether the first layer or another: its backward computes no gradient of its input.
        key = (layer.operation, phase, batch, "input" in layer.inputs)
        if key not in self._known:
            self._known[key] = self._find(layer, phase, batch)
        return self._known[key]

    def _find(self, layer: Layer, phase: PhaseName, batch: int) -> Estimate | None:
        answers = self._answers(layer, phase, batch)
        return _added([answer for _, answer in answers]) if answers else None

    def _answers(self, layer: Layer, phase: PhaseName, batch: int) -> list[tuple[KernelShape, Estimate]]:
        """The kernels that regressors answer for a layer's phase: one, or both halves of backward; else none."""
        if phase not in ("FW", "BW", "BW_input", "BW_weight"):
            return []
        whole = kernel_shape(layer, phase, batch, self._dtype)
        answer = self.of_shape(whole)
        if whole is not None and answer is not None:
            return [(whole, answer)]
        answers: list[tuple[KernelShape, Estimate]] = []
        stages: tuple[KernelStage, ...] = ("BW_input", "BW_weight") if phase == "BW" else ()
        for stage in stages:
            half = kernel_shape(layer, stage, batch, self._dtype)
            if half is None:
                continue
            answer = self.of_shape(half)
            if answer is None:
                return []
            answers.append((half, answer))
        return answers

    def was_fitted_on(self, layer: Layer, phase: PhaseName, batch: int) -> bool:
        """Whether kernels of the very shapes that answer for a layer's phase were among those fitted on."""
        shapes = [shape for shape, _ in self._answers(layer, phase, batch)]
        return any(was_fitted_on(self._model_of(shape), shape) for shape in shapes)

    def shape_was_fitted_on(self, shape: KernelShape) -> bool:
        """The same of one kernel."""
        return self.of_shape(shape) is not None and was_fitted_on(self._model_of(shape), shape)

    def _model_of(self, shape: KernelShape) -> KernelModel:
        return self._models[shape.kind, shape.stage, tuple(sorted(shape.settings.items()))]

    def of_shape(self, shape: KernelShape | None) -> Estimate | None:
        """Seconds of a kernel run alone; None where no regressor is for it, or none was fitted on kernels near it.

        Raises:
            UserError: the regressors' file is missing, broken, or another one.
        """
        if shape is None:
            return None
        model = self._models.get((shape.kind, shape.stage, tuple(sorted(shape.settings.items()))))
        return None if model is None else estimate(model, shape)


def regressed_cost(regressed: Estimate, layer: Layer, in_situ: InSitu | None, *, asked: str = "") -> Cost:
    """A regressed time as a cost; what regressing leaves open is the method's error.

    Args:
        asked: what asks for it whatever was measured (``--layers regressed``); empty where nothing was measured.
    """
    remarks = [] if asked or regressed.published else [Remark(_OF_OTHERS, False, layer.name)]
    if regressed.published:
        remarks.append(Remark(f"published, not measured here: kernels of {regressed.published}", False, layer.kind))
    if regressed.extrapolated:
        text = f"regressed beyond the kernels that were swept ({', '.join(regressed.extrapolated)})"
        remarks.append(Remark(text, True, layer.name))
    if asked:
        text = f"{asked}: layers take regressed times of single kernels, even where they were measured in an iteration"
    elif in_situ is None:
        text = (
            "regressed times are those of single kernels, not inside an iteration; no measured layers say how the two"
            " differ"
        )
    else:
        text = (
            f"regressed times are multiplied by {in_situ.ratio:.2f}: so much longer {in_situ.layers} measured"
            " layers took in an iteration than their regressor says"
        )
    remarks.append(Remark(text, in_situ is None and not asked))
    sd_s = regressed.seconds * regressed.relative_sd
    # Each kind has regressors of its own, which are off independently.
    alone = Cost(regressed.seconds, source_of(regressed), method_sd_s=sd_s, remarks=tuple(remarks), method=layer.kind)
    if in_situ is None:
        return alone
    seconds, relative_sd = regressed.seconds * in_situ.ratio, math.hypot(regressed.relative_sd, in_situ.relative_sd)
    return alone.adjusted("inside an iteration", seconds)._replace(method_sd_s=seconds * relative_sd)


def source_of(regressed: Estimate) -> Source:
    """Whether a regressed time stands on one's own kernels, or on published ones."""
    return Source.PUBLISHED if regressed.published else Source.REGRESSED


def in_situ_of(kind: str, pairs: Sequence[Pair]) -> InSitu | None:
    """Ratio of what layers took to what regressors say, of the kind if there are enough, else of all kinds.

    It is the median of the single layers, and its spread theirs, in logarithms. By their sums, one large layer that
    takes another kernel would speak for all: the product with an odd vocabulary takes 8 times as long on a GPU.
    """
    of_kind = [pair for pair in pairs if pair.kind == kind]
    taken = of_kind if len(of_kind) >= FEWEST_PAIRS else list(pairs)
    if len(taken) < FEWEST_PAIRS:
        return None
    logs = [math.log(pair.measured_s / pair.regressed_s) for pair in taken]
    middle = statistics.median(logs)
    spread = MAD_TO_SD * statistics.median(abs(each - middle) for each in logs)
    return InSitu(math.exp(middle), spread, len(taken))


def _added(estimates: Sequence[Estimate]) -> Estimate:
    seconds = sum(kernel.seconds for kernel in estimates)
    # Halves of one layer are off together: standard deviations add.
    sd_s = sum(kernel.seconds * kernel.relative_sd for kernel in estimates)
    beyond = tuple(dict.fromkeys(text for kernel in estimates for text in kernel.extrapolated))
    published = " and ".join(dict.fromkeys(kernel.published for kernel in estimates if kernel.published))
    return Estimate(seconds, sd_s / seconds if seconds else 0.0, beyond, published)
