"""Every collective that a process issues, seen at torch's dispatcher, and how that compares with a plan.

torch's collectives are operators (``c10d::allreduce_``, ...), so a dispatch mode sees those that C++ issues too, DDP's
reducer among them; torch's own CommDebugMode works likewise. A mode costs time: it records iterations that are not
timed, and in timed ones the process group's sequence number shows that as many were issued.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from paradl_bench.plan.mesh import group_of, members_of
from paradl_bench.plan.tasks import Communication, Plan
from paradl_bench.records.training.issued import as_planned
from paradl_bench.records.training.training_record import IssuedCollective

When = Literal["setup", "first", "rebuild", "iteration"]

# Operator: our name, and which argument's tensors make up ``message_bytes`` as the operation defines it (what one rank
# contributes or keeps for all-gather and reduce-scatter, the part for each rank of an all-to-all, the whole buffer for
# the others).
OPERATORS = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "allgather_": ("all_gather", 1),
    "_allgather_base_": ("all_gather", 1),
    "allgather_coalesced_": ("all_gather", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 1),
    "reduce_scatter_": ("reduce_scatter", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 0),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 0),
    "send": ("send_recv", 0),
    "recv_": ("send_recv", 0),
    "recv_any_source_": ("send_recv", 0),
    "barrier": ("barrier", 0),
}


_TWO_SIDED = "all_to_all"
"""The operation in which a rank may receive other bytes than it sends."""


class CollectiveRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, counts collectives by operation, bytes and group. An operator that is not known keeps its name.

    Attributes:
        across_threads: that a thread which exchanges gradients takes it along.
    """

    across_threads = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[tuple[str, int, tuple[int, ...], int | None]] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled module runs compiled while this is active: what replicas exchange is issued outside of it."""
        return True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self._record(function, args, kwargs or {})
        return function(*args, **(kwargs or {}))

    def _record(self, function: Any, args: Any, kwargs: dict[str, Any]) -> None:
        call = OperatorReader(function).read(args, kwargs)
        self.counts[call.operation, call.message_bytes, call.group, call.received_bytes] += 1

    def issued(self, when: When) -> tuple[IssuedCollective, ...]:
        """What was counted, in the order of first occurrence."""
        return tuple(
            IssuedCollective(
                when=when, operation=operation, message_bytes=size, group=group, count=count, received_bytes=received
            )
            for (operation, size, group, received), count in self.counts.items()
        )


class IssuedCall(NamedTuple):
    """What one call of an operator does.

    Attributes:
        peer: place in the group of whom a message goes to or comes from; None of a collective.
        received_bytes: of an all-to-all, whose ``message_bytes`` are what is sent; else None.
    """

    operation: str
    message_bytes: int
    group: tuple[int, ...]
    peer: int | None
    received_bytes: int | None = None


class OperatorReader:
    """Reads off its arguments what a call of one of torch's operators for collectives does.

    Attributes:
        sends, receives: whether the operator does, to or from one rank.
    """

    def __init__(self, function: Any) -> None:
        # Schemas are made anew whenever they are asked for, which takes longer than a call.
        names = [argument.name for argument in function._schema.arguments]
        operator: str = function._schema.name.rpartition("::")[2]
        self._operation, self._position = OPERATORS.get(operator, (operator, 0))
        self.sends, self.receives = "dst" in names, "src" in names
        self._peer = names.index("dst" if self.sends else "src") if self.sends or self.receives else None

    def read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> IssuedCall:
        """What a call with these arguments does."""
        message_bytes = _bytes(args[self._position]) if len(args) > self._position else 0
        peer = None if self._peer is None else int(args[self._peer])
        group = _group((*args, *kwargs.values()))
        if self._operation == _TWO_SIDED:
            # The part for each rank, as the operation counts, and that of each.
            received = _bytes(args[0]) // len(group)
            return IssuedCall(self._operation, message_bytes // len(group), group, peer, received)
        return IssuedCall(self._operation, message_bytes, group, peer)


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(map(_bytes, value))
    return 0


def _group(values: Iterable[Any]) -> tuple[int, ...]:
    """Ranks of the process group among an operator's arguments; of the whole world where it names none."""
    for value in values:
        if isinstance(value, dist.ProcessGroup):
            return tuple(dist.get_process_group_ranks(value))
        if isinstance(value, torch.ScriptObject) and value._type().name() == "ProcessGroup":  # type: ignore[attr-defined]
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(value)))
    return tuple(range(dist.get_world_size()))


class SequenceCounter:
    """How many collectives some process groups have issued since the last call; None where one can't tell.

    A backend may count messages between two ranks as well.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup] = ()) -> None:
        self._groups: Sequence[Any] = groups
        self._last = self._read()

    def _read(self) -> int | None:
        try:
            return sum(int(group._get_sequence_number_for_group()) for group in self._groups)
        except RuntimeError:
            return None

    def since_last(self) -> int | None:
        """Collectives issued since the last call, or since construction."""
        last, self._last = self._last, self._read()
        return None if last is None or self._last is None else self._last - last


def planned_collectives(plan: Plan, rank: int = 0) -> tuple[IssuedCollective, ...]:
    """Every collective, and every message sent or received, that a plan says one rank issues."""
    role = plan.role_of(rank)
    counts: Counter[_Key] = Counter()
    exchanging = group_of(plan.strategy, plan.exchange_axes, rank)
    for when, operation, size, count in plan.roles[role].setup:
        counts[when, operation, size, exchanging] += count  # type: ignore[index]
    for when, sent in plan.roles[role].exchanged_before:
        counts[when, sent.operation, sent.message_bytes, members_of(plan.strategy, sent, rank)] += 1  # type: ignore[index]
    of_layers = plan.of_layers(role)
    in_iterations: tuple[tuple[When, list[Communication]], ...] = (
        ("first", [*plan.roles[role].handshake, *of_layers]),
        ("rebuild", of_layers),
        ("iteration", plan.communication(role)),
    )
    for recorded, works in in_iterations:
        for work in works:
            group = members_of(plan.strategy, work, rank)
            for operation, size in work.messages:
                counts[recorded, operation, size, group] += 1
    return tuple(
        IssuedCollective(when=when, operation=operation, message_bytes=size, group=group, count=count)
        for (when, operation, size, group), count in counts.items()
    )


def differences(issued: Sequence[IssuedCollective], planned: Sequence[IssuedCollective]) -> list[str]:
    """What was issued and not planned, or the other way, one line each; empty when they agree to the byte.

    Of an all-to-all the side that is planned counts (:func:`~paradl_bench.records.training.issued.as_planned`).
    """
    want, have = _counts(planned), _counts(as_planned(issued, planned))
    lines = []
    for key in sorted(have.keys() | want.keys(), key=lambda key: (get_args(When).index(key[0]), *key[1:])):
        if have.get(key, 0) != want.get(key, 0):
            when, operation, size, group = key
            ranks = ",".join(map(str, group))
            lines.append(
                f"{when}: {operation} of {size} bytes over ranks {ranks}:"
                f" issued {have.get(key, 0)}, planned {want.get(key, 0)}"
            )
    return lines


_Key = tuple[When, str, int, tuple[int, ...]]


def _counts(collectives: Iterable[IssuedCollective]) -> Mapping[_Key, int]:
    counts: Counter[_Key] = Counter()
    for item in collectives:
        counts[item.when, item.operation, item.message_bytes, item.group] += item.count
    return counts
