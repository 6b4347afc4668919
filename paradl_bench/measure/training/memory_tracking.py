"""Peak memory of one iteration on this rank, by category, as torch saw it.

torch's tracker watches every storage that an operator makes or reads, on the dispatcher, and says what it is for; on a
GPU the allocator's own peak and what it took of the device are kept as well. What was made before the iteration
and is read or written in it, as the exchange's buckets and the buffers that a pipeline receives into, was held
throughout, and counts so. Tracking is slow: the iteration is not timed.

torch adds up gradients in another way while it is tracked, so the allocator is asked about an iteration of its own,
with nothing cached from before (the model was run whole to see whether it runs).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed._tools.common_utils import get_untyped_storages
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from paradl_bench.measure.execution.optimizers import own_optimizers
from paradl_bench.measure.tracing.gradient_order import SumOfGradients
from paradl_bench.records.training.training_record import MemoryPeak
from paradl_bench.strategies.running.unit_hooks import entering, hide_hooks, unseen

_CATEGORIES = {
    "PARAM": "parameters",
    "BUFFER": "buffers",
    "GRAD": "gradients",
    "OPT": "optimizer",
    "ACT": "activations",
    "TEMP": "temporary",
    "INP": "input",
    "OTH": "other",
    # Of sharded parameters and gradients, and of the whole ones while they are there.
    "SHARDED_PARAM": "parameters",
    "UNSHARDED_PARAM": "parameters",
    "SHARDED_GRAD": "gradients",
    "UNSHARDED_GRAD": "gradients",
    "ALL_GATHER": "communication",
    "REDUCE_SCATTER": "communication",
}
_COMMUNICATION = "communication"
_TOTAL = "Total"
_LET_GO_S, _LET_GO_AT_MOST_S = 1e-3, 0.2
"""What a communication thread is given to let go of a message that is done: it may share a core with this one, and hold
the message for as long as it has to wait for it. So peaks are repeatable."""
_TASKS = "/proc/self/task"


class _NoModules:
    """Stands for the tracker's account of modules, whose hooks hold gradients longer than training does."""

    parents: frozenset[str] = frozenset()

    @property
    def is_bw(self) -> bool:
        return bool(torch._C._current_graph_task_id() != -1)

    def get_known_fqn(self, _: torch.nn.Module) -> str:
        return ""

    def register_user_hooks(self, *hooks: Any) -> None:
        pass

    def clear_user_hooks(self) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *args: object) -> None:
        pass


