"""Gradients gone over where they lie: that moves bytes alone, and is priced as a copy of gradients."""

from __future__ import annotations

import math

from calibrate.profile.profile import Profile
from paradl_bench.network.graph import DTYPE_BYTES
from paradl_bench.plan.works.computing import GradientPass
from paradl_bench.plan.works.moving import BucketCopy
from predict.costs.hardware.what_if_device import Demand, DemandContext
from predict.costs.kinds.bucket_copy import alone_over_all, nearest_copy, priced_copy
from predict.costs.kinds.kind_costs import KindCosts, KnownCosts, PricingContext, WorkContext
from predict.costs.sourced import Remark, Source
from predict.costs.spread.assembly import Priced

_TENSORS_OF_A_LAUNCH = 110
"""That one kernel of a GPU reads or scales: depth_to_max_tensors in ATen/native/cuda/MultiTensorApply.cuh."""


def _price(work: GradientPass, known: KnownCosts, context: WorkContext) -> Priced:
    on_host, copy = context.plan.place.ranks_on_host, _as_copy(work, known.profile)
    measured = nearest_copy(known.profile, copy, on_host)
    if measured is None:
        cost = known.model.unmeasured.copy(copy.bytes, copy.tensors, on_host)
        return Priced(cost, context.occurrences, work)
    priced = priced_copy(measured, copy, context.occurrences, on_host)
    what = "clipping gradients" if work.part in ("norm", "scale") else f"to {work.label}"
    remark = Remark(f"{what} was not measured: the times of {measured.what} are used", True)
    cost = priced.cost._replace(source=Source.SCALED, remarks=(*priced.cost.remarks, remark))
    return priced._replace(cost=cost, measurement=work)


def _as_copy(work: GradientPass, profile: Profile) -> BucketCopy:
    """The copy that moves as many bytes: it reads and writes each, as scaling does; the others read or write alone."""
    size = work.elements * DTYPE_BYTES["fp32"]
    on_cpu = all(device.kind == "cpu" for device in profile.devices)
    calls = work.tensors if on_cpu else math.ceil(work.tensors / _TENSORS_OF_A_LAUNCH)
    return BucketCopy(direction="into", bytes=size if work.part == "scale" else size // 2, tensors=calls)


def _alone_on_host(work: GradientPass, known: KnownCosts, place: PricingContext) -> tuple[float, float]:
    return alone_over_all(_as_copy(work, known.profile), known, place)


def _demand(work: GradientPass, context: DemandContext) -> Demand:
    copy = _as_copy(work, context.profile)
    measured = nearest_copy(context.profile, copy, context.ranks_on_host)
    return Demand(0.0, 2.0 * copy.bytes, 0.0 if measured is None else copy.tensors * measured.alpha_s)


COSTS = KindCosts(kind=GradientPass, price=_price, alone_on_host=_alone_on_host, demand=_demand)
