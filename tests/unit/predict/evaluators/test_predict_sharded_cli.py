"""``predict`` of strategies that share layers, as a user calls it: limits, sweeps, and options of their axes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from network_factory import pooled_convolutions
from profile_factory import make_profile, ring_fit

from calibrate.profile.profile import write_profile
from paradl_bench.core.terminal.command_line import run_command
from predict.cli import group

NETWORK = pooled_convolutions()
FITS = tuple(ring_fit(operation) for operation in ("all_reduce", "all_gather", "reduce_scatter", "send_recv"))


class Caller:
    """Calls ``predict`` in this process."""

    def __init__(self, profile: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self._profile, self._monkeypatch, self._capfd = profile, monkeypatch, capfd

    def __call__(self, *arguments: str) -> tuple[int | str | None, str, str]:
        call = ["predict", "--from-profile", str(self._profile), "--model", NETWORK.name, *arguments]
        self._monkeypatch.setattr(sys, "argv", call)
        with pytest.raises(SystemExit) as caught:
            run_command(group, "predict")
        return caught.value.code, *self._capfd.readouterr()


@pytest.fixture
def predict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Caller:
    write_profile(tmp_path / "profile.json", make_profile(NETWORK, communication=FITS))
    return Caller(tmp_path / "profile.json", monkeypatch, capfd)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("f8", "strategy f8: 8 ranks along f8, but p <= 6: fewest filters, layer fc"),
        ("c9", "strategy c9: 9 ranks along c9, but p <= 8: fewest channels, layer conv2"),
        ("s17", "the input of convolutional has 16 positions along dim 0, fewer than 17 parts"),
        ("f2s2", "filter and spatial both share layers out"),
    ],
)
def test_beyond_a_limit_is_one_line_that_names_the_layer(predict: Caller, strategy: str, message: str) -> None:
    code, out, err = predict("--strategy", strategy, "--batch", "8")
    assert code == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_a_sweep_stops_at_the_limit_and_reports_omissions(predict: Caller) -> None:
    code, out, err = predict(
        "--strategy", "filter", "--ranks", "2:16:x2", "--batch", "8", "--scaling", "strong", "--json"
    )
    assert code == 0
    assert [found["strategy"] for found in json.loads(out)] == ["f2", "f4"]
    assert json.loads(out)[0]["limits"] == ["p <= 6: fewest filters, layer fc"]
    assert err.count("left out") == 2
    assert "p <= 6: fewest filters, layer fc" in err


def test_options_of_axes_reach_the_plan_and_the_answer(predict: Caller) -> None:
    def found(*options: str) -> list[dict[str, Any]]:
        code, out, err = predict("--batch", "8", "--json", *options)
        assert (code, err) == (0, "")
        return list(json.loads(out))

    whole, of_fc, of_conv = (
        found("--strategy", "f2", *options)[0] for options in ((), ("--split", "fc"), ("--split", "conv*"))
    )
    assert [answer["options"] for answer in (whole, of_fc, of_conv)] == [{}, {"split": "fc"}, {"split": "conv*"}]
    assert of_fc["limits"] == ["p <= 6: fewest filters, layer fc"]
    assert of_conv["limits"] == ["p <= 8: fewest filters, layer conv1"]
    gathers = [answer["breakdown_s"]["all_gather"] for answer in (whole, of_fc, of_conv)]
    assert gathers[0] == pytest.approx(gathers[1] + gathers[2])
    late, early = (found("--strategy", "s2", *options)[0] for options in ((), ("--spatial-until", "conv2")))
    assert early["options"] == {"spatial_until": "conv2"}
    assert early["breakdown_s"]["halo"] < late["breakdown_s"]["halo"]
    (scattered,) = found("--strategy", "f2", "--filter-backward", "reduce-scatter")
    assert scattered["options"] == {"filter_backward": "reduce-scatter"}
    assert "filter parallelism reduce-scatters 2 of 2 input gradients" in scattered["notes"]
    assert scattered["breakdown_s"].get("all_reduce", 0.0) == 0 < scattered["breakdown_s"]["reduce_scatter"]
    # Where an option says something of one of several strategies it says nothing of the others.
    assert len(found("--strategy", "serial,d2,s2", "--batch-norm", "sync", "--spatial-until", "conv2")) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--strategy f2 --split conv3",
            "unknown layer of convolutional to split 'conv3': did you mean conv2 or conv1?",
        ),
        ("--strategy d2,s2 --split fc", "--split is for filter, channel, tensor parallelism, not for d2,s2"),
        ("--strategy d2,s2 --micro-batches 4", "--micro-batches is for pipeline parallelism, not for d2,s2"),
        ("--strategy d2 --schedule 1f1b", "--schedule is for pipeline parallelism, not for d2"),
        ("--strategy f2 --spatial-until fc", "--spatial-until is for spatial parallelism, not for f2"),
    ],
)
def test_an_option_that_says_nothing_is_refused(predict: Caller, arguments: str, message: str) -> None:
    code, out, err = predict("--batch", "8", *arguments.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_every_strategy_in_one_call(predict: Caller) -> None:
    code, out, err = predict("--strategy", "serial,d2,f2,c2,s2,d2f2,d2s2", "--batch", "8", "--why")
    assert (code, err) == (0, "")
    assert "not measured, scaled from the nearest operation of the kind" in out
    assert "for layers" in out
    assert "for layers" not in predict("--strategy", "serial,d2", "--batch", "8")[1]
