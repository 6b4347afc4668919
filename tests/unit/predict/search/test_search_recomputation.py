"""``predict search`` with activations that are computed again, against predicting every candidate."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from click.testing import CliRunner
from network_factory import NetworkFactory
from search_cases import asked, exactly, found, profile_of

from calibrate.profile.profile import write_profile
from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.settings import PlanSettings
from predict.cli import group
from predict.costs.cost_model import CostModel
from predict.search.candidates.mirrored import mirrored_dims
from predict.search.candidates.space import Space, find_space
from predict.search.pricing.estimate import Estimates
from predict.search.pricing.shared_work import SharedWorks


def blocks() -> ModelGraph:
    """4x16x16 -> conv 8 -> a block of two convolutions, one of three with activations -> fc 12 -> loss."""
    factory = NetworkFactory(4, 16, 16)
    for name in ("stem", "body.0.one", "body.0.two", "body.1.one"):
        factory.conv(name, 8, 3, padding=1)
    factory.relu("body.1.act")
    for name in ("body.1.two", "body.1.three"):
        factory.conv(name, 8, 3, padding=1)
    factory.flatten("flatten")
    factory.linear("fc", 12)
    factory.loss()
    return factory.network("chain")


NETWORK = blocks()
CAP_MB = 0.01
LIKE = mirrored_dims(profile_of(NETWORK), NETWORK)


class Candidates(NamedTuple):
    """All of a space: seconds and bytes, by the exact prediction, and whether they compute again."""

    space: Space
    seconds: np.ndarray
    held: np.ndarray
    again: np.ndarray


@pytest.fixture(scope="module")
def costs() -> CostModel:
    return CostModel(profile=profile_of(NETWORK), network=NETWORK)


@pytest.fixture(scope="module")
def predicted(costs: CostModel) -> Callable[[int, int], Candidates]:
    known: dict[tuple[int, int], Candidates] = {}

    def find(ranks: int, batch: int) -> Candidates:
        if (ranks, batch) not in known:
            space = find_space(NETWORK, PlanSettings(batch=batch, blocking=True), ranks, (CAP_MB,), like=LIKE)
            strategies = [space.strategies[index] for index in space.strategy]
            settings = [space.settings_of(candidate) for candidate in range(len(space))]
            points = list(zip(strategies, settings, strict=True))
            known[ranks, batch] = Candidates(
                space,
                np.array([exactly(costs, own, str(strategy)) for strategy, own in points]),
                np.array([costs.memory(*point).peak_bytes for point in points]),
                np.array([bool(own.recompute) for own in settings]),
            )
        return known[ranks, batch]

    return find


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    write_profile(tmp_path / "p.json", profile_of(NETWORK))
    return tmp_path / "p.json"


def test_every_axis_computes_again_but_parted_backward() -> None:
    space = find_space(NETWORK, PlanSettings(batch=8, blocking=True), 4, ())
    again = {
        (str(space.strategies[space.strategy[c]]), space.schedules[space.schedule[c]] if space.is_pipelined(c) else "")
        for c in range(len(space))
        if space.settings_of(c).recompute
    }
    assert {("d4", ""), ("z1d4", ""), ("f2d2", ""), ("s2x2", ""), ("z3d4", "")} <= again
    assert {("p4", "1f1b"), ("d2p2", "gpipe"), ("f2p2", "interleaved")} <= again
    assert not any(schedule in ("dualpipev", "zb", "zbv") for _, schedule in again)
    assert (
        space.impossible.counts["--schedule dualpipev, zb, zbv with --recompute, which runs under other schedules"] > 2
    )


def test_no_candidate_is_faster_than_its_estimate(costs: CostModel) -> None:
    space = find_space(NETWORK, PlanSettings(batch=8, blocking=True), 4, (CAP_MB,))
    estimates = Estimates(costs, space, SharedWorks(NETWORK, space.settings)).seconds()
    again = [c for c in range(len(space)) if space.settings_of(c).recompute and not space.mesh(c).shared]
    assert {str(space.strategies[space.strategy[c]]) for c in again} == {
        "d4",
        "z1d4",
        "z2d4",
        "z3d4",
        *("d2z2d2", "d2z3d2", "d2p2", "p2d2", "z1d2p2", "p2z1d2"),
        "p4",
    }
    for candidate in again:
        strategy = str(space.strategies[space.strategy[candidate]])
        assert 0 < estimates[candidate] <= exactly(costs, space.settings_of(candidate), strategy) * (1 + 1e-9)


def test_computing_again_is_estimated_to_take_what_it_takes_longer(
    costs: CostModel, predicted: Callable[[int, int], Candidates]
) -> None:
    space, seconds, _, again = predicted(1, 4)
    estimates = Estimates(costs, space, SharedWorks(NETWORK, space.settings)).seconds()
    assert space.micro_batches[again].tolist() == [1, 2, 4] == space.micro_batches[~again].tolist()
    assert estimates[again] - estimates[~again] == pytest.approx(seconds[again] - seconds[~again])


@pytest.mark.parametrize(("ranks", "batch"), [(1, 4), (2, 4)])
def test_the_best_within_a_limit_equals_exhaustive_prediction(
    profile: Path, predicted: Callable[[int, int], Candidates], ranks: int, batch: int
) -> None:
    _, seconds, held, again = predicted(ranks, batch)
    common = ("--ranks", str(ranks), "--batch", str(batch), "--caps", str(CAP_MB), "--predictions", "400")
    common += ("--offload", "none")
    limits = np.unique(held)
    best_computes_again = set()
    for limit in limits[:: max(1, len(limits) // 8)].tolist():
        fits = held <= limit
        answer = found(profile, *common, "--memory", f"{limit}B")
        best = answer["rows"][0]["prediction"]
        assert best["iteration_s"] == pytest.approx(seconds[fits].min(), rel=1e-12)
        best_computes_again.add("recompute" in best["options"])
        (searched,) = answer["searched"]
        assert searched["too_large"] <= (~fits).sum()
        counted = searched["predicted"] + searched["too_slow"] + searched["too_large"] + searched["open"]
        assert counted == searched["candidates"] == len(held)
    # Where everything but what computes again is too large, that is found.
    least_kept = held[~again].min()
    assert held[again].min() < least_kept
    assert best_computes_again == {True, False}


def test_the_pareto_set_without_limit_shows_recomputations_saved_memory(profile: Path) -> None:
    rows = found(profile, "--ranks", "1", "--batch", "1", "--pareto")["rows"]
    kept, again = (row["prediction"] for row in rows)
    assert all(row["pareto"] for row in rows)
    assert (kept["options"], again["options"]) == ({}, {"recompute": "all"})
    assert again["memory_bytes"] < kept["memory_bytes"]


@pytest.mark.parametrize(
    ("options", "names"),
    [(("--ranks", "1"), {"accumulate", "recompute"}), (("--ranks", "2", "--recompute", "all"), {"recompute"})],
)
def test_a_row_is_what_predict_says_to_its_command(profile: Path, options: tuple[str, ...], names: set[str]) -> None:
    answer = found(profile, *options, "--batch", "4", "--pareto")
    assert names <= {name for row in answer["rows"] for name in row["prediction"]["options"]}
    for row in answer["rows"]:
        _, *words = shlex.split(row["predict_command"])
        result = CliRunner().invoke(group, [*words, "--json"])
        assert json.loads(result.output) == [row["prediction"]]
        computes_again = "recompute" in row["prediction"]["options"]
        assert (" --recompute all" in row["train_command"]) == computes_again


@pytest.mark.parametrize("chosen", ["none", "all", "body.1,stem"])
def test_the_option_leaves_no_other_choice(profile: Path, chosen: str) -> None:
    answer = found(profile, "--ranks", "2", "--batch", "4", "--recompute", chosen)
    expected = {} if chosen == "none" else {"recompute": chosen}
    for row in answer["rows"]:
        assert {name: value for name, value in row["prediction"]["options"].items() if name == "recompute"} == expected
    assert "p2" in {row["prediction"]["strategy"] for row in answer["rows"]}


def test_what_cannot_be_computed_again_is_said_in_one_line(profile: Path) -> None:
    result = asked(profile, "--ranks", "2", "--batch", "4", "--recompute", "tail")
    assert isinstance(result.exception, UserError)
    assert "--recompute tail: chain has no such module; it has body" in str(result.exception)


def test_a_model_without_blocks_keeps_everything(tmp_path: Path) -> None:
    factory = NetworkFactory(4, 16, 16)
    factory.conv("stem", 8, 3, padding=1)
    factory.flatten("flatten")
    factory.linear("fc", 12)
    factory.loss()
    network = factory.network("chain")
    write_profile(tmp_path / "p.json", profile_of(network))
    answer = found(tmp_path / "p.json", "--ranks", "2", "--batch", "4")
    assert not any("recompute" in row["prediction"]["options"] for row in answer["rows"])
    assert any("has no blocks that can be computed again" in reason for reason in answer["searched"][0]["impossible"])
