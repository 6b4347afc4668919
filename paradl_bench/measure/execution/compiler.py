"""The compiler behind ``torch.compile``, looked for before any rank is started; needs no torch."""

from __future__ import annotations

import importlib.util
import os
import shutil
import stat
import subprocess
from pathlib import Path

from paradl_bench.core.errors import UserError
from paradl_bench.records.kernel_settings import KernelSettings

# As torch looks for them: kernels of a CPU are C++, a GPU's are Triton's, which a C compiler binds to Python.
_CPU, _CUDA = ("CXX", "g++"), ("CC", "gcc", "clang", "cc")
_SECONDS = 30


def compiler_settings(settings: KernelSettings, device: str) -> dict[str, str]:
    """What an environment says of the compiler: nothing where nothing is compiled."""
    if not settings.compile:
        return {}
    compiler = _find(_CPU if device == "cpu" else _CUDA) or "none"
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=_SECONDS, check=False)
    return {"compiler": (said.stdout.splitlines() or [compiler])[0].strip()}


def refuse_without_compiler(settings: KernelSettings, device: str) -> None:
    """Refuse to compile where there is nothing to compile with.

    Raises:
        UserError: says what to install.
    """
    if not settings.compile:
        return
    if device != "cpu" and importlib.util.find_spec("triton") is None:
        raise UserError("--compile: torch makes a GPU's kernels with triton, which is not installed here")
    variable, *names = _CPU if device == "cpu" else _CUDA
    if _find((variable, *names)) is None:
        given = os.environ.get(variable)
        wanted = f"{variable}={given}, which is not there" if given else f"{names[0]}, and none is on the PATH"
        raise UserError(f"--compile: torch makes kernels with {wanted}: install one, or name another in {variable}")


def refuse_open_cache(folder: Path) -> None:
    """Refuse a folder of compiled code that is another user's, or that all can write; made where there is none.

    torch's own has a name that anyone can guess, in a directory where anyone can make it.

    Raises:
        UserError: says what to do.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise UserError(f"cannot keep compiled code in {folder}: {error.strerror or error}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & stat.S_IWOTH:
        raise UserError(
            f"torch keeps compiled code in {folder}, which other users can write: set TORCHINDUCTOR_CACHE_DIR to"
            " a folder of yours"
        )


def _find(choices: tuple[str, ...]) -> str | None:
    """The compiler that a variable names, else the first that is there."""
    variable, *names = choices
    given = os.environ.get(variable)
    return next((place for name in ([given] if given else names) if (place := shutil.which(name))), None)
