"""What a machine has for measuring, what is missing, and what each missing thing costs."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata, util

import msgspec

from paradl_bench.core.units import format_bytes
from paradl_bench.measure.machine.node_findings import node_findings
from paradl_bench.ranks.environment import ALLOCATOR_VARIABLES, cpu_name, host_memory_bytes, versions
from paradl_bench.tools.catalog import tools


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked for, as in :class:`NodeFinding`, and what its absence costs."""

    name: str
    found: str | None
    without: str = ""
    text: str = ""


_TOOLS = {
    "mpirun": ("sweeps through MPI", "--version"),
    "sbatch": ("jobs through Slurm", "--version"),
    "srun": ("ranks started by Slurm", "--version"),
    "torchrun": ("ranks started by torchrun", ""),
    "nvidia-smi": ("driver version and topology in the environment", ""),
    "git": ("the commit in the environment of a measurement", "--version"),
}


def examine(*, cores: int | None = None) -> list[Finding]:
    """Look at devices, backends, tools and versions of this machine; measures nothing.

    Args:
        cores: that are said to be allowed; None for those that this process is allowed.
    """
    cores = cores or len(os.sched_getaffinity(0))
    return [
        Finding(name="CPU", found=f"{cpu_name()}, {cores} cores allowed, {format_bytes(host_memory_bytes())}"),
        Finding(name="kernel", found=f"{platform.system()} {platform.release()}"),
        *(Finding(name=finding.name, found=finding.found, text=finding.text) for finding in node_findings()),
        *_packages(),
        *_backends(),
        Finding(
            name="mpi4py",
            found=metadata.version("mpi4py") if util.find_spec("mpi4py") else None,
            without="sweeps over MPI without OSU or IMB: pip install 'paradl[mpi]'",
        ),
        *_sweep_tools(),
        *(_tool(name, cost, flag) for name, (cost, flag) in _TOOLS.items()),
        Finding(
            name="allocator",
            found="set for every rank that paradl-bench starts: " + ", ".join(ALLOCATOR_VARIABLES),
        ),
    ]


def _packages() -> list[Finding]:
    installed = versions()
    for package in ("transformers", "Pillow", "matplotlib", "scipy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package)
    costs = {
        "paradl": "versions in measurements: run it installed (pip install -e .)",
        "python": "",
        "torch": "nothing can be measured: pip install 'paradl[bench]' (calibrate and predict work without)",
        "torchvision": "only package.module:factory models: pip install 'paradl[bench]'",
        "transformers": "language models: pip install 'paradl[transformers]'",
        "scipy": "calibrate: pip install paradl",
        "matplotlib": "drawings of calibrate show -o: pip install 'paradl[plots]'",
        "Pillow": "paradl-bench io of images: pip install 'paradl[bench]'",
    }
    return [Finding(name=name, found=installed.get(name), without=cost) for name, cost in costs.items()]


def _backends() -> list[Finding]:
    if not util.find_spec("torch"):
        return []
    import torch
    import torch.distributed as dist

    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    names = ", ".join(f"{gpu.name} ({format_bytes(gpu.total_memory)})" for gpu in gpus)
    software = versions()
    cuda = ", ".join(f"{name} {software[name]}" for name in ("driver", "cuda", "cudnn") if name in software)
    unseen = f"torch is built for {torch.version.cuda}, and sees no GPU" if torch.version.cuda else None
    built = "built into torch"
    nccl = f"{software.get('nccl', 'version not known')}, {built}" if dist.is_nccl_available() and gpus else None
    rows = (
        ("CUDA devices", names or None, "GPU profiles and NCCL sweeps"),
        ("CUDA", cuda or unseen, "measurements on GPUs: this torch is built for CPUs"),
        ("gloo", built if dist.is_gloo_available() else None, "several ranks on CPUs"),
        ("NCCL", nccl, "collectives between GPUs"),
        ("MPI in torch", built if dist.is_mpi_available() else None, "torch.distributed over MPI"),
    )
    return [Finding(name=name, found=value, without=cost) for name, value, cost in rows]


def _sweep_tools() -> list[Finding]:
    """Benchmarks of other projects that ``collectives --tool`` runs: which of their programs are on PATH."""
    findings = []
    for tool in tools().values():
        if tool.read is not None:  # a program of our own
            continue
        paths = {op: next(filter(None, map(_which, names)), None) for op, names in tool.programs.items()}
        present = sorted(op for op, path in paths.items() if path)
        first = next(filter(None, paths.values()), None)
        lacking = "" if len(present) == len(paths) else f"; not of {', '.join(sorted(paths.keys() - set(present)))}"
        findings.append(
            Finding(
                name=tool.name,
                found=f"{first} and others, of {', '.join(present)}{lacking}" if first else None,
                without=f"sweeps by --tool {tool.name}, unless --tool-path says where it is",
            )
        )
    return findings


def _which(name: str) -> str | None:
    # What is installed with this Python counts, whether or not its folder is on PATH.
    return shutil.which(name, path=os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]))


def _tool(name: str, cost: str, flag: str) -> Finding:
    path = _which(name)
    if path is None or not flag:
        return Finding(name=name, found=path, without=cost)
    try:
        result = subprocess.run([path, flag], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return Finding(name=name, found=f"{path} (does not run: {error})", without=cost)
    lines = result.stdout.strip().splitlines()
    return Finding(name=name, found=f"{path} ({lines[0].strip()})" if lines else path, without=cost)
