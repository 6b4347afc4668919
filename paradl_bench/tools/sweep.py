"""Sweeps of collectives by another tool's programs: one start an operation, run and block; rows kept as they come.

A program that fails half way leaves its rows: they are read and kept, its last lines are shown, and the others go on.
"""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, cast

import msgspec

from paradl_bench.core.errors import UserError, WorkError
from paradl_bench.core.files.json_lines import append_together, read_lines, undo_unfinished
from paradl_bench.core.files.storage import hash_of_file
from paradl_bench.core.terminal.command_line import progress, say
from paradl_bench.core.terminal.printed import ending
from paradl_bench.importers.catalog import importers
from paradl_bench.importers.importer import Imported, ImportOptions, load_file
from paradl_bench.importers.writing import FileRead, environment_of
from paradl_bench.ranks.directories.directory import now_utc, refuse_unusable
from paradl_bench.ranks.directories.writer_lock import lock_for_writing, release
from paradl_bench.ranks.environment import host_memory_bytes, recorded_variables
from paradl_bench.ranks.rank_place import cluster_or_host
from paradl_bench.records.cluster import NODE
from paradl_bench.records.measurement import (
    COLLECTIVES_FILE,
    MANIFEST_NAME,
    SCHEMA_VERSION,
    UNKNOWN_DEVICE,
    Environment,
    Manifest,
    read_manifest,
    write_manifest,
)
from paradl_bench.records.samples import CollectiveSamples
from paradl_bench.tools.processes import Ended, can_report, find_program, launch_prefix, run_program
from paradl_bench.tools.request import ToolRequest
from paradl_bench.tools.tool import Job

LOGS = "logs"
DONE = "done.jsonl"
"""(operation, size as asked for, block) of what need not be measured again: tools round sizes."""


class Failure(NamedTuple):
    """A program that did not end well."""

    operation: str
    program: str
    ended: Ended
    held: Imported

    @property
    def words(self) -> str:
        """One line: what ended how, and what it left."""
        how = "its time was up" if self.ended.exit_code is None else ending(self.ended.exit_code)
        refused = _refused(self.held)
        dropped = f", {len(refused)} dropped ({refused[0]})" if refused else ""
        return f"{self.program} ({self.operation}): {how}, {self.held.rows} rows kept{dropped}"


def _refused(held: Imported) -> list[str]:
    """Why rows were dropped, those of no bytes left out: a program that was not asked for them may print them."""
    return [item.why for item in held.dropped if not item.why.startswith("no bytes")]


def sweep_with_tool(request: ToolRequest, output: Path, command_line: tuple[str, ...]) -> list[Failure]:
    """Run every operation in every block and keep what was measured; failures are returned, not raised.

    A program whose time was up ends the sweep: the next one would hang as well. One that failed and has measured
    nothing so far is not started for its other sizes and blocks, which would fail in the same way.

    Raises:
        UserError: the directory holds something else; the tool can't do what is asked.
        WorkError: a program or the launcher is not there.
    """
    launch_prefix(request.tool, request.launcher, request.ranks, request.launcher_arguments)
    refuse_unusable(output, "collectives")
    _say_shared_cores(request)
    programs = {name: find_program(request.tool, name, request.tool_path) for name in request.operations}
    reports = {path: can_report(path, request.tool) for path in sorted(set(programs.values()))}
    lock_for_writing(output)
    undo_unfinished(output)
    _open(output, request, programs, command_line)
    (output / LOGS).mkdir(exist_ok=True)
    done = _done(output)
    failures: list[Failure] = []
    barren: dict[str, bool] = {}
    pending = list(_jobs(request, output, programs, reports, done))
    with progress(request.tool.name, len(pending)) as bar:
        for block, job in pending:
            bar.advance()
            if barren.get(job.operation):
                continue
            bar.describe(f"{request.tool.name} {job.operation}")
            failure = _run(request, output, programs[job.operation], job, block)
            failures += [failure] if failure else []
            # What once measured something may do so again: memory runs out at large sizes alone.
            barren.setdefault(job.operation, failure is not None and not failure.held.rows)
            if failure and failure.ended.exit_code is None:
                break
    if not failures:
        write_manifest(output, msgspec.structs.replace(read_manifest(output), complete=True))
    release(output)
    return failures


