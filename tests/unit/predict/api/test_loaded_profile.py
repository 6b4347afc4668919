"""Predictions from Python: the numbers of the commands, refusals in a line, frames whose columns stay the same."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import msgspec
import pytest
from predict_caller import Caller
from predicted_runs import PROFILE, run_like
from profile_factory import make_profile, ring_fit

from calibrate.profile.profile import write_profile
from paradl_bench.core.errors import UserError
from predict import load_profile
from predict.api.loaded_profile import LoadedProfile

ROOT = Path(__file__).parents[4]
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "send_recv", "broadcast")


@pytest.fixture
def caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Caller:
    calls = Caller(tmp_path, monkeypatch, capfd)
    write_profile(calls.profile, make_profile(communication=tuple(map(ring_fit, OPERATIONS))))
    return calls


@pytest.fixture
def profile(caller: Caller) -> LoadedProfile:
    return load_profile(caller.profile)


def as_json(value: object) -> object:
    return json.loads(msgspec.json.encode(value))


def test_a_prediction_is_that_of_the_command(caller: Caller, profile: LoadedProfile) -> None:
    found = profile.predict("chain", "p2", batch=8, micro_batches=4, schedule="1f1b", dataset_samples=1000)
    (told,) = caller.bare(*shlex.split(found.command)[1:], "--json").json()
    assert as_json(found.prediction.record()) == told
    assert told["options"] == {"micro_batches": "4", "schedule": "1f1b"}
    assert (found.iteration_s, list(found.interval_s)) == (told["iteration_s"], told["interval_s"])
    row = found.to_frame().iloc[0]
    for column in ("iteration_s", "epoch_s", "samples_per_s", "memory_bytes", "efficiency", "local_batch", "dtype"):
        assert row[column] == told[column], column
    assert [row["interval_low_s"], row["interval_high_s"]] == told["interval_s"]
    assert row["options"] == "micro_batches=4; schedule=1f1b"


def test_parts_of_a_row_add_up_to_the_iteration(profile: LoadedProfile) -> None:
    frame = profile.sweep("chain", ["serial", "d2", "f2", "s2", "p2"], batch=8).to_frame()
    parts = ["fw_s", "bw_s", "layer_communication_s", "ge_s", "wu_s", "pipeline_idle_s", "input_s", "h2d_s"]
    assert frame[parts].sum(axis=1).to_list() == pytest.approx(frame["iteration_s"].to_list(), rel=1e-12)
    assert frame.set_index("strategy").loc["f2", "layer_communication_s"] > 0


def test_a_sweep_is_that_of_the_command(caller: Caller, profile: LoadedProfile) -> None:
    found = profile.sweep("chain", ["data", "filter"], ranks=[2, 4, 8], batch=8, evaluator="paradl")
    told = caller(
        *("--strategy", "data,filter", "--ranks", "2,4,8", "--batch", "8", "--evaluator", "paradl", "--json")
    ).json()
    assert [as_json(each.record()) for each in found.predictions] == told
    assert found.to_frame()["knee_ranks"].to_list() == [row["knee_ranks"] for row in told]
    assert any("knee of data" in line for line in found.notes)


def test_a_search_is_that_of_the_command(caller: Caller, profile: LoadedProfile) -> None:
    found = profile.search("chain", ranks=4, batch=8, memory="1GiB", top=3)
    told = caller.bare(*shlex.split(found.command)[1:], "--json").json()
    assert as_json(found.answer.record()) == told
    assert found.to_frame()["iteration_s"].to_list() == [row["prediction"]["iteration_s"] for row in told["rows"]]  # type: ignore[call-overload]


def test_without_a_quantity_twice_of_everything_is_tried(caller: Caller, profile: LoadedProfile) -> None:
    found = profile.what_if("chain", "d2", batch=8)
    assert as_json(found.rows) == caller.bare(*shlex.split(found.command)[1:], "--json").json()
    assert {"bandwidth 2", "peak-flops 2"} <= set(found.to_frame()["varied"])


def test_a_what_if_is_that_of_the_command(caller: Caller, profile: LoadedProfile) -> None:
    found = profile.what_if("chain", "d2", batch=8, vary=["bandwidth=1,2", "latency@node=4"], grid=True)
    assert as_json(found.rows) == caller.bare(*shlex.split(found.command)[1:], "--json").json()
    frame = found.to_frame()
    assert frame["bandwidth"].to_list() == [1, 1, 2]
    assert frame["varied"].to_list() == ["", "bandwidth 1, latency@node 4", "bandwidth 2, latency@node 4"]
    assert frame["latency"].isna().to_list() == [False, True, True]


def test_replaced_layers_are_those_of_the_command(caller: Caller, profile: LoadedProfile) -> None:
    name = PROFILE.network["chain"].layers[-1].name
    found = profile.what_if("chain", "d2", batch=8, replace=f"{name}=none")
    assert as_json(found.rows) == caller.bare(*shlex.split(found.command)[1:], "--json").json()
    assert found.to_frame()["removed"].to_list() == ["", name]


def test_a_timeline_is_that_of_the_command(caller: Caller, profile: LoadedProfile, tmp_path: Path) -> None:
    found = profile.timeline("chain", "p2", batch=8, micro_batches=2)
    told = caller.bare(*shlex.split(found.command)[1:], "--json").json()
    assert as_json(found.summary) == told
    frame = found.to_frame()
    assert frame["end_s"].max() == found.summary.iteration_s
    assert len(frame) == found.summary.tasks
    assert set(frame["micro_batch"].dropna()) == {0, 1}
    found.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == len(frame)
    with pytest.raises(UserError, match="exists"):
        found.write(tmp_path / "trace.json")


def test_a_ledger_adds_up_to_the_iteration(profile: LoadedProfile) -> None:
    found = profile.predict("chain", "d2", batch=8)
    frame = found.explain().to_frame()
    assert frame["exposed_s"].sum() == pytest.approx(found.iteration_s)
    assert (frame["base_s"] + frame["added_s"]).to_list() == pytest.approx(frame["total_s"].to_list())


def test_a_validation_is_that_of_the_command(caller: Caller, tmp_path: Path) -> None:
    write_profile(caller.profile, PROFILE)
    run = run_like(tmp_path / "run", "d2", 8, factor=1.1)
    found = load_profile(caller.profile).validate(run)
    told = caller.bare("validate", "--from-profile", str(caller.profile), str(run), "-o", str(tmp_path / "r"), "--json")
    assert as_json(found.report) == told.json()
    frame = found.to_frame().set_index("evaluator")
    assert frame.loc["simulate", "error"] == pytest.approx(1 / 1.1 - 1)
    assert frame.loc["simulate", "fw_measured_s"] == pytest.approx(1.1 * frame.loc["simulate", "fw_predicted_s"])
    assert found.write(tmp_path / "written").read_text() == (tmp_path / "r" / "report.md").read_text()


def test_columns_are_the_same_whatever_was_predicted(profile: LoadedProfile) -> None:
    frames = [
        profile.predict("chain", "serial", batch=8).to_frame(),
        profile.sweep("chain", "p2,d2f2,z3d4", batch=16, micro_batches=4, price=2.0).to_frame(),
        profile.predict("chain", "d2", batch=8, evaluator="osf", dataset_samples=100).to_frame(),
    ]
    assert len({tuple(frame.dtypes.items()) for frame in frames}) == 1
    seconds = {name for name in frames[0] if "iteration" in name or name in ("fw_s", "ge_s", "epoch_s")}
    assert all(name.endswith("_s") for name in seconds)


def test_a_profile_is_read_once(caller: Caller, profile: LoadedProfile) -> None:
    before = profile.predict("chain", "d2", batch=8).iteration_s
    caller.profile.unlink()
    assert profile.predict("chain", "d2", batch=8).iteration_s == before
    assert profile.search("chain", ranks=2, batch=8).answer.rows


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"model": "chian"}, "unknown model 'chian': did you mean chain"),
        ({"strategy": "q2"}, "q2"),
        ({"strategy": "d2,d4"}, "several configurations: use sweep"),
        ({"batch": "many"}, "--batch"),
        ({"batch": 0}, "--batch"),
        ({"evaluater": "osf"}, "unknown option 'evaluater': did you mean evaluator"),
        ({"evaluator": "oracle"}, "unknown evaluator 'oracle'"),
        ({"output": "x.json"}, "unknown option 'output'"),
        ({"scaling": "sideways"}, "'weak', 'strong'"),
        ({"spread": "yes"}, "spread='yes': this is True or False"),
        ({"spread": True}, "--spread is for emulated runs"),
        ({"cluster": "no/such.yaml"}, "no/such.yaml"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(profile: LoadedProfile, asked: dict[str, object], said: str) -> None:
    given: dict[str, object] = {"model": "chain", "strategy": "d2", "batch": 8, **asked}
    with pytest.raises(UserError) as caught:
        profile.predict(**given)  # type: ignore[arg-type]
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_methods_refuse_as_their_commands_do(profile: LoadedProfile) -> None:
    with pytest.raises(UserError, match=r"--strategy: predict search tries all of them"):
        profile.search("chain", ranks=2, batch=8, strategy="d2")
    with pytest.raises(UserError, match="--grid needs --vary: say what to vary"):
        profile.what_if("chain", "d2", batch=8, grid=True)
    with pytest.raises(UserError, match="exclude each other"):
        profile.what_if("chain", "d2", batch=8, vary="bandwidth=2", replace="x=none")
    with pytest.raises(UserError, match="one strategy and batch"):
        profile.timeline("chain", "d2,d4", batch=8)
    with pytest.raises(UserError, match="no/such"):
        profile.validate("no/such")
    with pytest.raises(UserError, match="no/such"):
        load_profile("no/such")


def test_the_committed_profile_predicts_as_its_command_does(caller: Caller) -> None:
    (path,) = (ROOT / "results").glob("cpu-2core/*/accuracy/profile.json")
    profile = load_profile(path)
    found = profile.sweep("resnet18", "serial,d2", batch=4)
    told = caller.bare(*shlex.split(found.command)[1:], "--json").json()
    assert [as_json(each.record()) for each in found.predictions] == told
    assert (found.to_frame()["measured_share"] > 0.5).all()
