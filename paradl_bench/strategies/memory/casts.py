"""What autocast makes beside the tensors of an operation: copies of its inputs, of parameters, and of their gradients.

An input of another dtype is converted for each operation that reads it; autograd keeps the copy where it would keep
the input. A parameter is converted once a forward, when the first operation reads it, and autocast keeps that copy
until forward is over; the weight among them (a bias has one dim) is kept for the operation's backward too. Backward
makes the parameters' gradients in the lower dtype, then their fp32 gradients from the last parameter to the first, and
the inputs' at the end: autograd runs what was made last first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from paradl_bench.network.graph import DTYPE_BYTES, ModelGraph
from paradl_bench.network.kinds.autocast import Width, computed_in, given_dtype, widths_of
from paradl_bench.plan.compute import INPUT
from paradl_bench.strategies.memory.ledger import Gradient, Ledger, Storage, hold


class Casts:
    """Conversions of one walk; of a dtype that is not trained in by autocast there are none."""

    def __init__(
        self, ledger: Ledger, network: ModelGraph, dtype: str, device: str, widths: Sequence[Width] = ()
    ) -> None:
        self._ledger, self._layers = ledger, network.layers
        self._widths = widths or widths_of(network, dtype, device)
        self.runs = {layer.name: width.runs for layer, width in zip(network.layers, self._widths, strict=True)}
        self._lower, self._kept_width = DTYPE_BYTES[computed_in(dtype)], DTYPE_BYTES[given_dtype(dtype)]
        self._shapes = {parameter.name: parameter.shape for parameter in network.parameters}
        self._copies: dict[str, Storage] = {}
        self._by_model: dict[int, tuple[Storage, Storage]] = {}

    def run_width(self, i: int) -> int:
        """Bytes of an element of what a layer's operation makes."""
        return self._widths[i].runs

    def read_width(self, i: int, position: int) -> int:
        """Bytes of an element of an input as it is."""
        reads = self._widths[i].reads
        return reads[position] if position < len(reads) else self._widths[i].runs

    def in_run_width(self, i: int, position: int, size: int) -> int:
        """Bytes that an input of ``size`` bytes has in the dtype that the operation runs in."""
        width = self._widths[i]
        if position >= len(width.reads) or width.reads[position] == width.runs:
            return size
        return size // width.reads[position] * width.runs

    def _received_width(self, i: int) -> int:
        """Bytes of an element of what the network reads, as a layer reads it."""
        reads = zip(self._layers[i].inputs, self._widths[i].reads, strict=True)
        return next((width for name, width in reads if name == INPUT), self._kept_width)

    def inputs(
        self, i: int, read: Sequence[Storage], size_of: Callable[[int], int]
    ) -> tuple[Sequence[Storage], list[Storage]]:
        """What the operation reads in the place of its inputs, and those among it that were made for that.

        Args:
            size_of: bytes of an input, by its position, as it is.
        """
        width = self._widths[i]
        places = (
            [place for place, read_width in enumerate(width.reads) if read_width != width.runs]
            if width.converts
            else []
        )
        if not places:
            return read, []
        as_read = list(read)
        for place in places:
            as_read[place] = self._converted(read[place], self.in_run_width(i, place, size_of(place)), width.by_model)
        self._ledger.mark()
        return as_read, [as_read[place] for place in places]

    def _converted(self, storage: Storage, size: int, by_model: bool) -> Storage:
        """What is made of a storage, or was and is still there if the model itself converts it."""
        if not by_model:
            return self._ledger.allocate(size)
        earlier = self._by_model.get(id(storage))
        if earlier is not None and earlier[1].holders and earlier[1].size == size:
            return hold(earlier[1])
        made = self._ledger.allocate(size)
        # Holding on to the first keeps its id from being another's.
        self._by_model[id(storage)] = storage, made
        return made

    def parameters(self, i: int) -> list[Storage]:
        """Copies of a layer's parameters that its backward needs, each held for it."""
        if not self._widths[i].lowers_parameters:
            return []
        names = [name for name in self._layers[i].parameters if name in self._shapes]
        for name in names:
            if name not in self._copies:
                self._copies[name] = self._ledger.allocate(math.prod(self._shapes[name]) * self._lower)
        return [hold(self._copies[name]) for name in names if len(self._shapes[name]) > 1]

    def end_forward(self) -> None:
        """Autocast lets go of its copies of parameters."""
        for storage in self._copies.values():
            self._ledger.release(storage)
        self._copies.clear()

    def lowered_gradients(self, i: int) -> list[tuple[int, int]]:
        """Of a layer's parameters in the order of backward, bytes of their gradients in the lower dtype and in fp32."""
        if not self._widths[i].lowers_parameters:
            return []
        names = [name for name in self._layers[i].parameters if name in self._shapes]
        elements = [math.prod(self._shapes[name]) for name in reversed(names)]
        return [(count * self._lower, count * self._kept_width) for count in elements]

    def gradient(self, i: int, source: int, gradient: Gradient) -> Gradient:
        """The gradient of a layer's input in the dtype of that.

        Args:
            source: index of the layer that made the input; below 0 for what the network reads.
        """
        runs, wanted = self._widths[i].runs, self._widths[source].runs if source >= 0 else self._received_width(i)
        if wanted == runs:
            return gradient
        size = gradient.size // runs * wanted
        made = Gradient(self._ledger.allocate(size), size, gradient.output)
        self._ledger.mark()
        self._ledger.release(gradient.storage)
        return made
