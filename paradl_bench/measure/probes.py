"""Probes: one training iteration with a pair of stamps round every operation, forward and backward.

Forward is stamped by a torch-function mode, backward by hooks on autograd's nodes. Every probe costs time, inside the
interval that it measures and outside of it; both costs are measured on operations that do next to nothing
(:func:`measure_probe_cost`) and taken off.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode

from paradl_bench.measure.clocks import Clock
from paradl_bench.measure.tracing import is_operation
from paradl_bench.spec.errors import WorkError

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeCost:
    """Seconds that one probe adds inside the interval that it measures, and outside of it.

    A torch function written in Python (most of ``torch.nn.functional``) reaches the probe by way of Python and costs
    more outside than a built-in one.
    """

    fw_inside_s: float
    fw_outside_builtin_s: float
    fw_outside_python_s: float
    bw_inside_s: float
    bw_outside_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedIteration:
    """One instrumented iteration; times in seconds, probes' own cost taken off but for the totals.

    Attributes:
        fw_s, bw_s: per layer, in the order of the network's layers.
        fw_between_s, bw_between_s: what passed between operations.
        fw_total_s, bw_total_s, wu_s: whole phases as they ran, probes included.
    """

    fw_s: Floats
    bw_s: Floats
    fw_between_s: float
    bw_between_s: float
    fw_total_s: float
    bw_total_s: float
    wu_s: float


class OperationProbe(TorchFunctionMode):
    """Stamps before and after every operation, and keeps the autograd node that it made."""

    def __init__(self, stamp: Callable[[], Any]) -> None:
        super().__init__()
        self._stamp = stamp
        self.builtin_calls = 0
        self.python_calls = 0
        self.records: list[tuple[Any, Any, Any]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stamp = self._stamp
        start = stamp()
        result = function(*args, **kwargs) if kwargs else function(*args)
        end = stamp()
        if type(function) is FunctionType:
            self.python_calls += 1
        else:
            self.builtin_calls += 1
        if isinstance(result, torch.Tensor):
            if function.__name__ not in ("__get__", "requires_grad_"):
                self.records.append((start, end, result.grad_fn))
        elif is_operation(function, result):
            self.records.append((start, end, result[0].grad_fn))
        return result


class BackwardProbe:
    """Hooks on the nodes of one backward pass that stamp the start and end of each."""

    def __init__(self, stamp: Callable[[], Any]) -> None:
        self._stamp = stamp
        self.starts: list[Any] = []
        self.ends: list[Any] = []
        self.layer: list[int] = []
        self.nodes = 0

    def attach(self, operation_nodes: list[Any], loss_node: Any) -> None:
        """Hook every node that backward will run; a node belongs to the operation that made it.

        Args:
            operation_nodes: per operation in forward order, the node of its output (None where none).
            loss_node: where backward starts.
        """
        seen: set[Any] = set()
        last = len(operation_nodes) - 1
        for index, root in enumerate([*operation_nodes, loss_node]):
            stack = [root]
            while stack:
                node = stack.pop()
                if node is None or node in seen:
                    continue
                seen.add(node)
                self._hook(node, min(index, last))
                stack.extend(child for child, _ in node.next_functions)
        self.nodes = len(seen)

    def _hook(self, node: Any, index: int) -> None:
        stamp, starts, ends, layer = self._stamp, self.starts, self.ends, self.layer

        def before(_: Any) -> None:
            layer.append(index)
            starts.append(stamp())

        def after(_: Any, __: Any) -> None:
            ends.append(stamp())

        node.register_prehook(before)
        node.register_hook(after)


def probed_iteration(
    forward: Callable[[], torch.Tensor], update: Callable[[], None], clock: Clock, cost: ProbeCost, layers: int
) -> ProbedIteration:
    """Run forward (to the loss), backward and weight update once, with probes.

    Raises:
        WorkError: forward ran another number of operations than the traced network has.
    """
    probe = OperationProbe(clock.stamp)
    with probe:
        begin = clock.stamp()
        loss = forward()
        fw_end = clock.stamp()
    records, probe.records = probe.records, []
    if len(records) != layers:
        raise WorkError(
            f"forward ran {len(records)} operations where the traced network has {layers}: its control flow varies"
        )
    backward = BackwardProbe(clock.stamp)
    backward.attach([record[2] for record in records], loss.grad_fn)
    stamps = [(start, end) for start, end, _ in records]
    del records
    bw_begin = clock.stamp()
    loss.backward()  # type: ignore[no-untyped-call]
    bw_end = clock.stamp()
    # The graph goes with its hooks before the update is timed: unhooking is the probes' cost, not the update's.
    del loss
    wu_begin = clock.stamp()
    update()
    end = clock.stamp()
    clock.synchronise()
    fw, fw_total, fw_between = _forward_times(clock, stamps, begin, fw_end, cost, probe)
    bw, bw_total, bw_between = _backward_times(clock, backward, bw_begin, bw_end, cost, layers)
    return ProbedIteration(
        fw_s=fw,
        bw_s=bw,
        fw_between_s=fw_between,
        bw_between_s=bw_between,
        fw_total_s=fw_total,
        bw_total_s=bw_total,
        wu_s=clock.seconds(wu_begin, end),
    )


def _forward_times(
    clock: Clock, stamps: list[tuple[Any, Any]], begin: Any, end: Any, cost: ProbeCost, probe: OperationProbe
) -> tuple[Floats, float, float]:
    raw = np.array([clock.seconds(*pair) for pair in stamps])
    total = clock.seconds(begin, end)
    # Calls that are no operation (sizes, attributes) pass through the probe too, and lie between operations.
    no_operation = probe.builtin_calls + probe.python_calls - len(raw)
    outside = probe.builtin_calls * cost.fw_outside_builtin_s + probe.python_calls * cost.fw_outside_python_s
    between = total - raw.sum() - outside - no_operation * cost.fw_inside_s
    return np.maximum(raw - cost.fw_inside_s, 0.0), total, max(float(between), 0.0)


def _backward_times(
    clock: Clock, probe: BackwardProbe, begin: Any, end: Any, cost: ProbeCost, layers: int
) -> tuple[Floats, float, float]:
    raw = np.array([clock.seconds(*pair) for pair in zip(probe.starts, probe.ends, strict=True)])
    net = np.maximum(raw - cost.bw_inside_s, 0.0)
    total = clock.seconds(begin, end)
    between = total - raw.sum() - len(raw) * cost.bw_outside_s
    return np.bincount(probe.layer, weights=net, minlength=layers).astype(float), total, max(float(between), 0.0)


# Between real operations the probe finds its code and data displaced by a kernel's; in a tight loop it would not, and
# would cost a third. So memory of the size of a core's cache is copied between the operations of the chain.
_EVICTED_BYTES = 1024 * 1024
_CHAIN_ELEMENTS = 16384


def measure_probe_cost(clock: Clock, device: torch.device, *, chain: int = 60, repetitions: int = 25) -> ProbeCost:
    """Cost of the probes, from chains of small operations with and without them, interleaved, on cold caches.

    The time of the operation itself inside a probed interval is that between two stamps round the bare operation; in
    backward, that of the same function called bare.
    """
    builtin, python = _ChainTimes(), _ChainTimes()
    for _ in range(repetitions):
        builtin.sample(torch.neg, clock, device, chain)
        python.sample(torch.nn.functional.relu, clock, device, chain)
    fw_inside = builtin.difference("inside", "stamped")
    bw_inside = builtin.difference("bw_inside", "alone")
    return ProbeCost(
        fw_inside_s=fw_inside,
        fw_outside_builtin_s=max(0.0, builtin.difference("probed", "bare") - fw_inside),
        fw_outside_python_s=max(0.0, python.difference("probed", "bare") - fw_inside),
        bw_inside_s=bw_inside,
        bw_outside_s=max(0.0, builtin.difference("bw_probed", "bw_bare") - bw_inside),
    )


class _ChainTimes:
    """Seconds an operation of a chain, with and without probes, sample by sample."""

    def __init__(self) -> None:
        self._samples: dict[str, list[float]] = {}
        self._memory = bytearray(_EVICTED_BYTES)
        self._other = bytearray(_EVICTED_BYTES)

    def difference(self, more: str, less: str) -> float:
        """Median of the differences of interleaved samples, not below zero."""
        pairs = zip(self._samples[more], self._samples[less], strict=True)
        return max(0.0, statistics.median(a - b for a, b in pairs))

    def sample(self, operation: Callable[[Any], Any], clock: Clock, device: torch.device, chain: int) -> None:
        """One sample of each: bare forward and backward, probed ones, and the operation alone."""
        for probe in (None, OperationProbe(clock.stamp)):
            self._add(**self._forward(operation, clock, device, chain, probe))
            self._add(**_backward_chain(operation, clock, device, chain, probed=probe is not None))
        self._add(alone=_alone(operation, clock, device, chain))

    def _add(self, **seconds: float) -> None:
        for name, value in seconds.items():
            self._samples.setdefault(name, []).append(value)

    def _forward(
        self,
        operation: Callable[[Any], Any],
        clock: Clock,
        device: torch.device,
        chain: int,
        probe: OperationProbe | None,
    ) -> dict[str, float]:
        tensor = torch.ones(_CHAIN_ELEMENTS, device=device, requires_grad=True)
        stamped = []
        with contextlib.nullcontext() if probe is None else probe:
            begin = clock.stamp()
            for _ in range(chain):
                self._memory[:] = self._other
                operation(tensor)
            end = clock.stamp()
        if probe is not None:
            stamped = [(start, stop) for start, stop, _ in probe.records]
        else:
            for _ in range(chain):
                self._memory[:] = self._other
                start = clock.stamp()
                operation(tensor)
                stamped.append((start, clock.stamp()))
        clock.synchronise()
        each = statistics.median(clock.seconds(*pair) for pair in stamped)
        whole = clock.seconds(begin, end) / chain
        return {"bare": whole, "stamped": each} if probe is None else {"probed": whole, "inside": each}


def _backward_chain(
    operation: Callable[[Any], Any], clock: Clock, device: torch.device, chain: int, *, probed: bool
) -> dict[str, float]:
    tensor = torch.ones(_CHAIN_ELEMENTS, device=device, requires_grad=True)
    nodes = []
    for _ in range(chain):
        tensor = operation(tensor)
        nodes.append(tensor.grad_fn)
    backward = BackwardProbe(clock.stamp)
    if probed:
        backward.attach(nodes, tensor.grad_fn)
    gradient = torch.ones_like(tensor)
    begin = clock.stamp()
    tensor.backward(gradient)  # type: ignore[no-untyped-call]
    end = clock.stamp()
    clock.synchronise()
    whole = clock.seconds(begin, end) / chain
    if not probed:
        return {"bw_bare": whole}
    pairs = zip(backward.starts, backward.ends, strict=True)
    return {"bw_probed": whole, "bw_inside": statistics.median(clock.seconds(*pair) for pair in pairs)}


def _alone(operation: Callable[[Any], Any], clock: Clock, device: torch.device, chain: int) -> float:
    tensor = torch.ones(_CHAIN_ELEMENTS, device=device)
    with torch.no_grad():
        begin = clock.stamp()
        for _ in range(chain):
            operation(tensor)
        end = clock.stamp()
    clock.synchronise()
    return clock.seconds(begin, end) / chain
