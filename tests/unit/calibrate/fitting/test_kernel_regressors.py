"""Regressors of kernels: from sweeps with a known law to the profile, its archive, and a layer that nobody measured."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
from profile_factory import make_profile
from synthetic_measurements import ENVIRONMENT, network

from calibrate.fitting.fit import fit_profile
from calibrate.fitting.kernels.kernel_drift import fit_drift
from calibrate.fitting.kernels.kernel_trial import fit_trees, timed_kernels, timed_shapes, try_candidates
from calibrate.fitting.merging.merge import with_archives_beside
from calibrate.kernels.features import kernels_of, log_sizes, process_features, roofline_features
from calibrate.kernels.files import read_arrays, write_arrays
from calibrate.kernels.mlp import evaluate_mlp, train_mlp
from calibrate.kernels.model import estimate, held_regressors, was_fitted_on, with_regressor, with_typical_drift
from calibrate.kernels.process import _misfit, evaluate_process, fit_process
from calibrate.kernels.trees import arrays_of, check_trees, evaluate_trees
from calibrate.profile.profile import Profile, read_profile, write_profile
from calibrate.report.show import explanation, print_profile
from paradl_bench.core.errors import UserError
from paradl_bench.core.files.json_lines import append_lines
from paradl_bench.network.kernel import KERNELS_FILE, KernelSamples, KernelShape
from paradl_bench.ranks.directories.directory import MeasurementDirectory
from predict.costs.compute.layer_costs import LayerCosts
from predict.costs.sourced import Source

lightgbm = pytest.importorskip("lightgbm")

PEAK, BANDWIDTH, FLOOR_S = 1e11, 1e10, 5e-6


def linear(batch: int, inputs: int, outputs: int) -> KernelShape:
    return KernelShape(
        kind="linear",
        stage="FW",
        sizes={"batch": batch, "in_features": inputs, "out_features": outputs, "bias": 0},
        settings={"function": "linear"},
        flops=2 * batch * inputs * outputs,
        bytes=4 * (batch * inputs + inputs * outputs + batch * outputs),
    )


def law_s(shape: KernelShape) -> float:
    """A roofline over a floor; narrow outputs reach half of the peak."""
    efficiency = 0.5 if shape.sizes["out_features"] < 128 else 1.0
    return FLOOR_S + max(shape.flops / PEAK / efficiency, shape.bytes / BANDWIDTH)


def drawn(count: int, seed: int = 0) -> list[KernelShape]:
    sizes = np.exp(np.random.default_rng(seed).uniform(np.log(4), np.log(2048), (3 * count, 3))).astype(int)
    return [linear(*(int(size) for size in row)) for row in dict.fromkeys(map(tuple, sizes))][:count]


def records(shapes: list[KernelShape], noise: float = 0.02) -> list[KernelSamples]:
    generator = np.random.default_rng(1)
    return [
        KernelSamples(
            shape=shape,
            dtype="fp32",
            block=block,
            samples_s=tuple((law_s(shape) * np.exp(noise * generator.standard_normal(5))).tolist()),
        )
        for block in range(2)
        for shape in shapes
    ]


def write_kernels(path: Path, shapes: list[KernelShape]) -> Path:
    directory = MeasurementDirectory.open(
        path,
        kind="kernels",
        arguments={},
        command_line=("paradl-bench", "kernels", "-o", path.name),
        environment=ENVIRONMENT,
    )
    append_lines(path / KERNELS_FILE, records(shapes))
    directory.finish()
    return path


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile fitted to nothing but kernels."""
    folder = tmp_path_factory.mktemp("kernels")
    path = folder / "profile.json"
    profile = fit_profile(
        [write_kernels(folder / "sweep", drawn(160))], command_line=("calibrate",), force=False, beside=path
    )
    write_profile(path, profile)
    return path


