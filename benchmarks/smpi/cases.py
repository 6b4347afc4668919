"""What is simulated: the sweeps that a calibration is made of, and those that it is judged by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from fat_tree import FatTree
from simulation import Sweep

PARTS = ("all_gather", "reduce_scatter")
"""Operations whose message is one rank's part of the whole."""
OPERATIONS = ("all_reduce", *PARTS, "broadcast", "send_recv")
_LARGEST_WHOLE_BYTES = 1 << 28
_LARGEST_COPIES_BYTES = 1 << 29
"""SMPI's reduce-scatters copy the whole on every rank, shared or not: of all ranks together no more than this."""


class Extent(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run goes.

    Attributes:
        calibration_ranks: of sweeps that are fitted. judged_ranks: of those that are predicted, at ``judged_sizes``.
        large_ranks: of those that take minutes a size, at ``large_sizes``.
        models: whose iterations are judged, at so many samples a replica. iteration_ranks, large_iteration_ranks:
            on so many ranks.
    """

    libraries: tuple[str, ...]
    calibration_ranks: tuple[int, ...] = (2, 4, 8, 12, 16, 24, 32, 48, 64)
    calibration_sizes: tuple[int, ...] = tuple(1 << power for power in range(10, 27))
    judged_ranks: tuple[int, ...] = (128, 256)
    judged_sizes: tuple[int, ...] = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
    large_ranks: tuple[int, ...] = (1024,)
    large_sizes: tuple[int, ...] = (1 << 16, 1 << 22, 1 << 24, 1 << 26)
    models: tuple[str, ...] = ("resnet18", "vgg11")
    replica_batch: int = 4
    iteration_ranks: tuple[int, ...] = (128, 256)
    large_iteration_ranks: tuple[int, ...] = (1024,)


def calibration(extent: Extent, tree: FatTree) -> Iterator[Sweep]:
    """Groups alone, of all ranks of a node; then groups of one rank a node, alone and all at once."""
    for library in extent.libraries:
        for operation in OPERATIONS:
            for ranks in extent.calibration_ranks:
                for groups in _ways(ranks, tree):
                    yield _sweep(library, operation, ranks // groups, groups, extent.calibration_sizes)


def judged(extent: Extent, tree: FatTree) -> Iterator[Sweep]:
    """One size a case, since each may take long: the fewest ranks first."""
    for library in extent.libraries:
        for ranks, sizes in [
            *((ranks, extent.judged_sizes) for ranks in extent.judged_ranks),
            *((ranks, extent.large_sizes) for ranks in extent.large_ranks),
        ]:
            for operation in OPERATIONS:
                for size in sizes:
                    for groups in _ways(ranks, tree):
                        case = _sweep(library, operation, ranks // groups, groups, (size,))
                        # What is too large to be simulated is left out.
                        if case.sizes:
                            yield case


def _ways(ranks: int, tree: FatTree) -> tuple[int, ...]:
    """One group of all ranks, and as many groups as a node has ranks."""
    apart = tree.ranks_per_node
    return (1, apart) if ranks % apart == 0 and ranks > apart else (1,)


def _sweep(library: str, operation: str, ranks: int, groups: int, sizes: Sequence[int]) -> Sweep:
    most = _LARGEST_WHOLE_BYTES // (ranks if operation in PARTS else 1)
    if operation == "reduce_scatter":
        most = min(most, _LARGEST_COPIES_BYTES // (ranks * ranks * groups))
    fitting = tuple(size for size in sizes if size <= most)
    return Sweep(library=library, operation=operation, ranks=ranks, groups=groups, sizes=fitting)
