"""Gradients moved into buckets, out of them, or added up, and which measurement stands for a copy."""

from __future__ import annotations

from calibrate.profile.profile import CopyTime, Profile
from paradl_bench.core.errors import UserError
from paradl_bench.network.kinds.kernel_shape import copy_shape
from paradl_bench.plan.works.moving import BucketCopy, TensorCopy
from predict.costs.compute.layer_roofline import nearest_count
from predict.costs.hardware.what_if_device import Demand, DemandContext
from predict.costs.kinds.kind_costs import KindCosts, KnownCosts, PricingContext, WorkContext
from predict.costs.sourced import UNIFORM_TO_SD, Cost, Remark, Source
from predict.costs.spread.assembly import Priced

_MORE_TO_ADD = 0.5
"""What adding up may take longer than copying: it moves three tensors where that moves two."""


def nearest_copy(profile: Profile, work: TensorCopy, ranks_on_host: int) -> CopyTime | None:
    """What was measured with the nearest number of ranks on the host; None where nothing was.

    Copies into buckets stand for sums that were not measured.
    """
    copies = _copies(profile, work)
    if not copies:
        return None
    measured = nearest_count([copy.ranks_on_host for copy in copies], ranks_on_host)
    return next(copy for copy in copies if copy.ranks_on_host == measured)


def alone_over_all(work: TensorCopy, known: KnownCosts, place: PricingContext) -> tuple[float, float]:
    """Seconds with one rank on the host over those with all of them, and the ratio's standard deviation.

    1 and 0 where they were not measured both ways.
    """
    ranks_on_host = place.ranks_on_host
    measured = {copy.ranks_on_host: copy for copy in _copies(known.profile, work)}
    if not {1, ranks_on_host} <= measured.keys():
        return 1.0, 0.0
    one, every = measured[1], measured[ranks_on_host]
    of_all = every.seconds(work.bytes, work.tensors)
    if not of_all:
        return 1.0, 0.0
    ratio = one.seconds(work.bytes, work.tensors) / of_all
    return ratio, ratio * (one.relative_sd**2 + every.relative_sd**2) ** 0.5


def priced_copy(copy: CopyTime, work: TensorCopy, count: float, ranks_on_host: int) -> Priced:
    """Gradients moved, by a measurement; a sum that was not measured is a copy that may take half as long again."""
    seconds = copy.seconds(work.bytes, work.tensors)
    remarks: list[Remark] = []
    if copy.ranks_on_host != ranks_on_host:
        text = f"{copy.what} were measured with {copy.ranks_on_host} ranks on a host, and are used for {ranks_on_host}"
        remarks.append(Remark(text, True))
    stands_in = copy.direction != work.direction
    if stands_in:
        remarks.append(Remark("adding up gradients was not measured: the times of copies into buckets are used", True))
    cost = Cost(
        seconds,
        Source.SCALED if remarks else Source.REGRESSED,
        method_sd_s=_MORE_TO_ADD * seconds * UNIFORM_TO_SD if stands_in else 0.0,
        remarks=tuple(remarks),
    )
    return Priced(cost, count, work, modes=((copy.what, seconds * copy.relative_sd),))


def _copies(profile: Profile, work: TensorCopy) -> list[CopyTime]:
    copies = [copy for copy in profile.copies if copy.direction == work.direction]
    if not copies and work.direction == "add":
        return [copy for copy in profile.copies if copy.direction == "into"]
    return copies


def _price(work: BucketCopy, known: KnownCosts, context: WorkContext) -> Priced:
    on_host = context.plan.place.ranks_on_host
    copy = nearest_copy(known.profile, work, on_host)
    if copy is None and not known.profile.model_times:
        return Priced(known.model.unmeasured.copy(work.bytes, work.tensors, on_host), context.occurrences, work)
    if copy is None:
        raise UserError(
            "the profile holds no times of copying gradients into and out of buckets; measure a model again:"
            f" paradl-bench layers {known.model_name} --batch N -o DIR, then calibrate fit"
        )
    return priced_copy(copy, work, context.occurrences, on_host)


def _demand(work: BucketCopy, context: DemandContext) -> Demand:
    measured = nearest_copy(context.profile, work, context.ranks_on_host)
    moved = copy_shape("D2D", work.bytes, work.tensors).bytes
    return Demand(0.0, moved, 0.0 if measured is None else work.tensors * measured.alpha_s)


COSTS = KindCosts(kind=BucketCopy, price=_price, alone_on_host=alone_over_all, demand=_demand)
