"""Collectives of a profiler's trace: operation, bytes and group of each NCCL kernel.

From torch 2.2 on a kernel carries them (``Collective name``, ``In msg nelems``, ``dtype``, ``Group size``); before, the
annotation that launched it does (``nccl:all_reduce`` with its input's dims), and the group is not said.
"""

from __future__ import annotations

import math
import re
from typing import Any

from paradl_bench.core.bounds import MOST_RANKS
from paradl_bench.importers.importer import Imported, ImportOptions, LogFile
from paradl_bench.importers.kineto_traces.kineto_events import Kernel, Lanes, Trace, by_lane, running_at
from paradl_bench.records.samples import CollectiveSamples

_KERNEL = re.compile(r"(?:nccl|rccl|mscclpp?)(?:Dev)?(?:Kernel|_kernel)|^nccl", re.IGNORECASE)
_ANNOTATION = re.compile(r"(?:nccl|rccl):_?([a-z_]{1,40})")
_OPERATIONS = {
    "all_reduce": "all_reduce",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "all_gather": "all_gather",
    "allgather": "all_gather",
    "all_gather_base": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "all_to_all": "all_to_all",
    "all_to_allv": "all_to_all",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "send": "send_recv",
    "recv": "send_recv",
    "gather": "gather",
    "scatter": "scatter",
}
_ELEMENT_BYTES = {
    "float": ("fp32", 4),
    "double": ("fp64", 8),
    "half": ("fp16", 2),
    "bfloat16": ("bf16", 2),
    "long": ("int64", 8),
    "long int": ("int64", 8),
    "int": ("int32", 4),
    "char": ("int8", 1),
    "signed char": ("int8", 1),
    "byte": ("uint8", 1),
    "unsigned char": ("uint8", 1),
    "bool": ("bool", 1),
}
Key = tuple[str, str, int, int]


def is_communication(kernel: Kernel) -> bool:
    """Whether a kernel is a collective of NCCL or its ports."""
    return kernel.sort == "kernel" and _KERNEL.search(kernel.event.name) is not None


def add_collectives(result: Imported, trace: Trace, log: LogFile, options: ImportOptions) -> None:
    """Add this rank's collectives, one record a (operation, bytes, group); what has no bytes or group is dropped."""
    kernels = [kernel for kernel in trace.kernels if is_communication(kernel)]
    if not kernels:
        return
    calls = by_lane(event for event in trace.annotations if _ANNOTATION.match(event.name))
    durations_s: dict[Key, list[float]] = {}
    for number, kernel in enumerate(kernels, start=1):
        key = _key(kernel, calls, trace, options)
        if isinstance(key, str):
            result.drop(number, kernel.event.name, f"NCCL kernel {number}: {key}")
        else:
            durations_s.setdefault(key, []).append(kernel.event.seconds)
    count = sum(map(len, durations_s.values()))
    if not count:
        return
    if options.level is None:
        result.leave_out(f"{log.path}: {count} NCCL kernels are left out: give --level, node or system")
        return
    result.rows += count
    result.collectives += [
        CollectiveSamples(
            library=options.library or "nccl",
            tool="kineto",
            operation=operation,
            level=options.level,
            ranks=ranks,
            message_bytes=message_bytes,
            dtype=dtype,
            block=0,
            samples_s=(tuple(times),),
            verified=False,
            source=log.path,
        )
        for (operation, dtype, message_bytes, ranks), times in sorted(durations_s.items())
    ]
    result.notes.append(
        f"{log.path}: a kernel's time on one rank includes the wait for other ranks; calibrate does not fit it"
    )


def _key(kernel: Kernel, calls: Lanes, trace: Trace, options: ImportOptions) -> Key | str:
    values = kernel.event.arguments
    if "Collective name" in values:
        return _key_of_kernel(values)
    launch = kernel.launch
    call = None if launch is None else running_at(calls, launch.lane, launch.start_s)
    if call is None:
        return "no annotation of a collective launched it"
    name = _ANNOTATION.match(call.name)
    operation = _OPERATIONS.get(name.group(1)) if name else None
    if operation is None:
        return f"{call.name!r} is no collective that is known"
    sizes = _sizes(call.arguments)
    if isinstance(sizes, str):
        return sizes
    dtype, message_bytes = sizes
    info = trace.properties.get("distributedInfo")
    ranks = options.ranks or (info.get("world_size") if isinstance(info, dict) else None)
    if not isinstance(ranks, int) or isinstance(ranks, bool) or not 0 < ranks <= MOST_RANKS:
        return "the trace does not say how many ranks: give --ranks"
    return _defined(operation, dtype, message_bytes, ranks)


def _key_of_kernel(values: dict[str, Any]) -> Key | str:
    operation = _OPERATIONS.get(str(values["Collective name"]).lower().lstrip("_"))
    element = _ELEMENT_BYTES.get(str(values.get("dtype", "")).lower())
    elements, ranks = values.get("In msg nelems"), values.get("Group size")
    if operation is None:
        return f"{str(values['Collective name'])[:40]!r} is no collective that is known"
    if element is None or type(elements) is not int or type(ranks) is not int:
        return "its bytes or its group are not in the trace"
    if not (0 <= elements < 2**60 and 0 < ranks < 10**7):
        return "its bytes or its group are no count"
    return _defined(operation, element[0], elements * element[1], ranks)


def _defined(operation: str, dtype: str, sent_bytes: int, ranks: int) -> Key:
    """Bytes as the operation counts them, from what a rank puts in: a reduce-scatter keeps a part."""
    return operation, dtype, sent_bytes // ranks if operation in ("reduce_scatter", "all_to_all") else sent_bytes, ranks


def _sizes(values: dict[str, Any]) -> tuple[str, int] | str:
    """Type and bytes of an annotation's first tensors."""
    shapes, types = values.get("Input Dims"), values.get("Input type")
    if not isinstance(shapes, list) or not isinstance(types, list) or not shapes or not types:
        return "its bytes are not in the trace: record_shapes was off"
    element = _ELEMENT_BYTES.get(str(types[0]).lower())
    if element is None:
        return f"its type {str(types[0])[:40]!r} is not known"
    elements = _elements(shapes[0])
    if elements is None:
        return "its shape is none"
    return element[0], elements * element[1]


def _elements(shape: object) -> int | None:
    """Elements of a tensor's dims, or of several tensors'."""
    if not isinstance(shape, list) or len(shape) > 10000:
        return None
    if shape and all(isinstance(part, list) for part in shape):
        parts = [_dims(part) for part in shape]
        return None if None in parts else sum(part for part in parts if part is not None)
    return _dims(shape)


def _dims(shape: list[object]) -> int | None:
    extents = [part for part in shape if isinstance(part, int) and not isinstance(part, bool) and 0 <= part < 2**40]
    if len(extents) < len(shape) or len(extents) > 32:
        return None
    product = math.prod(extents)
    return product if product < 2**60 else None