def _open(output: Path, request: ToolRequest, programs: dict[str, Path], command_line: tuple[str, ...]) -> None:
    if (output / MANIFEST_NAME).exists():
        held = read_manifest(output)
        unlike = [name for name, value in request.arguments().items() if held.arguments.get(name) != value]
        if unlike or held.kind != "collectives" or held.environment.hostname != cluster_or_host():
            what = unlike[0] if unlike else "on another host"
            raise UserError(f"{output} was measured with other settings ({what}); give another directory")
        return
    # Programs of one name may differ between two measurements.
    builds = {path.name: hash_of_file(path)[:16] for path in sorted(set(programs.values()))}
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        kind="collectives",
        command_line=command_line,
        arguments=request.arguments(),
        created_utc=now_utc(),
        environment=Environment(
            device="cuda" if request.tool.backend == "nccl" else "cpu",
            device_name=UNKNOWN_DEVICE,
            device_count=1,
            memory_bytes=host_memory_bytes() if request.tool.backend == "mpi" else 0,
            hostname=cluster_or_host(),
            kernel=platform.release(),
            versions={},
            settings={"tool": request.tool.name, "launcher": request.launcher, **builds},
            variables=recorded_variables(),
        ),
    )
    write_manifest(output, manifest)


def _say_shared_cores(request: ToolRequest) -> None:
    """Say so where all ranks of an MPI are started here, and are more than there are cores."""
    here = request.launcher == "mpirun" and request.level == NODE and not request.launcher_arguments
    cores, started = len(os.sched_getaffinity(0)), request.ranks * request.concurrent
    if request.tool.backend == "mpi" and here and started > cores:
        say(f"{started} ranks share {cores} cores: times are not those of ranks with a core each")


_Done = tuple[str, int, int] | tuple[str, int, int, int]
"""(operation, size, block), and how many groups ran at once where several did."""


def _done(output: Path) -> set[_Done]:
    path = output / LOGS / DONE
    return {cast(_Done, tuple(row)) for row in read_lines(path, list[str | int])[0]} if path.exists() else set()


def _mark(operation: str, size: int, block: int, concurrent: int) -> _Done:
    return (operation, size, block) if concurrent == 1 else (operation, size, block, concurrent)


def _jobs(
    request: ToolRequest,
    output: Path,
    programs: dict[str, Path],
    reports: dict[Path, bool],
    done: set[_Done],
) -> Iterator[tuple[int, Job]]:
    # Programs that measure groups at once alone are started without groups before that, in every block.
    counts = (1, request.concurrent) if request.tool.groups == "at once" else (request.concurrent,)
    for block in range(request.blocks):
        for operation, concurrent in itertools.product(request.operations, dict.fromkeys(counts)):
            wanted = [size for size in request.sizes if _mark(operation, size, block, concurrent) not in done]
            of_groups = f"-{concurrent}groups" if concurrent > 1 else ""
            for number, sizes in enumerate(request.tool.at_once(wanted) if wanted else ()):
                job = Job(
                    operation=operation,
                    message_bytes=sizes,
                    # A ping-pong is between two, however many ranks there are.
                    ranks=2 if operation == "send_recv" else request.ranks,
                    own=request.launcher == "own",
                    folder=output / LOGS,
                    stem=_free_stem(output / LOGS, f"{operation}-{block}-{number}{of_groups}"),
                    report=reports[programs[operation]],
                    point_s=request.point_s,
                    concurrent=concurrent,
                )
                yield block, job


def _free_stem(folder: Path, stem: str) -> str:
    # A log of an earlier, interrupted start is kept.
    names = (stem, *(f"{stem}-again{number}" for number in range(1, 10000)))
    return next(name for name in names if not (folder / f"{name}.log").exists())


