"""Blocks that are another's with like dims in turn: searched once, where they are predicted alike."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from network_factory import NetworkFactory
from search_cases import exactly, found, profile_of

from calibrate.profile.profile import Profile, write_profile
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.settings import PlanSettings, plan_settings
from predict.costs.cost_model import CostModel
from predict.search.candidates.mirrored import is_first_written, like_dims, mirrored_dims
from predict.search.candidates.space import find_space


def images(*shape: int, name: str = "images") -> ModelGraph:
    """conv 8 -> relu -> pool 2 -> conv 16 -> flatten -> fc 6 -> loss."""
    factory = NetworkFactory(*shape)
    factory.conv("conv1", 8)
    factory.relu("relu")
    factory.pool("pool", 2)
    factory.conv("conv2", 16)
    factory.flatten("flatten")
    factory.linear("fc", 6)
    factory.loss()
    return factory.network(name)


SQUARE, OBLONG = images(4, 16, 16), images(4, 16, 32)


def strategies(tmp_path: Path, profile: Profile, ranks: int = 2) -> tuple[set[str], list[str]]:
    """Of all rows, and what was not searched."""
    write_profile(tmp_path / "p.json", profile)
    asked = "--ranks", str(ranks), "--batch", "8", "--predictions", "400", "--top", "99"
    answer = found(tmp_path / "p.json", *asked, model="images")
    return {row["prediction"]["strategy"] for row in answer["rows"]}, answer["searched"][0]["not_searched"]


def test_of_two_alike_the_first_written_is_searched(tmp_path: Path) -> None:
    names, left_out = strategies(tmp_path, profile_of(SQUARE))
    assert "s2" in names
    assert "s1x2" not in names
    assert "blocks that are another's with like dims in turn (s1x2)" in left_out


def test_where_height_and_width_differ_both_are(tmp_path: Path) -> None:
    names, left_out = strategies(tmp_path, profile_of(OBLONG))
    assert {"s2", "s1x2"} <= names
    assert not any("in turn" in line for line in left_out)


@pytest.mark.parametrize(("one", "other"), [("s2", "s1x2"), ("s4x2", "s2x4"), ("d2s4", "d2s1x4"), ("s4p2", "s1x4p2")])
def test_what_is_left_out_is_predicted_as_what_is_kept(one: str, other: str) -> None:
    costs = CostModel(profile=profile_of(SQUARE), network=SQUARE)
    settings = plan_settings(batch=8, blocking=True, micro_batches=2 if "p" in one else None)
    assert exactly(costs, settings, one) == pytest.approx(exactly(costs, settings, other), rel=1e-12)
    space = find_space(SQUARE, PlanSettings(batch=8), 8, (), like=like_dims(SQUARE))
    names = {str(strategy) for strategy in space.strategies}
    assert other not in names
    assert one in names or len(one) == 2


def test_windows_tell_dims_apart() -> None:
    assert like_dims(SQUARE) == (0, 0)
    assert like_dims(OBLONG) == (0, 1)
    layers = list(SQUARE.layers)
    tall = {**layers[0].attributes, "kernel_size": (3, 1), "padding": (1, 0)}
    layers[0] = msgspec.structs.replace(layers[0], attributes=tall)
    assert like_dims(msgspec.structs.replace(SQUARE, layers=tuple(layers))) == (0, 1)


def test_dims_that_a_profile_may_tell_apart_stay() -> None:
    profile = profile_of(SQUARE)
    assert mirrored_dims(profile, SQUARE) == (0, 0)
    shard = msgspec.structs.replace(profile.layer_times[0], shard="s1x2")
    measured = msgspec.structs.replace(profile, layer_times=(*profile.layer_times, shard))
    assert mirrored_dims(measured, SQUARE) == (0, 1)
    beside = msgspec.structs.replace(profile, network={**profile.network, "oblong": images(4, 16, 32, name="oblong")})
    assert mirrored_dims(beside, SQUARE) == (0, 1)


def test_most_parts_come_first_among_like_dims() -> None:
    assert is_first_written((4, 2), (0, 0))
    assert not is_first_written((2, 4), (0, 0))
    assert is_first_written((2, 4), (0, 1))
    assert is_first_written((2, 8, 1), (0, 1, 0))
    assert not is_first_written((1, 8, 2), (0, 1, 0))
    assert is_first_written((1, 2), ())
