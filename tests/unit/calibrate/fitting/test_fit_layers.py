"""Layers add up, closure and spreads come back from samples of known times."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_measurements import LayersSpec, network, write_layers

from calibrate.fitting.copy_fit import fit_copies
from calibrate.fitting.layer_fit import QUANTILES, layer_times, model_times, rates_reached
from calibrate.fitting.reading import Placed, read_measurements
from calibrate.profile.profile import LayerTime
from calibrate.statistics.blocks import (
    between_block_sd,
    block_sd,
    quantile_covariance,
    split_half_difference,
)
from paradl_bench.core.errors import UserError
from paradl_bench.core.statistics import bootstrap_interval
from paradl_bench.records.samples import CopySamples, IterationSamples, LayerSamples

LAYER = LayerSamples(
    model="toy",
    layer="conv",
    operation="conv(3x16x16; )",
    phase="FW",
    mode="in_situ",
    batch=4,
    dtype="fp32",
    ranks_on_host=1,
    rank=0,
    block=0,
    samples_s=(1.0, 2.0, 9.0),
)


def place(record: LayerSamples, directory: int = 0, **changes: object) -> Placed[LayerSamples]:
    return Placed(directory, msgspec.structs.replace(record, **changes))


def iterations_of(records: Sequence[Placed[LayerSamples]]) -> list[Placed[IterationSamples]]:
    """Iterations in which each record's samples are all that there was."""
    found = {}
    for directory, r in records:
        none = (0.0,) * len(r.samples_s)
        iteration = IterationSamples(
            model=r.model, batch=r.batch, dtype=r.dtype, optimizer="sgd", ranks_on_host=r.ranks_on_host, rank=r.rank,
            block=r.block, fw_s=r.samples_s, bw_s=none, wu_s=none, fw_layers_s=r.samples_s, bw_layers_s=none,
            fw_between_s=none, bw_between_s=none, fw_instrumented_s=none, bw_instrumented_s=none, shard=r.shard,
            position=r.position,
        )  # fmt: skip
        key = (directory, r.model, r.batch, r.dtype, r.ranks_on_host, r.rank, r.block, r.shard, r.position)
        found[key] = Placed(directory, iteration)
    return list(found.values())


def times_of(*records: Placed[LayerSamples]) -> tuple[LayerTime, ...]:
    return layer_times(records, iterations_of(records))


def test_an_operation_takes_the_mean_of_its_places_medians() -> None:
    (time,) = times_of(place(LAYER), place(LAYER, layer="other", samples_s=(4.0, 4.0, 40.0)))
    assert time.time.median_s == pytest.approx((2 + 4) / 2)
    assert time.time.samples == 6
    assert time.time.minimum_s == 1.0
    assert time.time.iqr_s == pytest.approx((4.0 + 18.0) / 2)


def test_typical_times_add_up_where_medians_do_not() -> None:
    """Noise hits one of four layers an iteration: every median misses it, and every iteration has it."""
    generator = np.random.default_rng(0)
    samples = np.ones((4, 200))
    samples[generator.integers(0, 4, 200), np.arange(200)] += 2.0
    records = [
        place(LAYER, layer=f"l{i}", operation=f"o{i}", samples_s=tuple(map(float, row)))
        for i, row in enumerate(samples)
    ]
    total = Placed(0, msgspec.structs.replace(iterations_of(records)[0].record, fw_layers_s=tuple(samples.sum(0))))
    times = layer_times(records, [total])
    assert sum(time.time.median_s for time in times) == 4.0
    assert sum(time.time.typical_s for time in times) == pytest.approx(6.0)


def test_dispatch_is_shared_out_over_operations_that_run_kernels() -> None:
    """Two of three forward operations and one of three backward ones take as long as a kernel."""
    forward = [place(LAYER, layer=name) for name in ("a", "b")] + [place(LAYER, layer="c", samples_s=(0.0,) * 3)]
    backward = [
        place(LAYER, layer=f.record.layer, phase="BW", samples_s=(float(f.record.layer == "a"),) * 3) for f in forward
    ]
    (iteration,) = iterations_of(forward[:1])
    dispatched = {"fw_dispatch_s": (6e-5, 8e-5, 5e-3), "bw_dispatch_s": (9e-5, 9e-5, 9e-5)}
    timed = Placed(0, msgspec.structs.replace(iteration.record, **dispatched))
    (found,) = model_times([timed], [*forward, *backward])
    assert found.dispatch is not msgspec.UNSET
    assert (found.dispatch.forward_s, found.dispatch.backward_s) == pytest.approx((4e-5, 9e-5))
    assert model_times([iteration], forward)[0].dispatch is msgspec.UNSET


