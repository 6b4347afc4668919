"""Networks as measured and planned: a graph of operations with shapes, parameters, FLOPs and bytes.

Shapes are per sample (the batch dimension is left out), in elements. A network is torch-free data: it is written by
``paradl-bench describe`` and read by plans, memory models and predictions.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
from collections import Counter
from pathlib import Path
from typing import Literal

import msgspec

from paradl_bench.core.bounds import (
    AnyFloat,
    AnyInt,
    Bytes,
    ElementBytes,
    Extent,
    Flops,
    Index,
    SignedBytes,
    check_elements,
)
from paradl_bench.core.cache_keys import Answers
from paradl_bench.core.files.storage import read_json

Attribute = AnyInt | AnyFloat | bool | str | tuple[AnyInt, ...] | None

# Text that reads as nothing but text; numbers, JSON's constants and anything with a separator are quoted in a key.
_PLAIN_TEXT = re.compile(r"(?!(?:true|false|null|NaN|Infinity)$)[A-Za-z_][A-Za-z0-9_.:-]*", re.ASCII)

TARGET_DTYPE = "int64"
"""Of targets, as of token ids."""
_KEYS = Answers(4096)
"""Of operations, by what they are spelt from, encoded: blocks repeat theirs. A tuple would not tell True from 1."""
DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "int64": 8, "int32": 4, "int8": 1, "uint8": 1, "bool": 1}

_ADDED: dict[str, object] = {"batchless": False, "batchless_inputs": (), "input_dtype": "fp32", "dtype": "fp32"}
"""Fields that older networks lack, and what they stand for there: digests pass over them, and stay what they were."""

_OF_DATA_FLOW = (
    "reads", "writes", "further_outputs", "without_gradient", "state", "returns_view", "handled", "repeats",
    "repeats_with", "outputs", "frozen", "registered", "memory", "held_until", "along",
)  # fmt: skip
"""Fields that tell tensors and their memory apart and change no work: digests pass over them always."""

Value = tuple[str, Index]
"""A tensor that the network's code holds: the layer that returned it last (or ``input``), and which of its outputs."""

_ONE_OUTPUT = frozenset(
    {"activation", "addmm", "batch_norm", "cat", "conv", "dropout", "elementwise", "embedding", "linear", "softmax"}
)
"""Kinds of layers that make one tensor; others may make several, of which a network has the first one's shape."""

RETURNS_INPUT = "returns_input"
"""Attribute of a layer that did nothing: its output is its input, which others still read of the layer before."""
NEXT_FORWARD = "input"
"""In the place of a layer's name: a model keeps an output, as in an attribute, until its next forward replaces it."""


class Tensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A parameter or a buffer: its name in the module, its shape in elements, its dtype."""

    name: str
    shape: tuple[Extent, ...]
    dtype: str = "fp32"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        check_elements(self.shape)

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return self.elements * DTYPE_BYTES[self.dtype]


BatchBytes = tuple[SignedBytes, SignedBytes]
"""Bytes a sample, and bytes whatever the batch; of fp32."""


class LayerMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory of an operation beside what it reads and returns, as it was watched where no formula gives it.

    Attributes:
        inputs: indices of the activations read that autograd keeps. output: whether it keeps the first output.
        width: bytes of an element of the first output.
        kept: of further tensors from forward to backward; without a gradient, of outputs after the first, as long as
            that one.
        forward: held during forward beside these and the outputs.
        backward: held during backward beside all that is there when it begins, and the gradients that it makes;
            negative where much of that is let go before the last of these is made.
        backward_if_held: likewise, where another branch holds the output's gradient as well.
        passes_gradient: whether gradients of what it reads are the output's gradient, or views of it.
        aliases: whether the first output is memory of what it reads.
        apart: whether each of several outputs has a backward of its own, which makes a gradient of all that is read;
            else one backward makes it of all their gradients.
    """

    inputs: tuple[Index, ...] = ()
    output: bool = False
    width: ElementBytes = 4
    kept: BatchBytes = (0, 0)
    forward: BatchBytes = (0, 0)
    backward: BatchBytes = (0, 0)
    backward_if_held: BatchBytes = (0, 0)
    passes_gradient: bool = False
    aliases: bool = False
    apart: bool = False


