"""What ``paradl-bench collectives`` is asked to measure; torch-free, so that the launcher's side checks it."""

from __future__ import annotations

import random

import msgspec

from paradl_bench.core.errors import UserError, unknown_choice
from paradl_bench.core.registry import lookup
from paradl_bench.core.units import format_bytes
from paradl_bench.plan.collectives.catalog import operations, routines
from paradl_bench.plan.collectives.routine import ELEMENT_BYTES
from paradl_bench.ranks.emulated_nodes.layout import NodeLayout
from paradl_bench.records.contexts.context import OF_GROUP, OfGroup
from paradl_bench.records.measurement import argument_texts


class CollectivesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A sweep, and in which contexts to measure its calls too.

    Attributes:
        ranks: of one group, or all that ``side_by_side`` parts.
        operations: names; sizes: message bytes as each operation defines them.
        blocks: how often the whole sweep is repeated, so that drift over time is seen.
        point_s: seconds that the repetitions of one operation and size take in one block, about.
        contexts: those of one group; several groups at once are ``concurrent``, disjoint ones of so many ranks.
        side_by_side: of how many ranks side by side the groups are that are swept, all of them at once; an all-reduce
            in flight goes over all ranks then. None for one group of all ranks, or several that share links.

    Raises:
        UserError: an unknown operation, a size that is no whole number of elements, or a backend that does not fit.
    """

    ranks: int
    backend: str
    device: str
    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    blocks: int
    point_s: float
    seed: int
    contexts: tuple[OfGroup, ...] = ()
    concurrent: int = 1
    side_by_side: int | None = None
    layout: NodeLayout | None = None

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise UserError(f"--ranks {self.ranks}: a collective needs at least 2 ranks")
        if self.backend == "nccl" and self.device != "cuda":
            raise UserError("--backend nccl moves data between GPUs: give --device cuda, or --backend gloo")
        beside = [context for context in self.contexts if context in ("with-compute", "with-all-reduce")]
        if beside and self.device == "cuda" and self.backend != "nccl":
            raise UserError(
                f"--contexts {beside[0]} on a GPU: {self.backend} blocks the host while it runs; give --backend nccl"
            )
        if self.layout is not None and self.device != "cpu":
            raise UserError("--nodes emulates nodes for ranks on a CPU: give --backend gloo, on --device cpu")
        if self.concurrent < 1:
            raise UserError(f"--contexts groups={self.concurrent}: give how many groups run at once, at least 2")
        if self.concurrent > 1 and self.contexts:
            raise UserError(
                f"--contexts groups={self.concurrent} needs a sweep of its own: measure {','.join(self.contexts)}"
                " in another sweep"
            )
        if self.side_by_side is not None:
            self._check_side_by_side(self.side_by_side)
        for name in self.operations:
            lookup(operations(), name, "operation")
        for size in self.sizes:
            if size % ELEMENT_BYTES:
                raise UserError(f"--sizes: {size} bytes are not a multiple of an fp32 element of {ELEMENT_BYTES} bytes")

    def _check_side_by_side(self, count: int) -> None:
        if self.concurrent > 1:
            raise UserError(
                "--side-by-side sweeps groups of ranks that share no links: give --contexts groups=K to a sweep of its"
                " own"
            )
        if count < 2 or self.ranks % count or count == self.ranks:
            raise UserError(
                f"--side-by-side {count}: {self.ranks} ranks cannot be divided into several such groups; give a"
                f" divisor of {self.ranks}, from 2 to {self.ranks // 2}"
            )

    @property
    def groups(self) -> int:
        """How many groups of ranks call at once."""
        return self.concurrent if self.side_by_side is None else self.ranks // self.side_by_side

    @property
    def of_group(self) -> int:
        """Ranks of each of them."""
        return self.side_by_side or self.ranks

    @property
    def all_ranks(self) -> int:
        """Ranks of all groups together."""
        return self.ranks * self.concurrent

    def arguments(self) -> dict[str, str]:
        """Settings that two runs have to share for one to resume the other."""
        # Directories of before know none of them.
        later = {"contexts": ",".join(sorted(self.contexts))} if self.contexts else {}
        later |= {"concurrent": str(self.concurrent)} if self.concurrent > 1 else {}
        later |= {} if self.side_by_side is None else {"side_by_side": str(self.side_by_side)}
        later |= {"emulated_nodes": str(self.layout)} if self.layout else {}
        return {
            **argument_texts(self, "ranks", "backend"),
            "tool": "torch",
            **argument_texts(self, "operations", "sizes", "blocks", "point_s", "seed"),
            **later,
        }

    def order(self, block: int) -> list[tuple[str, int]]:
        """Operations and sizes of one block, shuffled: alike on all ranks, unlike in all blocks."""
        points = [(name, size) for name in self.operations for size in self.sizes]
        random.Random(f"{self.seed} {block}").shuffle(points)
        return points

    def pool_elements(self) -> tuple[int, int]:
        """Elements of the largest input and the largest output of a rank."""
        largest = max(self.sizes) // ELEMENT_BYTES
        pairs = [routines()[name].elements(largest, self.of_group) for name in self.operations]
        return max(inputs for inputs, _ in pairs), max(outputs for _, outputs in pairs)

    def check_memory(self, *, ranks_on_host: int, memory_bytes: int) -> None:
        """Raises:
        UserError: all ranks' buffers, twice since backends copy them, need over three quarters of the memory.
        """
        needed = 2 * sum(self.pool_elements()) * ELEMENT_BYTES * ranks_on_host
        if needed > 0.75 * memory_bytes:
            raise UserError(
                f"--sizes: messages of {format_bytes(max(self.sizes))} on {ranks_on_host} ranks a host need"
                f" {format_bytes(needed)} of its {format_bytes(memory_bytes)}; choose a smaller last size"
            )


def parse_contexts(text: str) -> tuple[tuple[OfGroup, ...], int]:
    """``after-compute,with-compute`` or ``groups=K``: contexts of one group, and how many groups run at once.

    Raises:
        UserError: an unknown context, or no number of groups from 2 on.
    """
    known: dict[str, OfGroup] = {context: context for context in OF_GROUP}
    contexts: list[OfGroup] = []
    groups = 1
    for word in (word.strip() for word in text.split(",")):
        name, _, number = word.partition("=")
        if name == "groups":
            if not number.isdecimal() or int(number) < 2:
                raise UserError(f"--contexts {word}: say how many groups run at once, at least 2: groups=2")
            groups = int(number)
        elif word in known:
            contexts.append(known[word])
        else:
            raise unknown_choice("context", word, (*known, "groups=K"))
    return tuple(dict.fromkeys(contexts)), groups
