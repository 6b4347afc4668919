"""``--format`` takes the same words in all commands; what prints a summary prints it as CSV and Parquet too."""

from __future__ import annotations

import io
from pathlib import Path

import click
import pandas
import pytest
from click.testing import CliRunner
from synthetic_measurements import CollectivesSpec, write_collectives

from calibrate.cli import group as calibrate
from paradl_bench.cli import group as bench
from paradl_bench.core.terminal.forms import summary_format
from paradl_bench.measure.collectives.summary import print_collectives, summarise_collectives
from predict.cli import group as predict

PROGRAMS = {"paradl-bench": bench, "calibrate": calibrate, "predict": predict}
FORMS = ["table", "json", "csv", "parquet", "markdown"]


def commands_with_a_format() -> dict[str, click.Option]:
    found = {}
    for program, group in PROGRAMS.items():
        names = group.list_commands(click.Context(group))
        for command in (group, *(group.get_command(click.Context(group), name) for name in names)):
            assert command is not None
            for option in command.params:
                if isinstance(option, click.Option) and "--format" in option.opts:
                    found[f"{program} {command.name}"] = option
    return found


def test_every_format_option_takes_the_same_words() -> None:
    options = commands_with_a_format()
    assert {"paradl-bench models", "paradl-bench doctor", "predict diagnose", "predict buckets"} <= options.keys()
    taken = {name: option.type.choices for name, option in options.items() if isinstance(option.type, click.Choice)}
    assert {name: list(words) for name, words in taken.items()} == dict.fromkeys(options, FORMS)


@pytest.mark.parametrize(
    ("words", "columns"),
    [
        (("models",), ["model"]),
        (("doctor",), ["name", "found", "without", "text"]),
        (("describe", "alexnet"), ["name", "kind", "attributes", "inputs"]),
    ],
)
def test_summaries_are_printed_as_frames(words: tuple[str, ...], columns: list[str]) -> None:
    done = CliRunner().invoke(bench, [*words, "--format", "csv"])
    found = pandas.read_csv(io.StringIO(done.stdout))
    assert list(found.columns)[: len(columns)] == columns
    packed = CliRunner().invoke(bench, [*words, "--format", "parquet"])
    assert list(pandas.read_parquet(io.BytesIO(packed.stdout_bytes)).columns) == list(found.columns)
    assert CliRunner().invoke(bench, [*words, "--csv"]).stdout == done.stdout
    assert "| --- |" in CliRunner().invoke(bench, [*words, "--format", "markdown"]).stdout or words == ("models",)


def test_a_description_is_written_as_the_name_says(tmp_path: Path) -> None:
    target = tmp_path / "layers.csv"
    done = CliRunner().invoke(bench, ["describe", "alexnet", "-o", str(target)])
    assert "alexnet, input" in done.stdout, "a table is shown beside the file"
    assert "conv" in set(pandas.read_csv(target).kind)


def test_an_import_and_a_fit_print_frames(tmp_path: Path) -> None:
    log = Path(__file__).parents[4] / "data" / "imports" / "nccl-tests-2.4.log"
    done = CliRunner().invoke(bench, ["import", "nccl-tests", str(log), "-o", str(tmp_path / "in"), "--csv"])
    (imported,) = pandas.read_csv(io.StringIO(done.stdout)).itertuples()
    assert (imported.path, imported.format, imported.rows) == (str(log), "nccl-tests", 8)
    write_collectives(tmp_path / "swept", CollectivesSpec())
    target = tmp_path / "profile.json"
    fitted = CliRunner().invoke(calibrate, ["fit", str(tmp_path / "swept"), "-o", str(target), "--format", "csv"])
    shown = CliRunner().invoke(calibrate, ["show", str(target), "--format", "csv"])
    assert fitted.stdout == shown.stdout
    assert "covariance_01" in fitted.stdout.splitlines()[0]


def test_rows_of_a_summary_are_printed_where_asked_for(tmp_path: Path) -> None:
    @click.command()
    @summary_format("All hold rows.")
    def summary(as_json: bool) -> None:
        print_collectives(tmp_path / "swept", as_json=as_json)

    write_collectives(tmp_path / "swept", CollectivesSpec())
    frame = pandas.read_csv(io.StringIO(CliRunner().invoke(summary, ["--format", "csv"]).stdout))
    rows = summarise_collectives(tmp_path / "swept").collectives
    assert frame.median_s.to_list() == pytest.approx([row.median_s for row in rows])
    assert "algbw" in CliRunner().invoke(summary, ["--format", "markdown"]).stdout
