"""``predict search`` with the optimizer's state in host memory, where a strategy does not fit with it on the device."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from network_factory import NetworkFactory
from search_cases import found, profile_of

from calibrate.profile.profile import write_profile
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from predict.cli import group
from predict.costs.cost_model import CostModel


def wide() -> ModelGraph:
    """Activations of one sample outweigh all parameters."""
    factory = NetworkFactory(4, 16, 16)
    for index in range(4):
        factory.conv(f"conv{index}", 4, 3, padding=1)
    factory.flatten("flatten")
    factory.linear("fc", 2)
    factory.loss()
    return factory.network("chain")


NETWORK = wide()
COMMON = ("--ranks", "1", "--batch", "1", "--recompute", "none")


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    write_profile(tmp_path / "p.json", profile_of(NETWORK))
    return tmp_path / "p.json"


def held(offload: str) -> int:
    costs = CostModel(profile=profile_of(NETWORK), network=NETWORK)
    settings = PlanSettings(batch=1, offload=offload)  # type: ignore[arg-type]
    return costs.memory(Strategy(), settings).peak_bytes


def test_the_state_moves_where_nothing_fits_with_it(profile: Path) -> None:
    assert held("optimizer") < held("none")
    answer = found(profile, *COMMON, "--memory", f"{held('optimizer')}B")
    (row,) = answer["rows"]
    assert row["prediction"]["options"] == {"offload": "optimizer"}
    assert row["prediction"]["memory_bytes"] == held("optimizer")
    for command in (row["predict_command"], row["train_command"]):
        assert " --offload optimizer" in command
    _, *words = shlex.split(row["predict_command"])
    assert json.loads(CliRunner().invoke(group, [*words, "--json"]).output) == [row["prediction"]]


@pytest.mark.parametrize("memory", [(), ("--memory", "1GiB")])
def test_what_fits_keeps_its_state(profile: Path, memory: tuple[str, ...]) -> None:
    answer = found(profile, *COMMON, *memory)
    assert [row["prediction"]["options"] for row in answer["rows"]] == [{}]
    (searched,) = answer["searched"]
    assert searched["candidates"] == 1


def test_the_option_leaves_no_other_choice(profile: Path) -> None:
    answer = found(profile, *COMMON, "--offload", "optimizer")
    assert {row["prediction"]["options"]["offload"] for row in answer["rows"]} == {"optimizer"}
