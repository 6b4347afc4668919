"""Seconds of copying gradients into and out of buckets, and which measurement stands for a number of ranks."""

from __future__ import annotations

from calibrate.profile import CopyTime, Profile
from paradl_bench.spec.plan import BucketCopy
from predict.assembly import Priced
from predict.costs import UNIFORM_TO_SD, Cost, Remark, Source
from predict.layer_costs import nearest_count

_MORE_TO_ADD = 0.5
"""What adding up may take longer than copying: it moves three tensors where that moves two."""


def measured_direction(work: BucketCopy) -> str:
    """The direction whose measurement stands for a copy: gradients are added up as they are copied into buckets."""
    return "into" if work.direction == "add" else work.direction


def nearest_copy(profile: Profile, work: BucketCopy, ranks_on_host: int) -> CopyTime | None:
    """The copies that were measured with the nearest number of ranks on the host; None where none were."""
    direction = measured_direction(work)
    copies = [copy for copy in profile.copies if copy.direction == direction]
    if not copies:
        return None
    measured = nearest_count([copy.ranks_on_host for copy in copies], ranks_on_host)
    return next(copy for copy in copies if copy.ranks_on_host == measured)


def priced_copy(copy: CopyTime, work: BucketCopy, count: float, ranks_on_host: int) -> Priced:
    """A copy of gradients by a measurement; adding up was not measured, and is a copy that may take half as long again.

    Args:
        copy: of :func:`nearest_copy`.
    """
    seconds = work.tensors * copy.alpha_s + work.bytes * copy.beta_s_per_byte
    remarks: list[Remark] = []
    if copy.ranks_on_host != ranks_on_host:
        text = f"bucket copies were measured with {copy.ranks_on_host} ranks on a host, and stand for {ranks_on_host}"
        remarks.append(Remark(text, True))
    added = work.direction == "add"
    if added:
        remarks.append(Remark("adding up gradients was not measured, copies into buckets stand for it", True))
    cost = Cost(
        seconds,
        Source.SCALED if remarks else Source.REGRESSED,
        method_sd_s=_MORE_TO_ADD * seconds * UNIFORM_TO_SD if added else 0.0,
        remarks=tuple(remarks),
    )
    mode = f"copies {measured_direction(work)} buckets", seconds * copy.relative_sd
    return Priced(cost, count, work, modes=(mode,))
