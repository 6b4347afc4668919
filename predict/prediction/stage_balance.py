"""The cut into stages that balances a profile's seconds.

A layer counts what a rank computes of it, forward and backward of a micro-batch, with its share of the time between
operations: measured, or from whichever source the cost model has. Where an axis shares layers it counts as the largest
of its shards; what is communicated for layers does not count.
"""

from __future__ import annotations

from paradl_bench.core.errors import UserError
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import degree_of
from paradl_bench.plan.tasks import Compute, FrameworkOverhead
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.passes.recomputation import segments_of
from paradl_bench.strategies.pipeline.axis import PipelineOptions
from paradl_bench.strategies.pipeline.stages import balanced_stages
from predict.costs.cost_model import CostModel
from predict.workload import Configuration

CUT_BY = "seconds of the profile"


def with_balanced_stages(costs: CostModel, point: Configuration) -> Configuration:
    """The point with stages that balance the profile's seconds; as it is without a pipeline."""
    if degree_of(point.strategy, Trait.STAGES) == 1:
        return point
    stages = balanced_stages(costs.network, point.strategy, point.settings, layer_seconds(costs, point))
    settings = point.settings.changed(PipelineOptions, stages=stages, cut_by=CUT_BY)
    return Configuration(strategy=point.strategy, settings=settings)


def layer_seconds(costs: CostModel, point: Configuration) -> tuple[float, ...]:
    """Seconds of every layer, as a stage computes it on a micro-batch; forward twice where it runs again."""
    # Which seconds a layer takes does not depend on the stage that it is in, nor on the parts that backward runs in:
    # any cut prices them all, and GPipe's has as few stages as any.
    settings = point.settings.changed(PipelineOptions, schedule="gpipe")
    plan = planner_for(point.strategy).plan(costs.network, point.strategy, settings)
    seconds = costs.price(plan).costs.seconds.tolist()
    between = {work.phase: seconds[index] for index, work in plan.of_kind(FrameworkOverhead).items()}
    seconds_of: dict[tuple[str, str], float] = {}
    for index, work in plan.of_kind(Compute).items():
        key = work.layer, work.way
        seconds_of[key] = max(seconds_of.get(key, 0.0), seconds[index] + between[work.way])
    once = [sum(seconds_of.get((layer.name, phase), 0.0) for phase in between) for layer in costs.network.layers]
    for segment in segments_of(costs.network, point.settings):
        for i in segment.layers:
            once[i] += seconds_of.get((costs.network.layers[i].name, "FW"), 0.0)
    return tuple(once)


def refuse_without_pipeline(stages: str | None, points: tuple[Configuration, ...]) -> None:
    """Raise a UserError where ``--stages`` is given and no point has a pipeline."""
    if stages and not any(degree_of(point.strategy, Trait.STAGES) > 1 for point in points):
        raise UserError("--stages is for pipelines, and none of the strategies has a pipeline")
