"""Peak memory of one iteration on this rank, by category, as torch saw it.

torch's tracker watches every storage that an operator makes or reads, on the dispatcher, and says what it is for; on a
GPU the allocator's own peak is kept as well, which holds rounding and fragments too. What was made out of the tracker's
sight and is not touched in the iteration does not count. Tracking is slow: the iteration is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed._tools.mem_tracker import MemTracker

from paradl_bench.spec.measurement import MemoryPeak

_CATEGORIES = {
    "PARAM": "parameters",
    "BUFFER": "buffers",
    "GRAD": "gradients",
    "OPT": "optimizer",
    "ACT": "activations",
    "TEMP": "temporary",
    "INP": "input",
    "OTH": "other",
}
_COMMUNICATION = "communication"


class _MicroBatchTracker(MemTracker):  # type: ignore[no-untyped-call]
    """Lets the outermost module be called again, which torch's tracker takes for another iteration and refuses."""

    def _pre_fw_hook(self, module: torch.nn.Module, inputs: Any) -> None:
        if module in self.memory_tracking and not self._mod_tracker.is_bw:
            del self.memory_tracking[module]
        super()._pre_fw_hook(module, inputs)


def track_memory(
    iterate: Callable[[], object],
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Sequence[torch.Tensor],
    *,
    rank: int,
    bucket_bytes: int,
    repeated: bool = False,
) -> MemoryPeak:
    """Run one iteration and return its peak.

    Args:
        iterate: the iteration; ranks that communicate in it all track it.
        module: what is trained, wrapped as it is. inputs: the batch and its targets.
        repeated: whether the iteration calls the module, or parts of it, several times: once a micro-batch.
        bucket_bytes: of the exchange's buckets, which torch allocates out of sight and the tracker finds as temporary.
    """
    device = inputs[0].device
    tracker = _MicroBatchTracker() if repeated else MemTracker()
    tracker.track_external(module, optimizer, *inputs)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with tracker:
        iterate()
    snapshot = tracker.get_tracker_snapshot("peak")
    found = {str(category).rpartition(".")[2]: size for category, size in snapshot.get(device, {}).items()}
    parts = {_CATEGORIES.get(name, name.lower()): size for name, size in found.items() if name != "Total"}
    communication = min(bucket_bytes, parts.get("temporary", 0))
    if communication:
        parts["temporary"] -= communication
        parts[_COMMUNICATION] = communication
    return MemoryPeak(
        rank=rank,
        tracked_bytes=sum(parts.values()),
        allocator_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        parts_bytes={name: size for name, size in sorted(parts.items()) if size},
    )