def test_a_known_law_is_recovered_inside_its_interval(fitted: Path) -> None:
    (model,) = read_profile(fitted).kernel_models
    assert (model.kind, model.stage, model.kernels) == ("linear", "FW", 160)
    assert model.varied == ("batch", "in_features", "out_features")
    own = next(each for each in model.candidates if each.model == model.model)
    assert own.validation_re == min(each.validation_re for each in model.candidates)
    assert own.held_out_re < 0.12
    unseen = [shape for shape in drawn(400, seed=5) if estimate(model, shape)]
    inside = []
    for shape in unseen:
        found = estimate(model, shape)
        assert found is not None
        inside.append(abs(found.seconds / law_s(shape) - 1) <= 1.645 * found.relative_sd)
    assert np.mean(inside) > 0.8
    assert {each.model for each in model.candidates} >= {"trees", "plain trees"}


def test_trees_and_the_papers_network_are_held_by_name(fitted: Path) -> None:
    pytest.importorskip("torch")
    (model,) = read_profile(fitted).kernel_models
    assert {"trees", "mlp", "trees and mlp"} <= set(held_regressors(model))
    unseen = [shape for shape in drawn(300, seed=5) if estimate(model, shape)]
    for name in ("trees", "mlp", "trees and mlp"):
        named = with_regressor(model, name)
        assert named is not None
        found = [(estimate(named, shape), law_s(shape)) for shape in unseen]
        assert np.median([abs(each.seconds / law - 1) for each, law in found if each]) < 0.3
    assert was_fitted_on(model, drawn(160)[7])
    assert not was_fitted_on(model, linear(257, 263, 269))


@pytest.mark.slow
def test_the_same_sweep_gives_the_same_archive(fitted: Path, tmp_path: Path) -> None:
    again = fit_profile(
        [fitted.parent / "sweep"], command_line=("calibrate",), force=False, beside=tmp_path / "profile.json"
    )
    assert again.kernel_models[0].sha256 == read_profile(fitted).kernel_models[0].sha256


def test_exported_trees_say_what_the_library_says() -> None:
    generator = np.random.default_rng(0)
    features = generator.normal(size=(400, 5))
    target = np.sin(features[:, 0]) + features[:, 1] ** 2
    booster = lightgbm.train({"verbose": -1, "num_threads": 1}, lightgbm.Dataset(features, target), 50)
    unseen = generator.normal(size=(200, 5))
    ours = evaluate_trees(arrays_of(booster.dump_model()), unseen)
    np.testing.assert_allclose(ours, booster.predict(unseen), atol=1e-6)


def test_a_tree_that_could_not_be_split_is_its_leaf() -> None:
    arrays = arrays_of({"tree_info": [{"tree_structure": {"leaf_value": 2.5}}]})
    np.testing.assert_array_equal(evaluate_trees(arrays, np.zeros((3, 1))), [2.5, 2.5, 2.5])


def test_the_exported_network_says_what_torch_says() -> None:
    torch = pytest.importorskip("torch")
    generator = np.random.default_rng(0)
    inputs = generator.uniform(size=(120, 2))
    target = inputs.sum(axis=1)
    arrays = train_mlp(inputs[:100], target[:100], inputs[100:], target[100:], seed=0)
    values = torch.as_tensor(inputs)
    for index in range(6):
        weight, bias = (torch.as_tensor(arrays[f"{name}{index}"]) for name in ("weight", "bias"))
        values = torch.nn.functional.linear(values, weight, bias)
        values = values.relu() if index < 5 else values
    np.testing.assert_allclose(evaluate_mlp(arrays, inputs), values[:, 0].numpy(), atol=1e-6)
    assert np.abs(evaluate_mlp(arrays, inputs) - target).mean() < 0.05


def test_sweep_drift_is_found_and_removed_from_estimates() -> None:
    shapes = drawn(600)
    order = np.linspace(0, 1, len(shapes))
    added = 2e-4 * order
    alone = np.array([law_s(shape) for shape in shapes])
    timed = timed_shapes(shapes, list(alone + added), "fp32")
    trial = try_candidates(timed, seed=0, with_mlp=False)
    assert trial.fitted.drift_s[-1] == pytest.approx(2e-4, rel=0.25)
    trees = next(each for each in trial.candidates if each.model == "trees")
    assert trial.in_order_re < trees.held_out_re


