"""Probes: one training iteration with a pair of stamps round every operation, forward and backward.

Forward is stamped by a torch-function mode, backward by hooks on autograd's nodes. Every probe costs time, inside the
interval that it measures and outside of it; both costs are measured on operations that do next to nothing
(:func:`measure_probe_cost`) and taken off.

A GPU is held before every operation until the host has dispatched it: probes measure kernels and what lies between them
on the GPU. What the host takes to dispatch a phase is measured without probes (:func:`dispatched_iteration`).
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode

from paradl_bench.core.errors import WorkError
from paradl_bench.ranks.clocks import Clock
from paradl_bench.strategies.running.operations import is_operation, output_of

Floats = NDArray[np.float64]
StandIn = Callable[[int, Callable[..., Any]], Callable[..., Any]]
"""From how many operations were called before, and a torch function, what is called in its place."""


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
    """Stamps before and after every operation, and keeps the autograd node that it made.

    Args:
        stamp: marks the end of an operation; start marks its beginning (None: the same).
        stand_in: what is called in the place of a function; None for the functions themselves.
    """

    def __init__(
        self, stamp: Callable[[], Any], stand_in: StandIn | None = None, *, start: Callable[[], Any] | None = None
    ) -> None:
        super().__init__()
        self._stamp = stamp
        self._start = start or stamp
        self._stand_in = stand_in
        self.builtin_calls = 0
        self.python_calls = 0
        self.records: list[tuple[Any, Any, Any]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called = function if self._stand_in is None else self._stand_in(len(self.records), function)
        start = self._start()
        result = called(*args, **kwargs) if kwargs else called(*args)
        end = self._stamp()
        if type(function) is FunctionType:
            self.python_calls += 1
        else:
            self.builtin_calls += 1
        # Most results are tensors, which take the shortest way here.
        if isinstance(result, torch.Tensor):
            if function.__name__ not in ("__get__", "requires_grad_") or is_operation(function, result):
                self.records.append((start, end, result.grad_fn))
        elif is_operation(function, result):
            output = output_of(function, args, result)
            self.records.append((start, end, (output if isinstance(output, torch.Tensor) else output[0]).grad_fn))
        return result


class BackwardProbe:
    """Hooks on the nodes of one backward pass that stamp the start and end of each."""

    def __init__(self, stamp: Callable[[], Any], *, start: Callable[[], Any] | None = None) -> None:
        self._stamp = stamp
        self._start = start or stamp
        self.starts: list[Any] = []
        self.ends: list[Any] = []
        self.layer: list[int] = []

    def attach(self, operation_nodes: list[Any], loss_node: Any) -> None:
        """Hook every node that backward will run; a node belongs to the operation that made it.

        Args:
            operation_nodes: per operation in forward order, the node of its output (None where none).
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

    def _hook(self, node: Any, index: int) -> None:
        start, stamp, starts, ends, layer = self._start, self._stamp, self.starts, self.ends, self.layer

        def before(_: Any) -> None:
            layer.append(index)
            starts.append(start())

        def after(_: Any, __: Any) -> None:
            ends.append(stamp())

        node.register_prehook(before)
        node.register_hook(after)


def entered(probe: OperationProbe) -> AbstractContextManager[Any]:
    """The probe itself: it sees every call of forward."""
    return probe


def probed_iteration(
    forward: Callable[[], torch.Tensor],
    update: Callable[[], None],
    clock: Clock,
    cost: ProbeCost,
    layers: int,
    *,
    observed: Callable[[OperationProbe], AbstractContextManager[Any]] = entered,
    stand_in: StandIn | None = None,
) -> ProbedIteration:
    """Run forward (to the loss), backward and weight update once, with probes.

    Args:
        observed: lets a probe see the operations of what runs inside.

    Raises:
        WorkError: forward ran another number of operations than the traced network has.
    """
    probe = OperationProbe(clock.stamp, stand_in, start=clock.start)
    with observed(probe):
        begin = clock.stamp()
        loss = forward()
        fw_end = clock.stamp()
    records, probe.records = probe.records, []
    if len(records) != layers:
        raise WorkError(
            f"forward ran {len(records)} operations where the traced network has {layers}: its control flow varies"
        )
    backward = BackwardProbe(clock.stamp, start=clock.start)
    backward.attach([record[2] for record in records], loss.grad_fn)
    stamps = [(start, end) for start, end, _ in records]
    del records
    fw_held = clock.take_held()
    bw_begin = clock.stamp()
    loss.backward()  # type: ignore[no-untyped-call]
    bw_end = clock.stamp()
    # The graph goes with its hooks before the update is timed: unhooking is the probes' cost, not the update's.
    del loss
    wu_begin = clock.stamp()
    update()
    end = clock.stamp()
    clock.synchronise()
    fw_total, bw_total = clock.seconds(begin, fw_end), clock.seconds(bw_begin, bw_end)
    fw, fw_between = _forward_times(clock, stamps, fw_total - _sum_s(clock, fw_held), cost, probe)
    bw, bw_between = _backward_times(clock, backward, bw_total - _sum_s(clock, clock.take_held()), cost, layers)
    return ProbedIteration(
        fw_s=fw,
        bw_s=bw,
        fw_between_s=fw_between,
        bw_between_s=bw_between,
        fw_total_s=fw_total,
        bw_total_s=bw_total,
        wu_s=clock.seconds(wu_begin, end),
    )


