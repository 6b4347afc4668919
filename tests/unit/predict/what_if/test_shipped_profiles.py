"""Predictions from profiles that come with the tool: without a measurement and torch, and whose seconds they are."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from predict_caller import Caller
from profile_factory import make_profile

from calibrate.profile.profile import read_profile
from calibrate.profile.shipped.catalog import shipped_profiles
from paradl_bench.core.errors import UserError
from paradl_bench.network.kinds.check import check_layers
from paradl_bench.network.models.language_sizes import UNTIED, language_model_names
from paradl_bench.network.models.traced_networks import network_file, traced_models, traced_network
from predict import load_profile
from predict.costs.files import choose_network

ROOT = Path(__file__).parents[4]
SWEPT = [name for name, path in shipped_profiles().items() if read_profile(path).communication]


@pytest.fixture
def predict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Caller:
    return Caller(tmp_path, monkeypatch, capfd)


def asked(predict: Caller, name: str, *options: str, model: str = "gpt2") -> list[dict[str, object]]:
    return predict.bare("--from-profile", name, "--model", model, *options, "--json").json()


def check_answer(answer: dict[str, object]) -> float:
    iteration_s, (low, high) = answer["iteration_s"], answer["interval_s"]  # type: ignore[misc]
    assert math.isfinite(high)  # type: ignore[has-type]
    assert 0 < low < iteration_s < high  # type: ignore[operator, has-type]
    sources = answer["sources"]
    assert isinstance(sources, dict)
    assert sources["measured"] == 0
    assert sources["published"] > 0.3
    assert sources["data_sheet"] > 0
    assert isinstance(iteration_s, float)
    return iteration_s


@pytest.mark.parametrize("name", shipped_profiles())
def test_every_shipped_profile_predicts_in_its_dtypes(predict: Caller, name: str) -> None:
    published = read_profile(name).published
    assert published
    for dtype in published.dtypes:
        # So large that kernels take longer than their dispatch, on the fastest of them too.
        options = ("--strategy", "serial", "--batch", "16,32", "--dtype", dtype)
        small, large = (check_answer(each) for each in asked(predict, name, *options))
        assert 1.5 * small < large < 2.5 * small


@pytest.mark.parametrize("name", SWEPT)
def test_more_ranks_of_weak_scaling_are_no_faster(predict: Caller, name: str) -> None:
    answers = asked(predict, name, "--strategy", "data", "--ranks", "2:512:x4", "--batch", "16")
    seconds = [check_answer(each) for each in answers]
    assert seconds == sorted(seconds)
    assert any("published, not measured here: sweeps of" in note for note in answers[0]["notes"])  # type: ignore[attr-defined]


def test_leaders_exchange_by_published_all_reduces(predict: Caller) -> None:
    """Nobody published a reduce to the leaders, nor a broadcast from them."""
    options = ("--from-profile", "h100-sxm", "--model", "gpt2", "--strategy", "d16", "--batch", "64", "--why")
    done = predict.bare(*options, "--exchange", "leader")
    assert done.code == 0, done.err
    for operation in ("reduce", "broadcast"):
        assert f"no {operation} was published: it is taken as an all-reduce" in done.out


def test_lower_precision_and_a_newer_device_are_faster(predict: Caller) -> None:
    options = ("--strategy", "serial", "--batch", "8")
    (bf16,), (fp32,) = (asked(predict, "h100-sxm", *options, "--dtype", dtype) for dtype in ("bf16", "fp32"))
    (older,) = asked(predict, "v100", *options)
    assert check_answer(bf16) < check_answer(fp32) < check_answer(older)


def test_answers_say_whose_seconds_they_are(predict: Caller) -> None:
    done = predict.bare("--from-profile", "h100-sxm", "--model", "gpt2", "--strategy", "d8", "--batch", "64", "--why")
    assert done.code == 0
    assert re.search(r"\d+% published by others; \d+% of data sheets", done.out)
    assert "published, not measured here: kernels of NeuSight" in done.out
    assert "by the data sheet" in done.out


def test_a_host_that_bounds_is_said_without_asking(predict: Caller) -> None:
    options = ("--from-profile", "h100-sxm", "--model", "gpt2", "--strategy", "serial", "--dtype", "bf16")
    done = predict.bare(*options, "--batch", "1,64")
    (line,) = (line for line in done.out.splitlines() if "% measured; " in line)
    assert (
        "% assumed or stated; host-bound: kernels wait for their dispatch; larger micro-batches or CUDA graphs" in line
    )
    assert "would help (serial on batch 1); " in line
    assert "host-bound" not in predict.bare(*options, "--batch", "64").out


def test_a_batch_left_out_is_as_many_samples_as_ranks(predict: Caller) -> None:
    options = ("--from-profile", "h100-sxm", "--model", "gpt2")
    done = predict.bare(*options, "--strategy", "data", "--ranks", "8:32:x2", "--json")
    assert [(row["ranks"], row["batch"]) for row in done.json()] == [(8, 8), (16, 16), (32, 32)]
    assert done.err == "predict: no --batch was given; taken: a mini-batch of 8 samples\n"
    done = predict.bare(*options, "--strategy", "d4,serial,t8", "--json")
    assert {row["batch"] for row in done.json()} == {8}
    refused = predict.bare(*options, "--strategy", "data")
    assert (refused.code, refused.out, refused.err.count("\n")) == (2, "", 1)
    assert "give numbers of ranks" in refused.err


def test_seconds_of_another_device_are_named(predict: Caller) -> None:
    options = ("--from-profile", "h100-sxm", "--model", "gpt2", "--strategy", "serial", "--batch", "8")
    done = predict.bare(*options, "--device", "l4")
    (line,) = (line for line in done.out.splitlines() if "% measured; " in line)
    assert re.search(r"[1-9]\d% scaled to another device", line)
    assert 98 <= sum(int(share) for share in re.findall(r"(\d+)% ", line)) <= 101
    assert "scaled to another device" not in predict.bare(*options).out


def test_names_are_listed_with_sources_and_licences(predict: Caller) -> None:
    shown = predict.bare("profiles")
    assert shown.code == 0
    rows = predict.bare("profiles", "--json").json()
    assert [row["name"] for row in rows] == list(shipped_profiles())
    for row in rows:
        assert f"{row['name']}:" in shown.out
        assert row["accuracy"]
        assert all(of["licence"] and of["source"] for of in row["publications"])  # type: ignore[attr-defined]


def test_a_wrong_name_is_one_line(predict: Caller) -> None:
    done = predict.bare("--from-profile", "h100", "--model", "gpt2", "--strategy", "serial", "--batch", "8")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "choices are a100-pcie, a100-sxm, b200, gh200, h100-sxm, v100" in done.err


def test_a_prediction_needs_no_torch() -> None:
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'lightgbm')));"
        "sys.argv = 'predict --from-profile h100-sxm --model llama-2-7b --strategy d8 --batch 8 --json'.split();"
        "from predict.cli import main; main()"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert json.loads(done.stdout)[0]["iteration_s"] > 0


def test_networks_that_come_with_the_tool_are_whole() -> None:
    names = traced_models()
    assert {name for name in language_model_names() if not name.endswith(UNTIED)} - set(names) == {
        "deepseek-v2",
        "deepseek-v3",
    }
    assert {"resnet50", "resnet152", "vgg16", "cosmoflow"} < set(names)
    assert sum(network_file(name).stat().st_size for name in names) < 1_200_000
    for name in names:
        network = traced_network(name)
        assert network is not None
        assert network.name == name
        check_layers(network, name)
    assert traced_network("no-such-model") is None
    assert traced_network("../sizes/gpt2") is None


@pytest.mark.parametrize("model", ["gpt2", "resnet50"])
def test_a_network_of_the_tool_is_as_traced_now(model: str) -> None:
    pytest.importorskip("transformers")
    from paradl_bench.measure.tracing.tracing import trace_network
    from paradl_bench.network.models.catalog import load_model

    shipped = traced_network(model)
    assert shipped is not None
    assert shipped == trace_network(load_model(model, device="meta"))


def test_published_profiles_take_networks_of_images() -> None:
    published = load_profile("h100-sxm")
    assert published.predict("resnet50", "d8", batch=256).iteration_s > 0
    with pytest.raises(UserError, match="--sequence 8: resnet50 does not read tokens"):
        choose_network(published.profile, "resnet50", None, Path("p"), 8)
    with pytest.raises(UserError, match="or give --network FILE from: paradl-bench describe resnet34 -o FILE"):
        choose_network(published.profile, "resnet34", None, Path("p"))
    told = (
        r"unknown model 'gpt2-medum': did you mean gpt2-medium\b.*\? paradl-bench models lists all; or give --network"
    )
    with pytest.raises(UserError, match=told) as refused:
        choose_network(published.profile, "gpt2-medum", None, Path("p"))
    assert len(str(refused.value)) < 200


def test_an_own_profile_takes_networks_that_come_with_the_tool() -> None:
    profile = make_profile()
    assert choose_network(profile, "resnet50", None, Path("p")).name == "resnet50"
    told = r"unknown model 'resnet5'.*; profile p holds chain; add it: paradl-bench layers resnet5 --batch N -o DIR"
    with pytest.raises(UserError, match=told):
        choose_network(profile, "resnet5", None, Path("p"))


def test_a_dtype_that_the_data_sheet_lacks_is_named() -> None:
    profile = load_profile("v100")
    told = "the data sheet of Tesla V100-PCIE-32GB states no peak in bf16, which it may not compute in"
    of_dtype = {dtype: profile.predict("gpt2", "d2", batch=4, dtype=dtype).prediction for dtype in ("fp32", "bf16")}
    said = {dtype: any(told in line for line in found.provenance.extrapolated) for dtype, found in of_dtype.items()}
    assert said == {"fp32": False, "bf16": True}
