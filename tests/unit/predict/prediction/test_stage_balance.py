"""Stages that balance what was measured: from a directory of layers, and from a profile."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")

from profile_factory import layer_times, make_network, make_profile, ring_fit
from synthetic_measurements import ENVIRONMENT

from paradl_bench.core.errors import UserError
from paradl_bench.measure.training.request import TrainingRequest
from paradl_bench.measure.training.stage_balance import with_measured_stages
from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.plan.axes.registry import read_options
from paradl_bench.plan.settings import PlanSettings, plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.ranks.directories.directory import MeasurementDirectory
from paradl_bench.records.measurement import ITERATIONS_FILE, LAYERS_FILE
from paradl_bench.records.samples import IterationSamples, LayerSamples
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.pipeline.axis import PipelineOptions
from paradl_bench.strategies.pipeline.stages import balanced_cuts
from predict.costs.cost_model import CostModel
from predict.prediction.stage_balance import layer_seconds, with_balanced_stages
from predict.workload import Configuration

NETWORK = make_network((64, 128, 256, 256, 32))
EVEN = {layer.name: 1e-3 for layer in NETWORK.layers}
LAST_IS_SLOW = EVEN | {"fc3": 20e-3}


def write(
    path: Path,
    seconds: Mapping[str, float] = LAST_IS_SLOW,
    *,
    network: ModelGraph = NETWORK,
    batch: int = 4,
    ranks_on_host: int = 2,
    between_s: float = 0.0,
) -> Path:
    """A directory of layers whose forward takes so long, and backward twice that."""
    directory = MeasurementDirectory.open(
        path, kind="layers", arguments={}, command_line=("paradl-bench", "layers"), environment=ENVIRONMENT
    )
    about = {"model": network.name, "batch": batch, "dtype": "fp32", "ranks_on_host": ranks_on_host, "rank": 0}
    directory.append(
        LAYERS_FILE,
        [
            LayerSamples(
                **about,
                layer=layer.name,
                operation=layer.operation,
                phase=phase,
                mode="in_situ",
                block=0,
                samples_s=(0.5 * times * seconds[layer.name], times * seconds[layer.name], 9.0),
            )
            for layer in network.layers
            for phase, times in (("FW", 1), ("BW", 2))
        ],
    )
    fields = [
        name for name in IterationSamples.__struct_fields__ if name.endswith("_s") and name != "wu_instrumented_s"
    ]
    known = dict.fromkeys(fields, (1.0,)) | dict.fromkeys(("fw_between_s", "bw_between_s"), (between_s,))
    directory.append(ITERATIONS_FILE, [IterationSamples(**about, optimizer="sgd", block=0, **known)])
    return path


def request(balance: Path | str | None, strategy: str = "p2", **changes: object) -> TrainingRequest:
    settings = {"model": NETWORK.name, "input_shape": None, "batch": 8, "device": "cpu"} | changes
    axes, others = read_options(settings)
    return TrainingRequest(
        strategy=parse_strategy(strategy), balance=None if balance is None else str(balance), axes=axes, **others
    )


def cut(path: Path, strategy: str = "p2", **changes: object) -> TrainingRequest:
    return with_measured_stages(request(path, strategy, **changes), NETWORK)


def stages_of(found: TrainingRequest) -> tuple[str, ...]:
    return found.settings.of(PipelineOptions).stages


def test_stages_balance_measured_seconds_and_not_flops(tmp_path: Path) -> None:
    by_flops = NETWORK.layers[balanced_cuts(NETWORK, 2)[0]].name
    assert by_flops == "fc2"
    assert stages_of(cut(write(tmp_path / "slow"))) == ("fc3",)
    assert stages_of(cut(write(tmp_path / "even", EVEN))) == ("fc2",)
    assert stages_of(cut(tmp_path / "slow", "p2f2")) == ("fc3",)
    assert len(stages_of(cut(tmp_path / "slow", "p2", schedule="interleaved"))) == 3


def test_time_between_operations_counts(tmp_path: Path) -> None:
    """Ten operations of equal share outweigh a slow one, if enough passes between them."""
    assert stages_of(cut(write(tmp_path / "layers", between_s=10.0))) == ("fc2",)


def test_measured_stages_are_a_setting_whose_source_the_plan_names(tmp_path: Path) -> None:
    found = cut(write(tmp_path / "layers"))
    assert found.balance is None
    plan = planner_for(found.strategy).plan(NETWORK, found.strategy, found.settings)
    assert f"cut by measured seconds of {tmp_path / 'layers'}, batch 4, 2 ranks on the host;" in plan.notes[0]
    assert with_measured_stages(found, NETWORK) is found
    of_flops = planner_for(found.strategy).plan(NETWORK, found.strategy, PlanSettings(batch=8))
    assert "stages start at fc2, cut by FLOPs; 2 micro-batches" in of_flops.notes[0]
    given = planner_for(found.strategy).plan(NETWORK, found.strategy, plan_settings(batch=8, stages=("fc1",)))
    assert "cut by --stages" in given.notes[0]


def test_the_nearest_batch_and_ranks_on_the_host_count(tmp_path: Path) -> None:
    directory = tmp_path / "layers"
    for batch, ranks_on_host, seconds in ((64, 2, EVEN), (8, 1, EVEN), (4, 2, LAST_IS_SLOW)):
        write(directory, seconds, batch=batch, ranks_on_host=ranks_on_host)
    assert stages_of(cut(directory)) == ("fc3",)
    assert stages_of(cut(directory, batch=128)) == ("fc2",)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ("nothing", "it does not exist"),
        ("file", "is a file: give a directory of paradl-bench layers"),
        ("another model", "holds layers in fp32 of other, none of chain"),
        ("another shape", r"layer fc0 of chain is linear\(64;.* and it measured linear\(32;"),
    ],
)
def test_what_does_not_fit_is_one_line(tmp_path: Path, made: str, message: str) -> None:
    path = tmp_path / "layers"
    if made == "file":
        path.write_text("{}")
    elif made == "another model":
        write(path, network=make_network((64, 128, 256, 256, 32), name="other"))
    elif made == "another shape":
        write(path, network=make_network((32, 128, 256, 256, 32)))
    with pytest.raises(UserError, match=message) as refused:
        cut(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("strategy", "changes", "message"),
    [
        ("d2", {"balance": "x"}, "--balance is for pipelines; strategy d2 has no pipeline"),
        ("d2", {"balance": None, "stages": "fc1"}, "--stages is for pipeline parallelism, not for d2"),
        ("p2", {"balance": "x", "stages": "fc1"}, "--balance finds the stages that --stages gives"),
    ],
)
def test_without_use_it_is_refused(strategy: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        request(strategy=strategy, **changes).check()  # type: ignore[arg-type]


# From a profile


def model_of(slow: str, point: Configuration) -> CostModel:
    """Of a profile that holds the whole layers and those that ranks of the point run."""

    def seconds(layer: Layer, phase: str, batch: int) -> float:
        return batch * (20e-3 if layer.name == slow else 1e-3) * (1 if phase == "FW" else 2)

    plan = planner_for(point.strategy).plan(NETWORK, point.strategy, point.settings)
    shards = tuple(msgspec.structs.replace(layer, inputs=("input",)) for layer, _ in plan.sharded)
    known = {layer.operation for layer in NETWORK.layers}
    network = msgspec.structs.replace(NETWORK, layers=tuple(layer for layer in shards if layer.operation not in known))
    profile = make_profile(
        NETWORK,
        layer_times=(*layer_times(NETWORK, seconds=seconds), *layer_times(network, seconds=seconds)),
        communication=tuple(map(ring_fit, ("all_reduce", "all_gather", "send_recv"))),
    )
    return CostModel(profile=profile, network=NETWORK)


@pytest.mark.parametrize("strategy", ["p2", "d2p2", "p2f2", "p2c2"])
def test_a_profile_cuts_by_its_seconds(strategy: str) -> None:
    point = Configuration(strategy=parse_strategy(strategy), settings=PlanSettings(batch=8))
    model = model_of("fc3", point)
    found = with_balanced_stages(model, point).settings
    assert (found.of(PipelineOptions).stages, found.of(PipelineOptions).cut_by) == (("fc3",), "seconds of the profile")
    seconds = dict(zip((layer.name for layer in NETWORK.layers), layer_seconds(model, point), strict=True))
    assert seconds["fc3"] > 10 * seconds["fc1"] > 0
    alone = Configuration(strategy=parse_strategy("d2"), settings=PlanSettings(batch=8))
    assert with_balanced_stages(model, alone) is alone
