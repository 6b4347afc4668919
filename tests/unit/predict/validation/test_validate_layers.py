"""Predictions from regressors alone, and their errors against measured layers: what is read, by hand, and refused."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from predict_caller import Caller
from profile_factory import (
    free_copies,
    layer_times,
    linear_seconds,
    make_network,
    make_profile,
    model_times,
    with_doctor,
    write_training_run,
)

from calibrate.kernels.features import kernels_of, log_sizes
from calibrate.kernels.files import write_arrays
from calibrate.kernels.model import (
    KernelCandidate,
    KernelModel,
    Regressor,
    SizeRange,
    held_regressors,
    with_regressor,
)
from calibrate.profile.profile import Profile, write_profile
from paradl_bench.core.errors import UserError
from paradl_bench.core.statistics import MAD_TO_SD
from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.network.kernel import KernelShape, KernelStage
from paradl_bench.network.kinds.kernel_shape import kernel_shape, optimizer_shape
from predict.costs.compute.kernel_costs import Pair, in_situ_of
from predict.costs.compute.layer_source import LayersFrom, parse_layers
from predict.costs.cost_model import CostModel
from predict.costs.kinds.kind_costs import PricingContext
from predict.costs.sourced import Source
from predict.validation.layers.comparison import Compared, LayerValidation, validate_layers

CHAIN = make_network()
REGRESSED = LayersFrom("regressed")
STAGES: tuple[KernelStage, ...] = ("FW", "BW")
BATCHES = (2, 4, 8)
SECONDS: dict[tuple[str, str], float] = {
    ("linear", "FW"): 1e-3,
    ("linear", "BW"): 2e-3,
    ("linear", "BW_weight"): 1.5e-3,
    ("activation", "FW"): 1e-4,
    ("activation", "BW"): 3e-4,
    ("optimizer", "WU"): 5e-3,
}
"""What trees say of a kernel, whatever its sizes; the network says twice that."""


def swept(network: ModelGraph) -> list[KernelShape]:
    """Kernels of a network's layers, and of its weight update."""
    found = [
        shape
        for layer in network.layers
        for stage in STAGES
        for batch in BATCHES
        if (shape := kernel_shape(layer, stage, batch, "fp32"))
    ]
    elements = sum(each.elements for each in network.parameters)
    updates = [optimizer_shape("sgd", elements * size, len(network.parameters), "fp32") for size in (1, 2)]
    return found + updates


def regressors(
    folder: Path, *, kinds: Iterable[str] = ("linear", "activation", "optimizer"), fitted_on: int | None = None
) -> tuple[KernelModel, ...]:
    """Regressors that say the same of every kernel, in an archive; trees were chosen, and the network is held.

    Args:
        fitted_on: only the first so many shapes of each were fitted on; None for all.
    """
    groups: dict[tuple[str, KernelStage], list[KernelShape]] = {}
    for shape in swept(CHAIN):
        if shape.kind in kinds:
            groups.setdefault((shape.kind, shape.stage), []).append(shape)
    models, arrays = [], {}
    for index, ((kind, stage), shapes) in enumerate(groups.items()):
        seconds = SECONDS[kind, stage]
        sizes = kernels_of(shapes).sizes
        inputs = tuple(SizeRange(name=n, low=int(v.min()), high=int(v.max())) for n, v in sizes.items())
        varied = tuple(each.name for each in inputs if each.low < each.high)
        arrays |= {f"{index}/{name}": array for name, array in constant_arrays(seconds, len(varied)).items()}
        arrays[f"{index}/seen"] = log_sizes(kernels_of(shapes[:fitted_on]), varied)
        errors: dict[str, Any] = {"validation_re": 0.1, "held_out_re": 0.1, "held_out_wre": 0.1, "held_out_bias": 0.0}
        candidates: tuple[Regressor, ...] = ("trees", "process", "mlp")
        models.append(
            KernelModel(
                kind=kind,
                stage=stage,
                settings=shapes[0].settings,
                dtype="fp32",
                kernels=len(shapes),
                model="trees",
                inputs=inputs,
                floor_s=seconds,
                peak_flops=0.0,
                bandwidth_bytes_per_s=0.0,
                interval_log=0.1,
                typical_distance=0.5,
                candidates=tuple(KernelCandidate(model=model, **errors) for model in candidates),
                file=str(folder / "profile.kernels.npz"),
                sha256="",
                arrays=str(index),
            )
        )
    sha256 = write_arrays(folder / "profile.kernels.npz", arrays)
    return tuple(msgspec.structs.replace(model, sha256=sha256) for model in models)


