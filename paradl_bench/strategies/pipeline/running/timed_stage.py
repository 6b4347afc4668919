"""A rank's stage as torch's schedules call it: forward, backward, or backward in two parts, each stamped.

torch parts backward by asking autograd for gradients of what the stage has received, and later, from where parameters
are used, for theirs. Its second part exchanges nothing between replicas, and its first one needs of a stage what
:func:`own_result` gives.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch.autograd.graph import GradientEdge
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from paradl_bench.strategies.running.spans import Spans

_USUAL = 2
"""Parameters of a node: a weight and a bias, which autograd accumulates in the order in which it does without parts."""


class TimedStage(PipelineStage):
    """A stage that stamps its own computation; what is left of a step is waiting for other stages.

    Args:
        spans: stamped while its ``stamp`` is set, with ``FW`` and ``BW``.
        arrival: names of the parameters in the order in which their gradients are exchanged.
    """

    def __init__(self, *args: Any, spans: Spans, arrival: Sequence[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._spans, self._arrival = spans, arrival

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of one micro-batch."""
        with self._spans.span("FW"), _own_error():
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Backward of one micro-batch, or the part of it that makes the gradient of what the stage has received."""
        with self._spans.span("BW"), _own_error():
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
            made = self.bwd_cache[bwd_chunk_id]
            # Gradients that autograd is asked for may lie in memory in any order, which those it accumulates do not.
            self.bwd_cache[bwd_chunk_id] = tuple(value if value is None else value.contiguous() for value in made)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Forward, in which none of the stage's exchanges prepares for gradients; torch knows of the outer one."""
        with _without_exchange(self._exchanges[1:]):
            return super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Backward, the last of which all exchanges are part of."""
        inner = self._exchanges[1:]
        for exchange in inner if last_backward else ():
            # As torch does for the outer one.
            sent = _find_tensors(bwd_kwargs["stage_output"])  # type: ignore[no-untyped-call]
            exchange.reducer.prepare_for_backward(list(sent))
        with _without_exchange(() if last_backward else inner):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Backward of the parameters for one micro-batch, whose input's part has run; after the last one, exchange."""
        with self._spans.span("BW"):
            if self.is_first:
                # torch runs all of backward here.
                super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
                return
            self.dw_runner.pop(bwd_chunk_id)
            _, groups, _, _ = self.backward_state.pop(bwd_chunk_id)
            self._accumulate(groups, last_backward=last_backward)

    def _accumulate(self, groups: list[dict[str, Any]], *, last_backward: bool) -> None:
        """Add up gradients of parameters in the order of backward, from what ``stage_backward_weight`` takes.

        torch's own second part asks autograd for gradients, which accumulates none: what hangs on that, as the exchange
        of DistributedDataParallel does, would never run.
        """
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        places = {name: place for place, name in enumerate(self._arrival)}
        of_groups = _apart(groups)
        exchanges = self._exchanges if last_backward else ()
        used = [parameter for together in of_groups for parameter in together.parameters.values()]
        for exchange in exchanges:
            # It looks for parameters behind these. What the stage has sent is detached by now; views lead to their own.
            exchange.reducer.prepare_for_backward([parameter.view_as(parameter) for parameter in used])

        def place(parameter: torch.Tensor) -> int:
            return places[names[id(parameter)]]

        of_groups.sort(key=lambda together: max(map(place, together.parameters.values())))
        # From one use of a shared parameter to another autograd passes nodes of other groups, and would free them.
        shared = [index for index, together in enumerate(of_groups) if len(together.nodes) > 1]
        for index, together in enumerate(of_groups):
            parameters, (nodes, gradients) = list(together.parameters.values()), together.let_go()
            keeps = bool(shared) and index <= shared[-1]
            if exchanges and len(parameters) > _USUAL:
                _hand_on(sorted(parameters, key=place), nodes, gradients, keeps=keeps)
            else:
                _differentiate(parameters, nodes, gradients, keeps=keeps)

    @functools.cached_property
    def _exchanges(self) -> tuple[DistributedDataParallel, ...]:
        """From the outside in."""
        exchanges, module = [], self.submod
        while isinstance(module, DistributedDataParallel):
            exchanges.append(module)
            module = module.module
        return tuple(exchanges)

    @property
    def _model(self) -> torch.nn.Module:
        own: Any = self._exchanges[-1].module if self._exchanges else self.submod
        return cast(torch.nn.Module, own.module)


