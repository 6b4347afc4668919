"""Which rank of a pipeline holds which stages, as torch's schedules place them. Torch-free."""

from __future__ import annotations

from typing import NamedTuple


class Placement(NamedTuple):
    """Stages lie over the ranks in rows, as many as each rank has stages.

    Attributes:
        stages_per_rank: how many rows there are.
        turns_back: whether every second row goes back, from the last rank to the first. Two rows are a V then: of p
            ranks, rank r has stages r and 2p - 1 - r. Else each row starts at the first rank: stages r and p + r.
    """

    stages_per_rank: int = 1
    turns_back: bool = False

    def stages(self, ranks: int) -> int:
        """Stages in all."""
        return ranks * self.stages_per_rank

    def rank_of(self, stage: int, ranks: int) -> int:
        """The rank that holds a stage."""
        row, place = divmod(stage, ranks)
        return ranks - 1 - place if self.turns_back and row % 2 else place

    def ranks_of_stages(self, ranks: int) -> tuple[int, ...]:
        """Per stage, the rank that holds it."""
        return tuple(self.rank_of(stage, ranks) for stage in range(self.stages(ranks)))

    def stages_of(self, rank: int, ranks: int) -> tuple[int, ...]:
        """The stages of a rank, ascending: one of each row."""
        rows = range(self.stages_per_rank)
        return tuple(row * ranks + (ranks - 1 - rank if self.turns_back and row % 2 else rank) for row in rows)


ONE_STAGE = Placement()
LOOP = Placement(2)
V_SHAPE = Placement(2, turns_back=True)
