"""Mistakes on the command line, and files given in the place of others: each says what would be right."""

from __future__ import annotations

import json
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner
from profile_factory import make_network, make_profile
from synthetic_measurements import write_layers

from calibrate.cli import group as calibrate
from calibrate.profile.profile import encode_profile, read_profile, write_profile
from paradl_bench.cli import group as bench
from paradl_bench.core.errors import UserError
from paradl_bench.core.files.documents import validation_text
from paradl_bench.core.files.storage import encode_pretty
from paradl_bench.core.terminal.usage import usage_text
from paradl_bench.network.graph import ModelGraph, read_network
from paradl_bench.records.cluster import ClusterFile
from paradl_bench.records.measurement import read_manifest
from predict.cli import group as predict
from predict.costs.files import read_cluster

NETWORK = make_network()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one file of each kind."""
    write_profile(tmp_path / "profile.json", make_profile(NETWORK))
    (tmp_path / "network.json").write_bytes(encode_pretty(NETWORK))
    (tmp_path / "trace.json").write_text('{"traceEvents": []}')
    (tmp_path / "predictions.json").write_text('[{"strategy": "d2", "iteration_s": 1.0}]')
    (tmp_path / "cluster.json").write_text('{"name": "one", "levels": [{"name": "node", "ranks": 4}]}')
    write_layers(tmp_path / "layers")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(group: click.Group, *arguments: str) -> str:
    """The one line that a command ends with."""
    result = CliRunner().invoke(group, arguments, standalone_mode=False)
    assert result.exception is not None, result.output
    if isinstance(result.exception, click.ClickException):
        return usage_text(result.exception)
    assert isinstance(result.exception, UserError), repr(result.exception)
    assert "\n" not in str(result.exception)
    return str(result.exception)


AS_ASKED = ("--model", "chain", "--strategy", "d2", "--batch", "8")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("network.json", "network.json is no profile, but a network of paradl-bench describe: give it by --network"),
        ("trace.json", "trace.json is no profile, but a trace: paradl-bench import kineto FILE"),
        ("predictions.json", "predictions.json is no profile, but predictions, which no command reads"),
        ("cluster.json", "cluster.json is no profile, but a cluster file: give it by --cluster"),
        ("layers/manifest.json", "is no profile, but the manifest of a measurement: give its directory to calibrate"),
        ("layers", "layers is no profile, but a measurement: make a profile of it by calibrate fit layers -o PROFILE"),
        (".", "cannot read profile .: it is a folder"),
    ],
)
def test_what_is_given_as_a_profile_is_named(place: Path, name: str, what: str) -> None:
    assert what in said(predict, "--from-profile", name, *AS_ASKED)
    assert what in said(calibrate, "show", name)


@pytest.mark.parametrize(
    ("option", "name", "what"),
    [
        ("--network", "profile.json", "network profile.json: it is a profile: give it by --from-profile"),
        ("--network", "trace.json", "network trace.json: it is a trace"),
        ("--cluster", "network.json", "cluster network.json: it is a network"),
        ("--cluster", "trace.json", "cluster trace.json: it is a trace"),
    ],
)
def test_what_is_given_as_a_network_or_cluster_is_named(place: Path, option: str, name: str, what: str) -> None:
    assert what in said(predict, "--from-profile", "profile.json", *AS_ASKED, option, name)


def test_a_file_is_not_reported_as_a_missing_directory(place: Path) -> None:
    assert said(calibrate, "fit", "profile.json", "-o", "x.json").startswith(
        "profile.json is no directory: give the one"
    )


@pytest.mark.parametrize(
    ("text", "of", "meant"),
    [
        ('{"name": "a", "levels": [{"name": "n", "ranks": 2, "alpha": 1}]}', ClusterFile, "did you mean alpha_s?"),
        ('{"name": "a", "memory_bytes": 1, "levels": []}', ClusterFile, "did you mean memory_bytes_per_rank?"),
        ('{"name": "a", "xyz": 1, "levels": []}', ClusterFile, "`xyz`: choices are name, levels,"),
        ('{"name": "a", "layers": [{"name": "b", "knid": "conv"}]}', ModelGraph, "did you mean kind?"),
    ],
)
def test_the_field_that_was_meant_is_named(text: str, of: type, meant: str) -> None:
    with pytest.raises(msgspec.ValidationError) as error:
        msgspec.json.decode(text, type=of)
    assert meant in validation_text(error.value, of)


def test_a_profile_is_read_from_a_path_in_words(place: Path) -> None:
    assert encode_profile(read_profile("profile.json")) == encode_profile(read_profile(place / "profile.json"))
    write_profile("again.json", read_profile("profile.json"))
    assert read_network("network.json") == NETWORK
    assert read_cluster("cluster.json").name == "one"
    assert read_manifest("layers").kind == "layers"
    assert json.loads((place / "again.json").read_text())["schema_version"]


IN = ("--from-profile", "profile.json", "--model", "chain")


@pytest.mark.parametrize(
    ("group", "arguments", "right"),
    [
        (
            predict,
            (*IN, "--strategy", "data", "--ranks", "2-64", "--batch", "64"),
            "write counts as 2,4,8, or a range as",
        ),
        (
            predict,
            (*IN, "--strategy", "data", "--ranks", "2:64", "--batch", "64"),
            "2:64:x2 (times 2) or 2:64:2 (plus 2)",
        ),
        (predict, (*IN, "--strategy", "d0", "--batch", "64"), "have to be at least 1, not 0"),
        (predict, (*IN, "--strategy", "s2x0", "--batch", "64"), "have to be at least 1, not 2x0"),
        (
            predict,
            (*IN, "--strategy", "d2"),
            "Missing option '--batch': write --batch N[,N...] (Samples in the global mini-batch)",
        ),
        (
            predict,
            (*IN, "--strategy", "d2", "--batch", "8", "--bucket-cap-mb", "x"),
            "'x' is no number: write --bucket-cap",
        ),
        (predict, ("search", *IN, "--ranks", "2", "--batch", "8", "--memory", "16"), "16 bytes; give a unit, as 16GiB"),
        (
            predict,
            ("what-if", *IN, "--strategy", "d2", "--batch", "8", "--vary", "bandwidth=1-2"),
            "a range as 0.1:10:log",
        ),
        (
            predict,
            (*IN, "--strategy", "d2", "--batch", "8", "--memory", "16GiB"),
            "No such option '--memory' here; it belongs to group diagnose, group explore, group report, group search",
        ),
        (predict, ("profiles", "--ranks", "2"), "'--ranks' here; it belongs to group, group buckets, "),
        (
            predict,
            ("report", *IN, "--ranks", "2", "--batch", "8", "-o", "r.pdf"),
            "r.pdf: the page is HTML; give a name",
        ),
        (predict, ("own.json",), "No such command 'own.json'. Commands are buckets, "),
        (bench, ("colectives",), "No such command 'colectives'. Did you mean 'collectives'?"),
        (bench, ("collectives", "--ranks", "2", "--sizes", "1K-4K", "-o", "c"), "write first:last:factor, as 1K:64M:2"),
        (bench, ("layers", "a", "--batch", "1", "--input-shape", "3,8,8", "-o", "l"), "channels first: 3x224x224"),
        (bench, ("layers", "resnet18", "--batch", "1"), "Missing option '-o' / '--output': write --output DIR"),
        (bench, ("describe", "layers"), "model 'layers' is a folder: give the config.json in it"),
        (
            bench,
            ("train", "resnet18", "--strategy", "data", "--batch", "4", "-o", "t"),
            "data is a kind, without its degree; write d4",
        ),
        (bench, ("describe", "./mine.py"), "write a model of your own as MODULE:FACTORY, as mine:build_model"),
        (bench, ("describe", "paradl_bench:x"), "paradl_bench defines no function or class that could build a model"),
    ],
)
def test_a_mistake_is_answered_by_what_would_be_right(
    place: Path, group: click.Group, arguments: tuple[str, ...], right: str
) -> None:
    assert right in said(group, *arguments)
