"""Networks built without torch: every layer through its kind's own facts, as tracing builds them."""

from __future__ import annotations

from typing import Any

from paradl_bench.network.graph import Layer, ModelGraph, Tensor
from paradl_bench.network.kinds.kind import Call, TensorArgument, kind_of_function

_BATCH = 7
_KINDS = kind_of_function()


class NetworkFactory:
    """Appends layers one after the other; each reads the last one unless it is told what to read.

    Args:
        input_shape: channels, then positions, per sample.
    """

    def __init__(self, *input_shape: int) -> None:
        self._input_shape = input_shape
        self._shape_of = {"input": input_shape}
        self._last = "input"
        self._layers: list[Layer] = []
        self._parameters: dict[str, Tensor] = {}
        self._buffers: list[Tensor] = []

    def _parameter(self, name: str, *shape: int) -> TensorArgument:
        self._parameters.setdefault(name, Tensor(name=name, shape=shape))
        return TensorArgument(shape, name)

    def _read(self, name: str) -> TensorArgument:
        return TensorArgument((_BATCH, *self._shape_of[name]))

    def call(
        self,
        name: str,
        function: str,
        arguments: tuple[Any, ...],
        output_shape: tuple[int, ...],
        inputs: tuple[str, ...],
        **keywords: Any,
    ) -> str:
        """A call of a torch function; shapes per sample, an output without dims being a scalar."""
        output = (_BATCH, *output_shape) if output_shape else ()
        call = Call(function, arguments, keywords, (output,), _BATCH)
        kind = _KINDS[function]
        facts = kind.facts(call)
        self._layers.append(
            Layer(
                name=name,
                kind=kind.name,
                attributes=facts.attributes,
                inputs=tuple(dict.fromkeys(inputs)),
                input_shapes=tuple(t.shape[1:] for t in call.tensors if not t.parameter),
                output_shape=output_shape,
                parameters=tuple(t.parameter for t in call.tensors if t.parameter and not t.parameter.startswith("*")),
                fw_flops=facts.fw_flops,
                bw_input_flops=facts.bw_input_flops,
                bw_weight_flops=facts.bw_weight_flops,
                fw_bytes=0 if kind.view else 4 * (call.input_elements + call.output_elements),
            )
        )
        self._shape_of[name] = output_shape
        self._last = name
        return name

    def conv(
        self,
        name: str,
        filters: int,
        kernel: int | tuple[int, ...] = 3,
        *,
        stride: int = 1,
        padding: int = 1,
        dilation: int = 1,
        groups: int = 1,
        bias: bool = True,
        weight: str = "",
        read: str = "",
    ) -> str:
        """A convolution over all positions; ``weight`` names another layer whose parameters it shares."""
        source = read or self._last
        channels, *extents = self._shape_of[source]
        kernels = kernel if isinstance(kernel, tuple) else (kernel,) * len(extents)
        owner = weight or name
        parameters = [self._parameter(f"{owner}.weight", filters, channels // groups, *kernels)]
        if bias:
            parameters.append(self._parameter(f"{owner}.bias", filters))
        outputs = [
            (extent + 2 * padding - dilation * (size - 1) - 1) // stride + 1
            for extent, size in zip(extents, kernels, strict=True)
        ]
        return self.call(
            name,
            f"conv{len(extents)}d",
            (self._read(source), *parameters),
            (filters, *outputs),
            (source,),
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
        )

    def pool(self, name: str, kernel: int, *, function: str = "max_pool", padding: int = 0, read: str = "") -> str:
        """Pooling with a stride of the kernel's size."""
        source = read or self._last
        channels, *extents = self._shape_of[source]
        outputs = [(extent + 2 * padding - kernel) // kernel + 1 for extent in extents]
        arguments = (self._read(source), kernel, kernel, padding)
        return self.call(name, f"{function}{len(extents)}d", arguments, (channels, *outputs), (source,))

    def relu(self, name: str, read: str = "") -> str:
        """An activation."""
        source = read or self._last
        return self.call(name, "relu", (self._read(source),), self._shape_of[source], (source,))

    def batch_norm(self, name: str, read: str = "") -> str:
        """Batch normalisation with running statistics."""
        source = read or self._last
        channels = self._shape_of[source][0]
        own = [self._parameter(f"{name}.{of}", channels) for of in ("weight", "bias")]
        self._buffers += [Tensor(name=f"{name}.{of}", shape=(channels,)) for of in ("running_mean", "running_var")]
        self._buffers.append(Tensor(name=f"{name}.num_batches_tracked", shape=(), dtype="int64"))
        running = [TensorArgument((channels,), f"*{name}.{of}") for of in ("running_mean", "running_var")]
        shape = self._shape_of[source]
        return self.call(name, "batch_norm", (self._read(source), *running, *own, True), shape, (source,))

    def add(self, name: str, one: str, other: str) -> str:
        """The sum of two layers' outputs."""
        return self.call(name, "add", (self._read(one), self._read(other)), self._shape_of[one], (one, other))

    def scale(self, name: str) -> str:
        """A multiplication by a number, which no gradient reaches where it reads the input."""
        source = self._last
        return self.call(name, "mul", (self._read(source), 2.0), self._shape_of[source], (source,))

    def flatten(self, name: str, read: str = "") -> str:
        """All of a sample in one dim."""
        source = read or self._last
        elements = 1
        for extent in self._shape_of[source]:
            elements *= extent
        return self.call(name, "flatten", (self._read(source), 1), (elements,), (source,))

    def linear(self, name: str, features: int, *, bias: bool = True) -> str:
        """A fully connected layer."""
        source = self._last
        weight = self._parameter(f"{name}.weight", features, self._shape_of[source][-1])
        own = (weight, self._parameter(f"{name}.bias", features)) if bias else (weight,)
        return self.call(name, "linear", (self._read(source), *own), (features,), (source,))

    def loss(self, name: str = "loss.cross_entropy") -> str:
        """Cross-entropy with targets that no layer makes."""
        targets = TensorArgument((_BATCH,))
        return self.call(name, "cross_entropy", (self._read(self._last), targets), (), (self._last,))

    def network(self, name: str, gradient_order: tuple[str, ...] | None = None) -> ModelGraph:
        """What was built; gradients arrive in reverse order of registration, unless another order is given."""
        parameters = tuple(self._parameters.values())
        return ModelGraph(
            name=name,
            input_shape=self._input_shape,
            layers=tuple(self._layers),
            parameters=parameters,
            buffers=tuple(self._buffers),
            gradient_order=tuple(p.name for p in reversed(parameters)) if gradient_order is None else gradient_order,
        )


def two_convolutions() -> ModelGraph:
    """4x16x16 -> conv 8 -> relu -> conv 8 -> flatten -> fc 6."""
    factory = NetworkFactory(4, 16, 16)
    factory.conv("conv1", 8)
    factory.relu("relu")
    factory.conv("conv2", 8)
    factory.flatten("flatten")
    factory.linear("fc", 6)
    factory.loss()
    return factory.network("convolutional")


def small() -> ModelGraph:
    """3x8x8 -> conv 6 -> relu -> pool 2 -> conv 4 without bias -> flatten -> fc 5."""
    factory = NetworkFactory(3, 8, 8)
    factory.conv("conv1", 6)
    factory.relu("relu")
    factory.pool("pool", 2)
    factory.conv("conv2", 4, bias=False)
    factory.flatten("flatten")
    factory.linear("fc", 5)
    factory.loss("loss")
    return factory.network("small")


def pooled_convolutions() -> ModelGraph:
    """4x16x16 -> conv 8 -> relu -> conv 8 -> pool 2 -> flatten -> fc 6."""
    factory = NetworkFactory(4, 16, 16)
    factory.conv("conv1", 8)
    factory.relu("relu")
    factory.conv("conv2", 8)
    factory.pool("pool", 2)
    factory.flatten("flatten")
    factory.linear("fc", 6)
    factory.loss()
    return factory.network("convolutional")


def small_cnn(convolutions: int, classes: int) -> ModelGraph:
    """Convolutions of 8 filters, a pool and a linear layer."""
    factory = NetworkFactory(4, 16, 16)
    for index in range(convolutions):
        factory.conv(f"conv{index}", 8)
    factory.pool("pool", 2)
    factory.flatten("flatten")
    factory.linear("fc", classes)
    factory.loss()
    return factory.network("small")