class _RealMoments(MemTracker):  # type: ignore[no-untyped-call]
    """Leaves out of the peak what is there only because somebody looks.

    That is what communication threads let go of late, and third tensors where gradients are added.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sum: SumOfGradients[dict[torch.device, dict[Any, int]]] | None = None
        self._communicated = False
        self._standing = WeakIdKeyDictionary()
        # Numbers of operations: the one running, and the one of the peak.
        self._operation = self._peak_operation = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.settle()
        self._operation += 1
        if self._communicated:
            _wait_for_threads()
        self._communicated = func.namespace == "c10d"
        if func is torch.ops.aten.add.Tensor and not types and self._mod_tracker.is_bw:
            self._sum = SumOfGradients(args[0])
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    def _update_peak_stats(self, peak_state: Any) -> None:
        if self._sum is not None:
            self._sum.moment = self.get_tracker_snapshot()
            return
        before = dict(self._peak_mem)
        super()._update_peak_stats(peak_state)
        if self._peak_mem != before:
            self._peak_operation = self._operation

    @property
    def standing_bytes(self) -> int:
        """Bytes of what was found, and neither made in the iteration nor among what is watched."""
        return sum(self._standing.values())  # type: ignore[no-untyped-call]

    def _find_standing(self, device: torch.device, *given: Any) -> None:
        """Note what an operator is given that was there before the iteration."""
        for value in tree_leaves(given):
            if isinstance(value, torch.Tensor) and value.device == device:
                for storage in get_untyped_storages(value):
                    if storage not in self._WINFO and storage not in self._standing:
                        self._standing[storage] = storage.nbytes()

    def _track(self, reftype: Any, t: torch.Tensor) -> None:
        if not any(storage in self._standing for storage in get_untyped_storages(t)):
            super()._track(reftype, t)

    def settle(self) -> None:
        """Count the moment of the last sum of gradients, unless autograd would have added in place."""
        done, self._sum = self._sum, None
        if done is None or done.moment is None or done.in_place:
            return
        for device, snapshot in done.moment.items():
            total = sum(size for category, size in snapshot.items() if category != _TOTAL)
            if total > self._peak_mem.get(device, 0):
                self._peak_mem[device], self._peak_mem_snap[device] = total, snapshot
                self._peak_operation = self._operation


class _ShardedTracker(_RealMoments, FSDPMemTracker):  # type: ignore[no-untyped-call]
    """Of modules whose parameters are sharded."""

    def __init__(self, device: torch.device, *args: Any) -> None:
        super().__init__(*args)
        self._device = device
        # Its hooks run in no backward that is asked for gradients of activations alone, as a part of one is.
        self._mod_tracker = _NoModules()  # type: ignore[assignment]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            # What stages receive into; units come and go in memory that stands empty between.
            self._find_standing(self._device, args, kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _fsdp_state_pre_forward(self, fsdp_mod: FSDPModule, orig_fsdp_state_pre_fw: Callable[..., Any]) -> Any:
        tracked = super()._fsdp_state_pre_forward(fsdp_mod, orig_fsdp_state_pre_fw)

        def inner(*args: Any, **kwargs: Any) -> Any:
            # The tracker takes the model's second forward for an iteration more: here it is of another micro-batch.
            if fsdp_mod is self._root_mod and fsdp_mod in self.memory_tracking and not self._mod_tracker.is_bw:
                del self.memory_tracking[fsdp_mod]
            return tracked(*args, **kwargs)

        # The tracker puts hooks of its own in the place of those that were hidden.
        return entering(inner)

    def _fsdp_state_post_forward(self, fsdp_mod: FSDPModule, orig_fsdp_state_post_fw: Callable[..., Any]) -> Any:
        return unseen(super()._fsdp_state_post_forward(fsdp_mod, orig_fsdp_state_post_fw))

    def _fsdp_param_group_post_backward(
        self, fsdp_mod: FSDPModule, orig_fsdp_param_group_post_backward: Callable[..., Any]
    ) -> Callable[..., None]:
        tracked = super()._fsdp_param_group_post_backward(fsdp_mod, orig_fsdp_param_group_post_backward)

        def inner(*args: Any, **kwargs: Any) -> None:
            # At the end of backward torch calls it of modules that did not run too, which the tracker does not know.
            (tracked if fsdp_mod in self.memory_tracking else orig_fsdp_param_group_post_backward)(*args, **kwargs)

        return inner


class _Groups:
    """A module's groups of parameters as the one that torch's tracker knows.

    Backward enters the first group first and leaves it last.
    """

    def __init__(self, groups: Sequence[FSDPParamGroup]) -> None:
        self._first = groups[0]
        self.fsdp_params = [parameter for group in groups for parameter in group.fsdp_params]

    @property
    def pre_backward(self) -> Callable[..., None]:
        return self._first.pre_backward

    @pre_backward.setter
    def pre_backward(self, called: Callable[..., None]) -> None:
        self._first.pre_backward = called  # type: ignore[method-assign]

    @property
    def post_backward(self) -> Callable[..., None]:
        return self._first.post_backward

    @post_backward.setter
    def post_backward(self, called: Callable[..., None]) -> None:
        self._first.post_backward = called  # type: ignore[method-assign]


@contextlib.contextmanager
def _as_one_group() -> Iterator[None]:
    """Let torch's tracker ask a module for its group of parameters where it has several, on as many meshes."""
    of_torch: Any = FSDPState.__dict__["_fsdp_param_group"]

    def find(state: FSDPState) -> Any:
        groups = state._fsdp_param_groups
        return _Groups(groups) if len(groups) > 1 else of_torch.fget(state)

    FSDPState._fsdp_param_group = property(find)  # type: ignore[assignment]
    try:
        yield
    finally:
        FSDPState._fsdp_param_group = of_torch  # type: ignore[method-assign]


