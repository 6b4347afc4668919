"""Gradient exchange in given messages: one all-reduce each, while backward goes on; all else is as in DDP.

A gradient, as it arrives, is divided by the number of ranks into its place in a flat buffer. A message is all-reduced
when its last gradient is there and the message before it was sent, so that all ranks send in one order. When the last
one is sent, what follows backward waits for each in turn and copies it back into its gradients. Where the settings say
so all messages are sent only then. Parameters and buffers are the first rank's at the start, buffers also before each
forward that follows an exchange.

Hooks stand on the nodes that accumulate gradients, where DDP has its own: what watches a gradient sees it before it is
copied. Parameters keep them where Python's collector does not look, so they hold the exchange weakly.

Source: torch/csrc/distributed/c10d/reducer.cpp and torch/nn/parallel/distributed.py (torch 2.13), for what DDP does.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.utils import _sync_module_states

from paradl_bench.core.errors import WorkError
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.strategies.exchange.buckets import BROADCAST_BYTES
from paradl_bench.strategies.exchange.gradients import GradientBuckets
from paradl_bench.strategies.exchange.options import ExchangeOptions


def exchange_messages(
    module: torch.nn.Module,
    model: torch.nn.Module,
    network: ModelGraph,
    settings: PlanSettings,
    process_group: dist.ProcessGroup,
) -> torch.nn.Module:
    """The module with its gradients averaged over the group in the messages of the settings; collective over it.

    Args:
        model: whose parameters the network names; what ``module`` runs.

    Raises:
        UserError: messages that are not of this network.
    """
    parameters = dict(model.named_parameters())
    messages = [[parameters[held.name] for held in message] for message in GradientBuckets(network, settings).rebuilt]
    _sync_module_states(
        module, process_group, BROADCAST_BYTES, src=0, params_and_buffers_to_ignore=(), broadcast_buffers=True
    )
    held = [_Message(message, process_group) for message in messages]
    return FusedModule(module, held, process_group, after_backward=settings.of(ExchangeOptions).after_backward)


class FusedModule(torch.nn.Module):
    """Runs a module, and exchanges its gradients message by message during backward, or when it is over."""

    def __init__(
        self,
        module: torch.nn.Module,
        messages: Sequence[_Message],
        process_group: dist.ProcessGroup,
        *,
        after_backward: bool = False,
    ) -> None:
        super().__init__()
        self.module = module
        self._group = process_group
        self._buffers_due = True
        self._exchange = _Exchange(messages, after_backward=after_backward)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module gives.

        Raises:
            WorkError: gradients of the backward before did not arrive.
        """
        self._exchange.check_complete()
        buffers = list(self.module.buffers())
        if self._buffers_due and buffers:
            dist._broadcast_coalesced(self._group, buffers, BROADCAST_BYTES, 0)  # type: ignore[attr-defined]
        self._buffers_due = self._exchange.active
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients are added up and stay on this rank."""
        self._exchange.active = False
        try:
            yield
        finally:
            self._exchange.active = True


class _Message:
    """A flat buffer, the gradients that it takes, and its all-reduce while that is under way."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
        self.parameters, self._group = parameters, group
        first = parameters[0]
        self._flat = torch.empty(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        starts = itertools.accumulate((p.numel() for p in parameters), initial=0)
        # In the layout of the parameter, which its gradient shares: a copy is then one pass over both.
        self._views = [
            self._flat.as_strided(p.shape, torch.empty_like(p).stride(), start)
            for p, start in zip(parameters, starts, strict=False)
        ]
        self._share = 1.0 / group.size()
        self._work: dist.Work | None = None
        self.missing = len(parameters)

    def take(self, index: int) -> None:
        """Copy a gradient that arrived."""
        torch.mul(_gradient(self.parameters[index]), self._share, out=self._views[index])
        self.missing -= 1

    def send(self) -> None:
        """Start the all-reduce; a group that moves nothing gives nothing back."""
        self._work = dist.all_reduce(self._flat, group=self._group, async_op=True)

    def finish(self) -> None:
        """Wait for it, and copy the means into the gradients."""
        if self._work is not None:
            self._work.wait()
        for parameter, view in zip(self.parameters, self._views, strict=True):
            _gradient(parameter).copy_(view)
        self._work, self.missing = None, len(self.parameters)


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return gradient.detach()


class _Exchange:
    """Sends messages in their order as gradients arrive, or all of them behind backward.

    Attributes:
        active: whether gradients that arrive are exchanged.
    """

    def __init__(self, messages: Sequence[_Message], *, after_backward: bool = False) -> None:
        self.active = True
        self._messages, self._sent, self._after_backward = messages, 0, after_backward
        # A parameter knows the node that accumulates its gradient as long as somebody holds that.
        self._nodes = [
            self._watch(parameter, message, index)
            for message in messages
            for index, parameter in enumerate(message.parameters)
        ]

    def _watch(self, parameter: torch.nn.Parameter, message: _Message, index: int) -> Any:
        with torch.enable_grad():
            function = parameter.expand_as(parameter).grad_fn
        assert function is not None
        node = function.next_functions[0][0]
        assert node is not None
        node.register_hook(_arriving(weakref.ref(self), weakref.ref(message), index))
        return node

    def arrived(self, message: _Message, index: int) -> None:
        """A gradient is there: what is complete is sent."""
        if not self.active:
            return
        message.take(index)
        while self._sent < len(self._messages) and not self._messages[self._sent].missing:
            if not self._after_backward:
                self._messages[self._sent].send()
            self._sent += 1
            if self._sent == len(self._messages):
                torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        for message in self._messages if self._after_backward else ():
            message.send()
        for message in self._messages:
            message.finish()
        self._sent = 0

    def check_complete(self) -> None:
        """Refuse to go on where a backward left a message unsent.

        Raises:
            WorkError: says which message, and how many of its gradients did not arrive.
        """
        begun = self._sent or any(message.missing < len(message.parameters) for message in self._messages)
        if begun:
            message = self._messages[self._sent]
            raise WorkError(
                f"message {self._sent + 1} of {len(self._messages)} was not sent: {message.missing} of its"
                f" {len(message.parameters)} gradients did not arrive in backward; --fusion needs the same ones each"
                " time"
            )


def _arriving(
    exchange: weakref.ref[_Exchange], message: weakref.ref[_Message], index: int
) -> Callable[[Any, Any], None]:
    def arrived(_inputs: Any, _outputs: Any) -> None:
        living, its = exchange(), message()
        if living is not None and its is not None:
            living.arrived(its, index)

    return arrived
