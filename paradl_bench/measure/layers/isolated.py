"""Operations measured alone: for shapes that no real iteration holds, and for backward in its two parts.

In situ, backward of a convolution or a linear layer is one node; schedules that delay weight gradients need the two
parts apart, so they are measured one by one here, with autograd asked for one of them only.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paradl_bench.measure.execution.kernel_layout import laid_out
from paradl_bench.network.graph import DTYPE_BYTES, Layer, ModelGraph
from paradl_bench.network.kinds.autocast import as_held, given_dtype, widths_of
from paradl_bench.network.kinds.kind import LayerKind, layer_kinds
from paradl_bench.ranks.clocks import Clock
from paradl_bench.records.kernel_settings import NO_SETTINGS, KernelSettings
from paradl_bench.strategies.running.autocast import TORCH_DTYPES, Entered, autocast_to

_DRAWN = 2**18

Settle = Callable[[Sequence[torch.Tensor]], None]
"""Brings caches into the state that a call is to find, given the tensors that were written right before it."""


def leave_warm(written: Sequence[torch.Tensor]) -> None:
    """Leave caches as the call before left them."""


class _NodeStamps:
    """Stamps as the first node of an operation's backward begins and as the last one ends.

    Starting autograd's engine takes longer than a small kernel; training starts it once an iteration, not once a layer.
    """

    def __init__(self, root: Any, clock: Clock) -> None:
        self._begins: list[Any] = []
        self._ends: list[Any] = []
        begins, ends, stamp = self._begins, self._ends, clock.stamp

        def begun(_: Any) -> None:
            if not begins:
                clock.hold()
            begins.append(stamp())

        seen, waiting = set(), [root]
        while waiting:
            node = waiting.pop()
            # A node with a variable hands its gradient to the parameter; asked for gradients, the engine leaves it out.
            if node is None or node in seen or hasattr(node, "variable"):
                continue
            seen.add(node)
            node.register_prehook(begun)
            node.register_hook(lambda _, __: ends.append(stamp()))
            waiting.extend(child for child, _ in node.next_functions)

    def taken(self) -> tuple[Any, Any] | None:
        """First and last stamp since the last time; None where no node ran."""
        pair = (self._begins[0], self._ends[-1]) if self._begins and self._ends else None
        self._begins.clear()
        self._ends.clear()
        return pair


class IsolatedOperation:
    """One operation over fresh tensors of its shapes.

    Args:
        layer: the first of the layers that share the operation.
        dtype: of inputs and parameters. input_dtypes: of each of the inputs, where autocast leaves them unlike.
        settle: called before every call that is kept.
    """

    def __init__(
        self,
        layer: Layer,
        parameter_shapes: Sequence[tuple[int, ...]],
        batch: int,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.float32,
        settle: Settle = leave_warm,
        input_dtypes: Sequence[torch.dtype] = (),
        entered: Entered = contextlib.nullcontext,
        kernel_settings: KernelSettings = NO_SETTINGS,
    ) -> None:
        kind: LayerKind = layer_kinds()[layer.kind]
        assert kind.build is not None
        self.layer = layer
        self._split = kind.splits_backward
        self._settle, self._entered = settle, entered
        self._run: Callable[[list[Any], list[Any]], Any] = kind.build(layer.attributes)
        # The network's own input needs no gradient: its layer has no input gradient to compute.
        self._input_gradient = "input" not in layer.inputs
        # Four dims are not always an image's: heads of attention have as many.
        of_channels = kind.windows is not None or kind.by_channel(layer.attributes)
        layout = kernel_settings if of_channels else NO_SETTINGS
        # A tensor that is read twice is named once: its last dtype is that of what is left.
        dtypes = itertools.chain(input_dtypes, itertools.repeat(input_dtypes[-1] if input_dtypes else dtype))
        self._inputs = [
            laid_out(random_tensor(shape, device, input_dtype), layout).requires_grad_(self._input_gradient)
            for shape, input_dtype in zip(shapes_of_inputs(layer, batch), dtypes, strict=False)
        ]
        self._parameters = [
            laid_out(random_tensor(shape, device, dtype), layout).requires_grad_() for shape in parameter_shapes
        ]
        self._warm = False

    def measure(self, clock: Clock, samples: int = 1) -> dict[str, list[float]]:
        """Samples in seconds of FW, and of BW_input and BW_weight, or BW; the first call warms up."""
        if not self._warm:
            self._measure_once(clock, leave_warm)
            self._warm = True
        measured = [self._measure_once(clock, self._settle) for _ in range(samples)]
        return {phase: [once[phase] for once in measured] for phase in measured[0]}

    def _measure_once(self, clock: Clock, settle: Settle) -> dict[str, float]:
        # In-place operations may not write to a leaf that needs its gradient.
        inputs = [tensor.clone() if self.layer.attributes.get("in_place") else tensor for tensor in self._inputs]
        settle(inputs)
        with self._entered():
            clock.hold()
            begin = clock.stamp()
            output = self._run(inputs, self._parameters)
            end = clock.stamp()
        stamps = {"FW": (begin, end)}
        gradient = torch.ones_like(output)
        nodes = _NodeStamps(output.grad_fn, clock)
        inputs = self._inputs if self._input_gradient else []
        parts = {"BW_input": inputs, "BW_weight": self._parameters}
        if not self._split:
            parts = {"BW": [*inputs, *self._parameters]}
        for phase, wanted in parts.items():
            if not wanted:
                continue
            settle([gradient])
            begin = clock.stamp()
            torch.autograd.grad(output, wanted, gradient, retain_graph=True)
            end = clock.stamp()
            stamps[phase] = nodes.taken() or (begin, end)
        clock.synchronise()
        return {phase: clock.seconds(*pair) for phase, pair in stamps.items()}


def random_tensor(shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers, the same again and again: drawing each would take longer than the kernel that reads them."""
    elements = math.prod(shape)
    drawn = torch.randn(min(elements, _DRAWN), device=device, dtype=dtype)
    return drawn.repeat(math.ceil(elements / max(1, len(drawn))))[:elements].view(tuple(shape))


