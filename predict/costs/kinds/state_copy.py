"""Copies of an optimizer's state between host memory and the device."""

from __future__ import annotations

from calibrate.profile.input_side import HostCopy
from calibrate.profile.profile import Profile
from paradl_bench.core.errors import UserError
from paradl_bench.core.units import format_bytes
from paradl_bench.plan.works.moving import BucketCopy, StateCopy
from predict.costs.kinds.bucket_copy import alone_over_all, nearest_copy, priced_copy
from predict.costs.kinds.kind_costs import KindCosts, KnownCosts, WorkContext
from predict.costs.sourced import Cost, Remark, Source
from predict.costs.spread.assembly import Priced


def _price(work: StateCopy, known: KnownCosts, context: WorkContext) -> Priced:
    priced = _copied(work, known, context)
    held = Remark("the optimizer's state lies in host memory, bytes a rank", False, format_bytes(work.bytes))
    return priced._replace(cost=priced.cost._replace(remarks=(held, *priced.cost.remarks)))


def _copied(work: StateCopy, known: KnownCosts, context: WorkContext) -> Priced:
    """By the copies that were measured; else by those of the input to a device, or by a CPU's inside of its memory."""
    on_host, profile = context.plan.place.ranks_on_host, known.profile
    copy = nearest_copy(profile, work, on_host)
    if copy is not None:
        return priced_copy(copy, work, context.occurrences, on_host)
    of_input = _copy_of_input(profile)
    if of_input is not None:
        seconds = work.tensors * of_input.alpha_s + work.bytes * of_input.beta_s_per_byte
        cost = _standing_in(Cost(seconds, Source.SCALED), f"the input's copies from {of_input.how} memory")
        modes = (("copies of the input", seconds * of_input.relative_sd),)
        return Priced(cost, context.occurrences, work, modes=modes)
    bucket = BucketCopy(direction="into", bytes=work.bytes, tensors=work.tensors)
    copy = nearest_copy(profile, bucket, on_host)
    if copy is not None and all(device.kind == "cpu" for device in profile.devices):
        priced = priced_copy(copy, bucket, context.occurrences, on_host)
        return priced._replace(cost=_standing_in(priced.cost, copy.what), measurement=work)
    raise UserError(
        "the profile holds no times of copying to the device and back, which --offload needs; measure a model"
        f" again: paradl-bench layers {known.model_name} --batch N -o DIR, then calibrate fit"
    )


def have_prices(profile: Profile) -> bool:
    """Whether copies of an optimizer's state have a price: their own, the input's or that of gradients' copies."""
    known = {copy.direction for copy in profile.copies}
    on_cpu = all(device.kind == "cpu" for device in profile.devices)
    return {"fetch", "store"} <= known or _copy_of_input(profile) is not None or ("into" in known and on_cpu)


def _standing_in(cost: Cost, what: str) -> Cost:
    remark = Remark(f"copies of the optimizer's state were not measured: the times of {what} are used", True)
    return cost._replace(source=Source.SCALED, remarks=(*cost.remarks, remark))


def _copy_of_input(profile: Profile) -> HostCopy | None:
    """From pinned memory to the device; None where only a copy inside of host memory was measured."""
    return next((copy for side in profile.input_side for copy in side.copies if copy.how == "pinned"), None)


COSTS = KindCosts(kind=StateCopy, price=_price, alone_on_host=alone_over_all)