def test_typical_iterations_leave_slow_spells_out() -> None:
    (time,) = times_of(place(LAYER, samples_s=(1.0, 1.1, 1.2, 1.3, 50.0, 60.0, 1.25, 1.15)))
    assert time.time.typical_s == pytest.approx(np.mean([1.15, 1.2, 1.25, 1.3]))


def test_samples_of_an_interrupted_block_do_not_count() -> None:
    whole, torn = place(LAYER), place(LAYER, block=1, samples_s=(99.0, 99.0, 99.0))
    (time,) = layer_times([torn, whole], iterations_of([whole]))
    assert time.time.samples == 3
    again = place(LAYER, block=1, samples_s=(3.0, 3.0, 3.0))
    (time,) = layer_times([torn, whole, again], iterations_of([whole, again]))
    assert time.time.samples == 6
    assert time.time.median_s == 3.0


def test_samples_that_lack_an_iteration_are_refused() -> None:
    short = place(LAYER, samples_s=(1.0, 2.0))
    with pytest.raises(UserError, match="2 samples for 3 iterations; there has to be one for each"):
        layer_times([short], iterations_of([place(LAYER)]))


def test_blocks_and_ranks_of_one_place_are_pooled() -> None:
    records = [place(LAYER), place(LAYER, block=1, samples_s=(3.0,)), place(LAYER, rank=1, samples_s=(4.0,))]
    (time,) = times_of(*records)
    assert time.time.median_s == 3.0
    assert time.block_relative_sd == pytest.approx(block_sd([2 / 3, 3 / 3, 4 / 3]))


def test_equal_blocks_of_two_directories_are_two_blocks() -> None:
    (apart,) = times_of(place(LAYER, samples_s=(1.0,)), place(LAYER, 1, samples_s=(3.0,)))
    assert apart.block_relative_sd == pytest.approx(block_sd([0.5, 1.5]))


def test_shards_align_with_iterations_of_their_own() -> None:
    """The whole model's iterations are the other way round: what is typical there is not typical here."""
    whole = place(LAYER, samples_s=(1.0, 2.0, 30.0))
    part = place(LAYER, shard="f2", position=1, samples_s=(9.0, 5.0, 5.0))
    times = {time.shard: time.time for time in times_of(whole, part)}
    assert (times[""].typical_s, times["f2"].typical_s) == (2.0, 5.0)
    assert times["f2"].samples == 3
    records = iterations_of([whole, part])
    assert [(time.shard, time.iteration.samples) for time in model_times(records)] == [("", 3)]
    assert [(time.shard, time.iteration.samples) for time in model_times(records, shards=True)] == [("f2", 3)]


@pytest.mark.parametrize(
    "change",
    [
        {"shard": "f2"},
        {"phase": "BW"},
        {"mode": "isolated"},
        {"batch": 8},
        {"dtype": "bf16"},
        {"ranks_on_host": 2},
        {"operation": "x"},
    ],
)
def test_what_decides_a_time_keeps_times_apart(change: dict[str, object]) -> None:
    assert len(times_of(place(LAYER), place(LAYER, **change))) == 2


def test_fitted_layer_times_add_up_to_the_generated_total(tmp_path: Path) -> None:
    spec = LayersSpec(batches=(2, 4), noise=0.0)
    measured = read_measurements([write_layers(tmp_path / "layers", spec)], force=False)
    fitted = layer_times(measured.layers, measured.iterations)
    times = {(time.operation, time.phase, time.batch): time.time.typical_s for time in fitted}
    net = measured.networks["toy"]
    for batch in spec.batches:
        total = sum(times[layer.operation, phase, batch] for layer in net.layers for phase in ("FW", "BW"))
        assert total == pytest.approx(3 * len(net.layers) * spec.layer_s * batch)


@pytest.mark.parametrize("unexplained", [0.0, 1e-4, -1e-4])
def test_the_remainder_has_its_sign_and_its_interval_holds_it(tmp_path: Path, unexplained: float) -> None:
    spec = LayersSpec(unexplained_s=unexplained, noise=0.02, blocks=8, pairs=10)
    measured = read_measurements([write_layers(tmp_path / "layers", spec)], force=False)
    (whole,) = model_times(measured.iterations)
    explained = 15 * spec.layer_s * 4 + 2 * spec.between_s + spec.wu_s
    truth = unexplained / (explained + unexplained)
    low, high = whole.remainder_interval
    assert low < truth < high
    assert low < whole.remainder_relative < high
    assert high - low < 0.05
    assert whole.noise_floor_relative < 0.02