class _Tracker(_RealMoments):
    """Keeps what stood before the iteration apart from what is made in it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._mod_tracker = _NoModules()  # type: ignore[assignment]
        # Numbers of the operations that made what backward made.
        self._made = WeakIdKeyDictionary()

    def watch(
        self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], inputs: Sequence[torch.Tensor]
    ) -> None:
        """Take what is held, and gradients as they arrive."""
        self.track_external(module, *optimizers, *inputs)
        for parameter in module.parameters():
            if parameter.requires_grad:
                before = parameter.register_hook(self._arrived)  # type: ignore[no-untyped-call]
                after = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda parameter: self._arrived(parameter.grad)
                )
                self._param_to_grad_hook_handles[parameter] = before, after

    def _arrived(self, gradient: torch.Tensor) -> None:
        """A parameter's gradient is known as one only now; at a peak since it was made it was temporary."""
        for storage in get_untyped_storages(gradient):
            made = self._made.pop(storage, None)  # type: ignore[no-untyped-call]
            if made is not None and made <= self._peak_operation:
                peak = self._peak_mem_snap[self._device]
                peak[_MemRefType.TEMP] -= storage.nbytes()
                peak[_MemRefType.GRAD] += storage.nbytes()
        self._update_and_maybe_create_winfos(gradient, _MemRefType.GRAD)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._find_standing(self._device, args, kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _track(self, reftype: Any, t: torch.Tensor) -> None:
        for storage in get_untyped_storages(t):
            known = storage in self._WINFO or storage in self._standing
            if reftype is _MemRefType.TEMP and not known and storage.device == self._device:
                self._made[storage] = self._operation
        super()._track(reftype, t)


def _wait_for_threads() -> None:
    """Let the other threads of this process run until none of them has anything to do, as far as that shows."""
    until = time.monotonic() + _LET_GO_AT_MOST_S
    time.sleep(_LET_GO_S)
    while _another_runs() and time.monotonic() < until:
        time.sleep(_LET_GO_S)


def _another_runs() -> bool:
    """Whether another thread of this process runs or waits for a core; never where there is no /proc."""
    this_thread = str(threading.get_native_id())
    for task in os.listdir(_TASKS) if os.path.isdir(_TASKS) else ():
        if task != this_thread:
            # A thread that ends meanwhile has let go too. Its name may hold anything but ends with the last bracket.
            with contextlib.suppress(OSError), open(f"{_TASKS}/{task}/stat", "rb", buffering=0) as stat:
                if stat.read().rpartition(b") ")[2].startswith(b"R"):
                    return True
    return False


def track_memory(
    iterate: Callable[[], object],
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Sequence[torch.Tensor],
    *,
    rank: int,
    handed: Callable[[], Sequence[torch.Tensor]] = tuple,
) -> MemoryPeak:
    """Run one iteration and return its peak.

    Args:
        iterate: the iteration; ranks that communicate in it all track it.
        inputs: the batch and its targets.
        handed: makes a list of what is held from before until the iteration makes it anew.
    """
    device = inputs[0].device
    of_device = _device_peak(iterate, device) if device.type == "cuda" else {}
    tracker: _RealMoments
    # The model's own module is sharded, whatever runs its layers.
    gathering = next((part for part in module.modules() if isinstance(part, FSDPModule)), None)
    if gathering is not None:
        sharded = tracker = _ShardedTracker(device, gathering, optimizer)
        sharded.track_inputs((*inputs, *handed()))
        with _as_one_group(), sharded:
            iterate()
        sharded.settle()
        for part in module.modules():
            hide_hooks(part)
    else:
        tracking = tracker = _Tracker(device)
        # Whoever kept these any longer would keep them from being let go of.
        tracking.watch(module, own_optimizers(optimizer), [*inputs, *handed()])
        with tracking:
            iterate()
        tracking.settle()
    parts: Counter[str] = Counter({_COMMUNICATION: tracker.standing_bytes})
    for category, size in tracker.get_tracker_snapshot("peak").get(device, {}).items():
        name = str(category).rpartition(".")[2]
        if name != _TOTAL:
            parts[_CATEGORIES.get(name, name.lower())] += size
    return MemoryPeak(
        rank=rank,
        tracked_bytes=sum(parts.values()),
        parts_bytes={name: size for name, size in sorted(parts.items()) if size},
        **of_device,
    )


def _device_peak(iterate: Callable[[], object], device: torch.device) -> dict[str, int]:
    """The allocator's peak in an iteration, what it holds for that, and all that is taken of the device."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    iterate()
    torch.cuda.synchronize(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return {
        "allocator_bytes": torch.cuda.max_memory_allocated(device),
        "reserved_bytes": torch.cuda.max_memory_reserved(device),
        "device_bytes": total_bytes - free_bytes,
    }
