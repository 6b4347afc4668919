"""The site file: what a cluster wants of a job, once for all its calibrations (YAML; docs/cluster.md).

Whatever becomes a line ``#SBATCH --...`` holds no blank, quote or line break, which sbatch would take apart; whatever
becomes a word of the script is quoted for the shell where it is written. ``setup`` alone is shell by intention.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, get_args

import msgspec

from paradl_bench.core.bounds import Count, PositiveCount, PositiveRate, PositiveSeconds, RanksOrUnknown, WholeSeconds
from paradl_bench.core.errors import UserError
from paradl_bench.core.files.documents import places, validation_text
from paradl_bench.core.files.yaml_file import read_yaml
from paradl_bench.core.units import parse_duration

_DIRECTIVE = re.compile(r"[!-~]+")
_FORBIDDEN = frozenset("'\"\\`#")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Launcher = Literal["srun", "torchrun"]
Runtime = Literal["apptainer", "enroot"]
Use = Literal["layers", "sweep", "run", "analysis"]
_MEASURING: tuple[Use, ...] = ("layers", "sweep", "run")
_HANG_S = 300
"""As the commands' own default."""
_HANG_ITERATIONS = 5


class TimeLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time limits of jobs as sites write durations (``30m``, ``1.5h``); each task of an array has its own."""

    layers: str = "1h"
    sweep: str = "1h"
    run: str = "30m"
    analysis: str = "30m"

    def __post_init__(self) -> None:
        for use in get_args(Use):
            self.seconds(use)

    def seconds(self, use: Use) -> int:
        """The limit of a kind of job, in whole minutes, as Slurm counts them."""
        minutes = -(-parse_duration(getattr(self, use), use) // 60)
        return int(minutes) * 60


class Container(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the program runs, if not on the node itself.

    Attributes:
        runtime: ``apptainer`` wraps every command; ``enroot`` is started by srun's pyxis plugin.
        image: file or name of the image.
        mounts: ``/from`` or ``/from:/to``; the calibration's folder and the working folder are mounted in any case.
        options: to apptainer, or further ``--container-...`` of pyxis, as they are.
    """

    runtime: Runtime
    image: str
    mounts: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.image:
            raise ValueError("image is empty: name the container's image")
        for mount in self.mounts:
            if "," in mount or not mount.startswith("/"):
                raise ValueError(f"mount {mount!r} is no absolute path: write /from or /from:/to")


