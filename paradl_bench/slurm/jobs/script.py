"""sbatch scripts from the one template: what a job asks Slurm for, and each command as its launcher starts it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from paradl_bench.core.errors import UserError, WorkError
from paradl_bench.slurm.jobs.job import Below, Job, Task, Word
from paradl_bench.slurm.jobs.site import Site

if TYPE_CHECKING:
    from jinja2 import Template

_PLAIN_PATH = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_./+@=-")
_FIRST_PORT, _PORTS = 20000, 12000
_JOINING = frozenset({"doctor", "layers", "collectives", "train"})
"""Commands that take ``--launcher``."""
_WAITS = {"afterok": "all have to end well", "afterany": "however they end"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Folders:
    """Where a calibration lies, and where its commands run (a user's ``package.module`` is found there).

    Raises:
        UserError: a path of the calibration that a line ``#SBATCH`` cannot hold.
    """

    output: Path
    work: Path

    def __post_init__(self) -> None:
        odd = sorted(set(str(self.output)) - _PLAIN_PATH)
        if odd:
            raise UserError(f"-o {self.output}: sbatch cannot take {odd[0]!r} in a path of logs; give another folder")


def script_of(job: Job, site: Site, folders: Folders) -> str:
    """The text of a job's sbatch script."""
    kinds = (("afterok", job.after_ok), ("afterany", job.after_any))
    return _template().render(
        job=job,
        site=site,
        waits="; ".join(f"{', '.join(names)} ({_WAITS[kind]})" for kind, names in kinds if names),
        dependency=",".join(":".join((kind, *("ID" for _ in names))) for kind, names in kinds if names),
        directives=list(_directives(job, site, folders)),
        output=str(folders.output),
        work=str(folders.work),
        limit_s=site.time_limits.seconds(job.use),
        warning_s=site.warning_s,
        variables=_variables(site),
        commands=[_command(task, job, site) for task in job.tasks],
    )


@cache
def _template() -> Template:
    try:
        import jinja2
    except ModuleNotFoundError as error:
        raise WorkError("jinja2 is not installed, and scripts are written with it: pip install jinja2") from error
    environment = jinja2.Environment(  # nosec B701
        loader=jinja2.PackageLoader("paradl_bench.slurm.jobs", "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # Shell, not HTML: values are quoted by the filter `sh` where they stand.
        autoescape=False,
    )
    environment.filters["sh"] = shlex.quote
    return environment.get_template("job.sbatch.j2")


def _directives(job: Job, site: Site, folders: Folders) -> Iterable[str]:
    number = "%A_%a" if job.array else "%j"
    yield f"--job-name=paradl-{job.name}"
    partition = site.partition if job.measures else site.analysis_partition or site.partition
    stated = {"account": site.account, "partition": partition, "qos": site.qos, "reservation": site.reservation}
    yield from (f"--{name}={value}" for name, value in stated.items() if value)
    if job.measures and site.constraint:
        yield f"--constraint={site.constraint}"
    yield f"--nodes={job.nodes}"
    yield f"--ntasks-per-node={job.ranks_per_node}"
    yield f"--cpus-per-task={site.cpus_per_rank}"
    if job.gpus:
        kind = f"{site.gpu_type}:" if site.gpu_type else ""
        yield f"--{site.gpu_request}={'gpu:' if site.gpu_request == 'gres' else ''}{kind}{job.gpus}"
    # A layer profile on one GPU leaves the others to whoever needs them: a GPU has its memory to itself.
    if job.measures and site.exclusive and job.gpus in (0, site.gpus_per_node):
        yield "--exclusive"
    yield f"--time={site.time_limits.seconds(job.use) // 60}"
    if job.measures:
        # To the ranks, which keep what they measured; the script goes on and notes it.
        yield f"--signal=TERM@{site.warning_s}"
    yield "--requeue" if site.requeue else "--no-requeue"
    if job.array:
        yield f"--array=0-{len(job.tasks) - 1}{f'%{site.array_limit}' if site.array_limit else ''}"
    yield f"--output={folders.output}/logs/{job.name}-{number}.out"
    yield "--open-mode=append"
    # Told from other calibrations' jobs by it, and by no number that a crash could lose.
    yield f"--comment={folders.output}"
    if job.after_ok or job.after_any:
        yield "--kill-on-invalid-dep=yes"
    yield from site.sbatch_options


def _variables(site: Site) -> dict[str, str]:
    variables = {
        "PARADL_CLUSTER": site.cluster_name,
        # What a node gives to ranks; a step sees no more cores than it asked for.
        "PARADL_HOST_CORES": str(site.ranks_per_node) if site.device == "cpu" else "",
        "GLOO_SOCKET_IFNAME": site.interface,
        "NCCL_SOCKET_IFNAME": site.interface if site.device == "cuda" else "",
    }
    return {name: value for name, value in variables.items() if value} | site.variables


def _command(task: Task, job: Job, site: Site) -> str:
    """A command with its launcher, in lines that a reader can take in."""
    program: list[str] = [shlex.quote(site.python), "-m"]
    nested = task.ranks > 1 and site.launcher == "torchrun"
    if nested:
        program += _torchrun(task)
    program.append(task.module)
    words = [_quoted(word) for word in task.words]
    if task.ranks and task.words[0] in _JOINING:
        words += ["--launcher", "torchrun" if nested else "srun"]
    if task.those_of:
        words.append('"${present[@]}"')
    lines = [*_srun(task, site, nested), *_container(job, site), " ".join(program), " ".join(words)]
    return " \\\n        ".join(lines)


def _srun(task: Task, site: Site, nested: bool) -> list[str]:
    if task.starts_own:
        return []
    on_node = max(1, task.ranks // task.nodes)
    processes = 1 if nested else on_node
    cores = site.cpus_per_rank * (on_node if nested else 1)
    placed = f"--nodes={task.nodes} --ntasks={processes * task.nodes} --ntasks-per-node={processes}"
    # Ranks on a CPU choose their cores themselves, the same way whoever starts them.
    bound = " --cpu-bind=none" if site.device == "cpu" else ""
    lines = [f"srun {placed} --cpus-per-task={cores} --kill-on-bad-exit=1{bound}"]
    if site.srun_options:
        lines.append(shlex.join(site.srun_options))
    return lines


def _torchrun(task: Task) -> list[str]:
    port = f"$(({_FIRST_PORT} + (SLURM_JOB_ID * 31 + {sum(map(ord, task.name))}) % {_PORTS}))"
    return [
        "torch.distributed.run",
        f"--nnodes={task.nodes}",
        f"--nproc-per-node={task.ranks // task.nodes}",
        "--rdzv-backend=c10d",
        f'--rdzv-endpoint="$MASTER_ADDR:{port}"',
        '--rdzv-id="$job"',
        "-m",
    ]


def _container(job: Job, site: Site) -> list[str]:
    container = site.container
    if container is None:
        return []
    mounts = [shlex.quote(mount) for mount in container.mounts]
    if container.runtime == "enroot":
        listed = ",".join(('"$OUTPUT:$OUTPUT,$WORK:$WORK"', *mounts))
        image = f"--container-image={shlex.quote(container.image)} --container-mounts={listed}"
        return [" ".join((image, '--container-workdir="$WORK"', *map(shlex.quote, container.options)))]
    binds = " ".join(f"--bind {mount}" for mount in ('"$OUTPUT"', '"$WORK"', *mounts))
    gpus = " --nv" if job.gpus else ""
    options = "".join(f" {shlex.quote(option)}" for option in container.options)
    return [f'apptainer exec{gpus} {binds} --pwd "$WORK"{options} {shlex.quote(container.image)}']


def _quoted(word: Word) -> str:
    if isinstance(word, Below):
        return f'"$OUTPUT"/{word.path}' if word.path else '"$OUTPUT"'
    return shlex.quote(word)