def test_drift_between_blocks_is_the_spread_that_all_layers_share(tmp_path: Path) -> None:
    spec = LayersSpec(blocks=40, drift=0.05, noise=0.005)
    measured = read_measurements([write_layers(tmp_path / "layers", spec)], force=False)
    (whole,) = model_times(measured.iterations)
    assert 0.03 < whole.common_relative_sd < 0.07
    assert whole.noise_floor_relative < 0.05


@pytest.mark.parametrize(("measurements", "within"), [(2, True), (5, False)])
def test_many_measurements_override_the_spread_of_blocks_within_each(
    tmp_path: Path, measurements: int, within: bool
) -> None:
    """All measurements are alike, and each drifts by 10% from block to block: their medians hardly differ."""
    directories = [
        write_layers(tmp_path / str(seed), LayersSpec(blocks=40, drift=0.1, noise=0.005, seed=seed))
        for seed in range(measurements)
    ]
    (whole,) = model_times(read_measurements(directories, force=False).iterations)
    assert (whole.common_relative_sd > 0.06) == within


def test_quantiles_of_single_iterations_are_relative_to_their_own_directory(tmp_path: Path) -> None:
    directories = [
        write_layers(tmp_path / "slow", LayersSpec(layer_s=2e-4, noise=0.01)),
        write_layers(tmp_path / "fast", LayersSpec(layer_s=1e-4, noise=0.01, seed=1)),
    ]
    measured = read_measurements(directories, force=False)
    (whole,) = model_times(measured.iterations)
    quantiles = whole.iteration_relative_quantiles
    assert len(quantiles) == QUANTILES
    assert list(quantiles) == sorted(quantiles)
    assert quantiles[QUANTILES // 2] == pytest.approx(1, abs=0.01)
    assert quantiles[-1] < 1.1


def test_probes_cost_taken_off_may_turn_time_between_operations_negative(tmp_path: Path) -> None:
    measured = read_measurements([write_layers(tmp_path / "layers", LayersSpec(noise=0.0))], force=False)
    records = [
        Placed(d, msgspec.structs.replace(r, fw_between_s=tuple(-1e-5 for _ in r.fw_between_s)))
        for d, r in measured.iterations
    ]
    (whole,) = model_times(records)
    assert whole.fw_between.median_s == 0
    assert whole.remainder_relative > 0


def test_an_iteration_of_no_time_is_refused(tmp_path: Path) -> None:
    measured = read_measurements([write_layers(tmp_path / "layers")], force=False)
    record = measured.iterations[0].record
    none = tuple(0.0 for _ in record.fw_s)
    broken = msgspec.structs.replace(record, fw_s=none, bw_s=none, wu_s=none)
    with pytest.raises(UserError, match="iterations of toy, batch 4, block 0: an iteration took 0 seconds"):
        model_times([Placed(0, broken)])


def test_rates_reached_are_those_of_the_fastest_layer() -> None:
    net = network()
    conv, relu = net.layers[0], net.layers[1]
    records = [
        place(LAYER, operation=conv.operation, samples_s=(1e-3,)),
        place(LAYER, operation=relu.operation, layer="relu1", samples_s=(1e-4,)),
        place(LAYER, operation=net.layers[4].operation, layer="loss", samples_s=(1e-9,)),
    ]
    reached = rates_reached(times_of(*records), {"toy": net})
    assert reached.peak_flops == pytest.approx(conv.fw_flops * 4 / 1e-3)
    assert reached.memory_bandwidth_bytes_per_s == pytest.approx(relu.fw_bytes * 4 / 1e-4)
    # What holds no batch computes and moves as much whatever the batch.
    layers = [msgspec.structs.replace(layer, batchless=True) for layer in net.layers]
    alike = rates_reached(times_of(*records), {"toy": msgspec.structs.replace(net, layers=tuple(layers))})
    assert alike.peak_flops == pytest.approx(conv.fw_flops / 1e-3)
    assert alike.memory_bandwidth_bytes_per_s == pytest.approx(relu.fw_bytes / 1e-4)
    assert rates_reached([], {}) == (None, None)


def test_bytes_reached_are_as_wide_as_the_dtype() -> None:
    net = network()
    relu = net.layers[1]

    def reached(dtype: str) -> float | None:
        record = place(LAYER, operation=relu.operation, layer="relu1", samples_s=(1e-4,), dtype=dtype)
        return rates_reached(times_of(record), {"toy": net}, "cuda").memory_bandwidth_bytes_per_s

    assert reached("bf16") == reached("bf16-weights") == pytest.approx(relu.fw_bytes * 4 / 1e-4 / 2)
    assert reached("fp32") == pytest.approx(relu.fw_bytes * 4 / 1e-4)


def copies(tensors: int, count: int, seconds: float, model: str) -> Placed[CopySamples]:
    return Placed(
        0,
        CopySamples(
            model=model,
            direction="into",
            tensors=tensors,
            bytes=count,
            ranks_on_host=2,
            rank=0,
            block=0,
            samples_s=(seconds,),
        ),
    )


def test_copies_are_fitted_per_tensor_and_per_byte_over_models() -> None:
    shapes = {"a": (60, 40_000_000), "b": (160, 14_000_000), "c": (20, 500_000_000)}
    records = [copies(t, b, 2e-6 * t + 1.5e-10 * b, name) for name, (t, b) in shapes.items()]
    (fit,) = fit_copies(records)
    assert fit.alpha_s == pytest.approx(2e-6, rel=1e-6)
    assert fit.beta_s_per_byte == pytest.approx(1.5e-10, rel=1e-6)
    assert fit.relative_sd < 1e-6
    assert fit.models == ("a", "b", "c")
    assert (fit.direction, fit.ranks_on_host) == ("into", 2)


def test_copies_of_one_model_are_all_bytes() -> None:
    (fit,) = fit_copies([copies(60, 1000, 1e-3, "a"), copies(60, 1000, 1.2e-3, "a")])
    assert fit.alpha_s == 0
    assert fit.beta_s_per_byte == pytest.approx(1.1e-6)
    assert 0.05 < fit.relative_sd < 0.2


def test_the_spread_of_few_blocks_is_unbiased() -> None:
    generator = np.random.default_rng(0)
    for count in (2, 3, 5, 8):
        estimates = [block_sd(generator.standard_normal(count)) for _ in range(4000)]
        assert np.mean(estimates) == pytest.approx(1, abs=0.05)


def test_one_delayed_block_does_not_decide_the_spread() -> None:
    assert block_sd([1.00, 1.02, 0.98, 1.01, 20.0]) < 0.15
    even = [1.0, 1.3, 0.9, 1.2, 1.1]
    assert block_sd(even) == pytest.approx(np.std(even, ddof=1) / 0.94, rel=1e-3)


def test_covariance_from_quantiles_matches_normal_draws_despite_a_tail() -> None:
    truth = np.array([[4.0, -1.5e-3], [-1.5e-3, 1e-6]])
    draws = np.random.default_rng(0).multivariate_normal([0, 0], truth, size=20_000)
    np.testing.assert_allclose(quantile_covariance(draws), truth, rtol=0.05)
    draws[:600, 0] += 1e6
    assert quantile_covariance(draws)[0, 0] < 8


def test_a_single_block_is_taken_as_two_halves() -> None:
    assert between_block_sd([np.array([1.0, 1.0, 3.0, 3.0])]) == pytest.approx(block_sd([0.5, 1.5]))
    assert between_block_sd([np.array([1.0])]) == 0


def test_bootstrap_draws_blocks_and_not_only_samples() -> None:
    generator = np.random.default_rng(1)
    blocks = [np.full(20, level) + 0.01 * generator.standard_normal(20) for level in (1.0, 2.0, 3.0, 4.0, 5.0)]
    low, high = bootstrap_interval(blocks)
    assert low <= 2.1
    assert high >= 3.9
    shuffled = generator.permutation(np.concatenate(blocks)).reshape(5, 20)
    narrow_low, narrow_high = bootstrap_interval(list(shuffled))
    assert narrow_high - narrow_low < high - low


@given(st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=30))
def test_sample_halves_differ_by_less_than_their_range(samples: list[float]) -> None:
    found = split_half_difference([np.array(samples)], splits=20)
    assert 0 <= found <= 2 * (max(samples) - min(samples)) / (max(samples) + min(samples)) + 1e-12