def constant_arrays(seconds: float, inputs: int) -> dict[str, np.ndarray[Any, Any]]:
    """Trees of one leaf on the floor, and a network without weights that says twice the floor."""
    widths = [inputs, *[2] * 5, 1]
    found: dict[str, np.ndarray[Any, Any]] = {
        **{f"mlp/weight{at}": np.zeros((widths[at + 1], widths[at])) for at in range(6)},
        **{f"mlp/bias{at}": np.zeros(widths[at + 1]) for at in range(5)},
        "mlp/bias5": np.array([math.log(2 * seconds)]),
        "interval/mlp": np.array([0.3]),
    }
    ints = {name: np.zeros(0, np.int32) for name in ("feature", "left", "right")}
    trees = {**ints, "threshold": np.zeros(0), "leaf": np.zeros(1), "root": np.array([-1], np.int32)}
    return found | {f"trees/{name}": array for name, array in trees.items()}


def wrong_seconds(layer: Layer, phase: str, batch: int) -> float:
    """A hundred times what layers of the factory take."""
    return 100 * linear_seconds(layer, phase, batch)


def profile_of(folder: Path, *, seconds: Any = linear_seconds, fitted_on: int | None = None, **changes: Any) -> Profile:
    kinds = changes.pop("kinds", ("linear", "activation", "optimizer"))
    return with_doctor(
        make_profile(
            CHAIN,
            layer_times=layer_times(CHAIN, seconds=seconds),
            model_times=model_times(CHAIN, seconds=linear_seconds),
            kernel_models=regressors(folder, kinds=kinds, fitted_on=fitted_on),
            copies=free_copies(),
            **changes,
        )
    )


def stage_sums(model: CostModel, batch: int = 8) -> dict[str, float]:
    """Seconds of the serial model by stage."""
    sums = model.sums(PricingContext(batch, 1))
    layers = sums.seconds_of_operations()
    per_layer = {phase: sum(layers[each.operation, phase] for each in CHAIN.layers) for phase in STAGES}  # type: ignore[index]
    return {**per_layer, "WU": float(sums.seconds[-1])}


def test_regressed_takes_none_of_wrong_measured_times(tmp_path: Path) -> None:
    right, wrong = (
        CostModel(profile=profile_of(tmp_path, seconds=seconds), network=CHAIN, layers_from=REGRESSED)
        for seconds in (linear_seconds, wrong_seconds)
    )
    # The first layer's backward computes no gradient of its input; three of each kind.
    expected = {"FW": 3 * (1e-3 + 1e-4), "BW": 1.5e-3 + 2 * 2e-3 + 3 * 3e-4, "WU": 5e-3}
    assert stage_sums(right) == pytest.approx(expected)
    assert stage_sums(wrong) == stage_sums(right)
    place = PricingContext(8, 1)
    assert wrong.sums(place).spread == right.sums(place).spread
    np.testing.assert_array_equal(wrong.sums(place).costs.sd_s, right.sums(place).costs.sd_s)
    measured = CostModel(profile=profile_of(tmp_path, seconds=wrong_seconds), network=CHAIN)
    assert stage_sums(measured)["FW"] == pytest.approx(sum(wrong_seconds(layer, "FW", 8) for layer in CHAIN.layers))


