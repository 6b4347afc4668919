"""ParaDL's closed forms of shared layers: against sums by hand, the simulation, and what the paper's tool printed."""

from __future__ import annotations

import math

import pytest
from network_factory import NetworkFactory
from profile_factory import layer_times, make_profile, model_times, ring_fit
from recorded_logs import public_data

from calibrate.profile.profile import Profile
from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.records.cluster import Cluster, Level
from paradl_bench.strategies.memory.paradl import paradl_memory
from predict.costs.cost_model import CostModel
from predict.prediction.prediction import Prediction, Predictor
from predict.workload import Configuration, evaluator_named

ALPHA_S, BETA = 50e-6, 1e-9
BATCH, SAMPLE_S, UPDATE_S = 8, 1e-3, 3e-3


def seconds(layer: Layer, phase: str, batch: int) -> float:
    return batch * SAMPLE_S


def profile_of(network: ModelGraph) -> Profile:
    return make_profile(
        network,
        layer_times=layer_times(network, seconds=seconds),
        model_times=model_times(network, seconds=seconds, wu_s=UPDATE_S),
        communication=tuple(ring_fit(name) for name in ("all_reduce", "all_gather", "send_recv")),
    )


def predicted(network: ModelGraph, strategy: str, evaluator: str = "paradl", **settings: object) -> Prediction:
    costs = CostModel(profile=profile_of(network), network=network)
    point = Configuration(strategy=parse_strategy(strategy), settings=plan_settings(batch=BATCH, **settings))
    return Predictor(costs, evaluator_named(evaluator)).predict(point)


def convolutional() -> ModelGraph:
    """4x16x16 -> conv 8 -> relu -> conv 12 -> pool 2 -> flatten -> fc 6."""
    factory = NetworkFactory(4, 16, 16)
    factory.conv("conv1", 8)
    factory.relu("relu")
    factory.conv("conv2", 12)
    factory.pool("pool", 2)
    factory.flatten("flatten")
    factory.linear("fc", 6)
    factory.loss()
    return factory.network("convolutional")


NETWORK = convolutional()
WEIGHTS = 4 * (8 * 4 * 9 + 8 + 12 * 8 * 9 + 12 + 6 * 12 * 64 + 6)
# What conv1 and conv2 make of a sample; the last layer's output is not in the sums.
OUTPUTS = 4 * 256 * (8 + 12)


def layers(samples: int) -> float:
    return 2 * len(NETWORK.layers) * samples * SAMPLE_S


def collectives(ranks: int, samples: int) -> float:
    return 3 * (ranks - 1) * (2 * ALPHA_S + samples * OUTPUTS / ranks * BETA)


def all_reduce(ranks: int, size: float) -> float:
    return 2 * (ranks - 1) * (ALPHA_S + size / ranks * BETA)


@pytest.mark.parametrize("kind", ["f", "c"])
def test_filter_and_channel_by_hand(kind: str) -> None:
    alone, nested = predicted(NETWORK, f"{kind}4"), predicted(NETWORK, f"d2{kind}4")
    assert alone.iteration_s == pytest.approx(layers(BATCH) / 4 + UPDATE_S / 4 + collectives(4, BATCH), rel=1e-9)
    expected = layers(4) / 4 + UPDATE_S / 4 + collectives(4, 4) + all_reduce(2, WEIGHTS / 4)
    assert nested.iteration_s == pytest.approx(expected, rel=1e-9)
    assert sum(nested.time.breakdown_s.values()) - nested.time.breakdown_s["exposed_communication"] == pytest.approx(
        expected
    )
    gather = 3 * (2 * ALPHA_S + 4 * OUTPUTS / 4 * BETA)
    assert alone.time.breakdown_s["all_gather"] == pytest.approx(3 * (2 * ALPHA_S + BATCH * OUTPUTS / 4 * BETA))
    assert nested.time.breakdown_s["all_gather"] == pytest.approx(gather)


def test_named_layers_are_split_and_the_others_run_whole() -> None:
    found = predicted(NETWORK, "f2", split=("conv1",))
    whole = len(NETWORK.layers) - 1
    expected = 2 * BATCH * SAMPLE_S * (whole + 1 / 2) + UPDATE_S / 2 + 3 * (ALPHA_S + BATCH * 4 * 256 * 8 / 2 * BETA)
    assert found.iteration_s == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("strategy", "groups"), [("s2", 1), ("d2s2", 2)])
def test_spatial_by_hand(strategy: str, groups: int) -> None:
    samples, ranks = BATCH // groups, 2 * groups
    # Rows of 16: of conv1's 4 and 8 channels, of conv2's 8 and 12. The pool's window is 2: one row of 16 in, of 8 out.
    slabs = [4 * 16, 8 * 16, 8 * 16, 12 * 16, 12 * 16, 12 * 8]
    halos = 2 * sum(ALPHA_S + samples * 4 * slab * BETA for slab in slabs)
    expected = layers(samples) / 2 + UPDATE_S + halos + all_reduce(ranks, WEIGHTS)
    found = predicted(NETWORK, strategy)
    assert found.iteration_s == pytest.approx(expected, rel=1e-9)
    assert found.time.breakdown_s["halo"] == pytest.approx(halos)


