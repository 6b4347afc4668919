"""Plan of data parallelism: replicas compute parts of the mini-batch and exchange gradients, by ZeRO in parts.

The exchange itself is that of all ranks that hold the same parameters (:mod:`paradl_bench.strategies.exchange`).
"""

from __future__ import annotations

from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.axis_planner import ShardedLayers, StageParts
from paradl_bench.plan.mesh import check_batch, zero_stage
from paradl_bench.plan.settings import Limit, PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import Before, RoleBuilder
from paradl_bench.strategies.data.zero.even_parts import add_even_update
from paradl_bench.strategies.data.zero.limits import check_zero
from paradl_bench.strategies.data.zero.plan import ShardedStages, add_optimizer_broadcasts, add_sharded_role
from paradl_bench.strategies.frameworks.presets import scatters_gradients


class DataPlanner:
    """Replicas that each compute a part of the mini-batch; they shard no layer, and exchange gradients."""

    name = "data"

    def check(self, network: ModelGraph, strategy: Strategy, axis: int, settings: PlanSettings) -> None:
        """Raises:
        UserError: fewer samples than ranks, a mini-batch that does not split evenly, or what ZeRO cannot run.
        """
        if strategy.axes[axis].prefix:
            check_zero(network, strategy, settings)
        check_batch(strategy, settings.batch)

    def limit(self, network: ModelGraph, settings: PlanSettings) -> Limit:
        """One sample a rank at least (ParaDL, Table 3)."""
        return Limit(axis="data", ranks=settings.batch, reason=f"one sample a rank, batch {settings.batch}")

    def add_role(
        self,
        builder: RoleBuilder,
        sharded: ShardedLayers,
        strategy: Strategy,
        settings: PlanSettings,
        operations: dict[int, str],
    ) -> Before | None:
        """That of stages 2 and 3, which gather parameters where they are used."""
        if zero_stage(strategy) < 2:
            return None
        return add_sharded_role(builder, sharded, strategy, settings, operations)

    def add_update(
        self,
        builder: RoleBuilder,
        network: ModelGraph,
        strategy: Strategy,
        settings: PlanSettings,
        done: tuple[int, ...],
        apart: frozenset[str],
    ) -> Before | None:
        """The weight update of stage 1, whose parts are broadcast, or gathered where they are equal."""
        if zero_stage(strategy) != 1:
            return None
        if scatters_gradients(strategy, settings):
            return add_even_update(builder, network, strategy, settings, done)
        return add_optimizer_broadcasts(builder, network, strategy, settings, done, apart)

    def stage_parts(
        self, network: ModelGraph, strategy: Strategy, settings: PlanSettings, apart: frozenset[str]
    ) -> StageParts | None:
        """Those of stages 2 and 3, which are one in a pipeline."""
        return ShardedStages(network, strategy, settings, apart) if zero_stage(strategy) > 1 else None


PLANNER = DataPlanner()