@contextlib.contextmanager
def _without_exchange(exchanges: Sequence[DistributedDataParallel]) -> Iterator[None]:
    with contextlib.ExitStack() as held:
        for exchange in exchanges:
            held.enter_context(exchange.no_sync())
        yield


@contextlib.contextmanager
def _own_error() -> Iterator[None]:
    """Raise what backward raised, and not the list of tensors that torch puts in its place."""
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is None:
            raise
        raise error.__cause__ from None


_Gradients = Sequence[Sequence[torch.Tensor | None] | None]


class _Together:
    """Parameters, by identity, whose gradients come from the same nodes of the graph, and those nodes' gradients."""

    def __init__(self, group: dict[str, Any]) -> None:
        self.parameters = {id(accumulator.variable): accumulator.variable for accumulator in group["params"]}
        nodes = group.pop("intermediates")
        self.nodes = dict(zip(nodes, group.pop("grads", [None] * len(nodes)), strict=True))

    def join(self, other: _Together) -> None:
        self.parameters |= other.parameters
        self.nodes |= other.nodes

    def let_go(self) -> tuple[list[Any], _Gradients]:
        """Nodes and gradients, which it no longer holds."""
        nodes, gradients = list(self.nodes), list(self.nodes.values())
        self.nodes.clear()
        return nodes, gradients


def _apart(groups: list[dict[str, Any]]) -> list[_Together]:
    """Groups of ``stage_backward_weight`` that have nothing in common; empties those it takes.

    torch's can overlap where a parameter is used at several nodes: its gradient would count twice.
    """
    place_of: dict[Any, _Together] = {}
    for group in groups:
        together = _Together(group)
        keys = (*together.parameters, *together.nodes)
        for other in {id(place_of[key]): place_of[key] for key in keys if key in place_of}.values():
            together.join(other)
        place_of |= dict.fromkeys((*together.parameters, *together.nodes), together)
    return list({id(together): together for together in place_of.values()}.values())


def _differentiate(parameters: list[torch.Tensor], nodes: Sequence[Any], gradients: _Gradients, *, keeps: bool) -> None:
    """Accumulate gradients of parameters from those of the nodes that they are used in; lets go of both.

    Args:
        keeps: whether nodes that autograd passes can be passed again.
    """
    with _edges(nodes, gradients) as (edges, values):
        if edges:
            torch.autograd.backward(edges, values, retain_graph=keeps, inputs=parameters)


def _hand_on(parameters: list[torch.Tensor], nodes: Sequence[Any], gradients: _Gradients, *, keeps: bool) -> None:
    """The same, one parameter after the other as they are given.

    A node of a recurrent layer has the gradients of all its parameters at once. In which order autograd accumulates
    them depends on what else is asked of the node.
    """
    with _edges(nodes, gradients) as (edges, values):
        made = (
            list(torch.autograd.grad(edges, parameters, values, retain_graph=keeps, allow_unused=True)) if edges else []
        )
    for parameter in parameters[: len(made)]:
        value = made.pop(0)
        if value is not None:
            torch.autograd.backward([parameter.view_as(parameter)], [value])


@contextlib.contextmanager
def _edges(nodes: Sequence[Any], gradients: _Gradients) -> Iterator[tuple[list[GradientEdge], list[torch.Tensor]]]:
    """Where to begin, and with which gradients."""
    given = list(zip(nodes, gradients, strict=False))
    pairs = [
        (GradientEdge(node, place), gradient)
        for node, grads in given
        for place, gradient in enumerate(grads or ())
        if gradient is not None
    ]
    # Where one node leads to another, that one is to get what it got, and not the same once more.
    handles = [node.register_prehook(lambda _, grads=grads: grads) for node, grads in given] if len(nodes) > 1 else []
    try:
        yield [edge for edge, _ in pairs], [gradient for _, gradient in pairs]
    finally:
        for handle in handles:
            handle.remove()


def own_result(value: Any) -> Any:
    """A tensor as the result of an operation of its own, in the same memory: torch detaches it in place, which a view
    cannot be, and what autograd has kept for the second part of backward must not.
    """
    differentiable = isinstance(value, torch.Tensor) and value.requires_grad
    return _OwnResult.apply(value) if differentiable else value  # type: ignore[no-untyped-call]


class _OwnResult(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        # A detached one would count as a view of what it was detached from.
        return value.data

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient
