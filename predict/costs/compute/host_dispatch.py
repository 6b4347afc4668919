"""A device runs behind its host: where kernels are shorter than their dispatch, it waits for the host.

The host dispatches one operation after the other and does not wait. Operation k starts when its dispatch is over (H_k,
a running sum) and the one before it is done, so that a stretch of a phase takes max over k of (H_k + what the device
takes from k on): the longer of host and device, block by block. What that is over the device's own time is added to the
time between operations. It holds where nothing was timed in iterations, which wait for their host already, or where the
host was timed beside them, while the device was held before every operation.

Host and device start an iteration together, and the host keeps what it is ahead from one phase, or micro-batch, to the
next. An operation without a kernel (a view) counts as none. Collectives of layers are dispatched too; the device is
busy with those that compute waits for, and not with what is gathered ahead or reduced behind, as ZeRO does.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibrate.profile.profile import SHORTEST_KERNEL_S, Dispatch, ModelTime, Profile
from paradl_bench.core.cache_keys import Answers
from paradl_bench.core.statistics import Z90, grouped
from paradl_bench.core.units import format_seconds
from paradl_bench.plan.tasks import Compute, FrameworkOverhead, Ints, Phase, Plan, Role
from predict.costs.sourced import HOST_DISPATCH, UNKNOWN_RELATIVE_SD, Adjustment, Cost, Floats, Remark, Source
from predict.costs.spread.assembly import Priced

Bools = NDArray[np.bool_]

UNMEASURED = Dispatch(forward_s=50e-6, backward_s=100e-6, relative_sd=UNKNOWN_RELATIVE_SD)
"""Of a host that nobody measured: about the middle of two. In published traces of ResNet-50 and DLRM (``param``) the
hosts of GPUs start an operation that runs a kernel every 73 us forward and 163 us backward; the profiler that wrote
them slows the host. A CPU host without one takes 18 us (the median of three networks), and the shortest published
kernel 7 us. Twice as much and nothing are both within the interval. The one host that this tool timed, of an H200, took
38 to 97 us forward and 49 to 95 us backward in three networks; that was seen afterwards."""
ALONE_RELATIVE_SD = 0.13
"""How far an iteration's kernels may be off by times of kernels alone. Products of eleven published traces were timed
twice on their GPUs, in a table of kernels and one by one in the network: the sums differ by 19% (root mean square of
logarithms), so that one table is off by that over the square root of two. Clocks, caches and fusion are all in it."""
HOST_BOUND = "host-bound: kernels wait for their dispatch; larger micro-batches or CUDA graphs would help"
_SUBJECT = "dispatch"
WORTH_SAYING = 0.05
"""Of what kernels take: every phase waits for its first dispatch, which binds nobody."""


_ALONE = Remark(
    "no iteration was timed on this device: all compute times may share one error, as large as the difference"
    f" between two tables of the same kernels (standard deviation {ALONE_RELATIVE_SD:.0%})",
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


def dispatch_of(profile: Profile, model_time: ModelTime | None = None, dtype: str = "") -> Dispatch | None:
    """What the device's host takes: beside the model's own iterations, else beside others', else as it was fitted.

    None where iterations tell, and of devices that are their own host. Layers that were timed inside of iterations tell
    it too.
    """
    device = profile.devices[0] if profile.devices else None
    if device is None or device.kind != "cuda" or profile.time_factor is not None:
        return None
    if model_time is not None and model_time.dispatch:
        return model_time.dispatch
    timed = [time for time in profile.model_times if time.dispatch and time.dtype == dtype]
    if timed:
        return _typical([[time.dispatch or UNMEASURED for time in of_model] for of_model in _by_model(timed)])
    if _tells_of_iterations(profile):
        return None
    return device.dispatch or UNMEASURED


def _by_model(times: Iterable[ModelTime]) -> Collection[Sequence[ModelTime]]:
    return grouped(times, lambda time: time.model).values()


def _typical(models: Sequence[Sequence[Dispatch]]) -> Dispatch:
    """Of a model that was not timed: medians over those that were, and how these differ."""
    dispatches = [dispatch for of_model in models for dispatch in of_model]
    both_s = [statistics.median(d.forward_s + d.backward_s for d in of_model) for of_model in models]
    spread = statistics.stdev(both_s) / statistics.median(both_s) if len(models) > 1 else UNKNOWN_RELATIVE_SD
    return Dispatch(
        forward_s=statistics.median(dispatch.forward_s for dispatch in dispatches),
        backward_s=statistics.median(dispatch.backward_s for dispatch in dispatches),
        relative_sd=math.hypot(spread, statistics.median(dispatch.relative_sd for dispatch in dispatches)),
        timed=True,
    )


def alone_relative_sd(profile: Profile) -> float:
    """What everything that computes shares, where no iteration of a GPU tells how kernels differ inside of one."""
    return 0.0 if _tells_of_iterations(profile) or dispatch_of(profile) is None else ALONE_RELATIVE_SD


def _tells_of_iterations(profile: Profile) -> bool:
    return bool(profile.model_times) or any(time.mode == "in_situ" for time in profile.layer_times)


def with_dispatch(
    dispatch: Dispatch | None, plan: Plan, parts: Mapping[int, Priced], after_compute: Callable[[Plan], Bools]
) -> dict[int, Priced]:
    """Parts by index of a plan's works, what the device waits for its host in the time between operations.

    Args:
        after_compute: per work of a plan, whether compute waits for it.
    """
    overheads = plan.of_kind(FrameworkOverhead).keys() & parts.keys()
    with_waits = dict(parts)
    if dispatch is None or not overheads:
        return with_waits
    ends = (1.0, 1 + Z90 * dispatch.relative_sd, max(1 - Z90 * dispatch.relative_sd, 0.0))
    usual, slow, fast = _gaps(plan, parts, dispatch, ends, after_compute(plan))
    is_unmeasured = not (dispatch.runs or dispatch.timed)
    remarks = [_where_from(dispatch)] if dispatch.timed else [_where_from(dispatch), _ALONE]
    if usual.waits_s.sum() > WORTH_SAYING * usual.device_s:
        remarks.append(Remark(HOST_BOUND, is_unmeasured))
    for work in overheads:
        between = parts[work].cost
        cost = _waiting(between, usual.mean_s(work))._replace(
            source=_source(dispatch),
            method_sd_s=math.hypot(between.method_sd_s, (slow.mean_s(work) - fast.mean_s(work)) / (2 * Z90)),
            remarks=(*between.remarks, *remarks),
            method="host",
        )
        with_waits[work] = parts[work]._replace(cost=cost)
    return with_waits


def _waiting(between: Cost, waits_s: float) -> Cost:
    """The time between operations with what it waits for the host, which a ledger shows as an effect."""
    effect = (Adjustment(HOST_DISPATCH, waits_s),) if waits_s else ()
    return between._replace(
        seconds=between.seconds + waits_s,
        adjustments=(*between.adjustments, *effect),
        base_source=between.origin if between.seconds else None,
    )


def _source(dispatch: Dispatch) -> Source:
    if dispatch.timed:
        return Source.MEASURED
    return Source.REGRESSED if dispatch.runs else Source.STATED


def said_of_dispatch(lines: Iterable[str]) -> str:
    """Of a prediction's remarks, the one that says what a dispatch takes and who says so; empty for none."""
    return next((line for line in lines if line.startswith(_SUBJECT)), "")


def _where_from(dispatch: Dispatch) -> Remark:
    if dispatch.timed or dispatch.runs:
        how = "timed on its host" if dispatch.timed else "fitted to training runs"
        return Remark(f"{_SUBJECT} of an operation takes {format_seconds(dispatch.forward_s)} forward, {how}", False)
    text = (
        f"{_SUBJECT} on this host was not timed: {format_seconds(dispatch.forward_s)} an operation are assumed, and"
        " the interval covers zero to twice as much"
    )
    return Remark(text, True)


def _gaps(
    plan: Plan, parts: Mapping[int, Priced], dispatch: Dispatch, ends: Sequence[float], waited_for: Bools
) -> list[_Gaps]:
    """How long works of time between operations wait, if dispatch takes each of so many times as long."""
    device_s, host_s = np.zeros(len(plan.works)), np.zeros(len(plan.works))
    for work, part in parts.items():
        kind = plan.works[work]
        dispatched = isinstance(kind, Compute) or (part.is_communication and kind.is_of_layer and kind.meets)
        if dispatched and part.cost.seconds >= SHORTEST_KERNEL_S:
            is_forward = not isinstance(kind, Compute) or kind.way == "FW"
            device_s[work] = part.cost.seconds if isinstance(kind, Compute) or waited_for[work] else 0.0
            host_s[work] = dispatch.forward_s if is_forward else dispatch.backward_s
    is_overhead = np.zeros(len(plan.works), bool)
    is_overhead[list(plan.of_kind(FrameworkOverhead))] = True
    issued = sum(role.multiplicity * role.counts(len(plan.works)) for role in plan.roles)
    all_s = float((device_s * issued).sum())
    counted = (host_s > 0) | is_overhead
    key = "stretches", counted.tobytes()
    of_roles = plan.found.once(key, lambda: _stretches_of_roles(plan, counted, is_overhead))
    occurrences = np.zeros(len(plan.works))
    for role, stretches in zip(plan.roles, of_roles, strict=True):
        occurrences += role.multiplicity * stretches.occurrences
    alike = Answers()
    gaps_of_ends = [_Gaps(occurrences, np.zeros(len(plan.works)), all_s) for _ in ends]
    for role, stretches in zip(plan.roles, of_roles, strict=True):
        waits_s = alike.once(id(role.arrays), functools.partial(_waits_s, stretches, device_s, host_s, ends))
        for gaps, of_end_s in zip(gaps_of_ends, waits_s, strict=True):
            _add_waits(role.multiplicity, stretches, of_end_s, gaps.waits_s)
    return gaps_of_ends


