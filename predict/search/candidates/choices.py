"""What settings of candidates are chosen from, which of their rows nobody needs, and what bounds say of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paradl_bench.plan.settings import CHOICES_WITHIN_A_LIMIT, PlanSettings
from predict.costs.sourced import Floats
from predict.search.candidates.mesh import Mesh, Settings, Sharing
from predict.search.candidates.refusals import Held


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What settings of candidates are chosen from.

    Attributes:
        settings: of the batch and of whatever is not searched. schedules: by name.
        held: choices of what a device keeps.
    """

    settings: PlanSettings
    schedules: tuple[str, ...]
    held: tuple[Held, ...]


class Bounds(Protocol):
    """What candidates hold at least."""

    def know(self, sharing: Sharing) -> None:
        """Find what all meshes with such axes ask for."""

    def of_mesh(self, mesh: Mesh, rows: Settings, within: float) -> Floats:
        """Bytes of a mesh's candidates, of which each row has the settings; not the tightest where more than within."""


def unneeded(
    held: Sequence[Held],
    others: Sequence[NDArray[np.integer]],
    again: NDArray[np.integer],
    may_fit: NDArray[np.bool_],
) -> NDArray[np.bool_]:
    """Rows that have a choice which is made within a limit alone, and follow one that may fit without it.

    Args:
        others: columns of all other settings. again: what is held, by index.
    """
    chosen = np.zeros(len(held), bool)
    for name, (without, *_) in CHOICES_WITHIN_A_LIMIT.items():
        if len({choice.get(name) for choice in held}) > 1:
            chosen |= np.array([choice[name] != without for choice in held])
    # A row follows the one that differs from it in that choice alone, where that is there.
    follows = may_fit[:-1] & (again[1:] == again[:-1] + 1)
    for column in others:
        follows &= column[1:] == column[:-1]
    return np.asarray(chosen[again] & np.append(False, follows))
