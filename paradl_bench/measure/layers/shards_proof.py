"""The proof that ``layers --shards`` runs first: the parts of all ranks make up what the whole model computes.

All ranks of the axis that shares layers run as threads of one process, on the CPU, and exchange over memory.
"""

from __future__ import annotations

import msgspec
import torch

from paradl_bench.core.terminal.command_line import say
from paradl_bench.measure.layers.rehearsal import sharing_axis
from paradl_bench.measure.layers.request import LayersRequest
from paradl_bench.measure.proof.copies import fresh_copy, undisturbed
from paradl_bench.measure.proof.cost import cost_of, what_forbids
from paradl_bench.measure.proof.parts import place_of
from paradl_bench.measure.proof.prove import NEITHER, Subject, find_trial, left_out, prove_copies
from paradl_bench.measure.proof.threads import Meeting, ThreadGroup, ThreadRanks, run_threads
from paradl_bench.measure.proof.verdict import Proved, end_if_differs
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.kinds.autocast import kept_dtype
from paradl_bench.network.models.catalog import LoadedModel, load_model
from paradl_bench.plan.strategy import Axis, Strategy
from paradl_bench.ranks.groups.process_groups import RankContext
from paradl_bench.ranks.out_of_memory import free_bytes
from paradl_bench.records.training.verification import Verification, VerifiedShards
from paradl_bench.strategies.nesting.parallel import ParallelModule
from paradl_bench.strategies.running.axis_runners import sharding_runner
from paradl_bench.strategies.running.sharded_module import ShardedModule
from paradl_bench.strategies.running.spans import Spans

_SAMPLES = 2


def verify_on_first_rank(
    request: LayersRequest, network: ModelGraph, strategy: Strategy, context: RankContext, sample_s: float
) -> list[VerifiedShards]:
    """What rank 0 says of a strategy's parts, as :func:`verify_shards`; the others rest meanwhile, and say nothing."""
    if context.rank:
        context.rest()
        return []
    axis = sharing_axis(strategy)
    verified = verify_shards(request, network, axis, sample_s)
    context.barrier()
    return [VerifiedShards(model=network.name, shards=str(Strategy(axes=(axis,))), verified=verified)]


def verify_shards(request: LayersRequest, network: ModelGraph, axis: Axis, sample_s: float) -> Verification:
    """Prove that the ranks of an axis compute together what the model does, or say why not.

    ``sample_s`` are the seconds that forward and backward of one sample take.

    Raises:
        WorkError: they compute something else; the message names the first layer that differs.
        UserError: the axis does not take the model.
    """
    if request.verify is False:
        return Verification(why_not="--no-verify")
    strategy = Strategy(axes=(axis,))
    settings = request.settings(min(_SAMPLES, *request.batches))
    place = place_of(strategy, settings, 0)
    cost = cost_of(network, place, sample_s, joint=False)
    of_all = cost._replace(seconds=cost.seconds * axis.degree, bytes=cost.bytes * axis.degree)
    cpu = torch.device("cpu")
    why_not = what_forbids(of_all, free_bytes(cpu), limited=request.verify is None)
    if not why_not:
        # The model as it was loaded may be on another device.
        proved = _prove(load_model(network.name, request.input_shape), network, strategy, request, settings.batch)
        end_if_differs(proved, network.name, strategy)
        if not proved.verification.why_not:
            return proved.verification
        why_not = proved.verification.why_not
    say(f"parts of {strategy} are not verified against the whole {network.name}: {why_not}")
    return Verification(why_not=why_not)


def _prove(model: LoadedModel, network: ModelGraph, strategy: Strategy, request: LayersRequest, batch: int) -> Proved:
    (axis,) = strategy.axes
    settings, cpu = request.settings(batch), torch.device("cpu")
    settings = msgspec.structs.replace(settings, dtype=kept_dtype(settings.dtype))

    def subject(rank: int, meeting: Meeting) -> Subject:
        def build(copied: LoadedModel) -> ParallelModule:
            group = ThreadGroup(
                process_group=None,  # type: ignore[arg-type]
                rank=rank,
                size=axis.degree,
                spans=Spans(),
                meeting=meeting,
            )
            sharding = sharding_runner(axis.declared).shard(copied.module, network, axis, group, settings)
            module = ShardedModule(copied.module, sharding)
            return ParallelModule(module, sharding.network, Spans(), sharding=sharding)

        return Subject(model, network, strategy, settings, cpu, ThreadRanks(rank, meeting), build)

    with undisturbed(cpu, torch.float64):
        trial = find_trial(subject(0, Meeting(1)))
    if trial is None:
        return left_out(NEITHER)
    with undisturbed(cpu, trial.dtype):
        # Here: what builds them sets the seed, which threads share.
        copies = [[fresh_copy(model, cpu, trial.dtype) for _ in range(2)] for _ in range(axis.degree)]

        def run(rank: int, meeting: Meeting) -> Proved:
            return prove_copies(subject(rank, meeting), trial, *copies[rank])

        return run_threads(axis.degree, run)[0]
