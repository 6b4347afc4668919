"""Probes: one training iteration with a pair of stamps round every operation, forward and backward.

Forward is stamped by a torch-function mode, backward by hooks on autograd's nodes. Every probe costs time, inside the
interval that it measures and outside of it; both costs are measured on operations that do next to nothing
(:func:`measure_probe_cost`) and taken off.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
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
    """Seconds that one probe adds inside the interval that it measures, and outside of it."""

    fw_inside_s: float
    fw_outside_s: float
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
        self.calls = 0
        self.records: list[tuple[Any, Any, Any]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stamp = self._stamp
        start = stamp()
        result = function(*args, **kwargs) if kwargs else function(*args)
        end = stamp()
        self.calls += 1
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
    del loss
    update()
    end = clock.stamp()
    clock.synchronise()
    fw, fw_total, fw_between = _forward_times(clock, stamps, begin, fw_end, cost, probe.calls)
    bw, bw_total, bw_between = _backward_times(clock, backward, bw_begin, bw_end, cost, layers)
    return ProbedIteration(
        fw_s=fw,
        bw_s=bw,
        fw_between_s=fw_between,
        bw_between_s=bw_between,
        fw_total_s=fw_total,
        bw_total_s=bw_total,
        wu_s=clock.seconds(bw_end, end),
    )


def _forward_times(
    clock: Clock, stamps: list[tuple[Any, Any]], begin: Any, end: Any, cost: ProbeCost, calls: int
) -> tuple[Floats, float, float]:
    raw = np.array([clock.seconds(*pair) for pair in stamps])
    total = clock.seconds(begin, end)
    # Calls that are no operation (sizes, attributes) pass through the probe too, and lie between operations.
    between = total - raw.sum() - calls * cost.fw_outside_s - (calls - len(raw)) * cost.fw_inside_s
    return np.maximum(raw - cost.fw_inside_s, 0.0), total, max(float(between), 0.0)


def _backward_times(
    clock: Clock, probe: BackwardProbe, begin: Any, end: Any, cost: ProbeCost, layers: int
) -> tuple[Floats, float, float]:
    raw = np.array([clock.seconds(*pair) for pair in zip(probe.starts, probe.ends, strict=True)])
    net = np.maximum(raw - cost.bw_inside_s, 0.0)
    total = clock.seconds(begin, end)
    between = total - raw.sum() - len(raw) * cost.bw_outside_s
    return np.bincount(probe.layer, weights=net, minlength=layers).astype(float), total, max(float(between), 0.0)


# 64 KiB an operation: caches are as cold for the probe as they are between real operations, which on one element they
# are not, and the operation is still short.
_CHAIN_ELEMENTS = 16384


def measure_probe_cost(clock: Clock, device: torch.device, *, chain: int = 100, repetitions: int = 25) -> ProbeCost:
    """Cost of the probes, from chains of small operations with and without them, interleaved.

    The time of the operation itself inside a probed interval is taken as that of the bare operation forward, and of
    the same function called bare in backward.
    """
    bare, probed, inside = [], [], []
    bw_bare, bw_probed, bw_inside, alone = [], [], [], []
    for _ in range(repetitions):
        bare_fw, bare_bw = _time_chain(clock, device, chain)
        fw, fw_in, bw, bw_in = _time_probed_chain(clock, device, chain)
        bare.append(bare_fw)
        probed.append(fw)
        inside.append(fw_in)
        bw_bare.append(bare_bw)
        bw_probed.append(bw)
        bw_inside.append(bw_in)
        alone.append(_time_alone(clock, device, chain))
    median = statistics.median
    fw_inside = max(0.0, median(inside) - median(bare))
    bw_in_cost = max(0.0, median(bw_inside) - median(alone))
    return ProbeCost(
        fw_inside_s=fw_inside,
        fw_outside_s=max(0.0, median(probed) - median(bare) - fw_inside),
        bw_inside_s=bw_in_cost,
        bw_outside_s=max(0.0, median(bw_probed) - median(bw_bare) - bw_in_cost),
    )


def _time_chain(clock: Clock, device: torch.device, chain: int) -> tuple[float, float]:
    tensor = torch.ones(_CHAIN_ELEMENTS, device=device, requires_grad=True)
    begin = clock.stamp()
    for _ in range(chain):
        tensor = torch.neg(tensor)
    middle = clock.stamp()
    tensor.backward(torch.ones_like(tensor))  # type: ignore[no-untyped-call]
    end = clock.stamp()
    clock.synchronise()
    return clock.seconds(begin, middle) / chain, clock.seconds(middle, end) / chain


def _time_probed_chain(clock: Clock, device: torch.device, chain: int) -> tuple[float, float, float, float]:
    tensor = torch.ones(_CHAIN_ELEMENTS, device=device, requires_grad=True)
    probe = OperationProbe(clock.stamp)
    with probe:
        begin = clock.stamp()
        for _ in range(chain):
            tensor = torch.neg(tensor)
        middle = clock.stamp()
    backward = BackwardProbe(clock.stamp)
    backward.attach([record[2] for record in probe.records], tensor.grad_fn)
    bw_begin = clock.stamp()
    tensor.backward(torch.ones_like(tensor))  # type: ignore[no-untyped-call]
    bw_end = clock.stamp()
    clock.synchronise()
    fw_inside = statistics.median(clock.seconds(start, end) for start, end, _ in probe.records)
    bw_inside = statistics.median(
        clock.seconds(start, end) for start, end in zip(backward.starts, backward.ends, strict=True)
    )
    count = len(backward.starts)
    return clock.seconds(begin, middle) / chain, fw_inside, clock.seconds(bw_begin, bw_end) / count, bw_inside


def _time_alone(clock: Clock, device: torch.device, chain: int) -> float:
    tensor = torch.ones(_CHAIN_ELEMENTS, device=device)
    with torch.no_grad():
        begin = clock.stamp()
        for _ in range(chain):
            torch.neg(tensor)
        end = clock.stamp()
    clock.synchronise()
    return clock.seconds(begin, end) / chain