def _sum_s(clock: Clock, pairs: Iterable[tuple[Any, Any]]) -> float:
    return sum(clock.seconds(*pair) for pair in pairs)


def _forward_times(
    clock: Clock, stamps: list[tuple[Any, Any]], total: float, cost: ProbeCost, probe: OperationProbe
) -> tuple[Floats, float]:
    raw = np.array([clock.seconds(*pair) for pair in stamps])
    # Calls that are no operation (sizes, attributes) pass through the probe too, and lie between operations.
    no_operation = probe.builtin_calls + probe.python_calls - len(raw)
    outside = probe.builtin_calls * cost.fw_outside_builtin_s + probe.python_calls * cost.fw_outside_python_s
    between = total - raw.sum() - outside - no_operation * cost.fw_inside_s
    return np.maximum(raw - cost.fw_inside_s, 0.0), max(float(between), 0.0)


def _backward_times(
    clock: Clock, probe: BackwardProbe, total: float, cost: ProbeCost, layers: int
) -> tuple[Floats, float]:
    raw = np.array([clock.seconds(*pair) for pair in zip(probe.starts, probe.ends, strict=True)])
    net = np.maximum(raw - cost.bw_inside_s, 0.0)
    between = total - raw.sum() - len(raw) * cost.bw_outside_s
    return np.bincount(probe.layer, weights=net, minlength=layers).astype(float), max(float(between), 0.0)


def dispatched_iteration(
    forward: Callable[[], torch.Tensor], update: Callable[[], None], clock: Clock
) -> tuple[float, float]:
    """Seconds that the host takes to dispatch forward and backward, each to a device that has nothing else to do.

    A host that gets too far ahead waits for the device: of phases of over a thousand long kernels it is an upper bound.
    """
    clock.synchronise()
    begin = time.perf_counter()
    loss = forward()
    forward_s = time.perf_counter() - begin
    clock.synchronise()
    begin = time.perf_counter()
    loss.backward()  # type: ignore[no-untyped-call]
    backward_s = time.perf_counter() - begin
    clock.synchronise()
    del loss
    update()
    clock.synchronise()
    return forward_s, backward_s


_CHAIN_ELEMENTS = 16384


def measure_probe_cost(clock: Clock, device: torch.device, *, chain: int = 40, repetitions: int = 25) -> ProbeCost:
    """Cost of the probes, with and without them in turn.

    Forward on blocks of a convolutional network: behind a real kernel the probe's own code and data are out of the
    core's caches, and it costs two to three times what it costs between operations that do next to nothing. The
    built-in function that follows the convolution stands for all such, batch norm and activation for those written in
    Python; the convolution's own time, a hundred times the probe's, would only add its noise. Backward on a
    chain of such blocks; what falls inside a node's interval, on pointwise nodes, whose own time is that of the
    function called bare. On a GPU, which is held before every operation, the cost is that of the events alone.
    """
    if device.type == "cuda":
        return _cost_of_events(clock, chain * repetitions)
    samples: dict[str, list[float]] = defaultdict(list)
    block = _Block(device)
    for _ in range(repetitions):
        seconds = {
            **block.time(clock, chain, None),
            **block.time(clock, chain, OperationProbe(clock.stamp)),
            "bw_bare": block.backward(clock, probed=False),
            "bw_probed": block.backward(clock, probed=True),
            "bw_inside": _inside_node(clock, device, chain),
            "alone": _alone(clock, device, chain),
        }
        for name, value in seconds.items():
            samples[name].append(value)

    def difference(more: str, less: str) -> float:
        """Median of the differences of interleaved values, not below zero."""
        pairs = zip(samples[more], samples[less], strict=True)
        return max(0.0, statistics.median(a - b for a, b in pairs))

    fw_inside, bw_inside = difference("inside", "bare_builtin"), difference("bw_inside", "alone")
    return ProbeCost(
        fw_inside_s=fw_inside,
        fw_outside_builtin_s=max(0.0, difference("probed_builtin", "bare_builtin") - fw_inside),
        fw_outside_python_s=max(0.0, difference("probed_python", "bare_python") - fw_inside),
        bw_inside_s=bw_inside,
        bw_outside_s=max(0.0, difference("bw_probed", "bw_bare") - bw_inside),
    )