def test_no_drift_is_found_where_there_is_none() -> None:
    shapes = drawn(300)
    timed = timed_shapes(shapes, [law_s(shape) for shape in shapes], "fp32")
    assert try_candidates(timed, seed=0, with_mlp=False).fitted.drift_s == ()


def test_drift_is_exact_where_the_kernels_are_known() -> None:
    order = np.linspace(0, 1, 200)
    kernel_s = np.full(200, 1e-3)
    drift = fit_drift(order, kernel_s + 1e-3 * order, lambda _: kernel_s)
    np.testing.assert_allclose(drift, 1e-3 * np.linspace(0, 1, len(drift)), atol=1e-5)


def test_typical_drift_has_the_least_relative_error() -> None:
    times = 1e-3 + np.linspace(0, 4e-3, 101)
    (typical,) = with_typical_drift(np.array([1e-3]), (0.0, 4e-3))
    errors = [np.mean(np.abs(guess - times) / times) for guess in np.append(times, typical)]
    assert errors[-1] == min(errors)


def test_estimates_beyond_swept_sizes_are_flagged_then_refused(fitted: Path) -> None:
    (model,) = read_profile(fitted).kernel_models
    inside, beyond = estimate(model, linear(256, 256, 256)), estimate(model, linear(3500, 256, 256))
    assert inside is not None
    assert beyond is not None
    assert not inside.extrapolated
    assert beyond.extrapolated == (f"batch 3500 beyond {model.inputs[0].low} to {model.inputs[0].high}",)
    assert beyond.relative_sd >= inside.relative_sd
    assert estimate(model, linear(20000, 256, 256)) is None
    with_bias = msgspec.structs.replace(linear(256, 256, 256), sizes={**linear(256, 256, 256).sizes, "bias": 1})
    assert estimate(model, with_bias) is None


