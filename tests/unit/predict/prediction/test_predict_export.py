"""``predict --export`` and ``--strategy @FILE``: a file for a program predicts what it was written from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from predict_caller import Caller
from profile_factory import free_copies, make_profile, ring_fit
from search_cases import OPERATIONS

from calibrate.profile.profile import write_profile

# Of the profile alone: a file sets the rest.
COMPARED = ("strategy", "ranks", "batch", "options", "bucket_cap_bytes", "iteration_s", "memory_bytes", "dtype")


@pytest.fixture
def predict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Caller:
    monkeypatch.chdir(tmp_path)
    caller = Caller(tmp_path, monkeypatch, capfd)
    fits = (ring_fit(), *(ring_fit(operation) for operation in OPERATIONS))
    write_profile(caller.profile, make_profile(communication=fits, copies=free_copies()))
    return caller


@pytest.mark.parametrize(
    ("program", "file", "options"),
    [
        ("megatron", "megatron.args", ("--strategy", "d2p2", "--schedule", "1f1b", "--micro-batches", "4")),
        ("megatron", "megatron.args", ("--strategy", "d4", "--accumulate", "2", "--bucket-cap-mb", "2")),
        ("torchtitan", "run.args", ("--strategy", "p2d2", "--micro-batches", "4", "--bucket-cap-mb", "100")),
        ("torchtitan", "torchtitan.args", ("--strategy", "z3d2", "--accumulate", "2")),
        (
            "deepspeed",
            "deepspeed.json",
            (
                "--strategy",
                "z1d4",
            ),
        ),
    ],
)
def test_a_file_predicts_what_it_was_written_from(
    predict: Caller, program: str, file: str, options: tuple[str, ...]
) -> None:
    told = (*options, "--batch", "16", "--export", program, "--export-to", file, "--json")
    (before,) = predict(*told).json()
    read = predict("--strategy", f"@{file}", "--optimizer", "sgd", "--json")
    (after,) = read.json()
    assert {name: after[name] for name in COMPARED} == {name: before[name] for name in COMPARED}
    assert f"--strategy {before['strategy']}" in read.err
    assert predict(*told).code == 2
    assert predict(*told, "--force").code == 0


def test_options_beside_a_file_go_before_its_own(predict: Caller) -> None:
    Path("m.args").write_text("--micro-batch-size 2 --global-batch-size 16 --bf16")
    for words in (("--ranks", "2", "--strategy", "@m.args"), ("--strategy", "@m.args", "--ranks", "2")):
        (found,) = predict(*words, "--dtype", "fp32", "--optimizer", "sgd", "--batch", "32", "--json").json()
        assert (found["strategy"], found["batch"], found["dtype"]) == ("d2", 32, "fp32")
        # Megatron clips to 1 where a file says nothing.
        assert found["options"] == {"accumulate": "4", "clip_norm": "1.0"}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--strategy", "d2,d4", "--export", "megatron"), "2 were predicted"),
        (("--strategy", "d2", "--export", "megatrn"), "unknown program 'megatrn': did you mean megatron?"),
        (("--strategy", "d2", "--export", "deepspeed", "--export-to", "a.yaml"), "DeepSpeed reads json"),
        (("--strategy", "f2", "--export", "torchtitan"), "has no setting for filter parallelism"),
        (("--strategy", "d2", "--export-to", "a"), "--export-to needs --export PROGRAM"),
        (("--strategy", "@none.toml"), "none.toml"),
        (("--strategy", "@m.args", "--ranks", "2:8:x2"), "one number of ranks"),
    ],
)
def test_what_cannot_be_written_or_read_is_refused(predict: Caller, options: tuple[str, ...], why: str) -> None:
    Path("m.args").write_text("--micro-batch-size 2")
    result = predict(*options, "--batch", "16")
    assert result.code == 2
    assert why in result.err
    assert len(result.err.splitlines()) == 1
    assert sorted(path.name for path in Path().iterdir()) == ["m.args", "profile.json"]


def test_standard_output_holds_the_settings_alone(predict: Caller) -> None:
    result = predict("--strategy", "z3d2", "--batch", "16", "--export", "deepspeed", "--export-to", "-")
    assert json.loads(result.out)["zero_optimization"] == {"stage": 3}
    assert "learning rate" in result.err


def test_a_search_exports_the_row_that_is_asked_for(predict: Caller) -> None:
    asked = ("search", "--from-profile", str(predict.profile), "--model", "chain", "--ranks", "4", "--batch", "16")
    export = ("--export", "megatron", "--export-to", "-", "--force")
    rows = json.loads(predict.bare(*asked, "--json").out)["rows"]
    place = next(row["place"] for row in rows if row["prediction"]["strategy"] == "z1d4")
    result = predict.bare(*asked, *export, "--row", str(place))
    assert "--use-distributed-optimizer" in result.out
    assert rows[place - 1]["train_command"] in result.err
    assert predict.bare(*asked, *export, "--row", "99").code == 2