def _run(request: ToolRequest, output: Path, program: Path, job: Job, block: int) -> Failure | None:
    started = job.ranks * job.concurrent
    prefix = launch_prefix(request.tool, request.launcher, started, request.launcher_arguments)
    log = job.folder / f"{job.stem}.log"
    command = [*prefix, str(program), *request.tool.arguments(job)]
    try:
        ended = run_program(command, log, timeout_s=request.timeout_s, variables=request.tool.variables(job))
    except KeyboardInterrupt:
        _keep(request, output, job, block, log, whole=False)
        raise
    held = _keep(request, output, job, block, log, whole=ended.well)
    if ended.well and held.rows and not _refused(held):
        return None
    return Failure(job.operation, program.name, ended, held)


def _keep(request: ToolRequest, output: Path, job: Job, block: int, log: Path, *, whole: bool) -> Imported:
    """Keep the rows of a program's start; sizes that it was to measure are done if it ended well, else those it did."""
    held, source = _read(request, job, log)
    _drop_other_ranks(held, job)
    records = [
        msgspec.structs.replace(record, block=block, source=os.path.relpath(record.source, output))
        for record in held.collectives
    ]
    if records:
        _describe(output, held, source)
    measured = {record.message_bytes for record in records}
    whole = whole and bool(records) and not _refused(held)
    ended = [size for size in job.message_bytes if whole or size in measured]
    done = [_mark(job.operation, size, block, job.concurrent) for size in ended]
    append_together(output, {COLLECTIVES_FILE: records, f"{LOGS}/{DONE}": done})
    return held


def _drop_other_ranks(held: Imported, job: Job) -> None:
    """Drop rows of another number of ranks: without MPI every process of a launcher runs by itself, on its own rank."""
    if any(record.concurrent > 1 for record in held.collectives):
        # Behind its groups IMB goes on to all ranks as one, which nobody asked for.
        _keep_only(held, [rec for rec in held.collectives if rec.concurrent > 1 or rec.ranks == job.ranks])
    others = sorted({record.ranks for record in held.collectives if record.ranks != job.ranks})
    if others:
        counts = " or ".join(map(str, others))
        held.drop(0, job.operation, f"measured on {counts} ranks, not {job.ranks}: is the program built with MPI?")
        _keep_only(held, [record for record in held.collectives if record.ranks == job.ranks])
    most = max((record.concurrent for record in held.collectives), default=job.concurrent)
    if most != job.concurrent:
        held.drop(
            0, job.operation, f"{most} groups at once, not {job.concurrent}: was the variable passed to all ranks?"
        )
        _keep_only(held, [])


def _keep_only(held: Imported, records: list[CollectiveSamples]) -> None:
    held.collectives, held.rows = records, len({(record.message_bytes, record.source) for record in records})


def _read(request: ToolRequest, job: Job, log: Path) -> tuple[Imported, Path]:
    """What the program measured: from its report where it wrote one that can be read, else from what it printed."""
    read = request.tool.read or importers()[request.tool.reads].read
    options = ImportOptions(ranks=job.ranks, level=request.level, operation=job.operation, keep=frozenset({"failed"}))
    for path in (job.report_path, log):
        if path.exists():
            try:
                held = read(load_file(path), options)
            except UserError:
                continue
            # What is not taken here can be taken from the log.
            taken = f"; paradl-bench import {request.tool.reads} {path} --keep "
            held.dropped = [replace(row, why=row.why.replace("; --keep ", taken)) for row in held.dropped]
            if held.rows:
                return held, path
    return Imported(), log


def _describe(output: Path, held: Imported, source: Path) -> None:
    """Add what the tool said of devices and versions to the environment."""
    manifest = read_manifest(output)
    said = environment_of(
        [FileRead(log=load_file(source), held=held)], cluster=None, device_name=None, memory_bytes=0, force=True
    )
    known = manifest.environment
    environment = msgspec.structs.replace(
        known,
        device=said.device,
        device_name=said.device_name if held.device_names else known.device_name,
        device_count=max(known.device_count, said.device_count),
        versions={**known.versions, **said.versions},
        settings={**known.settings, **said.settings},
    )
    if environment != known:
        write_manifest(output, msgspec.structs.replace(manifest, environment=environment))


def raise_failures(failures: Sequence[Failure], output: Path) -> None:
    """Raise WorkError of programs that did not end well; what they measured is kept."""
    if failures:
        words = "; ".join(failure.words for failure in failures)
        raise WorkError(f"{words}; logs are in {output / LOGS}; the same command measures the rest")
