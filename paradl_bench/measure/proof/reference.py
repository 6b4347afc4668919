"""The serial model that a strategy is held against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from paradl_bench.measure.proof.parts import AtOnce, NormCuts, Place
from paradl_bench.measure.proof.watching import Passage, WatchedForward, tensors_of
from paradl_bench.network.models.catalog import LoadedModel
from paradl_bench.ranks.groups.process_group import end_groups
from paradl_bench.ranks.groups.process_groups import RankContext
from paradl_bench.ranks.pulse import beat
from paradl_bench.ranks.rank_place import NO_BACKEND

T = TypeVar("T")


class Ranks(Protocol):
    """The ranks of a proof, as one of them sees them; every method is called by all of them."""

    @property
    def rank(self) -> int:
        """Of this one."""

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of ranks; of JSON's types."""

    def mean(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace tensors, which are alike in shape everywhere, by their means over all ranks."""

    def let_go(self, groups: Sequence[Any]) -> None:
        """End process groups that nothing reaches any more."""


class JoinedRanks:
    """Ranks that are processes of their own."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self.rank = context.rank

    def gather(self, value: T) -> list[T]:
        """See :class:`Ranks`."""
        return self._context.gather(value, Any)

    def mean(self, tensors: Sequence[torch.Tensor]) -> None:
        """See :class:`Ranks`."""
        if self._context.backend == NO_BACKEND:
            return
        for tensor in tensors:
            dist.all_reduce(tensor, group=self._context.group)
            tensor /= self._context.ranks

    def let_go(self, groups: Sequence[Any]) -> None:
        """See :class:`Ranks`."""
        self._context.barrier()
        end_groups(groups)


class SerialStep(NamedTuple):
    """What the serial model made of a mini-batch.

    Attributes:
        outputs: by forward. passages: likewise, where layers were noted.
        loss: mean over the samples that forwards read.
        input_gradient: of this rank's samples, by the mean over them; None where it was not asked for.
        finite: whether the outputs are, on all ranks; gradients are incomplete otherwise.
    """

    outputs: list[Any]
    passages: list[Passage]
    loss: torch.Tensor
    input_gradient: torch.Tensor | None
    finite: bool


class SerialReference:
    """The serial model; gradients of parameters are of the mean over the global mini-batch.

    A model that treats each sample by itself gives the same, whatever it reads at once.

    Args:
        model: with the same values as the parallel one; it is watched from now on.
        at_once: what forward reads; where that is of one replica, gradients are averaged over ranks.
    """

    def __init__(
        self,
        model: LoadedModel,
        place: Place,
        ranks: Ranks,
        *,
        cuts: dict[int, NormCuts],
        at_once: AtOnce,
        hold: bool = True,
    ) -> None:
        self.module, self._loss, self._place, self._ranks = model.module, model.loss, place, ranks
        self._at_once = at_once
        self.watched = WatchedForward(model.module, cuts=cuts, hold=hold)

    def run(self, inputs: torch.Tensor, targets: torch.Tensor, *, with_input: bool, note: bool = False) -> SerialStep:
        """Forward and backward of all micro-batches of a global mini-batch."""
        place, watched = self._place, self.watched
        watched.forget()
        watched.noting = note
        self.module.zero_grad(set_to_none=True)
        # A copy is no leaf, so that the model may change its input in place.
        leaf = inputs.detach().clone().requires_grad_(with_input)
        losses, finite = [], True
        for read in self._reads():
            beat()
            outputs = self.module(torch.cat([leaf[part] for part in read]))
            loss = self._loss(outputs, torch.cat([targets[part] for part in read]))
            losses.append(loss.detach())
            # A maximum over padding alone is no number and has no place: torch's backward would write out of bounds.
            finite = finite and all(bool(tensor.isfinite().all()) for tensor in tensors_of(outputs))
            if finite:
                # A replica takes the mean over its own samples: so gradients of activations are as large as there.
                (loss * len(read) / place.steps).backward()  # type: ignore[no-untyped-call]
        finite = all(self._ranks.gather(finite))
        if finite:
            self._average()
        gradient = None if leaf.grad is None else leaf.grad[place.own]
        return SerialStep(watched.outputs, watched.passages, torch.stack(losses).mean(), gradient, finite)

    @property
    def outputs(self) -> list[torch.Tensor]:
        """What the last :meth:`run` gave."""
        return [tensor for outputs in self.watched.outputs for tensor in tensors_of(outputs)]

    def _reads(self) -> list[list[slice]]:
        """By forward, the micro-batches that it reads."""
        place = self._place
        if self._at_once == "all":
            return [[place.micro_batch(r, step) for r in range(place.replicas) for step in range(place.steps)]]
        replicas = range(place.replicas) if self._at_once == "replicas" else (place.replica,)
        return [[place.micro_batch(replica, step) for replica in replicas] for step in range(place.steps)]

    def _average(self) -> None:
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        if self._at_once == "own":
            if self._place.replicas > 1:
                self._ranks.mean(gradients)
            return
        for gradient in gradients:
            gradient /= self._place.replicas

    def forward_of(self, step: int) -> int:
        """Which forward reads a micro-batch of this rank's."""
        return 0 if self._at_once == "all" else step

    def own_rows(self, exact: torch.Tensor, like: torch.Size, step: int) -> torch.Tensor:
        """The part of a tensor that belongs to a micro-batch of this rank's, and has the shape ``like``."""
        reads = self._reads()[self.forward_of(step)]
        if len(reads) == 1 or exact.dim() != len(like):
            return exact
        at = reads.index(self._place.micro_batch(self._place.replica, step))
        for dim, extent in enumerate(like):
            if exact.shape[dim] == len(reads) * extent and extent:
                return exact.narrow(dim, at * extent, extent)
        return exact
