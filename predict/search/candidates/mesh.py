"""A mesh: what decides the work of a rank, in whatever order its axes stand."""

from __future__ import annotations

from typing import NamedTuple

from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.axes.registry import kinds_with
from paradl_bench.plan.strategy import Axis


class Mesh(NamedTuple):
    """What a rank works on, wherever it stands.

    Attributes:
        shared: the axis that shares layers; None without one.
        stages: ranks along the pipeline, 1 without one. replicas: along data. zero: the stage of that.
    """

    shared: Axis | None
    stages: int
    replicas: int
    zero: int = 0

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Those of more than one rank, data first."""
        found = [axis_along(Trait.DIVIDES_BATCH, self.replicas, self.zero)] if self.replicas > 1 else []
        found += [axis_along(Trait.STAGES, self.stages)] if self.stages > 1 else []
        return (*found, *([self.shared] if self.shared else []))

    @property
    def exchanges(self) -> bool:
        """Whether ranks hold the same parameters and exchange their gradients."""
        return self.replicas > 1 or (self.shared is not None and self.shared.has(Trait.REPLICATES))

    @property
    def computes_again(self) -> bool:
        """Whether ranks can compute activations again instead of keeping them."""
        return self.stages == 1 and self.zero < 2


def axis_along(trait: Trait, degree: int, prefix: int = 0) -> Axis:
    """The axis that does what the trait says, with so many ranks."""
    return Axis(kind=kinds_with(trait)[0].name, extents=(degree,), prefix=prefix)
