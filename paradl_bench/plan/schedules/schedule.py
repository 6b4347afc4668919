"""What a pipeline schedule is: the order in which a rank computes forward and backward of micro-batches on its stages.

Backward is one action, or two: of the input, whose gradient is sent on, and later of the weights. Forward and backward
of two micro-batches may be one step.

A stage is a contiguous range of layers. A placement says which rank holds it. A schedule orders computation alone; what
ranks send follows from it (:meth:`Schedule.neighbours`). Torch-free.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from paradl_bench.core.errors import UserError
from paradl_bench.plan.schedules.placement import ONE_STAGE, Placement

Direction = Literal["FW", "BW", "BW_input", "BW_weight"]
Way = Literal["FW", "BW"]

_REACH = 9
"""Ranks behind one beyond which more of them change nothing but how often something is done."""
_MORE = 3
"""Micro-batches beside those that go through the pipeline in turns."""
_TRIED = ((1, _REACH), (_REACH, _REACH))
"""Ranks in front of one, and behind."""


class Action(NamedTuple):
    """Forward, backward or a part of backward of one micro-batch on one stage.

    Attributes:
        joins: whether it is one step with the forward before it: both are sent when it is done.
    """

    direction: Direction
    stage: int
    micro_batch: int
    joins: bool = False

    @property
    def way(self) -> Way:
        """Forward or backward, whichever part of it."""
        return "FW" if self.direction == "FW" else "BW"

    @property
    def completes(self) -> bool:
        """Whether the micro-batch is done on its stage then: its weights have all of their gradients."""
        return self.direction in ("BW", "BW_weight")


# Long pipelines have a hundred thousand actions, and the tuple's own constructor takes half the time of the named one.
_action_of = partial(tuple.__new__, Action)


def in_turn(direction: Direction, stage: int, micro_batches: Iterable[int]) -> Iterator[Action]:
    """The same action on a stage for one micro-batch after the other."""
    columns = itertools.repeat(direction), itertools.repeat(stage), micro_batches, itertools.repeat(False)
    return map(_action_of, zip(*columns, strict=False))


class Neighbours(NamedTuple):
    """Stages on other ranks that an action waits for and then feeds; None where there are none."""

    source: int | None
    target: int | None


class Extent(NamedTuple):
    """A rank of a pipeline: its number, how many there are, and of how many micro-batches."""

    rank: int
    ranks: int
    micro_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One pipeline schedule.

    Attributes:
        name: as ``--schedule`` takes it.
        torch_name: of the class in ``torch.distributed.pipelining``.
        placement: which stages each rank holds.
        order: called as ``order(rank, ranks, micro_batches)``.
        refusal: called as ``refusal(ranks, micro_batches)``; why so many micro-batches can't be scheduled, else empty.
        source: where it is from.
        drops_messages: whether torch lets go of a message once the next one in its direction is there; else it holds
            all of them to the end of the iteration.
        splits_backward: whether backward is two actions, always or at times.
    """

    name: str
    torch_name: str
    order: Callable[[int, int, int], tuple[Action, ...]]
    source: str
    placement: Placement = ONE_STAGE
    refusal: Callable[[int, int], str] = lambda ranks, micro_batches: ""
    drops_messages: bool = False
    splits_backward: bool = False

    def check(self, ranks: int, micro_batches: int, *, recomputes: bool = False) -> None:
        """Raises:
        UserError: so many micro-batches cannot be scheduled over so many ranks, or segments computed again.
        """
        if recomputes and self.splits_backward:
            raise UserError(
                f"--recompute with --schedule {self.name}: torch computes a segment again in the first part of"
                " backward, and in the second once for every layer with parameters; take another schedule"
            )
        refused = self.refusal(ranks, micro_batches)
        if refused:
            raise UserError(f"--micro-batches {micro_batches} with --schedule {self.name}: {refused}")

    def shorter(self, rank: int, ranks: int, micro_batches: int) -> Iterator[Extent]:
        """Smaller pipelines, from small to large, a rank of which may do all that this one does, less often."""
        # Whether ranks stand in front of one matters in all schedules, how many in some.
        tried = ((min(rank, in_front), min(ranks - 1 - rank, behind)) for in_front, behind in _TRIED)
        for in_front, behind in dict.fromkeys((*tried, (rank, ranks - 1 - rank))):
            like = in_front + 1 + behind
            for turns in (2, 3, 4, 6):
                count = turns * like + _MORE
                for even in dict.fromkeys((count, -(-count // like) * like)):
                    if 2 * even <= micro_batches and not self.refusal(like, even):
                        yield Extent(in_front, like, even)

    def neighbours(self, action: Action, ranks: int) -> Neighbours:
        """The stages on other ranks that the action receives from and sends to."""
        if action.direction == "BW_weight":
            return Neighbours(None, None)
        step = 1 if action.direction == "FW" else -1
        place, last = self.placement, self.placement.stages(ranks) - 1

        def elsewhere(stage: int) -> int | None:
            inside = 0 <= stage <= last
            return stage if inside and place.rank_of(stage, ranks) != place.rank_of(action.stage, ranks) else None

        return Neighbours(elsewhere(action.stage - step), elsewhere(action.stage + step))
