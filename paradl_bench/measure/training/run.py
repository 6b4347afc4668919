"""Real training of a strategy: phases of every iteration on every rank, and every collective that it issued.

The first three iterations are recorded instead of timed: collectives are seen at the dispatcher (DDP sends one bucket
in the first and rebuilds its buckets in the second), and which gradient arrives last is found. After the rest of the
warm-up, ranks run chunks of timed iterations, without a barrier between iterations, as real training does. A chunk
starts from a barrier and one iteration that is not timed, since rank 0 writes the chunk before.
"""

from __future__ import annotations

from pathlib import Path

from paradl_bench.core.errors import UserError, WorkError
from paradl_bench.core.terminal.command_line import progress
from paradl_bench.emulation.layers import hold_in_common
from paradl_bench.emulation.table import TableMaker, made_by_registered
from paradl_bench.measure.execution.compiled import Compiling
from paradl_bench.measure.execution.kernel_layout import refuse_without_channels
from paradl_bench.measure.input.feed import RunImages
from paradl_bench.measure.input.run_images import check_images, check_samples, close_images, open_images
from paradl_bench.measure.machine.measured_nodes import note_places
from paradl_bench.measure.proof.parts import place_of
from paradl_bench.measure.tracing.batch_dependence import refuse_changed_input
from paradl_bench.measure.tracing.tracing import refuse_single_sample, trace_network
from paradl_bench.measure.training.calls.recorder import differences, planned_collectives
from paradl_bench.measure.training.fused_messages import with_messages
from paradl_bench.measure.training.ghosts import Ghost, awake_iterations, describe_run, emulate
from paradl_bench.measure.training.proof import verify_training
from paradl_bench.measure.training.request import RECORDED, TrainingRequest
from paradl_bench.measure.training.stage_balance import with_measured_stages
from paradl_bench.measure.training.trainer import Trainer
from paradl_bench.measure.training.writer import RankTraining, TrainingWriter, keep_shortage
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.models.catalog import LoadedModel, load_model
from paradl_bench.plan.axis_planner import samples_at_once
from paradl_bench.ranks.groups.process_group import silent_groups
from paradl_bench.ranks.groups.process_groups import RankContext
from paradl_bench.ranks.out_of_memory import describe_shortage, ran_out, shortage
from paradl_bench.records.training.compile_record import CompileRecord
from paradl_bench.records.training.training_record import MemoryPeak, TrainingIterations
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.pipeline.rehearsal import rehearse

CHUNK_ITERATIONS = 10
"""Timed iterations between two writes: what an interruption loses at most. Half as many where calls are timed."""
_HOST_ITERATIONS = 9
"""Of an emulated run's ranks, in which nothing is slept or moved: some ten milliseconds each."""


def check_limits(request: TrainingRequest, network: ModelGraph | None = None) -> None:
    """Refuse, before any rank is started, what the model's layers do not allow.

    Args:
        network: of the request's model, where it has been traced before.

    Raises:
        UserError: a model that does not load or run, or a limit that is exceeded; the message names the layer.
    """
    model = load_model(request.model, request.input_shape, device="meta")
    network = network or trace_network(model)
    request = _settled(request, model, network)
    planner_for(request.strategy).plan(network, request.strategy, request.settings)
    if samples_at_once(request.strategy, request.settings) == 1:
        try:
            refuse_single_sample(model)
        except UserError as error:
            raise UserError(
                f"{error}; {request.strategy} on batch {request.batch} has one sample at a time: give a larger --batch"
            ) from error
    rehearse(model.module, network, request.strategy, request.settings)


def _settled(request: TrainingRequest, model: LoadedModel, network: ModelGraph) -> TrainingRequest:
    """The request with what follows from its network; a UserError of inputs that the model can't be fed with."""
    refuse_without_channels(request.model, network.input_shape, request.kernel_settings)
    refuse_changed_input(network)
    if request.input is not None:
        check_images(request.input, model)
    return with_messages(with_measured_stages(request, network), network)


def measure_training(
    request: TrainingRequest,
    context: RankContext,
    output: Path,
    command_line: tuple[str, ...],
    network: ModelGraph | None = None,
    make_table: TableMaker = made_by_registered,
) -> None:
    """Train on this rank, together with the others; rank 0 writes ``run.json`` and ``training.jsonl``.

    Args:
        network: of the request's model, where ranks that measure several runs have traced it before.

    Raises:
        UserError: a model, batch or number of ranks that does not fit the strategy, or a directory of something else.
        WorkError: the strategy trains otherwise than serial training does, a loss that is not finite, control flow that
            varies between iterations, or memory that ran out, which ``run.json`` then holds.
    """
    wanted = request.strategy.ranks
    if context.ranks != wanted:
        raise UserError(f"strategy {request.strategy} takes {wanted} ranks; {context.launcher} started {context.ranks}")
    # The model comes first: a mistake in it leaves no directory, which the corrected command would not fit.
    model = load_model(request.model, request.input_shape)
    network = network or trace_network(model)
    if context.rank == 0:
        model.say_guess()
    request = _settled(request, model, network)
    # What it refuses, it refuses before anything runs.
    planner_for(request.strategy).plan(network, request.strategy, request.settings)
    ghost = emulate(request, network, context, make_table)
    if ghost:
        hold_in_common(model.module)
    run = RankTraining(request, context, output, command_line, ghost.emulated if ghost else None)
    trainer: Trainer | None = None
    try:
        trainer = Trainer(model, request, context, ghost.twin if ghost else None)
        _measure(trainer, model, run, network, ghost)
        trainer.close()
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        phase = trainer.phase if trainer else "setting up the batch"
        lacked = shortage(error, context.rank, phase, context.device)
        keep_shortage(lacked, network, run)
        raise WorkError(describe_shortage(lacked)) from error


