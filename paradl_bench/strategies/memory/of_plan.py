"""The two models of a plan's memory: the walk over its tensors, and the paper's sum."""

from __future__ import annotations

import msgspec

from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.mesh import degree_of
from paradl_bench.plan.schedules.catalog import schedule_of
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.strategies.memory.paradl import paradl_memory, paradl_memory_of
from paradl_bench.strategies.memory.peak import MemoryUse, planned_memory
from paradl_bench.strategies.memory.pipeline import pipelined_memory
from paradl_bench.strategies.pipeline.stages import cut_into_stages


def memory_of_plan(
    network: ModelGraph, strategy: Strategy, settings: PlanSettings, *, dtype: str = "fp32", device: str = "cpu"
) -> MemoryUse:
    """The peak, in bytes of tensors, of the rank that needs most.

    Args:
        device: kind of the device: ``cpu`` or ``cuda``.

    Raises:
        UserError: a limit is exceeded, or an optimizer whose state is not known.
    """
    walk = pipelined_memory if degree_of(strategy, "pipeline") > 1 else planned_memory
    return walk(network, strategy, settings, dtype=dtype, device=device)


def paradl_memory_of_plan(
    network: ModelGraph, strategy: Strategy, settings: PlanSettings, *, dtype: str = "fp32", rho: float = 1.0
) -> MemoryUse:
    """The paper's sum; of a pipeline's the largest over its stages (one a rank), with activations of the whole
    local batch.

    Raises:
        UserError: stages that cannot be cut.
    """
    ranks = degree_of(strategy, "pipeline")
    if ranks == 1:
        return paradl_memory_of(network, strategy, settings, dtype=dtype, rho=rho)
    local_batch = settings.batch // degree_of(strategy, "data")
    given = settings.stages if schedule_of(settings.schedule).stages_per_rank == 1 else ()
    settings = msgspec.structs.replace(settings, schedule="gpipe", stages=given)
    stages = cut_into_stages(network, ranks, settings)
    uses = [paradl_memory(stage.network, local_batch, dtype=dtype, rho=rho) for stage in stages]
    return max(uses, key=lambda use: use.peak_bytes)
