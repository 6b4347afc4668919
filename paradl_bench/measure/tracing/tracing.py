"""Trace a model into a :class:`ModelGraph`: every torch function that forward and the loss call, with its dataflow.

The model runs once on the meta device, which allocates and computes nothing, under a torch-function mode: what is
recorded is what really ran, functional operations and Python control flow included. Backward runs as well, so that the
order in which gradients arrive is seen rather than assumed. A model that needs real values (data-dependent control
flow) is run once on the CPU instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from paradl_bench.core.errors import UserError
from paradl_bench.measure.tracing.batch_dependence import refuse_dependence
from paradl_bench.measure.tracing.gradient_order import GradientOrder
from paradl_bench.measure.tracing.kept_dtypes import with_kept_dtypes
from paradl_bench.measure.tracing.layouts import laid_out_as_on_a_cpu
from paradl_bench.measure.tracing.module_paths import RunningModule, following_modules
from paradl_bench.measure.tracing.own_checkpoints import Repeats, reentrant_checkpoints_run_once
from paradl_bench.measure.tracing.traced_call import TracedCall
from paradl_bench.measure.tracing.traced_values import (
    ReadTensors,
    TracedValues,
    Versions,
    changed_since,
    tensors_in,
    versions_of,
    without_own_state,
)
from paradl_bench.measure.tracing.trimmed_model import TrimmedModel, trim
from paradl_bench.measure.tracing.variable_lifetimes import held_by_variables
from paradl_bench.measure.tracing.watched_memory import MemoryWatch
from paradl_bench.network.equal_blocks import with_all_blocks
from paradl_bench.network.graph import RETURNS_INPUT, Layer, LayerMemory, ModelGraph, Tensor
from paradl_bench.network.kinds.kind import BUFFER, Call, Facts, TensorArgument, batch_dim, kind_of_function, per_sample
from paradl_bench.network.kinds.named_dims import named_dim
from paradl_bench.network.kinds.view import KIND as VIEW
from paradl_bench.network.models.catalog import LoadedModel
from paradl_bench.strategies.running.operations import (
    asks_else,
    asks_extent,
    function_name,
    is_operation,
    output_of,
    shaped,
)

_FLOATS = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_OTHERS = (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
_DTYPE_NAMES = _FLOATS | {dtype: str(dtype).removeprefix("torch.") for dtype in _OTHERS}
# Prime and unlike usual extents, so that a dim that is a multiple of it is the batch dim. On the meta device a batch
# takes no memory, and can be larger than any extent but a vocabulary's.
_META_BATCH = 10007
_CPU_BATCH = 7
# So few come first that a loop over samples is short.
_FEW = (2, 3)


class _TracingMode(TorchFunctionMode):
    """Records every operation as a layer; module paths come from hooks that :func:`following_modules` installs."""

    def __init__(self, module: torch.nn.Module, batch: int, inputs: torch.Tensor) -> None:
        super().__init__()
        self.batch = batch
        self.running: list[RunningModule] = []
        self.layers: list[Layer] = []
        self.functions: list[str] = []
        self.scope = ""
        self._kinds = kind_of_function()
        self._watch = MemoryWatch(batch)
        self._calls: dict[int, tuple[TracedCall, bool]] = {}
        self._names: Counter[str] = Counter()
        self._parameters = {id(p): name for name, p in module.named_parameters()}
        self._buffers = {id(b): name for name, b in module.named_buffers()}
        self._values = TracedValues(dict((*module.named_parameters(), *module.named_buffers())))
        self._values.name(inputs, ("input", 0), -1)
        self._repeats = Repeats()
        self._returned: list[tuple[torch.Tensor, ...]] = []
        self._handled: set[str] = set()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = versions_of(tensors_in((args, kwargs)))
        if function_name(function)[0] in self._kinds:
            result, flops = shaped(function)(*args, **kwargs), 0
        else:
            with FlopCounterMode(display=False) as counter:
                result = function(*args, **kwargs)
            flops = counter.get_total_flops() // self.batch
        if is_operation(function, result):
            result = laid_out_as_on_a_cpu(function, args, kwargs, result)
            outputs = tuple(tensors_in(output_of(function, args, result)))
            self._record(function, args, kwargs, outputs, flops, before)
        elif not asks_extent(function) and not asks_else(function):
            self._handled.update(self._values.read(tensor for tensor, *_ in before).inputs)
        return result

    def _record(
        self,
        function: Any,
        args: Any,
        kwargs: dict[str, Any],
        outputs: tuple[torch.Tensor, ...],
        flops: int,
        before: Versions,
    ) -> None:
        name, in_place = function_name(function)
        call = Call(
            function=name,
            arguments=tuple(self._argument(value) for value in args),
            keywords={key: self._argument(value) for key, value in kwargs.items()},
            output_shapes=tuple(tuple(t.shape) for t in outputs),
            batch=self.batch,
            in_place=in_place,
        )
        changed = changed_since(before)
        read = self._values.read(without_own_state(before, changed, outputs))
        layer = msgspec.structs.replace(self._layer(call, read, flops), other_dtype=_other_dtype(outputs[0]))
        self._returned.append(outputs)
        self.functions.append(name)
        given = any(outputs[0] is tensor for tensor, *_ in before)
        works_in_place = call.in_place or layer.attributes.get("in_place") or call.keywords.get("inplace")
        if given and not changed and not works_in_place:
            # Nothing was done, and the tensor stays that of the layer that made it.
            self.layers.append(_untouched(layer, call.function))
            return
        if not changed or (len(changed) == 1 and args and changed[0] is args[0] and not self._is_held(args[0])):
            graded = frozenset(id(tensor) for tensor, _, graded in before if graded)
            traced = TracedCall(function, args, kwargs, outputs, self._is_held, graded, in_place=bool(changed))
            kind = self._kinds.get(call.function)
            self._calls[len(self.layers)] = traced, kind is not None and not kind.watched(call)
        state = [t.parameter.removeprefix(BUFFER) for t in call.tensors if t.parameter.startswith(BUFFER)]
        state += [name for name in self._values.held(changed) if name not in layer.parameters]
        index = len(self.layers)
        written, repeat = self._values.write(changed, layer.name, index), self._repeats.of(layer.name)
        self.layers.append(
            msgspec.structs.replace(
                layer,
                writes=written,
                state=tuple(dict.fromkeys(state)),
                returns_view=any(tensor._is_view() for tensor in outputs),
                repeats=repeat.way,
                repeats_with=repeat.first,
            )
        )
        for number, tensor in enumerate(outputs):
            self._values.name(tensor, (layer.name, number), index)

    def finished(self) -> tuple[Layer, ...]:
        """All layers; call it once, when nothing more is traced."""
        seen = {value for layer in self.layers for value in layer.values_read}
        layers = []
        for index, (layer, outputs) in enumerate(zip(self.layers, self._returned, strict=True)):
            told = msgspec.structs.replace(layer, writes=None)
            written = tuple(value for value in layer.writes or () if value in seen)
            ungraded = tuple(number for number, tensor in enumerate(outputs) if not tensor.requires_grad)
            layers.append(
                msgspec.structs.replace(
                    layer,
                    memory=self._memory(index),
                    handled=layer.name in self._handled,
                    writes=None if written == told.values_written else written,
                    without_gradient=ungraded if layer.inputs or layer.parameters else (),
                )
            )
        return tuple(layers)

    def _memory(self, index: int) -> LayerMemory | None:
        """Memory of a layer where no formula gives it."""
        if index not in self._calls:
            return None
        call, has_formula = self._calls[index]
        if not has_formula:
            return self._watch.watch(call)
        return self._watch.watch_copy(call) if call.in_place else self._watch.watch_exception(call)

    def made(self, tensors: Iterable[torch.Tensor]) -> tuple[str, ...]:
        """The layers that made what tensors hold."""
        with torch._C.DisableTorchFunction():
            read = self._values.read(tensors)
        return tuple(name for name in dict.fromkeys(read.inputs) if name != "input")

    def _layer(self, call: Call, read: ReadTensors, counted_flops: int) -> Layer:
        kind = self._kinds.get(call.function)
        # For a function that no kind covers, torch's own counter knows forward; backward of a product is two products.
        unknown = Facts({"function": call.function, "in_place": call.in_place}, counted_flops, 2 * counted_flops)
        facts = kind.facts(call) if kind else unknown
        activations = [t for t in call.tensors if not t.parameter]
        batchless_inputs = tuple(i for i, t in enumerate(activations) if batch_dim(t.shape, self.batch) is None)
        shape = call.output_shapes[0]
        parameters = tuple(t.parameter for t in call.tensors if t.parameter and not t.parameter.startswith(BUFFER))
        # A loss is a scalar of samples; one of parameters alone holds none. Counters of batches are left as they were.
        of_none = bool(shape) or (bool(activations or parameters) and len(batchless_inputs) == len(activations))
        moved = facts.moved_elements
        if moved is None:
            moved = 0 if kind and kind.view else call.input_elements + call.output_elements
        along = named_dim(call)
        return Layer(
            name=self._unique_name(call),
            kind=kind.name if kind else "opaque",
            attributes=facts.attributes,
            inputs=read.inputs,
            reads=() if read.values == tuple((name, 0) for name in read.inputs) else read.values,
            input_shapes=tuple(per_sample(t.shape, self.batch) for t in activations),
            output_shape=call.output_shape,
            further_outputs=tuple(per_sample(shape, self.batch) for shape in call.output_shapes[1:]),
            batchless=of_none and batch_dim(shape, self.batch) is None,
            batchless_inputs=batchless_inputs,
            parameters=parameters,
            fw_flops=int(facts.fw_flops),
            bw_input_flops=int(facts.bw_input_flops),
            bw_weight_flops=int(facts.bw_weight_flops),
            fw_bytes=4 * moved,
            along=msgspec.UNSET if along is None else along,
        )

    def _is_held(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._parameters or id(tensor) in self._buffers

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            name = self._parameters.get(id(value), "")
            buffer = self._buffers.get(id(value))
            return TensorArgument(tuple(value.shape), BUFFER + buffer if buffer is not None else name)
        if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
            return tuple(self._argument(item) for item in value)
        return value

    def _unique_name(self, call: Call) -> str:
        where = ".".join(part for part in (self.scope, self.running[-1].name if self.running else "") if part)
        leaf = bool(self.running and self.running[-1].leaf)
        buffers = [t.parameter.removeprefix(BUFFER) for t in call.tensors if t.parameter.startswith(BUFFER)]
        if buffers and len(buffers) == len(call.tensors):
            name = f"{buffers[0]}.{call.function}"
        else:
            name = where if where and leaf else f"{where}.{call.function}" if where else call.function
        self._names[name] += 1
        return name if self._names[name] == 1 else f"{name}#{self._names[name]}"


def _untouched(layer: Layer, function: str) -> Layer:
    """A call that returned what it was given: a conversion to the same type, dropout of nothing."""
    attributes = {"function": function, RETURNS_INPUT: True}
    no_work = {"fw_flops": 0, "bw_input_flops": 0, "bw_weight_flops": 0, "fw_bytes": 0}
    return msgspec.structs.replace(layer, kind=VIEW.name, attributes=attributes, **no_work)


def trace_network(model: LoadedModel) -> ModelGraph:
    """The network of a model: layers in forward order, parameters, buffers, and the order of gradients in backward.

    Nothing is measured and no real memory is taken; ``model`` is not changed.

    Raises:
        UserError: forward fails for the model's input shape, or calls other operations for other numbers of samples.
    """
    trimmed = trim(model)
    if trimmed is not None and (network := _trace_trimmed(model, trimmed)) is not None:
        return network
    return trace_whole(model)


def _trace_trimmed(model: LoadedModel, trimmed: TrimmedModel) -> ModelGraph | None:
    """The network of a model of many blocks, from the trace of a few; None where it does not follow from these."""
    try:
        network = with_all_blocks(_trace_on_meta(trimmed), trimmed.stretches)
    except (NotImplementedError, RuntimeError):
        return None
    held = _held(model.module)
    if network is None or any(getattr(network, name) != value for name, value in held.items()):
        return None
    return network


def _trace_on_meta(model: LoadedModel) -> ModelGraph:
    _try_batches(model, _batch_on_meta, (*_FEW, _META_BATCH), "meta")
    return _trace(model.fresh("meta"), _META_BATCH, "meta")


def trace_whole(model: LoadedModel) -> ModelGraph:
    """The network of a model all of whose blocks are traced, as :func:`trace_network` gives it.

    Raises:
        UserError: as of that.
    """
    try:
        return _trace_on_meta(model)
    except (NotImplementedError, RuntimeError) as meta_error:
        try:
            _try_batches(model, _repeated, (_CPU_BATCH, 2 * _CPU_BATCH), "cpu")
            return _trace(model.fresh("cpu"), _CPU_BATCH, "cpu")
        except RuntimeError as error:
            shape = "x".join(map(str, model.input_shape))
            text = f"model {model.name!r} does not run on an input of {shape}: {error}{model.input_remedy}"
            raise UserError(text) from meta_error


def _try_batches(
    model: LoadedModel,
    make_batch: Callable[[LoadedModel, int], tuple[torch.Tensor, torch.Tensor]],
    samples: tuple[int, ...],
    device: str,
) -> None:
    tried = model.fresh(device)
    refuse_dependence(tried, partial(make_batch, tried), samples)


def refuse_single_sample(model: LoadedModel) -> None:
    """Refuse a model that trains on several samples at once, as tracing tries them, and fails on a single one.

    Batch norms of one value a channel do, and a ``squeeze`` that takes the batch's dim away.

    Raises:
        UserError: forward or the loss fails; the message says what torch says.
    """
    try:
        _try_batches(model, _batch_on_meta, (1,), "meta")
    except (NotImplementedError, RuntimeError):
        try:
            _try_batches(model, lambda tried, samples: tried.make_batch(samples, 0), (1,), "cpu")
        except RuntimeError as error:
            raise UserError(f"model {model.name!r} does not train on a single sample: {error}") from error


def _trace(model: LoadedModel, batch: int, device: str) -> ModelGraph:
    module = model.module
    inputs, targets = _batch_on_meta(model, batch) if device == "meta" else model.make_batch(batch, 0)
    mode = _TracingMode(module, batch, inputs)
    with following_modules(module, mode.running), reentrant_checkpoints_run_once(), mode:
        outputs = module(inputs)
        returned = mode.made(tensors_in(outputs))
        mode.scope = "loss"
        loss = model.loss(outputs, targets)
    with GradientOrder(module) as order:
        loss.backward()  # type: ignore[no-untyped-call]
    if any(layer.repeats == "reentrant" for layer in mode.layers):
        again = model.fresh(device)
        with GradientOrder(again.module) as order:
            again.loss(again.module(inputs), targets).backward()  # type: ignore[no-untyped-call]
    layers = held_by_variables(mode.finished(), mode.functions, model.fresh(device), (inputs, targets))
    return ModelGraph(
        name=model.name,
        input_shape=model.input_shape,
        input_dtype=model.input_dtype,
        layers=with_kept_dtypes(layers, mode.functions, model.fresh(device), inputs),
        gradient_order=order.completed,
        outputs=returned,
        **_held(module),
    )


def _held(module: torch.nn.Module) -> dict[str, Any]:
    """What a network tells of a module's parameters and buffers."""
    frozen = tuple(_describe(name, p) for name, p in module.named_parameters() if not p.requires_grad)
    return {
        "parameters": tuple(_describe(name, p) for name, p in module.named_parameters() if p.requires_grad),
        "buffers": tuple(_describe(name, b) for name, b in module.named_buffers()),
        "frozen": frozen,
        "registered": tuple(name for name, _ in module.named_parameters()) if frozen else (),
    }