def test_a_missing_broken_or_foreign_archive_is_one_line(fitted: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.kernels.npz"
    with pytest.raises(UserError, match="kernel regressors: keep it beside the profile"):
        read_arrays(path, "0" * 64)
    sha256 = write_arrays(path, {"0/x": np.arange(3)})
    np.testing.assert_array_equal(read_arrays(path, sha256)["0/x"], [0, 1, 2])
    with pytest.raises(UserError, match="SHA-256 differs"):
        read_arrays(path, "0" * 64)
    with zipfile.ZipFile(tmp_path / "odd.zip", "w") as odd:
        odd.writestr("0/x.npy", zipfile.Path(path, "0/x.npy").read_bytes().replace(b" 'shape'", b"B'shape'"))
    for content in (b"", b"PK\x03\x04 torn", path.read_bytes()[:-30], (tmp_path / "odd.zip").read_bytes()):
        path.write_bytes(content)
        with pytest.raises(UserError, match="not an archive of arrays"):
            read_arrays(path, hashlib.sha256(content).hexdigest())
    (model,) = read_profile(fitted).kernel_models
    other = tmp_path / "other.npz"
    named = msgspec.structs.replace(model, file=str(other), sha256=write_arrays(other, {"0/seen": np.zeros((1, 1))}))
    with pytest.raises(UserError, match="do not fit the profile"):
        estimate(named, linear(256, 256, 256))


def test_a_profile_moves_with_its_archive_in_one_folder(fitted: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in (fitted, fitted.with_name("profile.kernels.npz")):
        (moved / path.name).write_bytes(path.read_bytes())
    assert estimate(read_profile(moved / "profile.json").kernel_models[0], linear(64, 64, 64)) is not None
    (moved / "profile.json").write_text(fitted.read_text().replace('"profile.kernels.npz"', '"../x.npz"'))
    with pytest.raises(UserError, match="has to be the plain name of a file beside the profile"):
        read_profile(moved / "profile.json")


def test_a_merge_takes_archives_along(fitted: Path, tmp_path: Path) -> None:
    merged = with_archives_beside(read_profile(fitted), str(tmp_path / "merged.json"))
    write_profile(tmp_path / "merged.json", merged)
    (model,) = read_profile(tmp_path / "merged.json").kernel_models
    assert Path(model.file).parent == tmp_path
    assert estimate(model, linear(64, 64, 64)) == estimate(read_profile(fitted).kernel_models[0], linear(64, 64, 64))
    with pytest.raises(UserError, match="give -o PROFILE"):
        with_archives_beside(merged, "-")


def test_kernels_without_a_place_for_their_archive_are_refused(fitted: Path) -> None:
    with pytest.raises(UserError, match="give -o PROFILE"):
        fit_profile([fitted.parent / "sweep"], command_line=(), force=False)


def test_too_few_kernels_are_a_note(tmp_path: Path) -> None:
    sweep = write_kernels(tmp_path / "sweep", drawn(8))
    with pytest.raises(UserError, match="8 shapes are too few"):
        fit_profile([sweep], command_line=(), force=False, beside=tmp_path / "profile.json")


def test_show_has_every_candidate(fitted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from paradl_bench.core.terminal.command_line import open_console

    profile = read_profile(fitted)
    print_profile(profile, open_console())
    printed = capsys.readouterr().out
    assert "Regressors of kernels" in printed
    assert "plain trees" in printed
    assert explanation(profile)["kernel_models"] == profile.kernel_models


def test_blocks_of_a_shape_are_one_kernel() -> None:
    (timed,) = timed_kernels(records(drawn(60)))
    assert len(timed.shapes) == 60
    assert timed.order[0] == 0
    assert timed.order[-1] == 1


def test_features_are_finite_for_every_size(fitted: Path) -> None:
    kernels = kernels_of([linear(1, 1, 1), linear(5, 3, 7)])
    names, features = roofline_features(kernels, ("batch", "in_features", "out_features"))
    assert features.shape == (2, len(names))
    assert np.isfinite(features).all()
    assert np.isfinite(log_sizes(kernels, ("bias",))).all()
    assert fit_trees(timed_shapes(drawn(60), [law_s(s) for s in drawn(60)], "fp32"), (), 0).roofline[0] > 0


def profile_with(fitted: Path, **changes: object) -> Profile:
    toy = network()
    parts: dict[str, object] = {"network": {toy.name: toy}, "layer_times": ()}
    return make_profile(toy, kernel_models=read_profile(fitted).kernel_models, **(parts | changes))


def test_a_layer_that_nobody_measured_is_regressed(fitted: Path) -> None:
    toy = network()
    layer = msgspec.structs.replace(toy.layers[3], attributes={"bias": False})
    toy = msgspec.structs.replace(toy, layers=(*toy.layers[:3], layer, toy.layers[4]))
    costs = LayerCosts(profile_with(fitted, network={toy.name: toy}), toy, "fp32")
    cost = costs.cost(layer.operation, "FW", "", 64, 1)
    expected_s = law_s(linear(64, 2048, 10))
    assert cost.source is Source.REGRESSED
    assert cost.seconds == pytest.approx(expected_s, rel=0.3)
    assert cost.method_sd_s > 0
    assert any("regressed" in remark.text for remark in cost.remarks)
    assert costs.cost(layer.operation, "BW", "", 64, 1).source is Source.ROOFLINE


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"left": [1, 0, -1]}, "leads nowhere"),
        ({"right": [9, -2, -3]}, "leads nowhere"),
        ({"root": [-9]}, "leads nowhere"),
        ({"feature": [0, -1, 0]}, "no feature"),
        ({"threshold": [1.0]}, "length"),
        ({"left": [0.5, 1.0, 2.0]}, "whole numbers"),
    ],
)
def test_trees_without_a_way_to_a_leaf_are_refused(change: dict[str, list[float]], expected: str) -> None:
    sound = {
        "feature": [0, 0, 0],
        "threshold": [1.0, 2.0, 3.0],
        "left": [1, -1, -1],
        "right": [2, -2, -3],
        "leaf": [0.1, 0.2, 0.3],
        "root": [0],
    }
    check_trees({name: np.array(values) for name, values in sound.items()})
    with pytest.raises(ValueError, match=expected):
        check_trees({name: np.array(values) for name, values in (sound | change).items()})


