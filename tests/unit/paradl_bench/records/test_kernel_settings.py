"""Layout and modes of a GPU's libraries: put into effect, part of what a time is keyed by, chosen by predictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from in_process import run_in_process
from own_network import NET
from profile_factory import layer_times, make_network, make_profile, model_times

from calibrate.fitting.merging.merge import merge_profiles
from calibrate.profile.profile import Profile, write_profile
from calibrate.report.diff import compare
from paradl_bench.core.errors import UserError
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.records.kernel_settings import KernelSettings, choose_label, settings_of_label
from paradl_bench.strategies.passes.lower_precision import check_kernel_settings
from predict.cli import group

LABEL = "channels_last"
NETS = (
    NET
    + """
class Rows(nn.Module):
    input_shape = (6,)
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3)
    def forward(self, x):
        return self.head(x)
"""
)


def test_a_label_is_the_settings_that_are_on() -> None:
    every = KernelSettings(channels_last=True, compile=True, cudnn_benchmark=True, tf32=True)
    assert every.label == "channels_last+compile+cudnn_benchmark+tf32"
    for settings in (every, KernelSettings(), KernelSettings(tf32=True)):
        assert settings_of_label(settings.label) == settings
    for wrong in ("fast", "tf32+channels_last", "tf32+tf32", "+"):
        with pytest.raises(ValueError, match="kernel settings"):
            settings_of_label(wrong)


@pytest.mark.parametrize(
    ("given", "measured", "chosen"),
    [
        ({}, [], ""),
        ({"tf32": True}, [], "tf32"),
        ({"channels_last": None}, [LABEL], LABEL),
        ({"channels_last": False}, ["", LABEL], ""),
        ({"channels_last": True}, ["", LABEL], LABEL),
        ({"channels_last": True, "tf32": False}, [LABEL, f"{LABEL}+tf32"], LABEL),
    ],
)
def test_what_was_measured_is_chosen_by_what_is_given(given: dict[str, Any], measured: list[str], chosen: str) -> None:
    assert choose_label(given, measured) == chosen


@pytest.mark.parametrize(
    ("given", "message"),
    [({}, "without any setting, with --channels-last: say which"), ({"tf32": True}, "no iterations with --tf32")],
)
def test_a_choice_among_several_or_of_none_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        choose_label(given, ["", LABEL])


@pytest.mark.parametrize("strategy", ["f2", "s2", "p2", "z2d2", "z3d2"])
def test_what_cuts_tensors_does_not_go_with_channels_last(strategy: str) -> None:
    parsed = parse_strategy(strategy)
    check_kernel_settings(parsed, PlanSettings(batch=2), "tf32")
    check_kernel_settings(parse_strategy("z1d2"), PlanSettings(batch=2), LABEL)
    with pytest.raises(UserError, match="--channels-last with"):
        check_kernel_settings(parsed, PlanSettings(batch=2), LABEL)


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    pytest.importorskip("torch")
    (tmp_path / "nets_of_settings_test.py").write_text(NETS)
    return tmp_path


LAYERS = ("layers", "--batch", "2", "--blocks", "2", "--iterations", "2", "--warmup", "1")


@pytest.mark.parametrize(
    ("model", "flags", "message"),
    [
        ("Net", ("--tf32",), "--tf32 is a mode of GPUs"),
        ("Net", ("--cudnn-benchmark",), "--cudnn-benchmark is a mode of GPUs"),
        ("Net", ("--channels-last", "--shards", "f2"), "--channels-last with filter parallelism"),
    ],
)
def test_layers_refuses_what_has_no_effect(workplace: Path, model: str, flags: tuple[str, ...], message: str) -> None:
    result = run_in_process(workplace, *LAYERS, f"nets_of_settings_test:{model}", *flags, "-o", "out")
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_images_and_their_weights_are_laid_out_and_nothing_else() -> None:
    torch = pytest.importorskip("torch")
    from paradl_bench.measure.execution.kernel_layout import laid_out, lay_out, refuse_without_channels

    settings = KernelSettings(channels_last=True)
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv3d(4, 5, 2), torch.nn.Linear(5, 2))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    lay_out(module, settings)
    assert module[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert module[1].weight.is_contiguous(memory_format=torch.channels_last_3d)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    image = torch.randn(2, 3, 4, 5)
    assert laid_out(image, settings).stride() == (60, 1, 15, 3)
    assert laid_out(image, KernelSettings()) is image
    with pytest.raises(UserError, match="--channels-last is for images and volumes; a sample of Rows is 6"):
        refuse_without_channels("Rows", (6,), settings)


def of_label(profile: Profile, factor: float) -> Profile:
    """The times of a profile, measured in another layout that takes so many times as long."""

    def scaled(value: Any) -> Any:
        if isinstance(value, dict):
            changed = {key: item * factor if key.endswith("_s") else scaled(item) for key, item in value.items()}
            return {**changed, "kernel_settings": LABEL} if "dtype" in changed else changed
        return value

    def made(times: Any) -> Any:
        return tuple(msgspec.convert(scaled(msgspec.to_builtins(time)), type(time)) for time in times)

    return msgspec.structs.replace(
        profile, layer_times=made(profile.layer_times), model_times=made(profile.model_times)
    )


def profiles() -> tuple[Profile, Profile]:
    network = make_network()
    plain = make_profile(network, layer_times=layer_times(network), model_times=model_times(network))
    return plain, of_label(plain, 0.5)


def test_a_merged_profile_keeps_kernel_settings_apart_and_predicts_one(tmp_path: Path) -> None:
    plain, other = profiles()
    both = merge_profiles((plain, other), ("a", "b"), command_line=("calibrate", "merge"), force=False)
    assert len(both.layer_times) == 2 * len(plain.layer_times)
    assert {time.kernel_settings for time in both.model_times} == {"", LABEL}
    path = tmp_path / "both.json"
    write_profile(path, both)

    def asked(*flags: str) -> Any:
        words = ["--from-profile", str(path), "--model", "chain", "--strategy", "serial", "--batch", "8", "--json"]
        return CliRunner().invoke(group, [*words, *flags])

    ambiguous = asked()
    assert ambiguous.exit_code != 0
    assert isinstance(ambiguous.exception, UserError)
    assert "without any setting, with --channels-last" in str(ambiguous.exception)
    rows = [json.loads(asked(flag).output)[0] for flag in ("--no-channels-last", "--channels-last")]
    assert [row["kernel_settings"] for row in rows] == ["", LABEL]
    assert rows[1]["iteration_s"] == pytest.approx(rows[0]["iteration_s"] / 2)


def test_times_of_two_settings_are_not_held_against_each_other() -> None:
    plain, other = profiles()
    assert compare(plain, plain).compared
    found = compare(plain, other)
    assert {group.group for group in found.groups} & {"layer_times", "model_times"} == set()
