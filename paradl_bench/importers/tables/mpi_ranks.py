"""How many ranks a command line starts."""

from __future__ import annotations

import re

_LAUNCHER = re.compile(r"\b(?:mpirun|mpiexec(?:\.hydra)?|mpirun_rsh|srun)\b(.{0,2000})")
_COUNT = re.compile(r"\s(?:-np|-n|--np|--ntasks)[ =](\d{1,7})(?=\s|$)")


def ranks_of_command(line: str) -> int | None:
    """Ranks of a line that holds ``mpirun -np 8`` or ``srun -n 8``; None where it holds no such command."""
    command = _LAUNCHER.search(line)
    if command is None:
        return None
    counts = [int(count) for count in _COUNT.findall(command.group(1)) if int(count) > 0]
    return counts[0] if counts else None