def _waits_s(stretches: _Stretches, device_s: Floats, host_s: Floats, ends: Sequence[float]) -> list[list[float]]:
    """Seconds that each of the distinct stretches waits, all times together; for dispatch so many times as long."""
    known = [_stretch(device_s[works], host_s[works], ends) for works in stretches.distinct]
    waits_of_ends = []
    for end in range(len(ends)):
        waits_s, dispatched_s, done_s = [0.0] * len(known), 0.0, 0.0
        for which in stretches.order:
            stretch = known[which]
            end_s = max(done_s + stretch.device_s, dispatched_s + stretch.from_first_dispatch_s[end])
            waits_s[which] += max(end_s - done_s - stretch.device_s, 0.0)
            dispatched_s, done_s = dispatched_s + stretch.host_s[end], end_s
        waits_of_ends.append(waits_s)
    return waits_of_ends


def _add_waits(ranks: int, stretches: _Stretches, waits_s: Sequence[float], of_works_s: Floats) -> None:
    """Add what stretches of one phase wait on so many ranks, shared out over the operations of each."""
    for overheads, waited_s in zip(stretches.overheads, waits_s, strict=True):
        if waited_s and len(overheads):
            np.add.at(of_works_s, overheads, ranks * waited_s / len(overheads))


class _Stretches(NamedTuple):
    """Runs of a role's tasks that are of one phase, forward or backward: works of those that differ, and their order.

    Micro-batches repeat their stretches.

    Attributes:
        overheads: per distinct stretch, those of its works that are time between operations.
        occurrences: per work of the plan, how often such time is among the tasks of all stretches.
    """

    distinct: list[Ints]
    order: list[int]
    overheads: list[Ints]
    occurrences: NDArray[np.int64]


def _stretches_of_roles(plan: Plan, counted: Bools, is_overhead: Bools) -> list[_Stretches]:
    alike = Answers()
    return [
        alike.once(id(role.arrays), functools.partial(_stretches, role, counted, is_overhead)) for role in plan.roles
    ]


def _stretches(role: Role, counts: Bools, is_overhead: Bools) -> _Stretches:
    brief = role.arrays.brief
    tasks = brief.tasks
    kept = np.flatnonzero(np.isin(tasks.phase, (Phase.FW, Phase.BW)) & counts[tasks.work])
    phases, works, actions = tasks.phase[kept], tasks.work[kept], brief.action[kept]
    begins = np.append(True, (np.diff(phases) != 0) | (np.diff(actions) != 0))[: len(kept)]
    first = np.flatnonzero(begins)
    parts, phase_of = np.split(works, first[1:]), phases[first].tolist()
    parts_of: list[list[int]] = [[] for _ in brief.forward_here]
    for part, action in enumerate(actions[first].tolist()):
        parts_of[action].append(part)
    in_order = itertools.chain.from_iterable(map(parts_of.__getitem__, brief.like.tolist()))
    numbers: dict[tuple[int, ...], int] = {}
    order = [
        numbers.setdefault(tuple(stretch), len(numbers))
        for _, stretch in itertools.groupby(in_order, phase_of.__getitem__)
    ]
    distinct = [np.concatenate([parts[part] for part in stretch]) for stretch in numbers]
    overheads = [works[is_overhead[works]] for works in distinct]
    occurrences = np.bincount(works, weights=brief.times[kept], minlength=len(counts)).astype(int) * is_overhead
    return _Stretches(distinct, order, overheads, occurrences)


class _Stretch(NamedTuple):
    """Seconds of a stretch: of its device alone; of its host alone; and to its end where only the host holds it up.

    The latter two by how long dispatch takes.
    """

    device_s: float
    host_s: list[float]
    from_first_dispatch_s: list[float]


def _stretch(device_s: Floats, host_s: Floats, ends: Sequence[float]) -> _Stretch:
    """Of operations in their order."""
    of_ends_s = np.multiply.outer(ends, host_s)
    dispatched_s, left_s = np.cumsum(of_ends_s, axis=1), np.cumsum(device_s[::-1])[::-1]
    waits = of_ends_s > 0
    held_s = np.max(np.where(waits, dispatched_s + left_s, 0.0), axis=1, initial=0.0)
    return _Stretch(float(device_s.sum()), of_ends_s.sum(axis=1).tolist(), held_s.tolist())