def _batch_on_meta(model: LoadedModel, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a mini-batch is like; a volume of 4x512^3 is not made for that."""
    if model.task is None:
        inputs = torch.empty((batch, *model.input_shape), device="meta")
        return inputs, torch.empty((batch,), dtype=torch.int64, device="meta")
    ids, targets = model.make_batch(1, 0)
    ids, targets = (t.new_empty((batch, *t.shape[1:]), device="meta") for t in (ids, targets))
    return ids, targets


def _repeated(model: LoadedModel, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The mini-batch that is traced on a CPU, repeated: what values decide is the same for any number of samples."""
    inputs, targets = (torch.cat([tensor] * (samples // _CPU_BATCH)) for tensor in model.make_batch(_CPU_BATCH, 0))
    return inputs, targets


def _other_dtype(tensor: torch.Tensor) -> str | msgspec.UnsetType:
    """Dtype of what a layer returned, where that is of floating numbers other than fp32."""
    known = _DTYPE_NAMES.get(tensor.dtype, "fp32") if tensor.is_floating_point() else "fp32"
    return msgspec.UNSET if known == "fp32" else known


def _describe(name: str, tensor: torch.Tensor) -> Tensor:
    if tensor.dtype not in _DTYPE_NAMES:
        raise UserError(
            f"tensor {name!r} has dtype {tensor.dtype}, which is not one of {', '.join(_DTYPE_NAMES.values())}"
        )
    return Tensor(name=name, shape=tuple(tensor.shape), dtype=_DTYPE_NAMES[tensor.dtype])
