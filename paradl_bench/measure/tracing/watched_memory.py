"""What memory one call of a torch function holds beside what it reads and returns, watched on tensors without memory.

torch's own autograd runs forward and backward of the call on fake CPU tensors, which have shapes alone. Every storage
that an operator makes is followed until it is freed. So what no formula covers is right for the torch at hand: an
attention in one function, a recurrent layer, what is padded or resized.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from paradl_bench.measure.tracing.gradient_order import SumOfGradients
from paradl_bench.measure.tracing.layouts import (
    FAILS_WITHOUT_VALUES,
    addresses_of,
    as_it_lay,
    fake_tensors,
    tensor_leaves,
)
from paradl_bench.measure.tracing.traced_call import GradientLayout, TracedCall
from paradl_bench.network.graph import BatchBytes, LayerMemory
from paradl_bench.strategies.running.operations import output_of

_FOR_REAL = frozenset(("lstm",))
"""Functions whose kernel on a CPU keeps memory that only it knows."""
_FEW, _MANY = 4, 1 << 10
"""The fewest and the most samples that these run on, and twice as many. So many of any tensor fill whole pages, which
kernels on a CPU take their memory in."""
_PAGES_BYTES = 1 << 25
"""Held of a call, pages that are not full make no difference."""


class MemoryWatch:
    """Watches calls, each kind of call once."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._known: dict[Any, LayerMemory | None] = {}

    def watch(self, call: TracedCall, *, plain: bool = False) -> LayerMemory | None:
        """The memory of a call; None where it does not run without values.

        Args:
            plain: as if all tensors lay in memory in the order of their elements.
        """
        given = tree_map_only(torch.Tensor, _described, (call.arguments, call.changed_part))
        # What autograd keeps is told by place among activations, which parameters are none of.
        activations = {id(tensor) for tensor in call.activations}
        are_activations = tuple(id(tensor) in activations for tensor in tensor_leaves(call.arguments))
        key = call.function, plain, call.gradient, repr(given), are_activations
        if key not in self._known:
            try:
                self._known[key] = _watch(call, self._batch, plain)
            except FAILS_WITHOUT_VALUES:
                self._known[key] = None
        return self._known[key]

    def watch_copy(self, call: TracedCall) -> LayerMemory | None:
        """The memory of a call that changes its first argument; None where autograd copies nothing for that: not what
        was there before, and, of a part of a tensor, not the gradient of the whole.
        """
        memory = self.watch(call)
        return None if memory is None or memory.kept == memory.backward == (0, 0) else memory

    def watch_exception(self, call: TracedCall) -> LayerMemory | None:
        """The memory of a call that a formula covers; None where that holds: what is read gets gradients, is laid out
        and as wide as usual, and is more than a view of a parameter.
        """
        if call.is_mixed or call.is_wide or call.views_parameter:
            return self.watch(call)
        if call.is_plain:
            return None
        memory = self.watch(call)
        return None if memory == self.watch(call, plain=True) else memory


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype}{tuple(tensor.shape)}{tensor.stride()}{tensor.requires_grad}"


