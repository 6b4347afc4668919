"""Activations that are computed again: segments, plans, prices and memory against sums by hand."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import msgspec
import pytest
from in_process import run_in_process
from network_factory import NetworkFactory
from profile_factory import linear_seconds, make_profile

from calibrate.profile.profile import Profile
from paradl_bench.core.errors import UserError
from paradl_bench.core.files.storage import encode_pretty
from paradl_bench.core.units import parse_recompute
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.models.traced_networks import traced_network
from paradl_bench.plan.settings import PlanSettings, plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Compute, Phase, Plan
from paradl_bench.strategies.memory.of_plan import memory_of_plan
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.passes.recomputation import segments_of
from predict.cli import main
from predict.costs.cost_model import CostModel
from predict.prediction.prediction import Prediction, Predictor
from predict.workload import Configuration, evaluator_named

BATCH = 8


def sequence(*names: str, width: int = 8) -> ModelGraph:
    """3x3 convolutions of equal width, by name, one after the other, and a loss."""
    factory = NetworkFactory(width, 16, 16)
    for name in names:
        factory.conv(name, width, 3, padding=1)
    factory.flatten("flatten")
    factory.loss()
    return factory.network("chain")


BLOCKS = sequence("stem", "body.0.one", "body.0.two", "body.1.one", "body.1.two", "body.1.three", "head")


def found(network: ModelGraph, *recompute: str) -> list[tuple[str, range]]:
    settings = PlanSettings(batch=BATCH, recompute=recompute)
    return [(segment.name, segment.layers) for segment in segments_of(network, settings)]


def planned(strategy: str, network: ModelGraph = BLOCKS, **settings: Any) -> Plan:
    parsed = parse_strategy(strategy)
    return planner_for(parsed).plan(network, parsed, plan_settings(batch=BATCH, **settings))


def test_blocks_are_what_numbers_name() -> None:
    assert found(BLOCKS, "all") == [("body.0", range(1, 3)), ("body.1", range(3, 6))]
    assert found(BLOCKS) == []


def test_a_sequence_of_operations_splits_into_square_root_many_segments() -> None:
    network = sequence(*(f"features.{n}" for n in range(9)))
    runs = [("features.0:3", range(3)), ("features.3:6", range(3, 6)), ("features.6:9", range(6, 9))]
    assert found(network, "all") == runs
    assert found(network, *(name for name, _ in runs)) == runs


def test_names_patterns_and_slices() -> None:
    assert found(BLOCKS, "body.*") == found(BLOCKS, "all")
    assert found(BLOCKS, "body") == [("body", range(1, 6))]
    assert found(BLOCKS, "head", "body.1") == [("body.1", range(3, 6)), ("head", range(6, 7))]
    assert found(BLOCKS, "body.1:2") == [("body.1:2", range(3, 6))]


def test_attention_is_the_innermost_modules_that_call_one() -> None:
    network = traced_network("gpt2")
    assert network is not None
    assert [name for name, _ in found(network, "attention")] == [f"transformer.h.{n}.attn" for n in range(12)]
    with pytest.raises(UserError, match="--recompute attention: chain has no modules that call an attention of torch"):
        found(BLOCKS, "attention")


@pytest.mark.parametrize(
    ("recompute", "message"),
    [
        (("tail",), "tail: chain has no such module; it has body"),
        (("body.0", "body.0:2"), "body.0 and body.0:2 share operations"),
        (("body.4:6",), "has no such module"),
        (("body.2:1",), "write a run of a sequence's children as features.3:8"),
    ],
)
def test_what_is_no_segment_is_refused(recompute: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        found(BLOCKS, *recompute)


def changed_in_place(network: ModelGraph, name: str) -> ModelGraph:
    layers = tuple(
        msgspec.structs.replace(layer, attributes={**layer.attributes, "in_place": True})
        if layer.name == name
        else layer
        for layer in network.layers
    )
    return msgspec.structs.replace(network, layers=layers)


def test_what_is_changed_in_place_is_not_computed_again() -> None:
    starts_in_place = changed_in_place(BLOCKS, "body.1.one")
    with pytest.raises(UserError, match=r"body\.1\.one changes in place what it is given"):
        found(starts_in_place, "body.1")
    assert found(starts_in_place, "all")[0] == ("body.0", range(1, 3))
    assert found(changed_in_place(BLOCKS, "body.0.two"), "body.0") == [("body.0", range(1, 3))]
    runs = changed_in_place(sequence(*(f"features.{n}" for n in range(9))), "features.3")
    assert [name for name, _ in found(runs, "all")] == ["features.0:4", "features.4:6", "features.6:9"]


def test_what_somebody_else_changes_in_place_is_not_read_again() -> None:
    factory = NetworkFactory(8, 16, 16)
    given = factory.conv("stem", 8, 3, padding=1)
    factory.conv("body.0.one", 8, 3, padding=1)
    factory.conv("body.0.two", 8, 3, padding=1)
    factory.relu("act", given)
    factory.flatten("flatten")
    factory.loss()
    network = changed_in_place(factory.network("aside"), "act")
    with pytest.raises(UserError, match="act changes in place what it reads"):
        found(network, "body.0")


@pytest.mark.parametrize(
    ("strategy", "settings", "message"),
    [
        ("p2", {"schedule": "zb", "recompute": ("all",)}, "--recompute with --schedule zb: torch computes"),
        ("z3d2", {"recompute": ("body",)}, "--recompute body runs body.0 again, whose parameters are gathered"),
    ],
)
def test_what_cannot_run_is_refused(strategy: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        planned(strategy, **settings)


def again_by_rank(network: ModelGraph, **settings: Any) -> list[Counter[str]]:
    """Per role, how often forward of each layer runs in backward."""
    plan = planned("p2", network, micro_batches=2, **settings)
    found = []
    for role in plan.roles:
        works = ((plan.works[work], phase) for work, phase in zip(role.work, role.phase, strict=True))
        found.append(Counter(w.layer for w, p in works if isinstance(w, Compute) and w.phase == "FW" and p == Phase.BW))
    return found


def test_each_stage_computes_its_part_of_a_segment_again() -> None:
    parted = again_by_rank(BLOCKS, recompute=("body.0", "body.1"), stages=("body.1.two",))
    assert parted == [{"body.0.one": 2, "body.0.two": 2, "body.1.one": 2}, {"body.1.two": 2, "body.1.three": 2}]
    assert again_by_rank(BLOCKS, recompute=("body.0",), stages=("body.1.two",)) == [
        {"body.0.one": 2, "body.0.two": 2},
        {},
    ]


def test_text_of_the_option() -> None:
    assert parse_recompute(None) == parse_recompute("none") == ()
    assert parse_recompute("all") == parse_recompute("full") == ("all",)
    assert parse_recompute("selective") == ("attention",)
    assert parse_recompute("layer1.*, head") == ("layer1.*", "head")
    for wrong in ("", "a,,b", "all,head", "none,all"):
        with pytest.raises(UserError, match="--recompute"):
            parse_recompute(wrong)


def computed(plan: Plan) -> list[tuple[str, str, str]]:
    role = plan.roles[0]
    works = ((plan.works[work], Phase(phase).name) for work, phase in zip(role.work, role.phase, strict=True))
    return [(work.layer, work.phase, phase) for work, phase in works if isinstance(work, Compute)]


@pytest.mark.parametrize("strategy", ["serial", "d2", "f2", "s2", "z2d2", "z3d2"])
def test_a_segment_runs_again_when_backward_comes_to_it(strategy: str) -> None:
    kept, again = computed(planned(strategy)), computed(planned(strategy, recompute=("body.1", "stem")))
    names = ["body.1.one", "body.1.two", "body.1.three"]
    assert Counter(again) - Counter(kept) == Counter((name, "FW", "BW") for name in (*names, "stem"))
    at = again.index(("body.1.three", "BW", "BW"))
    assert again[at - 3 : at] == [(name, "FW", "BW") for name in names]


@pytest.mark.parametrize("strategy", ["f2", "c2", "s2"])
def test_its_communication_is_issued_again_in_backward(strategy: str) -> None:
    kept, again = (planned(strategy, recompute=recompute) for recompute in ((), ("body.1",)))
    of_three = planned(strategy).communication(phases=(Phase.FW,))
    found_more = Counter(again.of_layers()) - Counter(kept.of_layers())
    assert again.communication(phases=(Phase.FW,)) == of_three
    assert sum(found_more.values()) == 3
    assert set(found_more) <= set(of_three)


def predicted(profile: Profile, strategy: str = "serial", evaluator: str = "simulate", **options: Any) -> Prediction:
    model = CostModel(profile=profile, network=profile.network["chain"])
    settings = plan_settings(batch=BATCH, **options)
    point = Configuration(strategy=parse_strategy(strategy), settings=settings)
    return Predictor(model, evaluator_named(evaluator)).predict(point)


def test_backward_takes_the_forward_of_what_is_computed_again_longer() -> None:
    profile = make_profile(BLOCKS)
    kept, again = predicted(profile), predicted(profile, recompute=("body", "stem", "head"))
    more_s = sum(linear_seconds(layer, "FW", BATCH) for layer in BLOCKS.layers if layer.kind == "conv")
    assert again.time.phases_s["FW"] == pytest.approx(kept.time.phases_s["FW"])
    assert again.time.phases_s["BW"] == pytest.approx(kept.time.phases_s["BW"] + more_s)
    assert again.use.model_flops == kept.use.model_flops
    assert again.options == {"recompute": "body,stem,head"}


@pytest.mark.parametrize("evaluator", ["paradl", "osf", "csf", "dag"])
def test_closed_forms_say_that_they_know_none(evaluator: str) -> None:
    with pytest.raises(UserError, match=f"{evaluator} cannot predict --recompute all: give --evaluator simulate"):
        predicted(make_profile(BLOCKS), "d2", evaluator, recompute=("all",))


def test_a_segment_keeps_its_input_and_recomputes_the_rest() -> None:
    network = sequence("first", *(f"body.{n}" for n in range(9)))
    output = 8 * 16 * 16 * 4 * BATCH
    use = {
        recompute: memory_of_plan(network, parse_strategy("serial"), PlanSettings(batch=BATCH, recompute=recompute))
        for recompute in ((), ("body.0:3", "body.3:6", "body.6:9"))
    }
    kept, again = (each.parts_bytes["activations"] for each in use.values())
    # Kept: outputs of all ten convolutions are there, and two gradients, at the last; again: the inputs of three
    # segments, the outputs inside of one, and two gradients, when the last operation of a segment runs backward.
    assert kept == (10 + 1) * output
    assert again == (3 + 2 + 2) * output


def predict(where: Path, *arguments: str) -> CompletedProcess[str]:
    return run_in_process(where, *arguments, main=main, program="predict")


def test_predict_takes_it_as_a_user_gives_it(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_bytes(encode_pretty(make_profile(BLOCKS)))
    common = ("--from-profile", "profile.json", "--model", "chain", "--strategy", "d2", "--batch", "8")
    done = predict(tmp_path, *common, "--recompute", "all", "-o", "found.json")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "found.json").read_text())[0]["options"] == {"recompute": "all"}
    refused = predict(tmp_path, *common, "--recompute", "tail")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