@pytest.mark.parametrize("shape", ["(1000000000000,)", "(-1, 3)", "(2,)"])
def test_an_array_larger_than_its_bytes_allocates_nothing(tmp_path: Path, shape: str) -> None:
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    path = tmp_path / "profile.kernels.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("0/seen.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(24))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(UserError, match="in 24 bytes"):
        read_arrays(path, sha256)


def test_a_process_recovers_a_smooth_law_despite_outliers() -> None:
    generator = np.random.default_rng(0)
    features = generator.uniform(-1, 1, (160, 3))
    law = np.sin(2 * features[:, 0]) + features[:, 1] ** 2
    disturbed = law + 0.01 * generator.standard_normal(160)
    disturbed[::20] += 2.0
    fitted = fit_process(features, disturbed, seed=0)
    unseen = generator.uniform(-0.9, 0.9, (200, 3))
    expected = np.sin(2 * unseen[:, 0]) + unseen[:, 1] ** 2
    assert np.median(np.abs(evaluate_process(fitted, unseen) - expected)) < 0.05
    # The third feature says nothing: its length scale is the longest.
    assert fitted["length"].argmax() == 2
    again = fit_process(features, disturbed, seed=1, known=fitted)
    np.testing.assert_allclose(evaluate_process(again, unseen), evaluate_process(fitted, unseen))


def test_the_analytic_gradient_of_the_misfit_equals_finite_differences() -> None:
    generator = np.random.default_rng(0)
    scaled, target = generator.normal(size=(30, 2)), generator.normal(size=30)
    apart = np.stack([(column[:, None] - column) ** 2 for column in scaled.T])
    logs, plane, kept = np.array([0.3, 0.9, -0.2, -1.0, -1.5]), scaled @ scaled.T + 1.0, generator.uniform(0.2, 1, 30)
    _, gradient = _misfit(logs, apart, plane, target, kept)
    for at in range(5):
        step = 1e-5 * np.eye(5)[at]
        up, down = (_misfit(logs + sign * step, apart, plane, target, kept)[0] for sign in (1, -1))
        assert gradient[at] == pytest.approx((up - down) / 2e-5, rel=1e-4, abs=1e-6)


def convolution(**changes: int) -> KernelShape:
    sizes = {"batch": 8, "in_channels": 16, "out_channels": 32, "groups": 1, "in_depth": 1, "in_height": 28}
    sizes |= {"in_width": 28, "kernel_depth": 1, "kernel_height": 1, "kernel_width": 1, "stride_depth": 1}
    sizes |= {"stride_height": 1, "stride_width": 1, "padding_depth": 0, "padding_height": 0, "padding_width": 0}
    sizes |= {"out_depth": 1, "out_height": 28, "out_width": 28, "bias": 1} | changes
    return KernelShape(kind="conv", stage="FW", sizes=sizes, flops=1e6, bytes=1e5)


def test_the_process_knows_when_torch_convolves_by_itself() -> None:
    three = {"kernel_height": 3, "kernel_width": 3}
    shapes = [
        convolution(),
        convolution(batch=16),
        convolution(**three),
        convolution(stride_height=2, stride_width=2),
        convolution(**three, batch=1),
        convolution(**three, batch=1, in_height=56),
    ]
    features = process_features(kernels_of(shapes), ("batch", "in_height", "kernel_height"))
    assert np.isfinite(features).all()
    # Pointwise below 16 images, or one small image: torch's own; all others go to oneDNN.
    np.testing.assert_array_equal(features[:, -1], [1, 0, 0, 0, 1, 0])
