"""``predict search``: what it chooses from, what it rules out, and that its best is that of trying everything."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from network_factory import NetworkFactory
from profile_factory import make_network, make_profile, ring_fit
from search_cases import LEVELS, asked, exactly, found, group_along, profile_of

from calibrate.profile.profile import write_profile
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.schedules.catalog import schedules
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Collective
from paradl_bench.records.cluster import Cluster
from paradl_bench.strategies.pipeline.axis import PipelineOptions
from predict.cli import group
from predict.costs.cost_model import CostModel
from predict.costs.input.input_terms import NO_INPUT, InputOptions
from predict.costs.memory_estimate import tensors_within
from predict.prediction.prediction import Predictor
from predict.search import ranking
from predict.search.candidates.space import find_space
from predict.search.pricing.estimate import Estimates
from predict.search.pricing.groups import GroupCosts
from predict.search.pricing.shared_work import SharedWorks

NETWORK = make_network((64, 512, 256, 512, 32))
OF_IMAGES = "convolutional"


def convolutional() -> ModelGraph:
    """4x16x16 -> conv 8 -> relu -> conv 8 -> pool 2 -> conv 16 -> flatten -> fc 6 -> loss."""
    factory = NetworkFactory(4, 16, 16)
    factory.conv("conv1", 8)
    factory.relu("relu")
    factory.conv("conv2", 8)
    factory.pool("pool", 2)
    factory.conv("conv3", 16)
    factory.flatten("flatten")
    factory.linear("fc", 6)
    factory.loss()
    return factory.network(OF_IMAGES)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    write_profile(tmp_path / "p.json", profile_of(NETWORK))
    return tmp_path / "p.json"


@pytest.mark.parametrize(("ranks", "batch"), [(2, 8), (4, 12), pytest.param(8, 4, marks=pytest.mark.slow)])
def test_the_best_is_that_of_predicting_every_candidate(profile: Path, ranks: int, batch: int) -> None:
    costs = CostModel(profile=profile_of(NETWORK), network=NETWORK)
    space = find_space(NETWORK, PlanSettings(batch=batch, blocking=True), ranks, (0.25, 1))
    times = {}
    for candidate in range(len(space)):
        strategy = str(space.strategies[space.strategy[candidate]])
        times[candidate] = exactly(costs, space.settings_of(candidate), strategy)
    answer = found(profile, "--ranks", str(ranks), "--batch", str(batch), "--caps", "0.25,1", "--predictions", "400")
    (searched,) = answer["searched"]
    assert searched["candidates"] == len(space)
    assert searched["open"] == searched["too_large"] == 0
    assert searched["predicted"] + searched["too_slow"] == len(space)
    best = answer["rows"][0]["prediction"]
    assert best["iteration_s"] == pytest.approx(min(times.values()), rel=1e-12)
    assert searched["predicted"] < len(space)


@pytest.mark.parametrize(
    ("slower", "ranks", "batch"), [(1, 8, 16), (30, 8, 16), (30, 8, 64), (100, 8, 64), (100, 16, 64)]
)
def test_few_predictions_find_the_best_where_messages_outweigh_compute(
    tmp_path: Path, slower: float, ranks: int, batch: int
) -> None:
    """Estimates leave out what schedules wait for, which is most of an iteration there. Few are ten a schedule."""
    network = make_network((64, 512, 256, 512, 32, 256, 256, 64))
    levels = [msgspec.structs.replace(level, alpha_s=level.alpha_s * slower) for level in LEVELS]
    write_profile(tmp_path / "p.json", profile_of(network, cluster=Cluster(name="slow", levels=tuple(levels))))
    asked_for = ("--ranks", str(ranks), "--batch", str(batch), "--caps", "1,25")
    few, all_of_them = (
        found(tmp_path / "p.json", *asked_for, "--predictions", str(most)) for most in (10 * len(schedules()), 600)
    )
    assert all_of_them["searched"][0]["open"] == 0
    best, least = (answer["rows"][0]["prediction"]["iteration_s"] for answer in (few, all_of_them))
    assert best == pytest.approx(least, rel=1e-9)


def test_what_is_tried_for_the_best_depends_on_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    levels = [msgspec.structs.replace(level, alpha_s=level.alpha_s * 100) for level in LEVELS]
    profile = tmp_path / "p.json"
    write_profile(profile, profile_of(NETWORK, cluster=Cluster(name="slow", levels=tuple(levels))))
    predict, tried = ranking.Ranker._predict, list[list[int]]()

    def kept(self: ranking.Ranker, predictor: Predictor, candidate: int) -> bool:
        tried[-1].append(candidate)
        return predict(self, predictor, candidate)

    monkeypatch.setattr(ranking.Ranker, "_predict", kept)
    for rows in ("1", "3", "20"):
        tried.append([])
        found(profile, "--ranks", "8", "--batch", "64", "--predictions", "24", "--top", rows)
    few, some, many = (candidates[: 24 - ranking._FOR_ROWS] for candidates in tried)
    assert few == some == many


def test_what_needs_least_is_found_in_few_steps(profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From bytes on, doubling alone takes as many steps as there are powers of two up to what fits."""
    widen, steps = ranking.Ranker._widen, list[float]()

    def counted(self: ranking.Ranker, within: float) -> None:
        steps.append(within)
        widen(self, within)

    monkeypatch.setattr(ranking.Ranker, "_widen", counted)
    answer = asked(profile, "--ranks", "4", "--batch", "16", "--memory", "1KiB")
    assert "the smallest that was found needs" in str(answer.exception)
    assert 1 <= len(steps) <= 4


