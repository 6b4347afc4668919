"""Which stages of ZeRO, and options of the axes that share layers, go with all axes of a mesh: their planners say."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import msgspec

from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.axis_planner import axis_planner
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.strategies.data.zero.limits import check_zero
from paradl_bench.strategies.passes.lower_precision import check_dtype
from paradl_bench.strategies.passes.recomputation import segments_of
from predict.search.candidates.mesh import Mesh
from predict.search.candidates.ruled_out import RuledOut

Held = Mapping[str, Any]
"""What is chosen of :data:`~paradl_bench.plan.settings.MEMORY_CHOICES`, by name."""


class Refusals:
    """Of meshes whose axes are each within their limits.

    Each answer is found once for all meshes with the same kinds of axes: it does not depend on their degrees.
    """

    def __init__(self, network: ModelGraph, settings: PlanSettings) -> None:
        self._network, self._settings = network, settings
        self._known: dict[Hashable, str] = {}

    def of(self, mesh: Mesh, held: Held | None = None) -> str:
        """Why a mesh cannot be, with a choice of what a device keeps; empty where it can."""
        if not (mesh.zero or any(options != type(options)() for options in mesh.chosen)):
            return ""
        # What the others do not go with is one reason, whatever axis stands beside them.
        with_replicas = mesh.shared and mesh.zero and mesh.replicas > 1
        without = self.of(mesh._replace(shared=(), chosen=()), held) if with_replicas else ""
        if without:
            return without
        kinds = tuple((axis.kind, axis.prefix) for axis in mesh.axes)
        key = kinds, mesh.chosen, tuple((held or {}).items())
        if key not in self._known:
            self._known[key] = self._find(mesh, held or {})
        return self._known[key]

    def _find(self, mesh: Mesh, held: Held) -> str:
        strategy = Strategy(axes=mesh.axes)
        settings = msgspec.structs.replace(self._settings.having(*mesh.chosen), **held)
        try:
            if mesh.zero:
                check_zero(self._network, strategy, settings)
            for axis in mesh.shared if mesh.chosen else ():
                axis_planner(axis.declared).check(self._network, strategy, strategy.axes.index(axis), settings)
        except UserError as error:
            return str(error)
        return ""


def possible_choices(
    network: ModelGraph, settings: PlanSettings, held: Sequence[Held], impossible: RuledOut, dtype: str
) -> tuple[Held, ...]:
    """Choices of what a device keeps that the network has something for; others are counted as impossible."""
    possible = []
    for chosen in held:
        try:
            tried = msgspec.structs.replace(settings, **chosen)
            segments_of(network, tried)
            check_dtype(Strategy(), tried, dtype)
            possible.append(chosen)
        except UserError as error:
            if len(held) == 1:
                raise
            impossible.add(str(error))
    return tuple(possible)
