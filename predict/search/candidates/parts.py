"""Candidates by their number of stages, within what a rank's memory has room for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from paradl_bench.plan.settings import PlanSettings
from predict.costs.sourced import Floats
from predict.search.candidates.choices import Bounds, Choices, unneeded
from predict.search.candidates.finder import MOST_TRIED_MICRO_BATCHES, Finder
from predict.search.candidates.mesh import Mesh, Settings, Sharing, divisors
from predict.search.candidates.ruled_out import Counted, RuledOut
from predict.search.processes import find_each

_MANY = 1000
"""Sharings times numbers of stages from which on their bounds take longer than a second."""

_NOT_SEARCHED: dict[str, Callable[[Mesh, PlanSettings], bool]] = {
    f"more than {MOST_TRIED_MICRO_BATCHES} micro-batches": lambda mesh, settings: (
        divisors(settings.batch // mesh.samplers)[-1] > MOST_TRIED_MICRO_BATCHES
    ),
    "gradients exchanged by node leaders or in segments (--exchange)": lambda mesh, _: (
        mesh.exchanges and mesh.stages == 1 and mesh.zero < 2
    ),
    "replicas inside of shards, or of ZeRO stage 1 (z3d4d2, d2z1d4)": lambda mesh, _: mesh.zero > 0,
    "pipeline stages that do not balance FLOPs (--stages)": lambda mesh, _: mesh.stages > 1,
}
"""What could be asked for of a mesh, and has no candidates."""


class Part(msgspec.Struct, frozen=True):
    """Candidates with so many stages that may fit, and what became of the others.

    Attributes:
        meshes: of each the number of its sharing, replicas, zero and copies. lengths: how many rows each has.
        rows, least_bytes: settings (int32) and what they hold at least (float64), of one mesh after the other.
        not_searched: what could be asked for of the meshes. placements: of all meshes. too_large: candidates that are.
    """

    stages: int
    meshes: list[tuple[int, int, int, int]]
    lengths: list[int]
    rows: bytes
    least_bytes: bytes
    impossible: Counted
    not_searched: set[str]
    placements: int
    too_large: int

    def fitting(self, sharings: Sequence[Sharing]) -> Iterator[tuple[int, Mesh, Settings, Floats]]:
        """Of every mesh the number of its sharing, its rows, and what they hold at least."""
        ends = np.cumsum(self.lengths)[:-1]
        rows = np.split(np.frombuffer(self.rows, np.int32).reshape(-1, 4), ends)
        least = np.split(np.frombuffer(self.least_bytes), ends)
        for (number, replicas, zero, copies), own, bound in zip(self.meshes, rows, least, strict=False):
            shared, chosen = sharings[number]
            yield number, Mesh(shared, self.stages, replicas, zero, chosen, copies), own, bound


class Parts:
    """Finds them.

    Args:
        computed_in: dtype and kernel settings that are trained in.
        bounds: what candidates hold at least; None where all fit. within: bytes that a rank has.

    Attributes:
        choices, bounds, within: as given. sharings: axes that share layers, within their limits.
    """

    def __init__(
        self, choices: Choices, finder: Finder, computed_in: tuple[str, str], bounds: Bounds | None, within: float
    ) -> None:
        self.choices, self.bounds, self.within = choices, bounds, within
        self._finder, self._computed_in = finder, computed_in
        self.sharings: list[Sharing] = []
        # One after the other: what is found to check one is asked for again by its bounds, and by those of the next.
        for sharing in finder.sharings():
            self.sharings.append(sharing)
            if bounds is not None:
                bounds.know(sharing)

    def of(self, stages: Sequence[int]) -> list[Part]:
        """Those with each of these numbers of stages."""
        # Without bounds there is little to find out, and much to bring back.
        if self.bounds is not None and len(stages) * len(self.sharings) > _MANY:
            return find_each(self._with, stages, Part)
        return list(map(self._with, stages))

    def _with(self, stages: int) -> Part:
        impossible = RuledOut()
        placements = too_large = 0
        possible: list[Mesh] = []
        meshes: list[tuple[int, int, int, int]] = []
        fitting: list[Settings] = []
        least: list[Floats] = []
        for number, mesh, rows in self._meshes(stages, impossible):
            possible.append(mesh)
            placements += mesh.order_count
            own, bound, beyond = self._within_memory(mesh, rows)
            too_large += mesh.order_count * beyond
            if len(own):
                meshes.append((number, mesh.replicas, mesh.zero, mesh.copies))
                fitting.append(own)
                least.append(bound)
        settings = self.choices.settings
        return Part(
            stages=stages,
            meshes=meshes,
            lengths=list(map(len, fitting)),
            rows=b"".join(own.tobytes() for own in fitting),
            least_bytes=b"".join(bound.tobytes() for bound in least),
            impossible=impossible.counted,
            not_searched={text for text, of in _NOT_SEARCHED.items() if any(of(mesh, settings) for mesh in possible)},
            placements=placements,
            too_large=too_large,
        )

    def _meshes(self, stages: int, impossible: RuledOut) -> Iterator[tuple[int, Mesh, Settings]]:
        """Of every mesh that can be the number of its sharing, and its rows."""
        finder = self._finder.counting_in(impossible)
        for number, sharing in enumerate(self.sharings):
            for mesh in finder.meshes(sharing, stages):
                if finder.trains_in(mesh, *self._computed_in) and len(rows := finder.combinations(mesh)):
                    yield number, mesh, rows

    def _within_memory(self, mesh: Mesh, rows: Settings) -> tuple[Settings, Floats, int]:
        """Rows of a mesh that may fit, what they hold at least, and how many others are too large."""
        if self.bounds is None:
            return rows, np.zeros(len(rows)), 0
        least = self.bounds.of_mesh(mesh, rows, self.within)
        fits = least <= self.within
        # No row follows one that fits where none does.
        if not fits.any():
            return rows[:0], least[:0], len(rows)
        *others, again = rows.T
        needed = ~unneeded(self.choices.held, others, again, fits)
        return rows[fits], least[fits], int((~fits & needed).sum())


def not_searched(parts: Sequence[Part]) -> Iterator[str]:
    """What could be asked for of their meshes, and has no candidates."""
    return (text for text in _NOT_SEARCHED if any(text in part.not_searched for part in parts))