def shapes_of_inputs(layer: Layer, batch: int) -> list[tuple[int, ...]]:
    """Shapes of what a layer reads of a mini-batch, whose samples come first."""
    return [
        shape if index in layer.batchless_inputs else (batch, *shape) for index, shape in enumerate(layer.input_shapes)
    ]


def isolated_operations(
    network: ModelGraph,
    batch: int,
    device: torch.device,
    *,
    which: str,
    dtype: str = "fp32",
    kernel_settings: KernelSettings = NO_SETTINGS,
) -> list[IsolatedOperation]:
    """Distinct operations of a network, which is trained in ``dtype``, to be measured alone.

    Args:
        which: ``none``; ``split``: those whose backward has two parts; ``all``: every one whose kind can be built.
    """
    kinds = layer_kinds()
    network = as_held(network, dtype)
    shapes = {tensor.name: tensor.shape for tensor in network.parameters}
    chosen: dict[tuple[str, bool], IsolatedOperation] = {}
    widths = widths_of(network, dtype, device.type)
    by_width = {DTYPE_BYTES[name]: torch_dtype for name, torch_dtype in TORCH_DTYPES.items()}
    entered = autocast_to(dtype, device)
    for layer, width in zip(network.layers, widths, strict=True) if which != "none" else ():
        kind = kinds.get(layer.kind)
        key = (layer.operation, "input" in layer.inputs)
        if kind is None or kind.build is None or key in chosen or not layer.input_shapes:
            continue
        if which == "all" or kind.splits_backward:
            chosen[key] = IsolatedOperation(
                layer,
                [shapes[name] for name in layer.parameters],
                batch,
                device,
                dtype=TORCH_DTYPES[given_dtype(dtype)],
                input_dtypes=[by_width[size] for size in width.reads],
                entered=entered,
                kernel_settings=kernel_settings,
            )
    return list(chosen.values())
