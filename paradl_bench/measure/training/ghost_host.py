"""What ranks of an emulated run take their host for besides communication.

The same strategy, over groups that move nothing, in iterations that sleep nothing, on all ranks at once: what is left
is the modules, hooks, copies and schedules of the ranks, on the cores that they share. On a real cluster each rank has
cores of its own for that, and a device to compute beside it.
"""

from __future__ import annotations

from paradl_bench.emulation.layers import hold_in_common
from paradl_bench.measure.training.ghosts import Ghost, awake_iterations
from paradl_bench.measure.training.request import TrainingRequest
from paradl_bench.measure.training.trainer import Trainer
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.models.catalog import load_model
from paradl_bench.ranks.groups.process_group import silent_groups
from paradl_bench.ranks.groups.process_groups import RankContext

REPEATED = 9
"""Iterations, of some ten milliseconds each."""


def host_seconds(
    ghost: Ghost, request: TrainingRequest, context: RankContext, network: ModelGraph
) -> tuple[float, ...]:
    """Seconds of each iteration on its slowest rank; none where this torch has no such groups. A collective."""
    if context.ranks == 1:
        return ()
    # Strategies replace parameters by shards of them: the run's own model stays whole.
    model = load_model(request.model, request.input_shape)
    hold_in_common(model.module)
    try:
        with silent_groups():
            trainer = Trainer(model, request, context, ghost.twin)
            trainer.prepare(network)
    except ImportError:
        return ()
    # The first one takes what memory it needs.
    awake_iterations(ghost.twin, trainer.iterate, context, 1)
    found = awake_iterations(ghost.twin, trainer.iterate, context, REPEATED)
    ghost.twin.sleeper.take_asked()
    trainer.close()
    return found
