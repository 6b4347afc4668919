"""Kernels of a traced layer as regressors read them, and back: from sizes to a layer that can be run.

FLOPs are the layer's; bytes are what a stage has to move at least, each tensor once: what it reads (inputs, parameters,
what autograd kept, the output's gradient) and what it writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from paradl_bench.network.graph import DTYPE_BYTES, Layer
from paradl_bench.network.kernel import KernelShape, KernelStage
from paradl_bench.network.kinds.autocast import KEPT_DTYPE, computed_in, has_masters
from paradl_bench.network.kinds.kind import BUFFER, Call, LayerKind, Operands, TensorArgument, layer_kinds, per_sample
from paradl_bench.network.optimizers import optimizer_named

_INDEX_BYTES = 8


def kernel_shape(layer: Layer, stage: KernelStage, batch: int, dtype: str) -> KernelShape | None:
    """Shape of what a layer runs in a stage on a mini-batch.

    Backward of a layer that reads the network's own input computes no input gradient: its ``BW`` is the ``BW_weight``
    that it runs, where the kind tells them apart.

    Args:
        batch: samples of the local mini-batch. dtype: of activations and parameters.

    Returns:
        None where nothing runs in that stage, or sizes don't describe the layer.
    """
    kind = layer_kinds().get(layer.kind)
    stages = () if kind is None else ("FW", "BW", *(("BW_input", "BW_weight") if kind.splits_backward else ()))
    if kind is None or stage not in stages:
        return None
    operands = kind.operands(layer, 1 if layer.batchless else batch)
    if operands is None:
        return None
    reads_network = "input" in layer.inputs
    if reads_network and stage == "BW_input":
        return None
    if reads_network and stage == "BW" and kind.splits_backward:
        stage = "BW_weight"
    moved = _bytes_moved(layer, kind, operands, stage, batch, DTYPE_BYTES[computed_in(dtype)])
    flops = _flops_per_sample(layer, stage) * (1 if layer.batchless else batch)
    return KernelShape(
        kind=layer.kind, stage=stage, sizes=operands.sizes, settings=operands.settings, flops=flops, bytes=moved
    )


def optimizer_shape(function: str, elements: int, tensors: int, dtype: str) -> KernelShape:
    """Shape of an optimizer's step over all parameters.

    Raises:
        UserError: an optimizer that is not known.
    """
    optimizer = optimizer_named(function)
    return KernelShape(
        kind="optimizer",
        stage="WU",
        sizes={"elements": elements, "tensors": tensors},
        settings={"function": function},
        flops=optimizer.flops * elements,
        bytes=optimizer.touched * elements * DTYPE_BYTES[computed_in(dtype)],
    )


def update_bytes_beside(dtype: str) -> int:
    """Bytes of an element that a weight update moves beside the optimizer's step.

    With fp32 copies of parameters a gradient is read and written in fp32, and the copy read and written back.
    """
    return 2 * (DTYPE_BYTES[computed_in(dtype)] + DTYPE_BYTES[KEPT_DTYPE]) if has_masters(dtype) else 0


def copy_shape(stage: Literal["D2D", "H2D"], size_bytes: int, tensors: int) -> KernelShape:
    """Shape of copying tensors of ``size_bytes`` together: read and written in one memory, or sent to the device."""
    moved = size_bytes * (2 if stage == "D2D" else 1)
    return KernelShape(kind="copy", stage=stage, sizes={"bytes": size_bytes, "tensors": tensors}, bytes=moved)


class SizedLayer(NamedTuple):
    """A layer made from sizes: the local batch and the shapes of its parameters go with it."""

    layer: Layer
    batch: int
    parameter_shapes: tuple[tuple[int, ...], ...]


def layer_of_sizes(kind_name: str, sizes: Mapping[str, int], settings: Mapping[str, str]) -> SizedLayer:
    """The inverse of :func:`kernel_shape`: a layer that has these sizes, and another layer before it.

    Raises:
        ValueError: the kind can't be made from sizes.
    """
    kind = layer_kinds().get(kind_name)
    if kind is None or kind.call is None:
        raise ValueError(f"a layer of kind {kind_name!r} can't be made from sizes")
    call = kind.call(sizes, settings)
    layer = layer_of_call(kind, call, kind_name, ("before",))
    return SizedLayer(layer, call.batch, tuple(tensor.shape for tensor in parameters_of(call)))


def layer_of_call(kind: LayerKind, call: Call, name: str, inputs: tuple[str, ...]) -> Layer:
    """The layer of a call that nobody traced; its parameters have the names that the call gives them."""
    facts = kind.facts(call)
    activations = [tensor for tensor in call.tensors if not tensor.parameter]
    moved = 0 if kind.view else call.input_elements + call.output_elements
    return Layer(
        name=name,
        kind=kind.name,
        attributes=facts.attributes,
        inputs=inputs,
        input_shapes=tuple(per_sample(tensor.shape, call.batch) for tensor in activations),
        output_shape=call.output_shape,
        parameters=tuple(tensor.parameter for tensor in parameters_of(call)),
        fw_flops=facts.fw_flops,
        bw_input_flops=facts.bw_input_flops,
        bw_weight_flops=facts.bw_weight_flops,
        fw_bytes=DTYPE_BYTES["fp32"] * moved,
    )


def parameters_of(call: Call) -> list[TensorArgument]:
    """Arguments of a call that are trained."""
    return [tensor for tensor in call.tensors if tensor.parameter and not tensor.parameter.startswith(BUFFER)]


def _flops_per_sample(layer: Layer, stage: KernelStage) -> int:
    return {
        "FW": layer.fw_flops,
        "BW_input": layer.bw_input_flops,
        "BW_weight": layer.bw_weight_flops,
        "BW": layer.bw_weight_flops + (layer.bw_input_flops if "input" not in layer.inputs else 0),
    }[stage]


def _bytes_moved(
    layer: Layer, kind: LayerKind, operands: Operands, stage: KernelStage, batch: int, element_bytes: int
) -> int:
    inputs, outputs = layer.input_elements_of(batch), layer.output_elements_of(batch)
    parameters = operands.parameter_elements
    if stage == "FW":
        return (inputs + parameters + outputs) * element_bytes
    if stage in ("BW_input", "BW_weight"):
        return (outputs + inputs + parameters) * element_bytes
    if kind.passes_gradient(layer):
        return 0
    input_gradients = 0 if "input" in layer.inputs else inputs
    # Parameters are read, and their gradients written.
    moved = (outputs + input_gradients + 2 * parameters) * element_bytes
    return moved + _bytes_kept(layer, kind, batch, element_bytes)


def _bytes_kept(layer: Layer, kind: LayerKind, batch: int, element_bytes: int) -> int:
    saved = kind.saves(layer)
    samples = 1 if layer.batchless else batch
    kept = layer.input_elements_of(batch) * saved.inputs + layer.output_elements_of(batch) * saved.output
    beside = saved.statistics + samples * (saved.elements + saved.mask)
    return (kept + beside) * element_bytes + saved.indices * samples * _INDEX_BYTES