def _measure(trainer: Trainer, model: LoadedModel, run: RankTraining, network: ModelGraph, ghost: Ghost | None) -> None:
    request, context = run.request, run.context
    network = trainer.try_alone(network)
    plan = planner_for(request.strategy).plan(network, request.strategy, request.settings)
    trainer.phase = "verifying the strategy"
    verified = verify_training(model, network, request, context, run.output, trainer.sample_s)
    writer = TrainingWriter.open(run) if context.rank == 0 else None
    done = context.share(writer.done if writer else 0, int)
    if done >= request.iterations:
        return
    hosts_noted = note_places(context, writer.directory if writer else None)
    trainer.attempt = hosts_noted.attempt
    host = (trainer.host_time(network), _host_seconds(ghost, request, context, network)) if ghost else None
    images = _open_images(model, run)
    issued = trainer.prepare(network, images)
    if images is not None and trainer.feed is not None:
        check_samples(images, trainer.feed.first_samples, context)
    planned = planned_collectives(plan, context.rank)
    own_unplanned = [f"rank {context.rank}, {line}" for line in differences(issued, planned)]
    unplanned = _of_all_ranks(context, own_unplanned)
    cores = tuple(core for core in context.gather(context.core, int | None) if core is not None)
    # Ghosts hold other tensors than layers do: their memory says nothing of a real run's. A model that is tracked runs
    # uncompiled.
    untracked = ghost or request.kernel_settings.compile
    peaks = [] if untracked else context.gather(trainer.track_memory(), MemoryPeak)
    compiled = context.gather(trainer.compiled, tuple[CompileRecord, ...])
    about = describe_run(ghost, trainer.iterate, context, *host) if ghost and host else None
    if writer is not None:
        whole = tuple(record for of_rank in compiled for record in of_rank)
        writer.describe(network, context, cores, issued, planned, tuple(peaks), about, whole, verified, images)
        if ghost:
            writer.keep_table(ghost.table)
        writer.write(unplanned)
    _run_timed(trainer, request, context, writer, done, unplanned)
    hosts_noted.again()
    if images is not None and request.input is not None:
        close_images(images, request.input, context, run.output)
    if writer is not None:
        writer.directory.finish()


def _open_images(model: LoadedModel, run: RankTraining) -> RunImages | None:
    request, context = run.request, run.context
    if request.input is None:
        return None
    return open_images(
        request.input,
        model,
        context,
        run.output,
        batch=request.batch,
        own=place_of(request.strategy, request.settings, context.rank).own,
        workers=request.io_workers or 0,
        copies_ahead=request.overlap.copies_ahead,
    )


def _host_seconds(
    ghost: Ghost, request: TrainingRequest, context: RankContext, network: ModelGraph
) -> tuple[float, ...]:
    """Seconds that ranks of an emulated run take their host for besides communication; a collective.

    Of each iteration on its slowest rank; none where this torch has no groups that move nothing. The same strategy over
    such groups, in iterations that sleep nothing, on all ranks at once: what is left is the modules, hooks, copies and
    schedules of the ranks, on the cores that they share. On a real cluster each rank has cores of its own for that.
    """
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
    iteration_s = awake_iterations(ghost.twin, trainer.iterate, context, _HOST_ITERATIONS)
    ghost.twin.sleeper.take_asked()
    trainer.close()
    return iteration_s


def _run_timed(
    trainer: Trainer,
    request: TrainingRequest,
    context: RankContext,
    writer: TrainingWriter | None,
    done: int,
    unplanned: list[str],
) -> None:
    """The rest of the warm-up, then chunks of timed iterations, each written as soon as it is there."""
    about_run = f"{request.model} {request.strategy}, batch {request.batch}"
    with progress(about_run, request.iterations) as bar, Compiling() as compiling:
        bar.advance(done)
        for _ in range(request.warmup - len(RECORDED)):
            trainer.iterate()
        at_once = CHUNK_ITERATIONS // 2 if request.time_collectives else CHUNK_ITERATIONS
        while done < request.iterations:
            count = min(at_once, request.iterations - done)
            # In turn, so that what timing calls costs is seen, and is in half of the iterations alone.
            each_call = request.time_collectives and done // at_once % 2 == 0
            with compiling.nothing_more(request.model):
                chunk = trainer.run_chunk(done, count, each_call=each_call)
            unplanned += _count_differences(context, chunk, trainer.recorded_count)
            chunks = context.gather(chunk, TrainingIterations)
            if writer is not None:
                writer.append(chunks)
                writer.write(unplanned)
            done += count
            bar.advance(count)


def _of_all_ranks(context: RankContext, lines: list[str]) -> list[str]:
    return [line for of_rank in context.gather(lines, list[str]) for line in of_rank]


def _count_differences(context: RankContext, chunk: TrainingIterations, recorded: int | None) -> list[str]:
    wrong = [] if recorded is None else [count for count in chunk.collectives_issued if count != recorded]
    lines = []
    if wrong:
        lines = [
            f"rank {context.rank}, timed iterations from {chunk.first_iteration} on: {len(wrong)} issued {wrong[0]}"
            f" collectives where the recorded one issued {recorded}"
        ]
    return _of_all_ranks(context, lines)
