"""What a layer kind is: the torch functions it covers, and from a call the attributes and FLOPs.

Kinds are torch-free but for their builder. FLOPs are per sample and count a multiply-add as 2; kinds that move data
without computing count 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from paradl_bench.core.registry import discover
from paradl_bench.network.graph import Attribute, Layer, LayerMemory
from paradl_bench.network.kinds.attributes import Need
from paradl_bench.network.partition import Window

Cast = Literal["lower", "fp32", "widest", "input", "parameters"]
"""What autocast makes an operation run in: the lower dtype, fp32, the widest of what it reads, parameters included,
the dtype of its input whatever its parameters have, or that of its parameters whatever it reads."""
BUFFER = "buffer:"
"""Before the name of a tensor that a module keeps and does not train."""


class TensorArgument(NamedTuple):
    """A tensor among the arguments of a call: shape with the batch, and its name if a parameter or buffer."""

    shape: tuple[int, ...]
    parameter: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a torch function, with tensors replaced by :class:`TensorArgument`.

    Attributes:
        function: normalised name (``add`` for ``torch.add``, ``Tensor.add_`` and ``+=``).
        output_shapes: of every tensor returned, with the batch.
        batch: the batch that the call was traced with.
    """

    function: str
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    output_shapes: tuple[tuple[int, ...], ...]
    batch: int
    in_place: bool = False

    def bind(self, names: str) -> dict[str, Any]:
        """Arguments by the space-separated names of the function's signature; what was not given is absent."""
        bound = dict(zip(names.split(), self.arguments, strict=False))
        return bound | dict(self.keywords)

    @property
    def tensors(self) -> tuple[TensorArgument, ...]:
        """All tensor arguments in order, those inside lists included."""
        return tuple(_tensors_in((self.arguments, tuple(self.keywords.values()))))

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the first tensor returned, per sample; whole, of one that holds no batch."""
        return per_sample(self.output_shapes[0], self.batch)

    @property
    def output_elements(self) -> int:
        """Elements returned, per sample; of a tensor that holds no batch, all."""
        return sum(math.prod(per_sample(shape, self.batch)) for shape in self.output_shapes)

    @property
    def input_elements(self) -> int:
        """Elements of all activations read, per sample; of a tensor that holds no batch, all."""
        return sum(math.prod(per_sample(t.shape, self.batch)) for t in self.tensors if not t.parameter)


def batch_dim(shape: tuple[int, ...], batch: int) -> int | None:
    """The dim that holds the batch, alone or times something (windows of all samples, say); None where none does."""
    return next((dim for dim, extent in enumerate(shape) if extent and extent % batch == 0), None)


def per_sample(shape: tuple[int, ...], batch: int) -> tuple[int, ...]:
    """A shape without the batch; as it is where it holds none."""
    dim = batch_dim(shape, batch)
    if dim is None:
        return shape
    rest = shape[dim] // batch
    return (*shape[:dim], *((rest,) if rest > 1 else ()), *shape[dim + 1 :])


def _tensors_in(value: Any) -> list[TensorArgument]:
    if isinstance(value, TensorArgument):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors_in(item)]
    return []


class Facts(NamedTuple):
    """What a kind knows of a call: attributes that decide the kernel, and FLOPs per sample by phase.

    Attributes:
        moved_elements: that forward reads and writes, per sample; None where that is all of its inputs and outputs.
    """

    attributes: dict[str, Attribute]
    fw_flops: int = 0
    bw_input_flops: int = 0
    bw_weight_flops: int = 0
    moved_elements: int | None = None


class Saved(NamedTuple):
    """What autograd keeps of an operation from its forward to its backward, besides parameters.

    Attributes:
        inputs, output: whether all its inputs, its output are kept. An operation in place has no input left to keep.
        elements: of further tensors of the network's dtype, per sample.
        mask: elements of a mask, per sample: as wide as the dtype on a CPU, a byte each on a GPU.
        indices: of 8 bytes each, per sample.
        statistics: elements whatever the batch. sums: elements of fp32 or wider, per sample.
    """

    inputs: bool = False
    output: bool = False
    elements: int = 0
    mask: int = 0
    indices: int = 0
    statistics: int = 0
    sums: int = 0


class Operands(NamedTuple):
    """What the time of an operation's kernels depends on, besides the device: what regressors read.

    Attributes:
        sizes: whole numbers by name, the batch among them; the same names for all operations of the kind.
        parameter_elements: of the parameters that it reads.
    """

    sizes: dict[str, int]
    settings: dict[str, str] = {}  # noqa: RUF012  (never changed)
    parameter_elements: int = 0


@dataclass(frozen=True, slots=True)
class LayerKind:
    """A kind of layer; a module under ``paradl_bench/network/kinds`` declares one as ``KIND``.

    Attributes:
        functions: normalised names of the torch functions that it covers.
        build: from attributes, a function of (inputs, parameters) that runs the operation with torch (imported inside);
            None where it can't be run alone.
        attributes: what readers of a layer need of its attributes, by name; networks of a file are held to it.
        reads_dims: how many dims a sample has at least in what is read first; None of a kind that may read parameters
            alone.
        splits_backward: whether input and weight gradient are two kernels, which zero-bubble schedules need apart.
        view: moves no data: costs a call, but no bytes.
        windows: from attributes, what an output position reads along each spatial dim; None for a kind without windows.
        fill: from attributes, what a window reads outside the tensor.
        by_position: from attributes, whether each output position reads that position of its inputs alone (all channels
            of it, maybe), so that blocks of positions can be computed apart. Batch normalisation is, but for its
            statistics.
        by_channel: from attributes, whether each channel of the output (the first dim of a sample) reads that channel
            of the input alone, all positions of it maybe. Statistics of a channel are its own.
        returns_mask: from attributes, whether the output is of booleans, a byte each.
        by_element: from attributes, whether each element of the output reads that element of its inputs alone.
        saves: from a layer, what autograd keeps of it; everything, where nothing is known.
        watched: from a call, whether its memory is watched when it is traced, and ``saves`` is for networks of files.
        keeps_fp32: from a layer, whether what it holds beside inputs and output is fp32, whatever it reads.
        held_elements: from a layer, what its watched memory is in proportion to, where parts of a layer run.
        memory_on_gpu: from a layer, memory of the kernel that a GPU runs, where a CPU may run another; None where not.
        passes_gradient: from a layer, whether backward hands the output's gradient, or a view of it, to the inputs;
            else it makes a tensor for each.
        operands: from a layer and a local batch, its sizes for regressors; None for a layer that sizes don't describe.
        autocast: from attributes and the device's kind, what autocast to a lower dtype makes of it: torch's lists of
            operations by device (torch/amp, "Autocast Op Reference", and aten/src/ATen/autocast_mode.h).
        call: from sizes and settings that ``operands`` gave, a call with the same ones, so that sweeps can run it.
        like: the kind whose kernels run this one too, so that measured times of either say what the other takes.
    """

    name: str
    functions: tuple[str, ...]
    facts: Callable[[Call], Facts]
    build: Callable[[Mapping[str, Attribute]], Callable[[list[Any], list[Any]], Any]] | None = None
    attributes: Mapping[str, Need] = field(default_factory=dict, hash=False)
    reads_dims: int | None = None
    splits_backward: bool = False
    view: bool = False
    windows: Callable[[Mapping[str, Attribute]], tuple[Window, ...]] | None = None
    fill: Callable[[Mapping[str, Attribute]], float] = lambda attributes: 0.0
    by_position: Callable[[Mapping[str, Attribute]], bool] = lambda attributes: False
    by_channel: Callable[[Mapping[str, Attribute]], bool] = lambda attributes: False
    by_element: Callable[[Mapping[str, Attribute]], bool] = lambda attributes: False
    returns_mask: Callable[[Mapping[str, Attribute]], bool] = lambda attributes: False
    saves: Callable[[Layer], Saved] = lambda layer: Saved(inputs=True, output=True)
    watched: Callable[[Call], bool] = lambda call: False
    keeps_fp32: Callable[[Layer], bool] = lambda layer: False
    held_elements: Callable[[Layer], int] = lambda layer: layer.output_elements
    memory_on_gpu: Callable[[Layer], LayerMemory | None] | None = None
    passes_gradient: Callable[[Layer], bool] = lambda layer: False
    operands: Callable[[Layer, int], Operands | None] = lambda layer, batch: None
    autocast: Callable[[Mapping[str, Attribute], str], Cast] = lambda attributes, device: "widest"
    call: Callable[[Mapping[str, int], Mapping[str, str]], Call] | None = None
    like: str = ""


def layer_kinds() -> dict[str, LayerKind]:
    """All kinds by name."""
    return discover("paradl_bench.network.kinds", "KIND", LayerKind)


def kind_of_function() -> dict[str, LayerKind]:
    """Kinds by the torch function that they cover.

    Raises:
        ValueError: two kinds cover the same function.
    """
    kinds: dict[str, LayerKind] = {}
    for kind in layer_kinds().values():
        for function in kind.functions:
            if function in kinds:
                raise ValueError(f"layer kinds {kinds[function].name} and {kind.name} both cover {function}")
            kinds[function] = kind
    return kinds


def windows_of(attributes: Mapping[str, Attribute]) -> tuple[Window, ...]:
    """Windows of a convolution or pooling from its kernel, stride, padding and dilation, one a spatial dim.

    Networks that say nothing but the kernel have its windows step by 1, without padding or dilation.
    """
    kernel = attributes["kernel"]
    assert isinstance(kernel, tuple)
    stride, dilation = (attributes.get(name, (1,) * len(kernel)) for name in ("stride", "dilation"))
    assert isinstance(stride, tuple)
    assert isinstance(dilation, tuple)
    padding = attributes.get("padding", (0,) * len(kernel))
    if padding == "same":
        # torch puts the odd one behind.
        padding = tuple(step * (size - 1) // 2 for size, step in zip(kernel, dilation, strict=True))
    elif padding == "valid":
        padding = (0,) * len(kernel)
    assert isinstance(padding, tuple)
    return tuple(map(Window, kernel, stride, padding, dilation))


def inputs_saved(layer: Layer) -> Saved:
    """Inputs alone are kept."""
    return Saved(inputs=True)


def output_saved(layer: Layer) -> Saved:
    """The output alone is kept."""
    return Saved(output=True)


def nothing_saved(layer: Layer) -> Saved:
    """No tensor is kept."""
    return Saved()


def as_tuple(value: Any, dims: int) -> tuple[int, ...]:
    """A per-dim setting: one number stands for all dims."""
    if isinstance(value, (tuple, list)):
        values = tuple(int(item) for item in value)
        return values * dims if len(values) == 1 else values
    return (int(value),) * dims
