"""What compute and a collective under way at once cost each other: as measured, or as published for GPUs.

Nobody who did not measure it should be told that overlap is free: on GPUs it never was. Kernels of a collective hold
multiprocessors, and what they move goes through the memory that compute reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from calibrate.profile.collectives.communication import Interference
from calibrate.profile.collectives.communication_time import outside
from paradl_bench.core.statistics import IQR_TO_SD
from paradl_bench.plan.tasks import Collective
from predict.costs.sourced import Remark

PUBLISHED_COMPUTE_SLOWDOWN = 1.189
"""Compute with communication beside it over compute by itself: the mean over models, parallelism and A100, H100, MI210
and MI250 in "Characterizing Compute-Communication Overlap in GPU-Accelerated Distributed Deep Learning"
(arXiv:2507.03114, abstract; 1.4 at most). That is of all compute, whatever part had communication beside it, so the
least that it can be while both are under way. What it costs collectives is not told."""

_MEASURE = "measure it: paradl-bench collectives --beside-compute"


class Slowdown(NamedTuple):
    """How much slower compute and the collective each are side by side, with standard deviations over what ran."""

    compute: float
    communication: float
    compute_sd: float
    communication_sd: float
    remarks: tuple[Remark, ...]


def unmeasured_slowdown(*, of_gpu: bool) -> Slowdown:
    """Where no interference was measured: the published mean on GPUs; else, there being none, nothing, and flagged."""
    if of_gpu:
        text = (
            "no interference was measured: simulate has compute take "
            f"{PUBLISHED_COMPUTE_SLOWDOWN:g} times as long beside communication, a published mean of GPUs "
            f"(arXiv:2507.03114); {_MEASURE}"
        )
        return Slowdown(PUBLISHED_COMPUTE_SLOWDOWN, 1.0, 0.0, 0.0, (Remark(text, True),))
    text = f"no interference was measured, overlap is taken as free; {_MEASURE}"
    return Slowdown(1.0, 1.0, 0.0, 0.0, (Remark(text, True),))


def measured_slowdown(found: Sequence[Interference], work: Collective, level: str) -> Slowdown:
    """That of the likest of what was measured, with a remark where it is not of this operation or of as many ranks."""
    entry = min(found, key=lambda each: _unlikeness(each, work, level))
    remarks = []
    if entry.operation != work.operation:
        text = f"interference of {work.operation}: as measured for {entry.operation}"
        remarks.append(Remark(text, True))
    if entry.ranks < work.ranks:
        remarks.append(Remark(f"interference beyond the {entry.ranks} ranks that it was measured with", True))
    return Slowdown(
        entry.compute_slowdown,
        entry.communication_slowdown,
        entry.compute_slowdown_iqr * IQR_TO_SD,
        entry.communication_slowdown_iqr * IQR_TO_SD,
        tuple(remarks),
    )


def _unlikeness(entry: Interference, work: Collective, level: str) -> tuple[bool, bool, float, float]:
    return (
        entry.operation != work.operation,
        entry.level != level,
        abs(math.log(entry.ranks / work.ranks)),
        outside(work.message_bytes, entry.message_bytes),
    )