class _Moments(TorchDispatchMode):
    """Follows storages that operators make.

    Attributes:
        known: addresses of storages that were there before. now, peak: bytes a sample, and others.
        peak_if_held: likewise, had somebody else held the output's gradient all the while.
    """

    def __init__(self, batch: int, known: Iterable[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = set(known)
        self.now: BatchBytes = (0, 0)
        self.peak: BatchBytes = (0, 0)
        self._batch = batch
        self._sizes: dict[int, BatchBytes] = {}
        self._sum: SumOfGradients[BatchBytes] | None = None
        self.in_backward = False
        self._given: int | None = None
        self._let_go: BatchBytes = (0, 0)
        self.peak_if_held: BatchBytes = (0, 0)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.settle()
        if self.in_backward and function is torch.ops.aten.add.Tensor:
            self._sum = SumOfGradients(args[0])
        result = function(*args, **(kwargs or {}))
        for tensor in tensor_leaves(result):
            storage = tensor.untyped_storage()
            address = storage._cdata
            if address not in self.known and address not in self._sizes:
                self._sizes[address] = self._parted(_spanned_bytes(tensor))
                self.now = _sum(self.now, self._sizes[address])
                weakref.finalize(storage, self._freed, address)
        if self._sum is None:
            self._note(self.now)
        else:
            self._sum.moment = self.now
        return result

    def settle(self) -> None:
        """Note the moment of the last sum of gradients, unless autograd would have added in place."""
        done, self._sum = self._sum, None
        if done is not None and done.moment is not None and not done.in_place:
            self._note(done.moment)

    def begin_backward(self) -> None:
        """Note moments from now on alone."""
        self.peak = self.peak_if_held = self.now
        self.in_backward = True

    def give(self, gradient: torch.Tensor) -> None:
        """Have the output's gradient, which was just made, apart: somebody else may hold it too."""
        self._given = gradient.untyped_storage()._cdata

    def _note(self, moment: BatchBytes) -> None:
        self.peak = max(self.peak, moment, key=self._total)
        held = _sum(moment, self._let_go)
        self.peak_if_held = max(self.peak_if_held, held, key=self._total)

    def _total(self, size: BatchBytes) -> int:
        return size[0] * self._batch + size[1]

    def made(self, values: Any) -> BatchBytes:
        """Bytes of tensors that operators made, each storage once."""
        total: BatchBytes = (0, 0)
        for address, tensor in {tensor.untyped_storage()._cdata: tensor for tensor in tensor_leaves(values)}.items():
            if address not in self.known:
                # A tensor that Python makes of numbers passes no operator.
                size = self._sizes[address] if address in self._sizes else self._parted(_spanned_bytes(tensor))
                total = _sum(total, size)
        return total

    def _parted(self, size: int) -> BatchBytes:
        """Bytes a sample of what holds the batch, bytes in all of what does not."""
        a_sample, rest = divmod(size, self._batch)
        return (0, size) if rest else (a_sample, 0)

    def beyond(self, gradients: Iterable[torch.Tensor]) -> BatchBytes:
        """Bytes of storages that gradients do not fill, as the real part of complex numbers."""
        left = {gradient.untyped_storage()._cdata: _spanned_bytes(gradient) for gradient in gradients}
        for gradient in gradients:
            left[gradient.untyped_storage()._cdata] -= gradient.nbytes
        total: BatchBytes = (0, 0)
        for size in left.values():
            total = _sum(total, self._parted(max(size, 0)))
        return total

    def _freed(self, address: int) -> None:
        size = self._sizes.pop(address)
        self.now = _sum(self.now, size, -1)
        if address == self._given:
            # Its address may be another's next.
            self._given, self._let_go = None, size


def _spanned_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's memory, and of the gap behind its last element where elements lie with gaps.

    Without that gap, the memory of a batch is no multiple of its samples.
    """
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    spanned = max((extent * stride for extent, stride in strides), default=1)
    return max(tensor.untyped_storage().nbytes(), spanned * tensor.element_size())


def _sum(one: BatchBytes, other: BatchBytes, times: int = 1) -> BatchBytes:
    return one[0] + times * other[0], one[1] + times * other[1]


def _watch(call: TracedCall, batch: int, plain: bool) -> LayerMemory:
    """One call, on fake tensors; for real, of few samples, where fake ones do not tell."""
    if call.function.__name__ not in _FOR_REAL:
        with fake_tensors():
            return _watch_on(_contiguous if plain else as_it_lay, call, batch, plain)

    def few(count: int) -> LayerMemory:
        def shrunk(tensor: torch.Tensor) -> torch.Tensor:
            order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
            extents = [tensor.size(dim) for dim in order]
            shape = [extent // batch * count if extent % batch == 0 else extent for extent in extents]
            back = [order.index(dim) for dim in range(tensor.dim())]
            return torch.zeros(shape, dtype=tensor.dtype, device="cpu").permute(back)

        return _watch_on(shrunk, call, count, plain=True)

    count, kept = _FEW, few(_FEW).kept
    while count < _MANY and count * kept[0] + kept[1] < _PAGES_BYTES:
        count *= 2
    return _in_proportion(few(count), few(2 * count), count)


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def _in_proportion(few: LayerMemory, more: LayerMemory, count: int) -> LayerMemory:
    """What grows with the batch, and what does not, from a call on ``count`` samples and one on twice as many."""

    def parted(name: str) -> BatchBytes:
        (a_sample, fixed), (of_more, fixed_of_more) = getattr(few, name), getattr(more, name)
        one, two = a_sample * count + fixed, of_more * 2 * count + fixed_of_more
        a_sample = (two - one) // count
        return a_sample, one - a_sample * count

    names = ("kept", "forward", "backward", "backward_if_held")
    return msgspec.structs.replace(few, **{name: parted(name) for name in names})


def _watch_on(
    made_like: Callable[[torch.Tensor], torch.Tensor], call: TracedCall, batch: int, plain: bool
) -> LayerMemory:
    """Watch forward and backward on tensors like the arguments, which ``made_like`` makes."""
    leaves: list[torch.Tensor] = []
    copies: dict[int, torch.Tensor] = {}

    def like(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            part = call.changed_part if tensor is call.arguments[0][0] else None
            made = made_like(part.whole if part else tensor).requires_grad_(tensor.requires_grad)
            leaves.extend([made] if made.requires_grad else [])
            # No leaf that gets a gradient can be changed; of a clone it gets the same one.
            given = made.clone() if call.in_place and made.requires_grad else made
            copies[id(tensor)] = given.as_strided(tensor.shape, tensor.stride(), part.offset) if part else given
        return copies[id(tensor)]

    own_args, own_kwargs = tree_map_only(torch.Tensor, like, call.arguments)
    saved: set[int] = set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.update(addresses_of(tensor))
        # The tensor itself would hold the operation that made it.
        return tensor.detach()

    moments = _Moments(batch, addresses_of([*copies.values(), *leaves]))
    with moments, saved_tensors_hooks(pack, lambda tensor: tensor):
        result = output_of(call.function, own_args, call.function(*own_args, **own_kwargs))
        outputs = tensor_leaves(result)
    held, most = moments.now, moments.peak
    first = moments.made(outputs[:1])
    # What autograd does not keep of the others is let go by who called; without autograd, together with the first.
    passing = [output for output in outputs[1:] if not addresses_of(output) & (saved | addresses_of(outputs[:1]))]
    kept = _sum(_sum(held, first, -1), moments.made(passing if leaves else ()), -1)
    layout = None if plain else call.gradient
    backward = _watch_backward(moments, outputs, leaves, layout, views_parameter=call.views_parameter)
    aliases = bool(addresses_of(outputs[:1]) & addresses_of(list(copies.values())))
    return LayerMemory(
        inputs=tuple(i for i, t in enumerate(call.activations) if addresses_of(copies[id(t)]) & saved),
        output=bool(addresses_of(outputs[:1]) & saved),
        width=outputs[0].element_size(),
        kept=kept,
        forward=_sum(_sum(most, first, -1), kept, -1),
        backward=backward.alone,
        backward_if_held=backward.if_held,
        passes_gradient=backward.passes,
        aliases=aliases,
        apart=aliases and len(leaves) == 1 and _have_own_nodes(outputs),
    )


def _have_own_nodes(outputs: list[torch.Tensor]) -> bool:
    """Whether several outputs have a node of autograd's each, and not one together."""
    nodes = [output.grad_fn for output in outputs]
    return len(nodes) > 1 and len({id(node) for node in nodes}) == len(nodes)


class _Backward(NamedTuple):
    """As in :class:`~paradl_bench.network.graph.LayerMemory`."""

    alone: BatchBytes = (0, 0)
    if_held: BatchBytes = (0, 0)
    passes: bool = False


def _watch_backward(
    moments: _Moments,
    outputs: list[torch.Tensor],
    leaves: list[torch.Tensor],
    layout: GradientLayout | None,
    *,
    views_parameter: bool,
) -> _Backward:
    """What backward holds beside all that is there when it begins, and the gradients that it makes."""
    differentiable = next((output for output in outputs if output.requires_grad), None)
    if differentiable is None:
        return _Backward()
    whole = torch.zeros((), dtype=differentiable.dtype, device=differentiable.device).expand(differentiable.shape)
    moments.known |= addresses_of(whole)
    before = moments.now
    moments.begin_backward()
    arrived: list[Any] = []

    def arrive(_: torch.Tensor) -> torch.Tensor:
        # Nobody but autograd holds it, which may let go of it before the end.
        shape = tuple(differentiable.shape)
        if layout is not None and layout[0] == shape:
            gradient = torch.empty_strided(shape, layout[1], dtype=differentiable.dtype, device="cpu")
        else:
            gradient = torch.empty(shape, dtype=differentiable.dtype, device="cpu")
        moments.give(gradient)
        arrived.append((weakref.ref(gradient.untyped_storage()), moments.made(gradient), addresses_of(gradient)))
        return gradient

    # A hook on a view that was assigned to crashes torch, unless its node has been asked for and is held.
    node = differentiable.grad_fn
    differentiable.register_hook(arrive)  # type: ignore[no-untyped-call]
    del node
    with moments:
        gradients = [g for g in torch.autograd.grad(differentiable, leaves, whole, allow_unused=True) if g is not None]
    moments.settle()
    ((alive, given, addresses),) = arrived
    passes = alive() is not None and bool(gradients) and addresses_of(gradients) == addresses
    there = _sum(given, (0, 0) if passes else moments.made(gradients))
    there = _sum(_sum(there, before), moments.beyond(gradients), -1)
    if views_parameter and passes:
        # Autograd copies what does not lie in memory as the parameter does, to keep it.
        passes = gradients[0].stride() == leaves[0].stride()
    return _Backward(_sum(moments.peak, there, -1), _sum(moments.peak_if_held, there, -1), passes)
