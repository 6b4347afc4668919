"""The proof that ``train`` runs before it times anything, on the ranks of the run."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from paradl_bench.core.errors import WorkError
from paradl_bench.core.terminal.command_line import say
from paradl_bench.measure.proof.cost import cost_of, what_forbids
from paradl_bench.measure.proof.prove import Subject, prove
from paradl_bench.measure.proof.proving import synchronises
from paradl_bench.measure.proof.reference import JoinedRanks
from paradl_bench.measure.proof.verdict import end_if_differs
from paradl_bench.measure.training.request import TrainingRequest
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.kinds.autocast import kept_dtype
from paradl_bench.network.models.catalog import LoadedModel
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.axis_planner import steps_of
from paradl_bench.plan.mesh import degree_of
from paradl_bench.ranks.groups.process_groups import RankContext
from paradl_bench.ranks.out_of_memory import free_bytes, ran_out
from paradl_bench.ranks.rank_place import ranks_of_node
from paradl_bench.records.training.training_record import RUN_NAME, TRAINING_FILE, read_run
from paradl_bench.records.training.verification import Verification
from paradl_bench.strategies.nesting.parallel import ParallelModule, build_parallel

_SAMPLES = 2
"""Of a micro-batch: batch norm of one sample may have a single value to normalise."""


def verify_training(
    model: LoadedModel,
    network: ModelGraph,
    request: TrainingRequest,
    context: RankContext,
    output: Path,
    sample_s: float,
) -> Verification | None:
    """Prove the strategy of a run on the model at hand, or say why not; None for nothing to prove. A collective.

    Args:
        output: where an interrupted run, which was proved when it began, left what it measured.
        sample_s: seconds that forward and backward of one sample took on this rank.

    Raises:
        WorkError: the strategy trains something else than the serial model, or memory ran out.
    """
    if context.share((output / TRAINING_FILE).exists(), bool):
        return read_run(output).verified if context.rank == 0 and (output / RUN_NAME).exists() else None
    serial = not (request.strategy.axes or request.recompute or request.accumulate > 1)
    if serial or request.emulate is not None:
        # Nothing is computed otherwise than in serial training; layers that sleep compute nothing.
        return None
    if request.verify is False:
        return Verification(why_not="--no-verify")
    # As many parts as in the run, of few samples.
    parts = degree_of(request.strategy, Trait.DIVIDES_BATCH) * steps_of(request.strategy, request.settings)
    batch = parts * max(1, min(_SAMPLES, request.batch // parts))
    settings = msgspec.structs.replace(request.settings, batch=batch, dtype=kept_dtype(request.dtype))

    def build(copied: LoadedModel) -> ParallelModule:
        return build_parallel(copied.module, network, request.strategy, settings, context.device, copied.loss)

    ranks = JoinedRanks(context)
    subject = Subject(model, network, request.strategy, settings, context.device, ranks, build)
    why_not = _too_much(subject, request, context, sample_s)
    if why_not:
        if context.rank == 0:
            say(f"not verified against serial training: {why_not}")
        return Verification(why_not=why_not)
    try:
        proved = prove(subject)
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        raise WorkError("memory ran out while the strategy was verified; leave that out by --no-verify") from error
    end_if_differs(proved, request.model, request.strategy)
    if context.rank == 0:
        _tell(proved.verification, request)
    return proved.verification


def _too_much(subject: Subject, request: TrainingRequest, context: RankContext, sample_s: float) -> str:
    cost = cost_of(
        subject.network,
        subject.place,
        max(context.gather(sample_s, float)),
        joint=synchronises(subject.network, subject.strategy, subject.settings),
        link_bytes_per_s=request.layout.slowest_bytes_per_s if request.layout else math.inf,
    )
    sharing = 1 if context.device.type == "cuda" else ranks_of_node(context.launcher, context.ranks) or context.ranks
    why_not = what_forbids(cost, free_bytes(context.device) // sharing, limited=request.verify is None)
    # Hosts may have unlike memory.
    return next(filter(None, context.gather(why_not, str)), "")


def _tell(verification: Verification, request: TrainingRequest) -> None:
    if verification.why_not:
        say(f"not verified against serial training: {verification.why_not}")
    if verification.mixes_samples:
        say(
            f"{verification.mixes_samples} mixes the samples that it is given: {request.strategy} trains"
            f" {request.model} otherwise than one process does on the whole mini-batch, as plain data parallelism and"
            " micro-batches do"
        )