def test_rates_that_layers_reached_count_as_measured_layers(tmp_path: Path) -> None:
    reached = profile_of(tmp_path, kinds=("linear", "optimizer"))
    devices = tuple(msgspec.structs.replace(each, rates=(), rates_from="reached by layers") for each in reached.devices)
    without = msgspec.structs.replace(reached, devices=devices)
    with pytest.raises(UserError, match="no regressor covers activation of chain at batch 8") as caught:
        stage_sums(CostModel(profile=without, network=CHAIN, layers_from=REGRESSED))
    assert "paradl-bench kernels --for chain --kinds activation --batch 8 -o DIR" in str(caught.value)
    with pytest.raises(UserError, match="no rates of its device in fp32 except those that measured layers reached"):
        CostModel(profile=without, network=CHAIN, layers_from=LayersFrom("roofline"))


def test_a_kind_without_regressor_falls_to_the_roofline(tmp_path: Path) -> None:
    model = CostModel(profile=profile_of(tmp_path, kinds=["linear"]), network=CHAIN, layers_from=REGRESSED)
    relu = next(layer for layer in CHAIN.layers if layer.kind == "activation")
    cost = model._layers.cost(relu.operation, "FW", "", 8, 1)
    assert cost.source is Source.ROOFLINE
    assert cost.seconds == pytest.approx(8 * relu.fw_bytes / 1e10)
    (remark,) = cost.remarks
    assert remark.extrapolated
    assert "no regressor covers activation: the roofline is used instead; paradl-bench kernels" in remark.text


def test_roofline_is_flops_and_bytes_alone(tmp_path: Path) -> None:
    model = CostModel(profile=profile_of(tmp_path), network=CHAIN, layers_from=LayersFrom("roofline"))
    linear = CHAIN.layers[0]
    parameters = {each.name: each.bytes for each in CHAIN.parameters}
    moved = 8 * linear.fw_bytes + sum(parameters[name] for name in linear.parameters)
    bound_s = max(8 * linear.fw_flops / 1e11, moved / 1e10)
    assert model._layers.cost(linear.operation, "FW", "", 8, 1).seconds == pytest.approx(bound_s)
    elements = sum(each.elements for each in CHAIN.parameters)
    assert stage_sums(model)["WU"] == pytest.approx(5 * 4 * elements / 1e10)


def test_a_regressor_is_taken_by_name(tmp_path: Path) -> None:
    profile = profile_of(tmp_path)
    (first, *_) = profile.kernel_models
    assert held_regressors(first) == ("trees", "mlp")
    named = with_regressor(first, "mlp")
    assert named is not None
    assert (named.model, named.interval_log, with_regressor(first, "process")) == ("mlp", 0.3, None)
    chosen = stage_sums(CostModel(profile=profile, network=CHAIN, layers_from=REGRESSED))
    network = stage_sums(CostModel(profile=profile, network=CHAIN, layers_from=parse_layers("regressed:mlp")))
    assert network == pytest.approx({stage: 2 * seconds for stage, seconds in chosen.items()})
    with pytest.raises(UserError, match="regressed:process: no kernel of the profile has that regressor, only mlp, tr"):
        CostModel(profile=profile, network=CHAIN, layers_from=parse_layers("regressed:process"))


def test_regressed_times_take_the_ratio_of_measured_layers() -> None:
    pairs = [Pair("linear", 1.0, 1.5), Pair("linear", 2.0, 3.0), Pair("linear", 1.0, 1.5), Pair("conv", 9.0, 9.0)]
    own, others = in_situ_of("linear", pairs), in_situ_of("pool", pairs)
    assert own is not None
    assert others is not None
    assert (own.ratio, own.relative_sd, own.layers) == (1.5, 0.0, 3)
    assert (others.ratio, others.layers) == (1.5, 4)
    assert in_situ_of("linear", pairs[:2]) is None