@pytest.mark.parametrize("strategy", ["f2", "c2", "d2f2", "d2c2"])
def test_simulating_equal_shares_adds_communication_behind_the_last_layer(strategy: str) -> None:
    """A chain of fully connected layers: all of it is split, and the run gathers or sums its output as well."""
    factory = NetworkFactory(64)
    for number, width in enumerate((32, 128, 16)):
        factory.linear(f"fc{number}", width)
    network = factory.network("chain")
    simulated = predicted(network, strategy, "proportional", first_bucket_bytes=1 << 40, bucket_cap_bytes=1 << 40)
    paradl = predicted(network, strategy)
    last = BATCH // (2 if "d" in strategy else 1) * 16 * 4
    behind = ALPHA_S + last / 2 * BETA if "f" in strategy else 2 * (ALPHA_S + last / 2 * BETA)
    assert simulated.time.phases_s["FW"] - paradl.time.phases_s["FW"] == pytest.approx(behind, rel=1e-6)
    assert simulated.time.phases_s["BW"] == pytest.approx(paradl.time.phases_s["BW"], rel=1e-9)


def test_memory_is_the_paper_s_row() -> None:
    layers_of_paper = [layer for layer in NETWORK.layers if layer.kind != "view"]
    elements = sum(layer.input_elements + layer.output_elements for layer in layers_of_paper)
    bias = 4 * (8 + 12 + 6)
    rows = {
        "f2": 2 * BATCH * 4 * elements + (WEIGHTS - bias) + bias,
        "d2c2": BATCH * 4 * elements + (WEIGHTS - bias) + bias,
        "s2": BATCH * 4 * elements + 2 * (WEIGHTS - bias) + bias,
        "d2s2": BATCH * 2 * elements + 2 * (WEIGHTS - bias) + bias,
    }
    for strategy, expected in rows.items():
        assert predicted(NETWORK, strategy).memory.memory_bytes == expected, strategy
    assert paradl_memory(NETWORK, BATCH, rho=0.5).peak_bytes == pytest.approx(
        paradl_memory(NETWORK, BATCH).peak_bytes / 2
    )
    with pytest.raises(ValueError, match="reuse factor"):
        paradl_memory(NETWORK, BATCH, rho=0)


# What the paper's own tool printed


def vgg16() -> ModelGraph:
    """VGG16 on 3x226x226 as the tool has it: pools round up, no biases, activations between the last layers alone."""
    factory = NetworkFactory(3, 226, 226)
    channels, extent, number = 3, 226, 0
    for filters, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            number += 1
            factory.conv(f"conv{number}", filters, bias=False)
        channels, extent = filters, math.ceil(extent / 2)
        read = factory._read(factory._last)
        name = f"pool{number}"
        factory.call(name, "max_pool2d", (read, 2, 2, 0, 1, True), (channels, extent, extent), (factory._last,))
    factory.flatten("flatten")
    for number, width in enumerate((4096, 4096, 1000)):
        factory.linear(f"fc{number}", width, bias=False)
        if number < 2:
            factory.relu(f"act{number}")
    return factory.network("vgg16")


def printed_rows() -> list[list[str]]:
    text = (public_data() / "paradl-projections" / "README.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith(("| serial |", "| data |", "| filter, channel |"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


SAMPLES = 1_280_000
TOTAL_S, OF_CONVOLUTIONS = 0.008245589, 0.9643879837
LEVELS = (("node", 4, 9e-6, 2e-11), ("leaf", 68, 3.031e-5, 8e-11), ("rack", 136, 3.049e-5, 8e-11))
LEVELS += (("system", 4096, 3.098e-5, 8e-11),)


def test_the_tool_s_projections_are_reproduced() -> None:
    rows = printed_rows()
    assert len(rows) == 16
    network = vgg16()
    convolutions = [layer for layer in network.layers if layer.kind == "conv"]
    assert len(convolutions) == 13

    def shared_out(layer: Layer, phase: str, batch: int) -> float:
        of_kind, count = OF_CONVOLUTIONS, len(convolutions)
        if layer.kind != "conv":
            of_kind, count = 1 - OF_CONVOLUTIONS, len(network.layers) - len(convolutions)
        return batch * TOTAL_S * of_kind / count / 2

    profile = make_profile(
        network,
        layer_times=layer_times(network, seconds=shared_out, batches=(32,)),
        model_times=model_times(network, seconds=shared_out, wu_s=0.0, batches=(32,)),
        communication=tuple(ring_fit(name) for name in ("all_reduce", "all_gather")),
    )
    cluster = Cluster(
        name="theirs",
        levels=tuple(
            Level(name=name, ranks=ranks, alpha_s=alpha, beta_s_per_byte=beta) for name, ranks, alpha, beta in LEVELS
        ),
    )
    costs = CostModel(profile=profile, network=network, cluster=cluster)
    for kinds, batch_text, ranks, memory, compute, communication in rows:
        batch = int(batch_text)
        iterations = -(-SAMPLES // batch)
        for kind in kinds.split(", "):
            strategy = parse_strategy("serial" if kind == "serial" else f"{kind[0]}{ranks}")
            settings = plan_settings(batch=batch, split=("conv*",) if kind in ("filter", "channel") else ())
            point = Configuration(strategy=strategy, settings=settings)
            found = Predictor(costs, evaluator_named("paradl"), dataset_samples=SAMPLES).predict(point)
            assert found.time.communication_s * iterations == pytest.approx(float(communication), rel=1e-6), (
                kind,
                ranks,
            )
            assert found.time.compute_s / batch * SAMPLES == pytest.approx(float(compute), rel=1e-6), (kind, ranks)
            if memory:
                assert found.memory.memory_bytes == pytest.approx(int(memory.split()[0]), rel=1e-6), (kind, ranks)