@pytest.mark.parametrize(
    "fed",
    [
        NO_INPUT,
        InputOptions(preset="naive", io_s=1e-3, h2d_s=5e-4),
        InputOptions(preset="caffe-mpi", prefetch=2, io_s=1e-2, h2d_s=1e-3),
    ],
    ids=["from memory", "naive", "copied ahead"],
)
def test_no_candidate_is_faster_than_its_estimate(profile: Path, fed: InputOptions) -> None:
    costs = CostModel(profile=profile_of(NETWORK), network=NETWORK, input_options=fed)
    space = find_space(NETWORK, PlanSettings(batch=16, blocking=True), 8, (1,))
    shared = SharedWorks(NETWORK, space.settings)
    estimates = Estimates(costs, space, shared).seconds()
    whole = [c for c in range(len(space)) if not space.mesh(c).shared]
    assert len(whole) > 50
    assert {"gpipe", "1f1b", "zb"} <= {
        space.settings_of(c).of(PipelineOptions).schedule for c in whole if space.is_pipelined(c)
    }
    for candidate in whole:
        strategy = str(space.strategies[space.strategy[candidate]])
        exact = exactly(costs, space.settings_of(candidate), strategy)
        assert 0 < estimates[candidate] <= exact * (1 + 1e-9), strategy


def test_images_are_searched_over_blocks_of_positions_too(tmp_path: Path) -> None:
    network = convolutional()
    write_profile(tmp_path / "p.json", profile_of(network))
    answer = found(
        tmp_path / "p.json", "--ranks", "4", "--batch", "8", "--predictions", "400", "--top", "99", model=network.name
    )
    names = {row["prediction"]["strategy"] for row in answer["rows"]}
    assert {"d4", "z1d4"} <= names
    costs = CostModel(profile=profile_of(network), network=network)
    space = find_space(network, PlanSettings(batch=8, blocking=True), 4, (1,))
    kinds = {strategy.name for strategy in space.strategies}
    assert {"data+spatial", "spatial+data", "spatial", "filter+data", "data+filter"} <= kinds
    assert {"s2x2", "s4", "s1x4"} <= {str(strategy) for strategy in space.strategies}
    times = [
        exactly(costs, space.settings_of(candidate), str(space.strategies[space.strategy[candidate]]))
        for candidate in range(len(space))
        if space.cap[candidate] == 0
    ]
    assert answer["rows"][0]["prediction"]["iteration_s"] <= min(times) * (1 + 1e-12)


