"""A device runs behind its host: where kernels are shorter than their dispatch, it waits for the host.

The host dispatches one operation after the other and does not wait. Operation k starts when its dispatch is over (H_k,
a running sum) and the one before it is done, so that a stretch of a phase takes max over k of (H_k + what the device
takes from k on): the longer of host and device, block by block. What that is over the device's own time is time between
operations. It holds where no iteration was measured, whose time between operations has it in already.

Host and device start a stretch together: what the host is ahead at the end of forward is not taken into backward. An
operation without a kernel (a view) counts as none. Collectives that layers wait for are dispatched too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibrate.profile.profile import Dispatch, Profile
from paradl_bench.core.statistics import Z90
from paradl_bench.core.units import format_seconds
from paradl_bench.plan.tasks import Compute, FrameworkOverhead, Phase, Plan, Role
from predict.costs.sourced import UNKNOWN_RELATIVE_SD, Floats, Ints, Remark, Source
from predict.costs.spread.assembly import Priced

Bools = NDArray[np.bool_]

UNMEASURED = Dispatch(forward_s=50e-6, backward_s=100e-6, relative_sd=UNKNOWN_RELATIVE_SD, runs=())
"""Of a host that nobody measured: about the middle of two. In published traces of ResNet-50 and DLRM (``param``) the
hosts of GPUs start an operation that runs a kernel every 73 us forward and 163 us backward; the profiler that wrote
them slows the host. A CPU host without one takes 18 us (the median of three networks), and the shortest published
kernel 7 us. Twice as much and nothing are both within the interval."""
ALONE_RELATIVE_SD = 0.13
"""How far an iteration's kernels may be off by times of kernels alone. Products of eleven published traces were timed
twice on their GPUs, in a table of kernels and one by one in the network: the sums differ by 19% (root mean square of
logarithms), so that one table is off by that over the square root of two. Clocks, caches and fusion are all in it."""
HOST_BOUND = "host-bound: kernels wait for their dispatch; larger micro-batches or CUDA graphs would help"
WORTH_SAYING = 0.05
"""Of what kernels take: every phase waits for its first dispatch, which binds nobody."""


_ALONE = Remark(
    "no iteration was timed on this device: all that computes may be off together, by as much as two tables of the same"
    f" kernels differ (standard deviation {ALONE_RELATIVE_SD:.0%})",
    True,
)


class _Gaps(NamedTuple):
    """Per work of a plan, how often it occurs, and seconds that its occurrences wait for the host, in all roles.

    ``device_s`` is what all roles' kernels take.
    """

    occurrences: Floats
    waits_s: Floats
    device_s: float

    def mean_s(self, work: int) -> float:
        return float(self.waits_s[work] / max(self.occurrences[work], 1))


def dispatch_of(profile: Profile) -> Dispatch | None:
    """What the device's host takes; None where iterations tell, and of devices that are their own host.

    Layers that were timed inside of iterations tell it too.
    """
    device = profile.devices[0] if profile.devices else None
    told = bool(profile.model_times) or any(time.mode == "in_situ" for time in profile.layer_times)
    if device is None or told or device.kind != "cuda" or profile.time_factor is not None:
        return None
    return device.dispatch or UNMEASURED


def alone_relative_sd(profile: Profile) -> float:
    """What everything that computes shares, where no iteration of a GPU tells how kernels differ inside of one."""
    return 0.0 if dispatch_of(profile) is None else ALONE_RELATIVE_SD


def with_dispatch(profile: Profile, plan: Plan, parts: Mapping[int, Priced]) -> dict[int, Priced]:
    """Parts by index of a plan's works, time between operations as the host has it."""
    dispatch = dispatch_of(profile)
    overheads = plan.of_kind(FrameworkOverhead).keys() & parts.keys()
    found = dict(parts)
    if dispatch is None or not overheads:
        return found
    ends = (1.0, 1 + Z90 * dispatch.relative_sd, max(1 - Z90 * dispatch.relative_sd, 0.0))
    usual, slow, fast = (_gaps(plan, parts, dispatch, times) for times in ends)
    is_unmeasured = not dispatch.runs
    remarks = [_where_from(dispatch), _ALONE]
    if usual.waits_s.sum() > WORTH_SAYING * usual.device_s:
        remarks.append(Remark(HOST_BOUND, is_unmeasured))
    for work in overheads:
        cost = parts[work].cost._replace(
            seconds=usual.mean_s(work),
            source=Source.STATED if is_unmeasured else Source.REGRESSED,
            method_sd_s=(slow.mean_s(work) - fast.mean_s(work)) / (2 * Z90),
            remarks=tuple(remarks),
            method="host",
        )
        found[work] = parts[work]._replace(cost=cost)
    return found


def _where_from(dispatch: Dispatch) -> Remark:
    if dispatch.runs:
        text = f"dispatch of an operation takes {format_seconds(dispatch.forward_s)} forward, fitted to training runs"
        return Remark(text, False)
    text = (
        f"nobody measured what this host takes to dispatch an operation: {format_seconds(dispatch.forward_s)} are"
        " taken, and the interval has anything from nothing to twice as much"
    )
    return Remark(text, True)


def _gaps(plan: Plan, parts: Mapping[int, Priced], dispatch: Dispatch, times: float) -> _Gaps:
    """How long works of time between operations wait, if dispatch takes so many times as long."""
    device_s, host_s = np.zeros(len(plan.works)), np.zeros(len(plan.works))
    for work, part in parts.items():
        kind = plan.works[work]
        waited_for = isinstance(kind, Compute) or (part.is_communication and kind.is_of_layer and kind.meets)
        if waited_for and part.cost.seconds:
            is_forward = not isinstance(kind, Compute) or kind.way == "FW"
            device_s[work] = part.cost.seconds
            host_s[work] = times * (dispatch.forward_s if is_forward else dispatch.backward_s)
    is_overhead = np.zeros(len(plan.works), bool)
    is_overhead[list(plan.of_kind(FrameworkOverhead))] = True
    all_s = sum(role.multiplicity * float(device_s[role.work].sum()) for role in plan.roles)
    gaps = _Gaps(np.zeros(len(plan.works)), np.zeros(len(plan.works)), all_s)
    for role in plan.roles:
        _add_waits(role, device_s, host_s, is_overhead, gaps)
    return gaps


def _add_waits(role: Role, device_s: Floats, host_s: Floats, is_overhead: Bools, gaps: _Gaps) -> None:
    """Add what a role's stretches of one phase wait, shared out over the operations of each."""
    known: dict[bytes, float] = {}
    for works in _stretches(role, (host_s > 0) | is_overhead):
        overheads = works[is_overhead[works]]
        if not len(overheads):
            continue
        waits_s = known.setdefault(works.tobytes(), _waits_s(device_s[works], host_s[works]))
        np.add.at(gaps.occurrences, overheads, role.multiplicity)
        np.add.at(gaps.waits_s, overheads, role.multiplicity * waits_s / len(overheads))


def _stretches(role: Role, counts: Bools) -> list[Ints]:
    """Works of each run of a role's tasks that are of one phase, forward or backward."""
    kept = np.flatnonzero(np.isin(role.phase, (Phase.FW, Phase.BW)) & counts[role.work])
    phases = role.phase[kept]
    return np.split(role.work[kept], np.flatnonzero(np.diff(phases)) + 1)


def _waits_s(device_s: Floats, host_s: Floats) -> float:
    """Of operations in their order, seconds over the device's own."""
    left_s = np.cumsum(device_s[::-1])[::-1]
    return float(np.max(np.cumsum(host_s) + left_s) - left_s[0]) if host_s.any() else 0.0