def _cost_of_events(clock: Clock, count: int) -> ProbeCost:
    """What events round nothing take on a GPU, inside of an interval and between the holds of two."""
    inside_s, outside_s = [], []
    for _ in range(3):
        begin = clock.stamp()
        stamps = [(clock.start(), clock.stamp()) for _ in range(count)]
        end = clock.stamp()
        clock.synchronise()
        each_s = [clock.seconds(*pair) for pair in stamps]
        inside_s.append(statistics.median(each_s))
        rest_s = clock.seconds(begin, end) - sum(each_s) - _sum_s(clock, clock.take_held())
        outside_s.append(max(rest_s, 0.0) / count)
    inside, outside = min(inside_s), min(outside_s)
    return ProbeCost(
        fw_inside_s=inside,
        fw_outside_builtin_s=outside,
        fw_outside_python_s=outside,
        bw_inside_s=inside,
        bw_outside_s=outside,
    )


class _Block:
    """A small block of a convolutional network, each operation stamped from outside."""

    def __init__(self, device: torch.device) -> None:
        channels, extent = 32, 22
        self._inputs = torch.randn(1, channels, extent, extent, device=device)
        self._kernel = torch.randn(channels, channels, 3, 3, device=device, requires_grad=True)
        self._scale = torch.ones(channels, device=device, requires_grad=True)
        self._shift = torch.zeros(channels, device=device, requires_grad=True)
        self._mean, self._variance = torch.zeros(channels, device=device), torch.ones(channels, device=device)

    def time(self, clock: Clock, chain: int, probe: OperationProbe | None) -> dict[str, float]:
        """Median seconds of a built-in and of a Python function, stamped from outside; with a probe, inside as well."""
        functional = torch.nn.functional
        stamps: list[tuple[Any, Any, Any, Any]] = []
        with contextlib.nullcontext() if probe is None else probe:
            for _ in range(chain):
                hidden = torch.conv2d(self._inputs, self._kernel, None, 1, 1)
                start = clock.stamp()
                torch.neg(self._scale)
                second = clock.stamp()
                hidden = functional.batch_norm(hidden, self._mean, self._variance, self._scale, self._shift, True)
                third = clock.stamp()
                functional.relu(hidden)
                stamps.append((start, second, third, clock.stamp()))
        clock.synchronise()
        builtin = statistics.median(clock.seconds(row[0], row[1]) for row in stamps)
        python = statistics.median(clock.seconds(row[1], row[3]) for row in stamps) / 2
        if probe is None:
            return {"bare_builtin": builtin, "bare_python": python}
        inside = statistics.median(clock.seconds(start, end) for start, end, _ in probe.records[1::4])
        return {"probed_builtin": builtin, "probed_python": python, "inside": inside}

    def backward(self, clock: Clock, *, probed: bool) -> float:
        """Seconds a node of backward through several blocks, with hooks or without."""
        functional, blocks = torch.nn.functional, 10
        hidden = self._inputs
        for _ in range(blocks):
            hidden = torch.conv2d(hidden, self._kernel, None, 1, 1)
            hidden = functional.batch_norm(hidden, self._mean, self._variance, self._scale, self._shift, True)
            hidden = functional.relu(hidden)
        loss = hidden.sum()
        probe = BackwardProbe(clock.stamp)
        if probed:
            probe.attach([loss.grad_fn], loss.grad_fn)
        begin = clock.stamp()
        loss.backward()  # type: ignore[no-untyped-call]
        end = clock.stamp()
        clock.synchronise()
        # Three operations a block, the sum, and the accumulation of the three parameters' gradients.
        return clock.seconds(begin, end) / (3 * blocks + 1 + 3)


def _inside_node(clock: Clock, device: torch.device, chain: int) -> float:
    """Median seconds between the stamps of a pointwise node."""
    tensor = torch.ones(_CHAIN_ELEMENTS, device=device, requires_grad=True)
    nodes = []
    for _ in range(chain):
        tensor = torch.neg(tensor)
        nodes.append(tensor.grad_fn)
    backward = BackwardProbe(clock.stamp)
    backward.attach(nodes, tensor.grad_fn)
    tensor.backward(torch.ones_like(tensor))  # type: ignore[no-untyped-call]
    clock.synchronise()
    return statistics.median(clock.seconds(*pair) for pair in zip(backward.starts, backward.ends, strict=True))


def _alone(clock: Clock, device: torch.device, chain: int) -> float:
    tensor = torch.ones(_CHAIN_ELEMENTS, device=device)
    with torch.no_grad():
        begin = clock.stamp()
        for _ in range(chain):
            torch.neg(tensor)
        end = clock.stamp()
    clock.synchronise()
    return clock.seconds(begin, end) / chain