def test_batches_that_wait_on_the_device_count_against_its_memory(profile: Path) -> None:
    fed = "--preset", "caffe-mpi", "--prefetch", "40", "--io-seconds", "1e-6"
    options = "--ranks", "2", "--batch", "64", "--caps", "1", "--pareto"
    without, beside = (
        {row["prediction"]["strategy"]: row["prediction"]["memory_bytes"] for row in found(profile, *asked_for)["rows"]}
        for asked_for in (options, (*options, *fed))
    )
    # More than all of them need by themselves, and less than some do with the batches.
    limit = max(without.values()) + 1
    assert min(beside.values()) <= limit < max(beside.values())
    answer = found(profile, *options, *fed, "--memory", f"{limit}B")
    assert [row for row in answer["rows"] if row["prediction"]["memory_bytes"] > limit] == []
    assert answer["searched"][0]["too_large"]


def test_where_reading_sets_the_pace_nothing_is_left_open(profile: Path) -> None:
    (searched,) = found(profile, "--ranks", "4", "--batch", "16", "--io-seconds", "5", "--predictions", "12")[
        "searched"
    ]
    assert searched["open"] == 0


def test_strategies_without_measured_messages_are_excluded_naming_their_measurement(tmp_path: Path) -> None:
    path = tmp_path / "reduced.json"
    write_profile(path, make_profile(NETWORK, communication=(ring_fit(), ring_fit("all_gather"))))
    answer = found(path, "--ranks", "2", "--batch", "16")
    names = {row["prediction"]["strategy"] for row in answer["rows"]}
    assert "d2" in names
    assert not names & {"p2", "z2d2", "z3d2"}
    (searched,) = answer["searched"]
    lacking = [text for text in searched["impossible"] if "measure it: paradl-bench collectives" in text]
    assert searched["not_compared"] == {
        "pipeline": "send_recv",
        "ZeRO 1": "broadcast",
        "ZeRO 2": "reduce_scatter",
        "ZeRO 3": "reduce_scatter",
    }
    command = "paradl-bench collectives --ranks 2 --backend gloo --ops broadcast,reduce_scatter,send_recv -o DIR"
    assert searched["measure_command"] == command
    first, second = asked(path, "--ranks", "2", "--batch", "16").output.splitlines()[:2]
    assert first.startswith("Not compared, because the profile lacks their collectives: ")
    assert {"pipeline (send_recv)", "ZeRO 1 (broadcast)"} <= set(first.partition(": ")[2].split(". ")[0].split(", "))
    assert command in second
    assert any("send_recv" in text for text in lacking)
    assert any("reduce_scatter" in text for text in lacking)
    counted = searched["predicted"] + searched["too_slow"] + searched["too_large"] + searched["open"]
    assert counted == searched["candidates"]


def test_strategies_too_large_for_memory_are_excluded_from_the_answer(profile: Path) -> None:
    free = found(profile, "--ranks", "4", "--batch", "16")
    limit = int(free["rows"][0]["prediction"]["memory_bytes"]) - 1
    tight = found(profile, "--ranks", "4", "--batch", "16", "--memory", f"{limit}B")
    assert tight["memory_bytes_per_rank"] == limit
    assert tight["searched"][0]["too_large"] > 0
    assert all(row["prediction"]["fits"] and row["prediction"]["memory_bytes"] <= limit for row in tight["rows"])
    assert tight["rows"][0]["prediction"]["iteration_s"] >= free["rows"][0]["prediction"]["iteration_s"]


