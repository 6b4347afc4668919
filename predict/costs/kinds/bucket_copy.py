"""Gradients moved into buckets, out of them, or added up."""

from __future__ import annotations

from paradl_bench.core.errors import UserError
from paradl_bench.network.kinds.kernel_shape import copy_shape
from paradl_bench.plan.works.moving import BucketCopy
from predict.costs.compute.copy_costs import alone_over_all, nearest_copy, priced_copy
from predict.costs.hardware.what_if_device import Demand, DemandContext
from predict.costs.kinds.kind_costs import KindCosts, KnownCosts, PricingContext, WorkContext
from predict.costs.spread.assembly import Priced


def _price(work: BucketCopy, known: KnownCosts, context: WorkContext) -> Priced:
    on_host = context.plan.place.ranks_on_host
    copy = nearest_copy(known.profile, work, on_host)
    if copy is None and not known.profile.model_times:
        return Priced(known.model.unmeasured.copy(work.bytes, work.tensors, on_host), context.occurrences, work)
    if copy is None:
        raise UserError(
            "the profile holds no times of copying gradients into and out of buckets; measure a model "
            f"anew: paradl-bench layers {known.model_name} --batch N -o DIR, then calibrate fit"
        )
    return priced_copy(copy, work, context.occurrences, on_host)


def _alone_on_host(work: BucketCopy, known: KnownCosts, place: PricingContext) -> tuple[float, float]:
    return alone_over_all(known.profile, work, place.ranks_on_host)


def _demand(work: BucketCopy, context: DemandContext) -> Demand:
    measured = nearest_copy(context.profile, work, context.ranks_on_host)
    moved = copy_shape("D2D", work.bytes, work.tensors).bytes
    return Demand(0.0, moved, 0.0 if measured is None else work.tensors * measured.alpha_s)


COSTS = KindCosts(kind=BucketCopy, price=_price, alone_on_host=_alone_on_host, demand=_demand)
