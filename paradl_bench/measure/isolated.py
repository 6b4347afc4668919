"""Operations measured alone: for shapes that no real iteration holds, and for backward in its two parts.

In situ, backward of a convolution or a linear layer is one node; schedules that delay weight gradients need the two
parts apart, so they are measured one by one here, with autograd asked for one of them only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paradl_bench.layers.kind import LayerKind, layer_kinds
from paradl_bench.measure.clocks import Clock
from paradl_bench.spec.errors import UserError
from paradl_bench.spec.network import Layer, Network

CHOICES = ("none", "split", "all")


class IsolatedOperation:
    """One operation over fresh tensors of its shapes.

    Args:
        layer: the first of the layers that share the operation.
        split: whether to measure backward's two parts (else backward as a whole).
    """

    def __init__(self, layer: Layer, network: Network, kind: LayerKind, batch: int, device: torch.device) -> None:
        assert kind.build is not None
        self.layer = layer
        self._split = kind.splits_backward
        self._run: Callable[[list[Any], list[Any]], Any] = kind.build(layer.attributes)
        shapes = {tensor.name: tensor.shape for tensor in network.parameters}
        # The network's own input needs no gradient: its layer has no input gradient to compute.
        self._input_gradient = "input" not in layer.inputs
        self._inputs = [
            torch.randn(shape, device=device, requires_grad=self._input_gradient)
            for shape in shapes_of_inputs(layer, batch)
        ]
        self._parameters = [torch.randn(shapes[name], device=device, requires_grad=True) for name in layer.parameters]
        self._warm = False

    def measure(self, clock: Clock) -> dict[str, list[float]]:
        """One sample in seconds of FW, and of BW_input and BW_weight, or BW; the first call warms up."""
        if not self._warm:
            self._measure_once(clock)
            self._warm = True
        return {phase: [value] for phase, value in self._measure_once(clock).items()}

    def _measure_once(self, clock: Clock) -> dict[str, float]:
        # In-place operations may not write to a leaf that needs its gradient.
        inputs = [tensor.clone() if self.layer.attributes.get("in_place") else tensor for tensor in self._inputs]
        begin = clock.stamp()
        output = self._run(inputs, self._parameters)
        end = clock.stamp()
        stamps = {"FW": (begin, end)}
        gradient = torch.ones_like(output)
        for phase, wanted in self._gradients_wanted().items():
            begin = clock.stamp()
            torch.autograd.grad(output, wanted, gradient, retain_graph=True)
            stamps[phase] = (begin, clock.stamp())
        clock.synchronise()
        return {phase: clock.seconds(*pair) for phase, pair in stamps.items()}

    def _gradients_wanted(self) -> dict[str, list[Any]]:
        inputs = self._inputs if self._input_gradient else []
        if self._split:
            parts = {"BW_input": inputs, "BW_weight": self._parameters}
        else:
            parts = {"BW": [*inputs, *self._parameters]}
        return {phase: wanted for phase, wanted in parts.items() if wanted}


def shapes_of_inputs(layer: Layer, batch: int) -> list[tuple[int, ...]]:
    """Shapes of what a layer reads of a mini-batch, whose samples come first."""
    return [
        shape if index in layer.batchless_inputs else (batch, *shape) for index, shape in enumerate(layer.input_shapes)
    ]


def isolated_operations(network: Network, batch: int, device: torch.device, *, which: str) -> list[IsolatedOperation]:
    """Distinct operations of a network to be measured alone.

    Args:
        which: ``none``; ``split``: those whose backward has two parts; ``all``: every one whose kind can be built.

    Raises:
        UserError: another choice.
    """
    if which not in CHOICES:
        raise UserError(f"isolated {which!r}: choices are {', '.join(CHOICES)}")
    kinds = layer_kinds()
    chosen: dict[tuple[str, bool], IsolatedOperation] = {}
    for layer in network.layers if which != "none" else ():
        kind = kinds.get(layer.kind)
        key = (layer.operation, "input" in layer.inputs)
        if kind is None or kind.build is None or key in chosen or not layer.input_shapes:
            continue
        if which == "all" or kind.splits_backward:
            chosen[key] = IsolatedOperation(layer, network, kind, batch, device)
    return list(chosen.values())
