"""The two models of a plan's memory: the walk over its tensors, and the paper's sum."""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

import msgspec

from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.kinds.autocast import WEIGHTS_DTYPE, as_held, has_masters, is_autocast
from paradl_bench.plan.axis_planner import staging_axis
from paradl_bench.plan.mesh import zero_stage
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.strategies.frameworks.presets import preset_named
from paradl_bench.strategies.memory.paradl import paradl_memory_of
from paradl_bench.strategies.memory.peak import MemoryUse, planned_memory


@runtime_checkable
class StagesMemory(Protocol):
    """``MEMORY`` of the ``memory.py`` in the folder of an axis that parts layers into stages."""

    def peak(
        self, network: ModelGraph, strategy: Strategy, settings: PlanSettings, *, dtype: str, device: str, within: float
    ) -> MemoryUse:
        """The walk over the tensors of the rank that needs most, or of the first that needs more than ``within``."""

    def papers_sum(
        self, network: ModelGraph, strategy: Strategy, settings: PlanSettings, *, dtype: str, rho: float
    ) -> MemoryUse:
        """The paper's sum of the stage that needs most."""


def memory_of_plan(
    network: ModelGraph,
    strategy: Strategy,
    settings: PlanSettings,
    *,
    dtype: str = "fp32",
    device: str = "cpu",
    within: float = math.inf,
) -> MemoryUse:
    """The peak, in bytes of tensors, of the rank that needs most.

    Args:
        device: kind of the device: ``cpu`` or ``cuda``.
        within: bytes that a rank has: the first rank that needs more is the answer, and others are not looked at.

    Raises:
        UserError: a limit is exceeded, or an optimizer whose state is not known.
    """
    _refuse_framework(strategy, settings.preset, dtype)
    staged = _of_stages(strategy)
    walk = planned_memory if staged is None else staged.peak
    settings = msgspec.structs.replace(settings, dtype=dtype, device=device)
    return walk(as_held(network, dtype), strategy, settings, dtype=dtype, device=device, within=within)


def paradl_memory_of_plan(
    network: ModelGraph, strategy: Strategy, settings: PlanSettings, *, dtype: str = "fp32", rho: float = 1.0
) -> MemoryUse:
    """The paper's sum; of a pipeline's the largest over its stages (one a rank), with activations of the whole
    local batch.

    Raises:
        UserError: stages that cannot be cut.
    """
    staged = _of_stages(strategy)
    papers_sum = paradl_memory_of if staged is None else staged.papers_sum
    return papers_sum(network, strategy, settings, dtype=dtype, rho=rho)


def _refuse_framework(strategy: Strategy, preset: str, dtype: str) -> None:
    """Refuse what a framework with a memory of its own does not train by.

    Raises:
        UserError: says what would be right.
    """
    if not preset or not preset_named(preset).memory.gradient_dtype:
        return
    if is_autocast(dtype) and not has_masters(dtype):
        raise UserError(
            f"--preset {preset}: its parameters are of the dtype that it computes in; give --dtype {WEIGHTS_DTYPE}, not"
            f" {dtype}"
        )
    if zero_stage(strategy) > 1:
        raise UserError(
            f"strategy {strategy}: --preset {preset} holds whole parameters, as under ZeRO's stage 1: write z1"
        )


def _of_stages(strategy: Strategy) -> StagesMemory | None:
    index = staging_axis(strategy)
    if index is None:
        return None
    memory = strategy.axes[index].declared.beside("memory", "MEMORY", StagesMemory)  # type: ignore[type-abstract]
    assert memory is not None
    return memory
