"""``paradl-bench``: one command a file under :mod:`paradl_bench.commands`, loaded when it is called."""

from __future__ import annotations

import importlib
import os
import pkgutil

import click

from paradl_bench.core.terminal.command_line import run_command
from paradl_bench.core.terminal.help import GroupedGroup


class _Commands(GroupedGroup):
    """A group whose commands are the modules of ``paradl_bench.commands``; only the one called is imported."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        path = importlib.import_module("paradl_bench.commands").__path__
        return sorted(info.name.replace("_", "-") for info in pkgutil.iter_modules(path))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        module = importlib.import_module(f"paradl_bench.commands.{cmd_name.replace('-', '_')}")
        command = module.COMMAND
        return command if isinstance(command, click.Command) else None


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="paradl", prog_name="paradl-bench")
def group() -> None:
    """Measure layer times, collectives and real training runs. Add --debug to any command for tracebacks."""
    if "PARADL_LAUNCHER_PID" in os.environ:
        # A rank: from its first moment on, since a launcher that is killed while ranks load torch can't end them.
        from paradl_bench.ranks.rank_place import die_with_launcher

        die_with_launcher()


def main() -> None:
    """Entry point of ``paradl-bench``."""
    run_command(group, "paradl-bench")