class Rates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the estimate of node-minutes takes for granted, before anything was measured.

    Attributes:
        flops_per_s: that one rank sustains; a core of a CPU, or a GPU. None: a cautious figure of the device.
        bytes_per_s: that a rank sends and receives.
        start_s: until the ranks of a command have met. None: as :mod:`paradl_bench.slurm.starts` finds it.
    """

    flops_per_s: PositiveRate | None = None
    bytes_per_s: PositiveRate = 1e9
    start_s: PositiveSeconds | None = None


class Site(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cluster as its jobs see it; docs/cluster.md explains every key.

    Attributes:
        device: ``cpu`` or ``cuda``. backend: gloo or nccl; by default that of the device.
        gpus_per_node: of which each rank takes one. ranks_per_node: given on a CPU; on GPUs one a GPU.
        cluster: name that stands for its nodes, which are taken as alike; empty for the partition's.
        analysis_partition: for the jobs that need neither GPU nor quiet; empty for ``partition``.
        warning_s: seconds before the time limit at which ranks are told to keep what they have.
        hang_s: seconds that a rank may get nowhere; 0 for five minutes or five iterations, or half of a shorter limit.
    """

    device: Literal["cpu", "cuda"]
    ranks_per_node: RanksOrUnknown = 0
    gpus_per_node: RanksOrUnknown = 0
    gpu_type: str = ""
    gpu_request: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    cpus_per_rank: PositiveCount = 1
    backend: Literal["gloo", "nccl"] | None = None
    cluster: str = ""
    account: str = ""
    partition: str = ""
    analysis_partition: str = ""
    qos: str = ""
    reservation: str = ""
    constraint: str = ""
    exclusive: bool = True
    requeue: bool = True
    array_limit: Count = 0
    sbatch_options: tuple[str, ...] = ()
    srun_options: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    variables: dict[str, str] = {}
    interface: str = ""
    python: str = "python"
    launcher: Launcher = "srun"
    container: Container | None = None
    nccl_tests: str = ""
    time_limits: TimeLimits = msgspec.field(default_factory=TimeLimits)
    warning_s: WholeSeconds = 120
    hang_s: WholeSeconds = 0
    estimate: Rates = msgspec.field(default_factory=Rates)

    def __post_init__(self) -> None:
        self._check_device()
        for name in ("account", "partition", "analysis_partition", "qos", "reservation", "constraint", "gpu_type"):
            _check_directive(name, getattr(self, name))
        for option in (*self.sbatch_options, *self.srun_options):
            if not option.startswith("-"):
                raise ValueError(f"option {option!r} does not begin with -: write --option=value")
        for option in self.sbatch_options:
            _check_directive("sbatch_options", option)
        for name in self.variables:
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"variables: {name!r} is no name of a variable")
        if not self.python:
            raise ValueError("python is empty: name the interpreter that has paradl, as python or a path")
        if self.warning_s < 1 or self.warning_s >= min(map(self.time_limits.seconds, get_args(Use))):
            raise ValueError(f"warning_s: {self.warning_s} s before the limit is not inside the shortest time limit")
        shortest_s = min(map(self.limit_s, _MEASURING))
        if self.hang_s >= shortest_s:
            raise ValueError(
                f"hang_s: {self.hang_s} s have to pass before the warning, which comes after {shortest_s} s"
            )

    def _check_device(self) -> None:
        if self.device == "cuda" and self.gpus_per_node < 1:
            raise ValueError("gpus_per_node is missing: device cuda takes at least 1")
        if self.device == "cpu" and self.gpus_per_node:
            raise ValueError("gpus_per_node is for device cuda; on a CPU give ranks_per_node")
        if self.device == "cpu" and self.ranks_per_node < 1:
            raise ValueError("ranks_per_node is missing: say how many ranks a node takes, at most one a core")
        if self.device == "cuda" and self.ranks_per_node not in (0, self.gpus_per_node):
            raise ValueError(f"ranks_per_node is {self.ranks_per_node}: a rank takes a GPU, of {self.gpus_per_node}")
        if self.backend == "nccl" and self.device == "cpu":
            raise ValueError("backend nccl moves data between GPUs: give gloo, or device cuda")
        if self.nccl_tests and self.device == "cpu":
            raise ValueError("nccl_tests is for device cuda")
        if self.nccl_tests and self.container:
            raise ValueError("nccl_tests: its programs are started by srun from inside of the job, not in a container")

    def limit_s(self, use: Use) -> int:
        """Seconds of a job until its ranks are warned of the time limit."""
        return self.time_limits.seconds(use) - self.warning_s

    def hang_timeout_s(self, use: Use, iteration_s: float | None) -> int:
        """Seconds that a rank of a job may get nowhere: a hang has to be told before the time limit ends it.

        Args:
            iteration_s: as estimated; several have to fit in, since that is rough.
        """
        wanted_s = max(_HANG_S, _HANG_ITERATIONS * (iteration_s or 0.0))
        return self.hang_s or max(1, int(min(wanted_s, self.limit_s(use) // 2)))

    @property
    def on_node(self) -> int:
        """Ranks of a full node."""
        return self.gpus_per_node if self.device == "cuda" else self.ranks_per_node

    @property
    def library(self) -> str:
        """The backend that ranks use."""
        return self.backend or ("nccl" if self.device == "cuda" else "gloo")

    @property
    def of_measurements(self) -> dict[str, str]:
        """What measurements of one calibration have to share, by the name of its key."""
        return {
            "device": self.device,
            "backend": self.library,
            "ranks of a node": str(self.on_node),
            "cluster": self.cluster_name,
        }

    @property
    def cluster_name(self) -> str:
        """What stands for the nodes in what is measured."""
        return self.cluster or self.partition


def read_site(path: Path) -> Site:
    """A site file.

    Raises:
        UserError: unreadable, no YAML, or a wrong key, named by its path.
    """
    raw = read_yaml(path, "site file")
    try:
        site = msgspec.convert(raw, Site, strict=False)
    except (msgspec.ValidationError, ValueError, RecursionError) as error:
        raise UserError(f"site file {path}: {validation_text(error, Site)}") from None
    # No line of a script may hold control characters.
    for where, item in places(msgspec.to_builtins(site)):
        if isinstance(item, str) and not item.isprintable():
            raise UserError(f"site file {path}: {item!r} holds a line break or control character - at `{where}`")
    return site


def _check_directive(name: str, text: str) -> None:
    if text and (not _DIRECTIVE.fullmatch(text) or _FORBIDDEN & set(text)):
        raise ValueError(f"{name}: {text!r} has a blank, quote or backslash, which sbatch would take apart")
