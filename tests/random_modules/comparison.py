"""One case on one rank: what it issues against the plan, and its training in float64 against the serial model's."""

from __future__ import annotations

import torch
from equality_program import TOLERANCE

from paradl_bench.measure.proof import proving
from paradl_bench.measure.proof.copies import Trial, runs
from paradl_bench.measure.proof.reference import JoinedRanks
from paradl_bench.measure.training.calls.recorder import differences, planned_collectives
from paradl_bench.measure.training.trainer import Trainer
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.models.catalog import LoadedModel, load_model
from paradl_bench.ranks.groups.process_groups import RankContext
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.nesting.parallel import ParallelModule, build_parallel
from random_modules.case import Case, draws_again

Found = list[str]
"""What differs, in words; nothing where nothing does."""
ITERATIONS = 2


def compare_with_plan(case: Case, network: ModelGraph, context: RankContext) -> Found:
    """Train as ``paradl-bench train`` does; every collective of construction and of the first iterations."""
    request = case.request(network)
    trainer = Trainer(load_model(case.model), request, context)
    network = trainer.try_alone(network)
    plan = planner_for(request.strategy).plan(network, request.strategy, request.settings)
    found = differences(trainer.prepare(network), planned_collectives(plan, context.rank))
    trainer.track_memory()
    trainer.run_chunk(0, 1)
    trainer.close()
    return found


def compare_with_serial(case: Case, network: ModelGraph, context: RankContext) -> Found:
    """Outputs, gradients of inputs and parameters, buffers, and what the optimizer makes of parameters."""
    request, ranks = case.request(network), JoinedRanks(context)
    strategy, settings = request.strategy, request.settings
    model, serial, tried = (_in_float64(load_model(case.model)) for _ in range(3))
    inputs, targets = model.make_batch(settings.batch, seed=7)
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    # A module may change its input in place, which a leaf of the graph does not let it.
    with_input = runs(tried, inputs[:2], Trial(torch.float64, True))

    def build(model: LoadedModel) -> ParallelModule:
        return build_parallel(model.module, network, strategy, settings, context.device, model.loss)

    about = proving.Case(
        network,
        strategy,
        settings,
        TOLERANCE,
        # These treat each sample by itself, all but batch norms.
        at_once=None if any(layer.kind == "batch_norm" for layer in network.layers) else "all",
        with_input=with_input,
        optimizer=settings.optimizer,
    )
    proof = proving.StrategyProof(about, model, serial, ranks, build)
    found: list[proving.Difference] = []
    for _ in range(ITERATIONS):
        # Together: a rank that went on alone would wait for the others.
        found = proof.iterate(inputs, targets).differences
        if any(ranks.gather(bool(found))):
            break
        found = proof.update().differences
        if any(ranks.gather(bool(found))):
            break
    groups = proof.groups
    del proof
    ranks.let_go(groups)
    return [f"{item.what} is off by {item.relative:.2g} of its largest" for item in sorted(found)]


def _in_float64(model: LoadedModel) -> LoadedModel:
    model.module.double()
    return model


def compare(case: Case, network: ModelGraph, context: RankContext) -> dict[str, Found]:
    """What differs on this rank: ``plan`` and ``serial``."""
    plan = compare_with_plan(case, network, context)
    return {
        "plan": plan,
        "serial": [] if draws_again(case.description) else compare_with_serial(case, network, context),
    }