def test_one_large_layer_does_not_speak_for_its_kind() -> None:
    """By the sums all would take 6.3 times as long; half of them differ by a factor of two from the middle."""
    found = in_situ_of("linear", [Pair("linear", 1.0, ratio) for ratio in (0.5, 1.0, 2.0)] + [Pair("linear", 9, 72)])
    assert found is not None
    assert found.ratio == pytest.approx(math.sqrt(2))
    assert found.relative_sd == pytest.approx(MAD_TO_SD * math.log(2), rel=0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("other", "unknown --layers 'other': choices are measured, regressed, regressed:REGRESSOR, roofline"),
        ("roofline:mlp", "unknown --layers 'roofline:mlp'"),
        ("regressed:", "unknown regressor ''"),
        ("regressed:forest", "unknown regressor 'forest': choices are mlp, "),
    ],
)
def test_other_words_for_layers_are_refused(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_layers(text)
    assert message in str(caught.value)


def test_a_profile_without_regressors_is_refused_with_a_command(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no regressors of kernels in fp32; measure some: .* --for chain --dtype fp32"):
        CostModel(profile=make_profile(), network=CHAIN, layers_from=REGRESSED)
    profile = profile_of(tmp_path)
    compiled = tuple(msgspec.structs.replace(time, kernel_settings="compile") for time in profile.model_times)
    profile = msgspec.structs.replace(profile, model_times=compiled)
    with pytest.raises(UserError, match="regressors hold for kernels without settings, and the prediction has compile"):
        CostModel(profile=profile, network=CHAIN, kernel_settings="compile", layers_from=REGRESSED)


def held_against(profile: Profile, text: str = "regressed", **more: Any) -> LayerValidation:
    return validate_layers(Compared(profile, CHAIN, "sgd", "fp32"), parse_layers(text), **more)


def test_errors_are_the_papers_by_hand(tmp_path: Path) -> None:
    measured = {"fc0": 2e-3, "relu0": 1e-4, "fc1": 1e-3, "relu1": 1e-4, "fc2": 1e-3, "relu2": 2e-4}

    def seconds(layer: Layer, phase: str, batch: int) -> float:
        return (
            measured[layer.name] if phase == "FW" else SECONDS["linear" if "fc" in layer.name else "activation", "BW"]
        )

    found = held_against(profile_of(tmp_path, seconds=seconds))
    forward = {each.layer: each for each in found.layers if each.stage == "FW"}
    mean = 4.4e-3 / 6
    assert forward["fc0"].re == pytest.approx(-0.5)
    assert forward["fc0"].wre == pytest.approx(-1e-3 / mean)
    assert forward["relu2"].re == pytest.approx(-0.5)
    assert forward["relu2"].wre == pytest.approx(-1e-4 / mean)
    assert forward["fc1"].re == pytest.approx(0, abs=1e-12)
    stage = found.stages["FW"]
    assert stage.wre == pytest.approx((1e-3 + 1e-4) / mean / 6)
    assert stage.mean_re == pytest.approx((0.5 + 0.5) / 6)
    assert stage.re == pytest.approx(3.3e-3 / 4.4e-3 - 1)
    # The first layer's backward is 1.5 ms where 2 ms were measured; the update takes 5 ms, measured 0.1 ms.
    assert found.stages["BW"].wre == pytest.approx(0.5e-3 / (3 * 2e-3 + 3 * 3e-4))
    assert found.stages["WU"].re == pytest.approx(49)
    missed, whole = 1.1e-3 + 0.5e-3 + 4.9e-3, 4.4e-3 + 6.9e-3 + 1e-4
    assert found.network.wre == pytest.approx(missed / whole)
    assert found.network.re == pytest.approx((3.3e-3 + 6.4e-3 + 5e-3) / whole - 1)
    assert (found.network.count, found.batch, found.ranks_on_host) == (13, 8, 1)


def test_blocks_are_names_of_modules() -> None:
    from predict.validation.layers.comparison import _block

    names = {"layer1.0.conv1": "layer1.0", "features.3": "features", "conv1": "conv1", "a.b.c.d": "a.b"}
    for name, block in names.items():
        assert _block(msgspec.structs.replace(CHAIN.layers[0], name=name), 2) == block
    assert _block(msgspec.structs.replace(CHAIN.layers[0], name="a.b.c.d"), 3) == "a.b.c"


def test_shapes_that_were_fitted_on_are_counted_apart(tmp_path: Path) -> None:
    every = held_against(profile_of(tmp_path))
    assert every.of_regressed == (13, 13)
    assert every.held_out is None
    # The first shape of each sweep is of the first layer at batch 2, or of the update itself.
    first = held_against(profile_of(tmp_path, fitted_on=1))
    assert [each.layer for each in first.layers if each.fitted_on] == ["weight update"]
    assert first.of_regressed == (1, 13)
    assert first.held_out is not None
    assert "does not say on which kernels" in first.notes[-1]


def test_layers_that_were_not_measured_are_left_out(tmp_path: Path) -> None:
    profile = profile_of(tmp_path)
    gone = CHAIN.layers[0].operation
    times = tuple(each for each in profile.layer_times if each.operation != gone or each.phase != "BW")
    found = held_against(msgspec.structs.replace(profile, layer_times=times))
    assert found.unmeasured == ("fc0 BW",)
    assert found.network.count == 12


@pytest.fixture
def predict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Caller:
    caller = Caller(tmp_path, monkeypatch, capfd)
    write_profile(caller.profile, profile_of(tmp_path))
    return caller


def test_every_command_takes_layers_from_regressors(predict: Caller, tmp_path: Path) -> None:
    line = ("--strategy", "serial", "--batch", "8", "--json", "--layers", "regressed")
    (point,) = predict(*line).json()
    sources = point["sources"]
    assert isinstance(sources, dict)
    assert sources["regressed"] == pytest.approx(1.0)
    profile = ("--from-profile", str(predict.profile))
    of_model = (*profile, "--model", "chain", "--batch", "8", "--layers", "regressed", "--json")
    (base, *_) = predict.bare("what-if", *of_model, "--strategy", "serial", "--vary", "batch=4").json()
    assert base["iteration_s"] == point["iteration_s"]
    searched = predict.bare("search", *of_model, "--ranks", "1")
    assert searched.code == 0, searched.err
    assert "--layers regressed" in searched.out
    run = write_training_run(
        tmp_path / "run", CHAIN, strategy="serial", ranks=1, batch=8, phases_s=[[(1e-3, 2e-3, 0.0, 1e-3)] * 12]
    )
    report = predict.bare("validate", *profile, str(run), "-o", str(tmp_path / "report"), "--layers", "regressed")
    assert report.code == 0, report.err
    assert "no prediction uses measured layers" in report.out
    diagnosed = predict.bare("diagnose", *profile, "--run", str(run), "--layers", "regressed", "--json")
    assert diagnosed.code == 0, diagnosed.err


def test_the_command_prints_writes_and_draws(predict: Caller, tmp_path: Path) -> None:
    line = ("validate-layers", "--from-profile", str(predict.profile), "--model", "chain")
    shown = predict.bare(*line, "--plot", str(tmp_path / "errors.png"), "-o", str(tmp_path / "errors.json"))
    assert shown.code == 0, shown.err
    assert "13 of 13 regressed layers have a shape that was swept" in shown.out.replace("\n", " ")
    assert (tmp_path / "errors.png").read_bytes().startswith(b"\x89PNG")
    found = msgspec.json.decode((tmp_path / "errors.json").read_bytes(), type=LayerValidation)
    assert found.layers_from == "regressed"
    assert found.sources == pytest.approx({"regressed": 1.0})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layers", "measured"), "--layers measured: validate-layers compares with measured layers"),
        (("--batch", "5"), "--batch 5: layers of chain were measured at batch 4, 8; give one of these"),
        (("--dtype", "bf16"), "the profile holds no measured layers of chain in bf16"),
        (("--plot", "errors.pdf"), "--plot errors.pdf: the name has to end in .png, .svg, .html"),
        (("--plot", "a.png", "-o", "a.png"), "-o and --plot both write to a.png"),
        (("--layers", "regressed:process"), "no kernel of the profile has that regressor"),
    ],
)
def test_what_cannot_be_held_against_is_one_line(predict: Caller, arguments: tuple[str, ...], message: str) -> None:
    result = predict.bare("validate-layers", "--from-profile", str(predict.profile), "--model", "chain", *arguments)
    assert result.code == 2
    assert message in result.err
    assert len(result.err.strip().splitlines()) == 1
