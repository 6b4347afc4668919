"""Plots in characters, and commands that can be run as they are suggested."""

from __future__ import annotations

import shlex
from io import StringIO
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner
from profile_factory import make_profile, ring_fit
from rich.console import Console

from calibrate.cli import group as calibrate
from calibrate.profile.collectives.communication import CommunicationPoint
from calibrate.profile.collectives.communication_time import communication_seconds
from calibrate.profile.profile import SCHEMA_VERSION, Profile, read_profile
from calibrate.report.explanation import model_sums, weaknesses
from calibrate.report.overview import _call_cell
from calibrate.report.show import print_models
from calibrate.report.terminal_plot import plots
from paradl_bench.cli import group
from paradl_bench.core.units import format_seconds, parse_size, parse_size_sweep, spell_size
from paradl_bench.plan.collectives.catalog import operations
from paradl_bench.records.cluster import Cluster, Level

PROFILE = Path(__file__).parents[3] / "data" / f"profile-v{SCHEMA_VERSION}.json"
CASE = read_profile(PROFILE)

COMMITTED = Path(__file__).parents[4] / "results" / "cpu-2core" / "2026-11-21-ffbe79c" / "accuracy" / "profile.json"


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
    sparse: Profile = msgspec.structs.replace(make_profile(), contexts=())
    commands = [weakness.command for profile in (CASE, sparse) for weakness in weaknesses(profile)]
    assert len(commands) > 10
    for command in commands:
        if command.startswith(("paradl-bench", "srun")):
            check(command)
            assert " -o " in command
            assert "," not in command.split(" -o ")[1]


@pytest.mark.parametrize(("given", "further"), [((), ("--all",)), (("--all",), ("--format", "json"))])
def test_what_is_left_out_has_its_command(given: tuple[str, ...], further: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "my profile.json"
    path.write_bytes(PROFILE.read_bytes())
    said = CliRunner().invoke(calibrate, ["show", str(path), *given]).output
    words = shlex.split(" ".join(said.split()).rpartition("calibrate ")[2])
    assert words == ["show", str(path), *further]
    assert CliRunner().invoke(calibrate, words).exit_code == 0


def test_suggested_commands_write_to_a_directory_each() -> None:
    """A directory holds one sweep: another one's command is refused there."""
    first, *_ = CASE.communication
    regimes = [
        msgspec.structs.replace(first, level=level, bytes_range=size, held_out_relative_error=0.2)
        for level in ("node", "system")
        for size in ((64, 1024), (1024, 65536))
    ]
    pieces: Profile = msgspec.structs.replace(CASE, communication=(*CASE.communication[1:], *regimes))
    for profile in (CASE, pieces):
        commands = dict.fromkeys(weakness.command for weakness in weaknesses(profile))
        places = [command.split(" -o ")[1] for command in commands if " -o " in command]
        assert len(set(places)) == len(places)


def test_differences_between_blocks_that_nobody_knows_are_no_weakness() -> None:
    def told(block_sd: float) -> list[str]:
        fits = [msgspec.structs.replace(fit, block_relative_sd=block_sd) for fit in CASE.communication]
        profile: Profile = msgspec.structs.replace(CASE, communication=tuple(fits))
        return [weakness.text for weakness in weaknesses(profile) if "blocks of calls" in weakness.text]

    assert told(0.01)
    assert not told(0.0)


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


@pytest.mark.parametrize("width", [80, 100])
def test_a_profile_is_shown_on_one_screen(width: int) -> None:
    shown = CliRunner().invoke(calibrate, ["show", str(COMMITTED)], env={"COLUMNS": str(width)}).output
    lines = [len(line) // width + 1 for line in shown.splitlines()]
    assert sum(lines) <= 50
    for text in ("mobilenet_v2", "206/206", "1.00 KiB", "64.0 MiB", "GB/s", "of one step of the algorithm", "--all"):
        assert text in shown


def test_the_screen_has_calls_as_they_are_predicted() -> None:
    profile = read_profile(COMMITTED)
    fits = [fit for fit in profile.communication if fit.operation == "all_reduce"]
    seconds = [float(communication_seconds(operations()["all_reduce"], fits, 2, size)) for size in (1024, 2**26)]
    shown = CliRunner().invoke(calibrate, ["show", str(COMMITTED)]).output
    (row,) = (line for line in shown.splitlines() if line.startswith(" all_reduce"))
    assert format_seconds(seconds[0]) in row
    # Of two ranks, bus bandwidth is bytes over seconds.
    assert f"{2**26 / seconds[1] / 1e9:.3g} GB/s" in row


def test_a_logs_size_is_found_again_on_the_screen() -> None:
    """nccl-tests' size of an all-gather is what all ranks contribute together."""
    point = CommunicationPoint(ranks=4, message_bytes=256, measured_s=1e-5, fitted_s=1.2e-5, held_out_s=1.2e-5)
    fit = ring_fit("all_gather", alpha_s=4e-6, beta_s_per_byte=0.0, ranks_range=(4, 4), measured=(point,))
    assert _call_cell([fit], 4, 1024) == "12.0 us (+20%)"
    assert _call_cell([msgspec.structs.replace(fit, bytes_range=(512, 1024))], 4, 1024) == "12.0 us (2.00 KiB)"
    rate = 2**26 * 3 / 4 / 12e-6
    assert _call_cell([fit], 4, 2**26, as_rate=True) == f"{rate / 1e9:.3g} GB/s"


def test_calls_over_several_nodes_are_swept_by_srun() -> None:
    """With compute too: its sweep is of as many ranks as were measured."""
    levels = (Level(name="node", ranks=4), Level(name="system", ranks=8))
    fits = (ring_fit(level="system", ranks_range=(8, 8)),)
    profile = make_profile(communication=fits, contexts=(), cluster=Cluster(name="two nodes", levels=levels))
    (command,) = (weakness.command for weakness in weaknesses(profile) if "with-compute" in weakness.command)
    assert command.startswith("srun --ntasks 8 --ntasks-per-node 4 paradl-bench collectives --launcher srun ")


def test_all_tables_are_there_for_those_who_ask() -> None:
    shown = CliRunner().invoke(calibrate, ["show", str(COMMITTED), "--all"], env={"COLUMNS": "80"}).output
    for text in ("layers-resnet18-1", "alpha a step", "132 us ± 2.35 us", "with-compute", "4.02 GB/s ± 14.1%"):
        assert text in shown
    tables = [line for line in shown.splitlines() if line.startswith(" ")]
    assert max(map(len, tables)) <= 80


def test_times_of_unlike_kernels_are_listed_and_remeasured_separately() -> None:
    plain = make_profile()
    others = [
        msgspec.structs.replace(time, dtype="bf16", kernel_settings="channels_last", optimizer="adam")
        for time in plain.model_times
    ]
    both = msgspec.structs.replace(plain, model_times=(*plain.model_times, *others))
    found = [sums.computed_in for sums in model_sums(both)]
    assert found == ["fp32"] * len(plain.model_times) + ["bf16 channels last"] * len(others)
    again = [weakness for weakness in weaknesses(both) if "bf16 channels last" in weakness.text]
    assert again
    for weakness in again:
        assert " --dtype bf16 --channels-last --optimizer adam " in weakness.command
        check(weakness.command)
    places = [weakness.command.split(" -o ")[1] for weakness in weaknesses(both) if "blocks of iter" in weakness.text]
    assert len(set(places)) == len(places) == len(found)
    out = StringIO()
    print_models(model_sums(both), Console(file=out, width=200))
    assert "bf16 channels last" in out.getvalue()
