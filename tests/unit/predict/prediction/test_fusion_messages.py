"""Messages of a fusion that a run exchanges by: found, written to a file, refused, and predicted as they ran."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from profile_factory import (
    affine_seconds,
    layer_times,
    make_network,
    make_profile,
    model_times,
    write_training_run,
)

from calibrate.profile.profile import Profile, write_profile
from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import ModelGraph, Tensor
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import BucketCopy, Collective
from paradl_bench.strategies.data.fusion.fusion_file import FusionFile, parse_fusion
from paradl_bench.strategies.data.fusion.rules import Fusion, Rule
from paradl_bench.strategies.exchange.messages import messages_of
from paradl_bench.strategies.exchange.options import ExchangeOptions
from predict.cli import group
from predict.costs.cost_model import CostModel
from predict.prediction.prediction import Prediction, Predictor
from predict.simulation.prepared import price
from predict.validation.diagnosis.of_run import options_of_run
from predict.validation.runs import read_runs
from predict.validation.validation import validate_runs
from predict.workload import Configuration, evaluator_named

NETWORK = make_network((64, 128, 256, 32))
LAYERS = tuple(4 * (rows * columns + columns) for rows, columns in ((256, 32), (128, 256), (64, 128)))
"""Bytes of the gradients of each layer, in the order of backward."""


def profile_of(network: ModelGraph) -> Profile:
    return make_profile(
        network,
        layer_times=layer_times(network, seconds=affine_seconds),
        model_times=model_times(network, seconds=affine_seconds, between_s=1e-4),
    )


PROFILE = profile_of(NETWORK)


def settings_of(messages: tuple[int, ...]) -> PlanSettings:
    return PlanSettings(batch=16, axes=(ExchangeOptions(fused_bytes=messages, fused_by="ada, some messages"),))


def predicted(settings: PlanSettings, evaluator: str, fusion: Fusion | None = None) -> Prediction:
    costs = CostModel(profile=PROFILE, network=NETWORK, fusion=fusion)
    return Predictor(costs, evaluator_named(evaluator)).predict(
        Configuration(strategy=parse_strategy("d4"), settings=settings)
    )


@pytest.mark.parametrize(
    ("asked", "sizes", "words"),
    [
        (("none", None), LAYERS, "none, 3 messages"),
        (("buffer", None), (sum(LAYERS),), "buffer of 64.0 MiB, 1 message"),
        (("buffer", str(LAYERS[0] + LAYERS[1])), (LAYERS[0] + LAYERS[1], LAYERS[2]), "buffer of "),
        (("buffer", "1"), LAYERS, "buffer of 1 B, 3 messages"),
    ],
)
def test_rules_without_costs_find_their_messages(
    asked: tuple[str, str | None], sizes: tuple[int, ...], words: str
) -> None:
    fusion = parse_fusion(*asked)
    assert fusion is not None
    assert fusion.messages(NETWORK) == sizes
    assert fusion.words(len(sizes)).startswith(words)


def test_a_message_holds_whole_layers_in_order() -> None:
    messages = messages_of(NETWORK, (LAYERS[0] + LAYERS[1], LAYERS[2]))
    assert [sorted(parameter.name for parameter in message) for message in messages] == [
        ["fc1.bias", "fc1.weight", "fc2.bias", "fc2.weight"],
        ["fc0.bias", "fc0.weight"],
    ]


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((LAYERS[0] - 4, 4), "message 1 has 32892 bytes, and gradients of whole layers of chain have 32896"),
        (LAYERS[:2], "33280 bytes of the gradients of chain are in no message"),
        ((*LAYERS, 8), "message 4 has 8 bytes, and gradients of whole layers of chain have 0"),
    ],
)
def test_messages_of_another_model_are_refused(sizes: tuple[int, ...], said: str) -> None:
    with pytest.raises(UserError, match=said):
        messages_of(NETWORK, sizes)


def test_a_message_of_several_dtypes_is_refused() -> None:
    halves = [p if "bias" in p.name else Tensor(name=p.name, shape=p.shape, dtype="bf16") for p in NETWORK.parameters]
    mixed = msgspec.structs.replace(NETWORK, parameters=tuple(halves))
    with pytest.raises(UserError, match="message 1 would mix bf16 and fp32"):
        messages_of(mixed, (2 * 256 * 32 + 4 * 32,))


@pytest.mark.parametrize("rule", ["none", "ada", "mg-wfbp"])
def test_a_planned_run_takes_what_osf_says(rule: Rule) -> None:
    """Copies are free here, nothing interferes and no rank is late, as the closed form has it."""
    plain = PlanSettings(batch=16)
    costs = CostModel(profile=PROFILE, network=NETWORK, fusion=Fusion(rule=rule))
    messages = costs.buffers(Fusion(rule=rule), parse_strategy("d4"), plain).bytes
    by_rule = predicted(plain, "osf", Fusion(rule=rule))
    for evaluator in ("simulate", "osf"):
        assert predicted(settings_of(messages), evaluator).iteration_s == pytest.approx(by_rule.iteration_s, rel=1e-9)
    assert any("ada, some messages: " in note for note in predicted(settings_of(messages), "osf").provenance.notes)


def test_the_plan_sends_each_message_once() -> None:
    messages = (LAYERS[0] + LAYERS[1], LAYERS[2])
    point = Configuration(strategy=parse_strategy("d4"), settings=settings_of(messages))
    plan = price(CostModel(profile=PROFILE, network=NETWORK), point).plan
    works = [plan.works[work] for work in plan.roles[0].work.tolist()]
    assert [work.message_bytes for work in works if isinstance(work, Collective)] == list(messages)
    out = [work.bytes for work in works if isinstance(work, BucketCopy) and work.direction == "out"]
    assert out == list(messages)
    assert {when: size for when, operation, size, _ in plan.roles[0].setup if operation == "broadcast"} == {
        "setup": sum(LAYERS)
    }


def predict(folder: Path, *arguments: str) -> Result:
    path = folder / "profile.json"
    write_profile(path, PROFILE)
    line = ("--from-profile", str(path), "--model", "chain", "--batch", "16", *arguments)
    return CliRunner().invoke(group, line, standalone_mode=False)


@pytest.mark.parametrize("rule", ["none", "buffer", "ada", "mg-wfbp"])
def test_predict_writes_messages_that_a_run_reads(tmp_path: Path, rule: Rule) -> None:
    path = tmp_path / "messages.json"
    found = predict(tmp_path, "--strategy", "d4", "--fusion", rule, "--fusion-out", str(path))
    assert found.exception is None, found.output
    file = msgspec.json.decode(path.read_bytes(), type=FusionFile)
    assert (file.model, file.strategy, file.batch, file.rule) == ("chain", "d4", 16, rule)
    costs = CostModel(profile=PROFILE, network=NETWORK)
    assert file.messages_bytes == costs.buffers(Fusion(rule=rule), parse_strategy("d4"), PlanSettings(batch=16)).bytes
    fusion = parse_fusion(str(path), None)
    assert fusion is not None
    assert fusion.messages(NETWORK) == file.messages_bytes
    assert fusion.words(2) == f"{rule} (file), 2 messages"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--strategy", "d4"), "--fusion-out needs --fusion none, buffer, ada or mg-wfbp"),
        (("--strategy", "d4", "--fusion", "ddp"), "--fusion-out needs --fusion none"),
        (("--strategy", "d2,d4", "--fusion", "ada"), "--fusion-out takes one strategy and batch, not 2"),
        (("--strategy", "serial", "--fusion", "ada"), "--fusion is for data parallelism alone"),
        (("--strategy", "f2", "--fusion", "ada"), "--fusion is for data parallelism alone"),
        (("--strategy", "d4", "--fusion", "ada", "--accumulate", "2"), "knows no --accumulate"),
    ],
)
def test_what_has_no_messages_is_not_written(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    path = tmp_path / "messages.json"
    found = predict(tmp_path, *arguments, "--fusion-out", str(path))
    assert said in str(found.exception)
    assert not path.exists()


def test_messages_replace_no_file_and_take_no_output(tmp_path: Path) -> None:
    path = tmp_path / "messages.json"
    path.write_text("kept")
    fused = ("--strategy", "d4", "--fusion", "ada", "--fusion-out")
    assert "exists; give --force" in str(predict(tmp_path, *fused, str(path)).exception)
    assert path.read_text() == "kept"
    assert "--fusion-out -: standard output is taken by the predictions" in str(
        predict(tmp_path, *fused, "-").exception
    )


def test_validation_takes_a_run_with_its_messages(tmp_path: Path) -> None:
    write_profile(tmp_path / "profile.json", PROFILE)
    rows = [[(1e-3, 2e-3, 1e-4, 1e-4)] * 12] * 4
    messages = {"one": (sum(LAYERS),), "each": LAYERS}
    runs = [
        write_training_run(
            tmp_path / name,
            NETWORK,
            strategy="d4",
            ranks=4,
            phases_s=rows,
            axis_options={"fused_bytes": sizes, "fused_by": f"{name}, of a test"},
        )
        for name, sizes in messages.items()
    ]
    report = validate_runs(tmp_path / "profile.json", runs, cluster_path=None, force=True)
    found = {Path(pair.run).name: pair for pair in report.pairs if pair.evaluator == "simulate"}
    for name, sizes in messages.items():
        assert found[name].options == {"fused_by": f"{name}, of a test"}
        assert found[name].predicted_s == pytest.approx(predicted(settings_of(sizes), "simulate").iteration_s)
    assert found["one"].predicted_s != found["each"].predicted_s
    ((read,), _) = read_runs([runs[0]])
    with pytest.raises(UserError, match="the run used --fusion one, of a test, and remedies are not tried with fusion"):
        options_of_run(read, {}, knows_input=False)


def test_a_run_whose_messages_are_no_sizes_is_refused(tmp_path: Path) -> None:
    rows = [[(1e-3, 2e-3, 1e-4, 1e-4)] * 12] * 2
    run = write_training_run(tmp_path / "run", NETWORK, phases_s=rows)
    document = json.loads((run / "run.json").read_text())
    for wrong in ("x", [0], [-1], [1.5], ["8"], 8, [], [1 << 80]):
        document["axis_options"] = {"fused_bytes": wrong, "fused_by": "none"}
        (run / "run.json").write_text(json.dumps(document))
        with pytest.raises(UserError, match=r"run\.json"):
            read_runs([run])