class Layer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """One operation of the traced graph.

    Attributes:
        name: unique in its network; the module's path where there is one (``layer1.0.conv1``), else path and kind.
        kind: the layer kind (``conv2d``, ``add``; ``opaque`` kinds keep the name of the torch function).
        attributes: what, besides the shapes, decides which kernel runs (stride, padding, groups, in place).
        inputs: names of the layers whose outputs are read; ``input`` is the network's own input.
        input_shapes, output_shape: per sample, in elements; whole, of tensors that hold no batch (position ids, masks).
        batchless: whether the output holds no batch. batchless_inputs: indices of the inputs that hold none.
        parameters: names of the parameters read, in the order in which the operation takes them.
        fw_flops, bw_input_flops, bw_weight_flops: per sample; a multiply-add counts 2. Of a layer whose output holds no
            batch: of the whole mini-batch.
        fw_bytes: bytes read and written by forward, likewise; parameters not counted.
        reads: tensors read, where these are others than the first outputs of ``inputs``. What works in place
            on a part of a tensor is an input of what reads the whole later, and returns another tensor.
        writes: tensors whose memory it changed; None where that is the first that it reads, if it works in place.
        further_outputs: shapes of the tensors that it returns after the first, as ``output_shape``.
        without_gradient: indices of the tensors returned that autograd passes no gradient to.
        state: names of the buffers that it reads or changes, and of the parameters that it changes.
        returns_view: whether autograd knows what it returns as a view of another tensor.
        handled: whether the model's code reads values of what it returns, or hooks on its gradient.
        repeats: "yes" where ``torch.utils.checkpoint`` runs it again in backward, "reentrant" where that is a backward
            of its own; else empty. repeats_with: name of the first layer that runs again with it.
        memory: beside what it reads and returns; None where its kind tells. along: the dim a call names, from behind.
        other_dtype: of the first tensor returned, where the model by itself sets one.
        held_until: name of the layer up to which the model's own variables hold the output; empty where that is its
            last reader, :data:`NEXT_FORWARD` where the model keeps it.
    """

    name: str
    kind: str
    attributes: dict[str, Attribute] = {}
    inputs: tuple[str, ...] = ()
    input_shapes: tuple[tuple[Extent, ...], ...] = ()
    output_shape: tuple[Extent, ...] = ()
    parameters: tuple[str, ...] = ()
    fw_flops: Flops = 0
    bw_input_flops: Flops = 0
    bw_weight_flops: Flops = 0
    fw_bytes: Bytes = 0
    batchless: bool = False
    batchless_inputs: tuple[Index, ...] = ()
    reads: tuple[Value, ...] = ()
    writes: tuple[Value, ...] | None = None
    further_outputs: tuple[tuple[Extent, ...], ...] = ()
    without_gradient: tuple[Index, ...] = ()
    state: tuple[str, ...] = ()
    returns_view: bool = False
    handled: bool = False
    repeats: Literal["", "yes", "reentrant"] = ""
    repeats_with: str = ""
    memory: LayerMemory | None = None
    held_until: str = ""
    along: AnyInt | msgspec.UnsetType = msgspec.UNSET
    other_dtype: str | msgspec.UnsetType = msgspec.field(name="dtype", default=msgspec.UNSET)

    @property
    def dtype(self) -> str:
        """Of the first tensor returned, as the model alone computes it; ``fp32`` of whole numbers and truths too."""
        return "fp32" if self.other_dtype is msgspec.UNSET else self.other_dtype

    def __post_init__(self) -> None:
        if not self.name or self.name == "input":
            raise ValueError(f"layer name {self.name!r} is reserved or empty")
        for shape in (*self.input_shapes, *self.output_shapes):
            check_elements(shape)
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"layer {self.name!r} has dtype {self.dtype!r}, none of {', '.join(DTYPE_BYTES)}")
        if self.batchless_inputs and not set(self.batchless_inputs) <= set(range(len(self.input_shapes))):
            raise ValueError(f"layer {self.name!r} has no such inputs as its batchless ones, {self.batchless_inputs}")
        if self.memory is not None and not set(self.memory.inputs) <= set(range(len(self.input_shapes))):
            raise ValueError(f"layer {self.name!r} has no such inputs as autograd keeps, {self.memory.inputs}")

    @property
    def output_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of every tensor returned."""
        return (self.output_shape, *self.further_outputs)

    @property
    def values_read(self) -> tuple[Value, ...]:
        """The tensors that it reads."""
        return self.reads or tuple((name, 0) for name in self.inputs)

    @property
    def values_written(self) -> tuple[Value, ...]:
        """The tensors whose memory it changes."""
        first = self.values_read[:1] if self.attributes.get("in_place") else ()
        return first if self.writes is None else self.writes

    @property
    def output_elements(self) -> int:
        """Elements of the output per sample (the papers' |y|)."""
        return math.prod(self.output_shape)

    @property
    def input_elements(self) -> int:
        """Elements of all inputs per sample (the papers' |x|)."""
        return sum(math.prod(shape) for shape in self.input_shapes)

    def output_elements_of(self, batch: int) -> int:
        """Elements of the output for a mini-batch."""
        return self.output_elements * (1 if self.batchless else batch)

    def input_elements_of(self, batch: int) -> int:
        """Elements of all inputs for a mini-batch."""
        shared = sum(math.prod(self.input_shapes[index]) for index in self.batchless_inputs)
        return shared + (self.input_elements - shared) * batch

    @functools.cached_property
    def operation(self) -> str:
        """Key of the operation: kind, attributes and shapes. Layers with equal keys run the same kernels."""
        told = (self.kind, self.attributes, self.input_shapes, len(self.parameters))
        encoded = msgspec.msgpack.encode((told, self.batchless_inputs))
        return _KEYS.once(encoded, lambda: operation_key(*told, batchless_inputs=self.batchless_inputs))


class ModelGraph(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model as a graph of layers in forward order, ending with the loss.

    Attributes:
        name: the model's name as the commands take it.
        input_dtype: ``fp32`` for numbers, which follow the dtype that is trained in; ``int64`` for token ids.
        parameters: in registration order, trainable ones only.
        gradient_order: parameter names in the order in which backward finished their gradients, as seen.
        outputs: layers whose tensors forward returns.
        frozen: parameters that are not trained. registered: names of all parameters in registration order, where some
            are frozen.
    """

    name: str
    input_shape: tuple[Extent, ...]
    layers: tuple[Layer, ...]
    parameters: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...] = ()
    gradient_order: tuple[str, ...] = ()
    input_dtype: str = "fp32"
    outputs: tuple[str, ...] = ()
    frozen: tuple[Tensor, ...] = ()
    registered: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.input_dtype not in DTYPE_BYTES:
            raise ValueError(f"input_dtype {self.input_dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        seen, outputs = {"input"}, {"input": 1}
        for layer in self.layers:
            if layer.name in seen:
                raise ValueError(f"layer name {layer.name!r} occurs twice in {self.name!r}")
            unknown = [name for name in layer.inputs if name not in seen]
            if unknown:
                raise ValueError(f"layer {layer.name!r} reads {unknown[0]!r}, which no earlier layer writes")
            for name, output in (*layer.reads, *(layer.writes or ())):
                if not 0 <= output < outputs.get(name, 0):
                    raise ValueError(f"layer {layer.name!r} reads or writes output {output} of {name!r}, which is none")
            seen.add(layer.name)
            outputs[layer.name] = len(layer.output_shapes)
        names = [parameter.name for parameter in self.parameters]
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise ValueError(f"parameter {twice[0]!r} occurs twice in {self.name!r}")
        if self.gradient_order and not set(self.gradient_order) <= set(names):
            raise ValueError(f"gradient_order of {self.name!r} names a parameter that the network lacks")
        if len(set(self.gradient_order)) != len(self.gradient_order):
            raise ValueError(f"gradient_order of {self.name!r} names a parameter twice")
        check_elements(self.input_shape)
        if self.layers and self.layers[-1].kind == "loss":
            self._check_as_traced()

    def _check_as_traced(self) -> None:
        """Hold layers to what a trace tells; files of other tools have no loss, and less to tell.

        Names of parameters that the network lacks are those of frozen ones, but what got a gradient was read.
        """
        read = {name for layer in self.layers for name in layer.parameters}
        unread = next((name for name in self.gradient_order if name not in read), None)
        if unread is not None:
            raise ValueError(f"no layer of {self.name!r} reads parameter {unread!r}, which got a gradient")
        # What works in place on a part of a tensor is an input of what reads the whole.
        made = {
            layer.name: layer.output_elements
            for layer in self.layers
            if layer.kind in _ONE_OUTPUT and not layer.attributes.get("in_place")
        }
        for index, layer in enumerate(self.layers):
            held = {math.prod(shape) for shape in layer.input_shapes}
            unlike = [name for name in layer.inputs if held and name in made and made[name] not in held]
            if unlike:
                raise ValueError(
                    f"layers[{index}].input_shapes: {layer.name!r} has no input as large as what {unlike[0]!r} makes"
                )

    @property
    def held_parameters(self) -> tuple[Tensor, ...]:
        """Trained and frozen parameters, in registration order."""
        place = {name: index for index, name in enumerate(self.registered)}
        return tuple(sorted((*self.parameters, *self.frozen), key=lambda tensor: place.get(tensor.name, 0)))

    @property
    def parameter_elements(self) -> int:
        """Elements of all trainable parameters (the papers' W)."""
        return sum(parameter.elements for parameter in self.parameters)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all trainable parameters, and of their gradients."""
        return sum(parameter.bytes for parameter in self.parameters)

    def input_bytes(self, batch: int, dtype: str) -> int:
        """Bytes of a mini-batch's input, trained in ``dtype``."""
        stored_dtype = dtype if self.input_dtype == "fp32" else self.input_dtype
        return batch * math.prod(self.input_shape) * DTYPE_BYTES[stored_dtype]

    def target_bytes(self, batch: int) -> int:
        """Bytes of a mini-batch's targets: a class of each sample, or a token at each position of one sequence."""
        return batch * (self.input_shape[-1] if self.input_dtype == TARGET_DTYPE else 1) * DTYPE_BYTES[TARGET_DTYPE]

    @property
    def fw_flops(self) -> int:
        """FLOPs of forward per sample."""
        return sum(layer.fw_flops for layer in self.layers)

    @property
    def bw_flops(self) -> int:
        """FLOPs of backward per sample."""
        return sum(layer.bw_input_flops + layer.bw_weight_flops for layer in self.layers)

    @property
    def digest(self) -> str:
        """Short hash over layers, shapes and parameters: equal digests are the same work."""
        document = msgspec.to_builtins(self, order="deterministic")
        for part in (document, *document["layers"]):
            for name in _ADDED.keys() & part.keys():
                if part[name] == _ADDED[name]:
                    del part[name]
            for name in _OF_DATA_FLOW:
                part.pop(name, None)
        return hashlib.sha256(msgspec.json.encode(document)).hexdigest()[:12]


def operation_key(
    kind: str,
    attributes: dict[str, Attribute],
    input_shapes: tuple[tuple[int, ...], ...],
    parameters: int = 0,
    *,
    batchless_inputs: tuple[int, ...] = (),
) -> str:
    """Canonical text of an operation: ``conv2d(64x56x56; kernel=3x3 stride=1x1 ...)``.

    Equal text means the same kernels on the same shapes, so that a time measured once is shared; unequal arguments
    give unequal text, but for a tuple of one number, which reads as that number.
    """
    shapes = " ".join(
        ("whole:" if index in batchless_inputs else "") + ("x".join(map(str, shape)) or "scalar")
        for index, shape in enumerate(input_shapes)
    )
    settings = " ".join(f"{name}={_attribute_text(attributes[name])}" for name in sorted(attributes))
    return f"{kind}({shapes}; {settings}{f' parameters={parameters}' if parameters else ''})"


def _attribute_text(value: Attribute) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    if isinstance(value, str) and _PLAIN_TEXT.fullmatch(value):
        return value
    return json.dumps(value)


def read_network(path: str | os.PathLike[str]) -> ModelGraph:
    """A network file, as ``paradl-bench describe`` and measurements write it.

    Raises:
        UserError: unreadable, truncated, or a wrong field, named by its path.
    """
    return read_json(Path(path), ModelGraph, what="network")
