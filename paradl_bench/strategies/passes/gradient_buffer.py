"""What a framework's buffer of all gradients takes beside the exchange: zeros before an iteration, and a check.

Gradients that are exchanged are checked and divided with that (:mod:`~paradl_bench.strategies.exchange.gradients`).
Those that no other rank holds are checked as well, and divided where replicas have other samples.

Source: Megatron-LM's ``train_step`` (``zero_grad_buffer``) and ``start_grad_sync`` (``check_grads``), at 23e00ed0.
"""

from __future__ import annotations

from collections.abc import Iterable

from paradl_bench.network.graph import DTYPE_BYTES, ModelGraph
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import axes_apart, group_axes
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import BucketCopy, GradientPass, Phase, RoleBuilder, Stream
from paradl_bench.strategies.frameworks.presets import framework_of


def add_zeros(builder: RoleBuilder, networks: Iterable[ModelGraph], settings: PlanSettings) -> None:
    """Set the buffer to zero where a framework holds one, before all that follows on the compute stream.

    Args:
        networks: with the parameters that a rank holds.
    """
    elements = sum(parameter.elements for network in networks for parameter in network.parameters)
    if elements and framework_of(settings).gradient_dtype:
        builder.add(GradientPass(part="zero", elements=elements, tensors=1), Phase.FW, Stream.COMPUTE)


def add_checks(
    builder: RoleBuilder,
    network: ModelGraph,
    strategy: Strategy,
    settings: PlanSettings,
    apart: frozenset[str],
    after: tuple[int, ...],
) -> tuple[int, ...]:
    """Check gradients that are not exchanged, behind backward; returns what the weight update waits for.

    Args:
        network: with the parameters that a rank holds. apart: as of
            :class:`~paradl_bench.plan.axis_planner.ShardedLayers`.
    """
    framework, replicates = framework_of(settings), group_axes(strategy, Trait.REPLICATES)
    of_apart = axes_apart(strategy)
    alone = [each for each in network.parameters if not (of_apart if each.name in apart else replicates)]
    elements = sum(parameter.elements for parameter in alone)
    if not elements or not framework.checks_gradients:
        return after
    done = builder.add(GradientPass(part="check", elements=elements, tensors=1), Phase.GE, Stream.COMPUTE, after)
    if replicates:
        size = elements * DTYPE_BYTES[framework.gradient_dtype]
        done = builder.add(BucketCopy(direction="into", bytes=size, tensors=1), Phase.GE, Stream.COMPUTE, (done,))
    return (done,)
