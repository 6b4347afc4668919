"""Plots in characters, and commands that can be run as they are suggested."""

from __future__ import annotations

import shlex
from pathlib import Path

import click
import msgspec
from profile_factory import make_profile

from calibrate.explanation import weaknesses
from calibrate.profile import SCHEMA_VERSION, Profile, read_profile
from calibrate.terminal_plot import plots
from paradl_bench.cli import group
from paradl_bench.spec.units import parse_size, parse_size_sweep, spell_size

CASE = read_profile(Path(__file__).parents[1] / "data" / f"profile-v{SCHEMA_VERSION}.json")


def check(command: str) -> None:
    """Parse as the program would, without running anything."""
    words = shlex.split(command)
    words = words[words.index("paradl-bench") + 1 :]
    context = click.Context(group)
    found = group.get_command(context, words[0])
    assert found is not None
    options = found.make_context(words[0], words[1:], parent=context).params
    if options.get("sizes"):
        parse_size_sweep(options["sizes"])


def test_suggested_commands_are_taken_by_the_program() -> None:
    sparse: Profile = msgspec.structs.replace(make_profile(), interference=())
    commands = [weakness.command for profile in (CASE, sparse) for weakness in weaknesses(profile)]
    assert len(commands) > 10
    for command in commands:
        if command.startswith(("paradl-bench", "srun")):
            check(command)
            assert " -o " in command
            assert "," not in command.split(" -o ")[1]


def test_sizes_are_spelt_as_they_are_read() -> None:
    for size, text in ((2**26, "64M"), (3 * 2**30, "3G"), (16, "16"), (1536, "1536"), (3072, "3K")):
        assert spell_size(size) == text
        assert parse_size(text) == size


def test_plots_fit_into_80_columns_and_show_every_rank_count() -> None:
    texts = list(plots(CASE))
    assert texts
    for text in texts:
        assert max(map(len, text.splitlines())) <= 80
        assert all(label in text for label in ("90% interval", "fit", "ranks", "+0%", "|"))
