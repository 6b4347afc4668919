"""What ``paradl-bench collectives --tool`` is asked to measure."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from paradl_bench.core.errors import UserError
from paradl_bench.core.registry import lookup
from paradl_bench.plan.collectives.catalog import operations
from paradl_bench.records.measurement import argument_texts
from paradl_bench.tools.tool import Launcher, SweepTool


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRequest:
    """A sweep by a tool.

    Attributes:
        ranks: of one group. concurrent: how many groups of so many ranks run at once.
        sizes: message bytes as each operation defines them, ascending.
        blocks: how often every program is started, so that drift between starts is seen.
        level: that the ranks span, for tools that don't say where their ranks were.
        timeout_s: of one start of a program. point_s: of the repetitions of one size, for programs of our own.
    """

    tool: SweepTool
    tool_path: Path | None
    launcher: Launcher
    launcher_arguments: tuple[str, ...]
    ranks: int
    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    blocks: int
    level: str
    timeout_s: float
    point_s: float
    concurrent: int = 1

    def __post_init__(self) -> None:
        # One rank that a tool's own process drives only copies, which shows that its programs run.
        if self.ranks < 2 and not self.tool.alone:
            raise UserError(f"--ranks {self.ranks}: a collective needs at least 2 ranks with {self.tool.name}")
        if self.concurrent > 1 and not self.tool.groups:
            raise UserError(
                f"--contexts groups=K: {self.tool.name} can't run groups of ranks at once: {self.tool.no_groups}"
            )
        if self.concurrent > 1 and self.launcher == "own":
            raise UserError(
                f"--contexts groups=K with --tool {self.tool.name}: its groups are made of processes; give --launcher"
                " mpirun or srun"
            )
        for name in self.operations:
            lookup(operations(), name, "operation")

    def arguments(self) -> dict[str, str]:
        """Settings that two runs have to share for one to resume the other."""
        # Directories of before do not know it.
        later = {"concurrent": str(self.concurrent)} if self.concurrent > 1 else {}
        return {
            "tool": self.tool.name,
            "tool_path": str(self.tool_path or ""),
            "launcher": self.launcher,
            "launcher_arguments": " ".join(self.launcher_arguments),
            **argument_texts(self, "ranks", "operations", "sizes", "blocks", "level", "point_s"),
            **later,
        }


def launcher_of_tool(tool: SweepTool, asked: str | None) -> Launcher:
    """Who starts a tool's ranks: nobody where one process can drive all, unless asked; UserError for torchrun."""
    if asked == "torchrun":
        raise UserError(f"--launcher torchrun starts Python programs; {tool.name} takes mpirun or srun")
    if asked == "mpirun" or (asked is None and not tool.alone):
        return "mpirun"
    return "srun" if asked == "srun" else "own"


def level_of_job() -> str:
    """``system`` in a Slurm job of several nodes, else ``node``; tools that print hosts are believed instead."""
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", os.environ.get("SLURM_NNODES", "1"))
    return "node" if nodes in ("", "0", "1") else "system"