def test_plans_of_many_layers_are_not_among_the_leanest(profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With or without a pipeline, layers times micro-batches have a limit there; others have none."""

    def micro_batches(most: int) -> list[int]:
        monkeypatch.setattr(ranking, "_LEAN_LAYERS", most * len(NETWORK.layers))
        words = (
            "--ranks",
            "2",
            "--batch",
            "256",
            "--recompute",
            "none",
            "--pareto",
            "--top",
            "1",
            "--predictions",
            "1",
        )
        commands = [row["predict_command"].split() for row in found(profile, *words)["rows"]]
        given = [dict(itertools.pairwise(command)) for command in commands]
        return [int(each.get("--accumulate") or each.get("--micro-batches") or 1) for each in given]

    (predicted,) = micro_batches(0)
    assert len({count for count in micro_batches(256) if count > 8} - {predicted}) > 1
    assert max({*micro_batches(8)} - {predicted}) == 8


def test_plans_whose_memory_nobody_looked_at_stay_open(profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for = ("--ranks", "8", "--batch", "64", "--recompute", "none", "--pareto")
    leanest = min(row["prediction"]["memory_bytes"] for row in found(profile, *asked_for)["rows"])
    monkeypatch.setattr(ranking, "_MEMORY_FOR_EACH", 1)
    tight = found(profile, *asked_for, "--predictions", "1", "--memory", f"{leanest}B")
    assert all(row["prediction"]["memory_bytes"] <= leanest for row in tight["rows"])
    (searched,) = tight["searched"]
    assert searched["open"] > 0
    counted = searched["predicted"] + searched["too_slow"] + searched["too_large"] + searched["open"]
    assert counted == searched["candidates"]


def test_the_best_is_predicted_with_the_input_that_is_stated(profile: Path) -> None:
    fed = "--io-seconds", "0.5", "--h2d-seconds", "0.01"
    best = found(profile, "--ranks", "2", "--batch", "8", *fed)["rows"][0]["prediction"]
    assert best["iteration_s"] >= 0.5 * (1 - 1e-12)
    options = ["--from-profile", str(profile), "--model", "chain", "--batch", "8", *fed, "--json"]
    options += ["--strategy", best["strategy"], "--bucket-cap-mb", str(best["bucket_cap_bytes"] / 2**20)]
    if best["strategy"].startswith("p"):
        options += ["--schedule", best["options"].get("schedule", "gpipe")]
        options += ["--micro-batches", best["options"].get("micro_batches", "2")]
    result = CliRunner().invoke(group, options)
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)[0]["iteration_s"] == pytest.approx(best["iteration_s"], rel=1e-2)


def test_a_batch_that_excludes_every_strategy_is_named_first(tmp_path: Path) -> None:
    network = convolutional()
    path = tmp_path / "reduced.json"
    write_profile(path, make_profile(network, communication=(ring_fit(),)))
    result = asked(path, "--ranks", "64", "--batch", "10", model=network.name)
    text = str(result.exception)
    assert ": batch 10 is smaller than 64 replicas; give at least 64; " in text
    assert "--recompute" not in text


def test_a_too_small_cluster_is_the_reported_reason(profile: Path, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("name: small\nlevels: [{name: node, ranks: 4}]\n")
    result = asked(profile, "--ranks", "8", "--batch", "16", "--cluster", str(cluster))
    assert str(result.exception) == "8 ranks do not fit cluster 'small', which holds 4"


@pytest.mark.parametrize("text", ["d8", "d4f2", "f2d4", "d2p2f2", "f2p2d2", "p2d2f2", "d2f4", "d32"])
def test_groups_cost_what_collectives_of_a_strategy_cost(text: str) -> None:
    model, strategy = CostModel(profile=profile_of(NETWORK), network=NETWORK), parse_strategy(text)
    costs = GroupCosts(model.communication)
    for index, axis in enumerate(strategy.axes):
        group_ = group_along(strategy, index)
        for size in (4, 4096, 1 << 22):
            operation = "all_reduce"
            work = Collective(operation=operation, message_bytes=size, ranks=axis.degree, axes=(index,))
            alone = model.communication.cost(work, strategy).cost.seconds
            assert costs.seconds(operation, group_, np.array([float(size)]))[0] == pytest.approx(alone)


def test_memory_is_compared_as_the_profile_has_it() -> None:
    made = profile_of(NETWORK)
    assert tensors_within(made, 1000.0) == pytest.approx(1000.0, abs=1.0)


def test_stages_that_share_a_parameter_are_searched(tmp_path: Path) -> None:
    network = convolutional()
    first, *others = network.layers
    owner, last = first.parameters[0], others[-2]
    tied = msgspec.structs.replace(last, parameters=(owner, *last.parameters[1:]))
    dropped = last.parameters[0]
    network = msgspec.structs.replace(
        network,
        layers=(first, *others[:-2], tied, others[-1]),
        parameters=tuple(each for each in network.parameters if each.name != dropped),
        gradient_order=tuple(name for name in network.gradient_order if name != dropped),
    )
    write_profile(tmp_path / "p.json", profile_of(network))
    answer = found(tmp_path / "p.json", "--ranks", "2", "--batch", "8", "--top", "20", model=network.name)
    assert "p2" in {row["prediction"]["strategy"] for row in answer["rows"]}
