"""What a sweep plans: within ranges, limits and budget, each kernel once, any first part a design of the same make."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from paradl_bench.core.errors import UserError
from paradl_bench.measure.kernels.design import (
    Design,
    Effort,
    Limits,
    MachineSpeed,
    Planner,
    SweptKernel,
    estimated_s,
    memory_bytes,
    read_design,
    shapes_of,
    sobol_points,
    sweepable_kinds,
    time_class,
)
from paradl_bench.measure.kernels.neighbours import Asked, kernels_of_models, rescaled, shards_of
from paradl_bench.measure.kernels.ranges import BATCH, CHANNELS, EXTENT, RANGES, channel_count, log_whole
from paradl_bench.measure.layers.isolated import shapes_of_inputs
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.kinds.kernel_shape import kernel_shape, layer_of_sizes
from paradl_bench.network.kinds.kind import layer_kinds
from paradl_bench.network.models.catalog import load_model

SPEED = MachineSpeed(flops_per_s=50e9, bytes_per_s=10e9)
LIMITS = Limits(kernel_s=0.05, memory_bytes=500e6)
EFFORT = Effort(blocks=3, most_samples=4, settle_s=2e-3)


def planner(*kinds: str, dtypes: tuple[str, ...] = ("fp32",), limits: Limits = LIMITS, seed: int = 0) -> Planner:
    return Planner(kinds, dtypes, limits, dict.fromkeys(dtypes, SPEED), EFFORT, seed=seed)


@pytest.fixture(scope="module")
def convolutions() -> Design:
    return planner("conv").design(budget_s=None, samples=300)


def test_a_smaller_design_is_a_prefix_of_a_larger_one() -> None:
    kinds = ("conv", "linear", "activation")
    large = planner(*kinds).design(budget_s=None, samples=60)
    small = planner(*kinds).design(budget_s=None, samples=40)
    assert small.kernels == large.kernels[:40]
    assert planner(*kinds, seed=1).design(budget_s=None, samples=40).kernels != small.kernels


@pytest.mark.parametrize("count", [75, 300])
def test_every_design_prefix_covers_all_sizes_and_time_classes(convolutions: Design, count: int) -> None:
    kernels = convolutions.kernels[:count]
    for name, (low, high) in {"batch": BATCH, "in_channels": CHANNELS, "out_channels": CHANNELS}.items():
        logs = [math.log(kernel.sizes[name] / low) / math.log(high / low) for kernel in kernels]
        quarters = Counter(min(3, int(4 * value)) for value in logs)
        # Large sizes are rarer: time and memory end there first.
        assert all(quarters[quarter] >= 0.05 * count for quarter in range(4)), (name, quarters)
    assert {kernel.sizes["kernel_height"] for kernel in kernels} == {1, 3, 5, 7, 9}
    assert {kernel.sizes["stride_height"] for kernel in kernels} == {1, 2, 4}
    classes = Counter(time_class(kernel.estimate_s) for kernel in kernels)
    inner = [classes[time] for time in sorted(classes)[1:-1]]
    assert max(inner) <= 2 * min(inner)


def test_kernels_are_in_their_ranges_within_limits_and_taken_once(convolutions: Design) -> None:
    assert len({kernel.key for kernel in convolutions.kernels}) == len(convolutions.kernels) == 300
    for kernel in convolutions.kernels:
        sizes = kernel.sizes
        assert BATCH[0] <= sizes["batch"] <= BATCH[1]
        assert CHANNELS[0] <= sizes["in_channels"] <= CHANNELS[1]
        assert EXTENT[0] <= sizes["in_height"] <= sizes["in_width"] <= EXTENT[1]
        shapes = shapes_of(kernel)
        longest, together = estimated_s(shapes, SPEED)
        assert longest <= LIMITS.kernel_s
        assert kernel.estimate_s == together
        assert memory_bytes(shapes) <= LIMITS.memory_bytes
    assert convolutions.passed_over["conv"]["time"] > 0


def test_a_kernel_that_comes_twice_is_taken_once_and_counted() -> None:
    kernel = SweptKernel(
        kind="activation", sizes={"batch": 2, "elements": 8, "in_place": 0}, settings={"function": "relu"}
    )
    design = planner("activation").design(budget_s=None, samples=None, source=[kernel, kernel])
    assert [found.sizes for found in design.kernels] == [kernel.sizes]
    assert design.passed_over == {"activation": {"drawn before": 1}}


def test_what_a_limit_leaves_out_is_counted_by_its_reason() -> None:
    def passed_over(**limits: float) -> dict[str, int]:
        given = Limits(**{"kernel_s": 1e9, "memory_bytes": 1e18, **limits})
        return planner("linear", limits=given).design(budget_s=None, samples=50).passed_over.get("linear", {})

    assert passed_over().keys() <= {"drawn before"}
    assert passed_over(kernel_s=1e-3)["time"] > 0
    assert passed_over(memory_bytes=1e6)["memory"] > 0


def test_a_budget_is_filled_and_shared_out_by_weight() -> None:
    made = planner("conv", "linear")
    design = made.design(budget_s=120.0, samples=None)
    costs = {kind: sum(made.cost_s(k) for k in design.kernels if k.kind == kind) for kind in ("conv", "linear")}
    last = made.cost_s(design.kernels[-1])
    assert 120.0 <= sum(costs.values()) <= 120.0 + last
    assert costs["conv"] / costs["linear"] == pytest.approx(RANGES["conv"].weight / RANGES["linear"].weight, rel=0.1)


def test_dtypes_take_turns() -> None:
    design = planner("activation", dtypes=("fp32", "bf16")).design(budget_s=None, samples=20)
    assert [kernel.dtype for kernel in design.kernels] == ["fp32", "bf16"] * 10


def test_long_kernels_get_fewer_samples() -> None:
    short, long = (SweptKernel(kind="conv", sizes={}, estimate_s=seconds) for seconds in (1e-4, 0.1))
    assert EFFORT.samples(long, 3) == 1 < EFFORT.samples(short, 3) <= EFFORT.most_samples


@pytest.mark.parametrize("kind", sorted(set(RANGES) - {"optimizer", "copy"}))
def test_what_ranges_draw_exists_runs_and_has_the_sizes_drawn(kind: str) -> None:
    ran = 0
    for point in itertools.islice(sobol_points(RANGES[kind].coordinates, 0), 256):
        drawn = RANGES[kind].draw(point, "fp32")
        if drawn is None:
            continue
        layer, batch, parameters = layer_of_sizes(kind, drawn.sizes, drawn.settings)
        shape = kernel_shape(layer, "FW", batch, "fp32")
        assert shape is not None
        assert (shape.sizes, shape.settings) == (drawn.sizes, drawn.settings)
        if shape.bytes > 1e6 or shape.flops > 1e7:
            continue
        build = layer_kinds()[kind].build
        assert build is not None
        output = build(layer.attributes)(
            [torch.rand(extents) for extents in shapes_of_inputs(layer, batch)], [torch.rand(p) for p in parameters]
        )
        assert tuple(output.shape) == (batch, *layer.output_shape)
        ran += 1
    assert ran >= 5


def test_numbers_are_drawn_from_end_to_end_and_in_steps() -> None:
    assert [log_whole(unit, 1, 256) for unit in (0.0, 0.5, 1.0)] == [1, 16, 256]
    drawn = {channel_count(unit / 1000, 3, 512) for unit in range(1001)}
    assert {3, 8, 48, 64, 96, 512} <= drawn
    assert all(number < 8 or number % 8 == 0 for number in drawn)


def test_some_linear_layers_have_as_odd_columns_as_vocabularies() -> None:
    points = itertools.islice(sobol_points(RANGES["linear"].coordinates, 0), 512)
    drawn = [found.sizes for point in points if (found := RANGES["linear"].draw(point, "bf16")) is not None]
    odd = sum(sizes["out_features"] % 8 > 0 for sizes in drawn)
    assert 0.05 < odd / len(drawn) < 0.2
    assert all(sizes["in_features"] % 8 == 0 for sizes in drawn)


def test_model_shapes_precede_shards_and_neighbours_and_all_exist() -> None:
    networks = [trace_network(load_model(name, (3, 64, 64))) for name in ("mobilenet_v2", "googlenet")]
    asked = Asked(sweepable_kinds(), ("fp32",), (4,))
    kernels = list(itertools.islice(kernels_of_models(networks, asked), 1800))
    origins = [("near" in kernel.origin, "over" in kernel.origin) for kernel in kernels]
    assert origins == sorted(origins)
    assert {"conv", "linear", "batch_norm", "pool", "elementwise", "optimizer", "copy"} <= {k.kind for k in kernels}
    assert any(kernel.sizes.get("groups", 1) > 1 for kernel in kernels if "near" in kernel.origin)
    for kernel in kernels[::9]:
        for shape in shapes_of(kernel):
            assert shape.sizes == kernel.sizes, kernel


def test_a_neighbours_output_is_what_torch_makes_of_its_input() -> None:
    network = trace_network(load_model("googlenet", (3, 64, 64)))
    kernels = list(itertools.islice(kernels_of_models([network], Asked(("conv", "pool"), ("fp32",), (1,))), 600))
    checked = 0
    for kernel in kernels[::5]:
        layer, batch, parameters = layer_of_sizes(kernel.kind, kernel.sizes, kernel.settings)
        build = layer_kinds()[kernel.kind].build
        assert build is not None
        inputs = [torch.empty(shape, device="meta") for shape in shapes_of_inputs(layer, batch)]
        output = build(layer.attributes)(inputs, [torch.empty(shape, device="meta") for shape in parameters])
        assert tuple(output.shape) == (batch, *layer.output_shape), kernel
        checked += "ceil_mode" in kernel.sizes and kernel.sizes["ceil_mode"]
    assert checked, "no pooling with ceil_mode among them"


def test_shards_are_parts_along_one_size() -> None:
    kernel = SweptKernel(
        kind="linear",
        sizes={"batch": 8, "in_features": 512, "out_features": 10, "bias": 1},
        settings={"function": "linear"},
        origin="model",
    )
    assert {shard.origin: shard.sizes for shard in shards_of(kernel, 4)} == {
        "model, batch over 4": {**kernel.sizes, "batch": 2},
        "model, out_features over 4": {**kernel.sizes, "out_features": 2},
        "model, in_features over 4": {**kernel.sizes, "in_features": 128},
    }


def test_depthwise_stays_depthwise() -> None:
    network = trace_network(load_model("mobilenet_v2", (3, 64, 64)))
    kernels = kernels_of_models([network], Asked(("conv",), ("fp32",), (1,)))
    sizes = next(k.sizes for k in kernels if k.sizes["groups"] > 1)
    found = rescaled("conv", sizes, {"in_channels": 0.5, "out_channels": 0.7})
    assert found is not None
    assert found["groups"] == found["in_channels"] == found["out_channels"] == sizes["groups"] // 2


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"kernels": []}', b"\xff"])
def test_a_damaged_design_is_one_line(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "design.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"design\.json") as told:
        read_design(path)
    assert "\n" not in str(told.value)
