"""Ranks that are threads of one process, each with its part of a model: they exchange for real, over memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from paradl_bench.strategies.running.group_functions import Group, Messages

T = TypeVar("T")


class Meeting:
    """Where the threads of a group give each other values."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._board: list[Any] = [None] * size

    def exchange(self, rank: int, value: T) -> list[T]:
        """Every thread's value, in the order of ranks.

        Raises:
            BrokenBarrierError: another thread has failed.
        """
        self._board[rank] = value
        self._barrier.wait()
        given = list(self._board)
        # Nobody writes the next value before all have read this one.
        self._barrier.wait()
        return given

    def leave(self) -> None:
        """Have all threads that wait here, or will, fail."""
        self._barrier.abort()


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadGroup(Group):
    """A group whose ranks are threads."""

    meeting: Meeting

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Sum over the threads, or their maximum, in place."""
        parts = torch.stack(self.meeting.exchange(self.rank, tensor.detach().clone()))
        tensor.copy_(parts.amax(0) if op == dist.ReduceOp.MAX else parts.sum(0))

    def all_gather(self, gathered: torch.Tensor, sent: torch.Tensor) -> None:
        """All threads' parts, in the order of ranks."""
        parts = self.meeting.exchange(self.rank, sent.detach().clone())
        gathered.copy_(torch.cat([part.flatten() for part in parts]).view_as(gathered))

    def reduce_scatter(self, received: torch.Tensor, sent: torch.Tensor, op: Any = None) -> None:
        """The sum, whatever ``op``: nothing that threads run asks for another."""
        parts = self.meeting.exchange(self.rank, sent.detach().clone())
        received.copy_(torch.stack(parts).sum(0).view(self.size, -1)[self.rank].view_as(received))

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, sizes: tuple[Sequence[int], Sequence[int]] | None = None
    ) -> None:
        """Parts by rank."""
        sent_copy = sent.detach().clone()
        sent_sizes = [len(sent_copy) // self.size] * self.size if sizes is None else list(sizes[1])
        parts = self.meeting.exchange(self.rank, torch.split(sent_copy, sent_sizes))
        received.copy_(torch.cat([of_rank[self.rank] for of_rank in parts]))

    def begin_exchange(self, sent: Messages, received: Messages) -> Callable[[], None]:
        """At once."""
        self.send_and_receive(sent, received)
        return lambda: None

    def send_and_receive(self, sent: Messages, received: Messages) -> None:
        """Tensors by peer."""
        of_all = self.meeting.exchange(self.rank, [(peer, tensor.detach().clone()) for peer, tensor in sent])
        mine = [[tensor for peer, tensor in of_rank if peer == self.rank] for of_rank in of_all]
        for peer, buffer in received:
            buffer.copy_(mine[peer].pop(0))


@dataclass(frozen=True, slots=True)
class ThreadRanks:
    """The ranks of a proof as threads; see :class:`~paradl_bench.measure.proof.reference.Ranks`."""

    rank: int
    meeting: Meeting

    def gather(self, value: T) -> list[T]:
        """Every thread's value."""
        return self.meeting.exchange(self.rank, value)

    def mean(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace tensors by their means."""
        of_all = self.meeting.exchange(self.rank, [tensor.detach().clone() for tensor in tensors])
        for tensor, parts in zip(tensors, zip(*of_all, strict=True), strict=True):
            tensor.copy_(torch.stack(parts).mean(0))

    def let_go(self, groups: Sequence[Any]) -> None:
        """Threads have no process groups."""


def run_threads(size: int, run: Callable[[int, Meeting], T]) -> list[T]:
    """What ``run`` gives on each of as many threads, in the order of ranks.

    Raises:
        Exception: that of the thread that failed first.
    """
    meeting = Meeting(size)

    def of_rank(rank: int) -> T:
        try:
            return run(rank, meeting)
        except BaseException:
            meeting.leave()
            raise

    with ThreadPoolExecutor(size) as pool:
        runs = [pool.submit(of_rank, rank) for rank in range(size)]
    failures = [error for future in runs if (error := future.exception()) is not None]
    causes = [error for error in failures if not isinstance(error, threading.BrokenBarrierError)]
    if failures:
        raise (causes or failures)[0]
    return [future.result() for future in runs]
