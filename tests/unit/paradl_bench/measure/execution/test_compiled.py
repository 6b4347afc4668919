"""Models compiled whole and layer by layer: what is compiled, that it computes the same, what is kept and refused.

torch compiles with a backend here that follows the model and differentiates what it found, and makes no kernels of it:
that takes no C++ compiler and no seconds. Kernels are made by the slow test at the end.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")

from profile_factory import layer_times, make_network, make_profile, model_times, write_training_run

from calibrate.fitting.fit import fit_profile
from calibrate.profile.profile import write_profile
from paradl_bench.core.errors import UserError, WorkError
from paradl_bench.measure.execution import compiled as compiling_module
from paradl_bench.measure.execution.compiled import (
    CompiledLayers,
    Compiling,
    compile_errors,
    compile_in_place,
    compiled,
)
from paradl_bench.measure.execution.compiler import compiler_settings, refuse_without_compiler
from paradl_bench.measure.execution.probes import OperationProbe
from paradl_bench.measure.layers.profiling import measure_layers
from paradl_bench.measure.layers.request import LayersRequest
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.measure.training.summary import print_training_summary
from paradl_bench.network.models.catalog import LoadedModel, load_model
from paradl_bench.plan.settings import PlanSettings, plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.ranks.groups.process_groups import RankContext
from paradl_bench.records.kernel_settings import KernelSettings
from paradl_bench.records.measurement import ITERATIONS_FILE, LAYERS_FILE, read_manifest, read_records
from paradl_bench.records.samples import IterationSamples, LayerSamples
from paradl_bench.records.training.compile_record import COMPILED_FILE, CompileRecord
from paradl_bench.records.training.training_record import read_run
from paradl_bench.strategies.passes.lower_precision import check_kernel_settings
from predict.prediction.prediction import _compiled_notes

COMPILE = KernelSettings(compile=True)
ALONE = RankContext(
    rank=0, ranks=1, local_rank=0, device=torch.device("cpu"), backend="none", launcher="own", core=None
)
NETS = """
import torch
from torch import nn
class Net(nn.Module):
    "An operation in place, statistics that are updated, two layers of one operation, calls that are no operation."
    input_shape = (3, 6, 6)
    def __init__(self):
        super().__init__()
        self.one, self.norm, self.act = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.two, self.three, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
    def forward(self, x):
        x = self.act(self.norm(self.one(x))) + 1
        x += x.tanh()
        x = x.reshape(x.shape[0], x.size(1), -1).mean(2)
        return self.head(self.three(self.two(x)))
class Pairs(nn.Module):
    "Batch norm over two values a channel, layer after layer: each makes of a rounding as much as the pair is apart."
    input_shape = (3, 2, 2)
    def __init__(self):
        super().__init__()
        layers = [nn.Conv2d(3, 8, 2, bias=False)]
        for _ in range(6):
            layers += [nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1, bias=False)]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(8, 3)
    def forward(self, x):
        return self.head(self.body(x).flatten(1))
class Deep(nn.Module):
    "Several buckets of 1 MiB, no biases: gradients of one graph arrive in one order."
    input_shape = (520,)
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(520, 520, bias=False) for _ in range(3)), nn.Linear(520, 3, bias=False))
    def forward(self, x):
        return self.body(x)
"""


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling_module, "BACKEND", "aot_eager")


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "nets_compiled_test.py").write_text(NETS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "nets_compiled_test", raising=False)
    return tmp_path


@pytest.fixture
def model(workplace: Path) -> LoadedModel:
    return load_model("nets_compiled_test:Net", None)


class Trained:
    """One iteration of a model after another from the same state: its loss, gradients and buffers."""

    def __init__(self, model: LoadedModel, batch: int = 4) -> None:
        self.model, self.state = model, {k: v.clone() for k, v in model.module.state_dict().items()}
        self.inputs, self.targets = model.make_batch(batch, 0)

    def to(self, dtype: torch.dtype) -> Trained:
        """The same numbers in another precision."""
        self.inputs = self.inputs.to(dtype)
        self.model.module.to(dtype)
        return self

    def loss(self, run: object = None) -> torch.Tensor:
        return self.model.loss((run or self.model.module)(self.inputs), self.targets)

    def by(self, run: object = None, stand_in: CompiledLayers | None = None) -> dict[str, torch.Tensor]:
        module = self.model.module
        module.load_state_dict(self.state)
        module.zero_grad()
        if stand_in is None:
            loss = self.loss(run)
        else:
            with OperationProbe(time.perf_counter, stand_in):
                loss = self.loss(run)
        loss.backward()
        gradients = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        return {"loss": loss.detach(), **gradients, **buffers}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], **tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def test_whole_and_layer_by_layer_it_computes_what_it_computed(model: LoadedModel) -> None:
    trained, network = Trained(model), trace_network(model)
    plain = trained.by()
    with Compiling() as of_whole:
        assert_same(plain, trained.by(compiled(model.module, "whole")))
    layers = CompiledLayers(network, trained.loss)
    with Compiling() as of_layers:
        assert_same(plain, trained.by(stand_in=layers))
    whole, apart = of_whole.record(0, "Net", 4, "whole"), of_layers.record(0, "Net", 4, "layers")
    of_model = [layer for layer in network.layers if not layer.name.startswith("loss.")]
    # Each operation once, and not the loss: two layers share one.
    assert (whole.graphs, apart.graphs) == (1, len({layer.operation for layer in of_model}))
    assert apart.graphs == len(of_model) - 1
    assert whole.compile_s > 0
    with of_layers.nothing_more("Net"):
        assert_same(plain, trained.by(stand_in=layers))
    compile_in_place(model.module)
    with Compiling() as in_place:
        assert_same(plain, trained.by())
    assert in_place.times > 0


def test_what_is_no_layer_is_called_as_it_is(model: LoadedModel) -> None:
    trained, network = Trained(model), trace_network(model)
    layers = CompiledLayers(network, trained.loss)
    assert layers(0, torch.conv2d) is not torch.conv2d
    assert layers(0, torch.Tensor.size) is torch.Tensor.size
    assert layers(len(network.layers) - 1, torch.nn.functional.cross_entropy) is torch.nn.functional.cross_entropy
    with pytest.raises(WorkError, match="its control flow varies"):
        CompiledLayers(network, lambda: model.module(trained.inputs))


def test_what_torch_cannot_follow_is_named_in_one_line(model: LoadedModel) -> None:
    def broken(tensor: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return tensor

    with pytest.raises(UserError) as refused, compile_errors("layer one of Net by itself"):
        compiled(broken, "broken", whole_graph=True)(torch.ones(2))
    assert str(refused.value).startswith("--compile: torch cannot compile layer one of Net by itself: ")
    assert "\n" not in str(refused.value)
    # A whole model runs on behind such a place, in another graph.
    with Compiling() as compiling:
        compiled(lambda tensor: broken(tensor + 1) * 2, "parted")(torch.ones(2))
    assert compiling.record(0, "parted", 1, "whole").graphs == 2


def test_nothing_is_timed_that_was_compiled_anew() -> None:
    doubled = compiled(lambda tensor: tensor * 2, "doubled")
    with Compiling() as compiling:
        doubled(torch.ones(2))
        with compiling.nothing_more("doubled"):
            doubled(torch.ones(2))
        anew = pytest.raises(WorkError, match="doubled was compiled again between timed iterations")
        with anew, compiling.nothing_more("doubled"):
            doubled(torch.ones(3))
    with Compiling() as nothing:
        doubled(torch.ones(2))
    with pytest.raises(WorkError, match="torch compiled no part of doubled"):
        nothing.record(0, "doubled", 1, "whole")


def request(settings: KernelSettings) -> LayersRequest:
    return LayersRequest(
        models=("nets_compiled_test:Net",),
        batches=(2,),
        input_shape=None,
        device="cpu",
        dtype="fp32",
        kernel_settings=settings,
        optimizer="sgd",
        ranks_on_host=(1,),
        blocks=2,
        pairs=2,
        warmup=1,
        isolated="none",
    )


def test_compiled_layers_stand_apart_in_a_profile(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", sys.executable)
    for name, settings in (("plain", KernelSettings()), ("compiled", COMPILE)):
        measure_layers(request(settings), ALONE, workplace / name, ("paradl-bench", "layers"))
    directories = [workplace / name for name in ("plain", "compiled")]
    assert not (directories[0] / COMPILED_FILE).exists()
    found = read_records(directories[1], COMPILED_FILE, CompileRecord)
    assert [(record.batch, record.what) for record in found] == [(2, "whole"), (2, "layers")]
    for directory, label in zip(directories, ("", "compile"), strict=True):
        layers = read_records(directory, LAYERS_FILE, LayerSamples)
        assert {record.kernel_settings for record in layers} == {label}
        assert len(read_records(directory, ITERATIONS_FILE, IterationSamples)) == 2
    settings = [read_manifest(directory).environment.settings for directory in directories]
    assert "compiler" not in settings[0]
    assert settings[1]["compiler"].startswith("Python")
    profile = fit_profile(directories, command_line=("calibrate", "fit"), force=False)
    assert {time.kernel_settings for time in profile.model_times} == {"", "compile"}
    # What another compiler made does not go with it.
    manifest = read_manifest(directories[1])
    environment = msgspec.structs.replace(manifest.environment, settings=settings[1] | {"compiler": "another"})
    copy = workplace / "copy"
    copy.mkdir()
    for path in directories[1].iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    (copy / "manifest.json").write_bytes(
        msgspec.json.encode(msgspec.structs.replace(manifest, environment=environment))
    )
    with pytest.raises(UserError, match=r"settings\.compiler"):
        fit_profile([directories[1], copy], command_line=("calibrate", "fit"), force=False)


@pytest.mark.parametrize(
    ("strategy", "settings", "message"),
    [
        ("f2", {}, "--compile with filter parallelism"),
        ("d2p2", {}, "--compile with pipeline parallelism"),
        ("z2d2", {}, "--compile with stage 2 of ZeRO"),
        ("d2", {"recompute": ("all",)}, "--compile with --recompute"),
        ("d2", {"batch_norm": "sync"}, "--compile with --batch-norm sync"),
        (
            "d2",
            {"first_bucket_bytes": 2**19, "bucket_cap_bytes": 2**19},
            "--compile with --bucket-cap-mb 0.5: .* 1 MiB",
        ),
    ],
)
def test_what_does_not_run_whole_is_refused(strategy: str, settings: dict[str, Any], message: str) -> None:
    planned = plan_settings(batch=8, **settings)
    with pytest.raises(UserError, match=message):
        check_kernel_settings(parse_strategy(strategy), planned, "compile+tf32")
    check_kernel_settings(parse_strategy(strategy), planned, "tf32")


def test_serial_and_replicated_models_are_compiled() -> None:
    for strategy in ("serial", "d4", "z1d4"):
        check_kernel_settings(parse_strategy(strategy), PlanSettings(batch=8, accumulate=2), "compile")
    small = plan_settings(batch=8, first_bucket_bytes=2**19, bucket_cap_bytes=2**19)
    check_kernel_settings(parse_strategy("serial"), small, "compile")


def test_a_missing_compiler_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match="CXX=no-such-compiler, which is not there"):
        refuse_without_compiler(COMPILE, "cpu")
    refuse_without_compiler(KernelSettings(), "cpu")
    assert compiler_settings(KernelSettings(), "cpu") == {}
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(UserError, match=r"g\+\+, and none is on the PATH"):
        refuse_without_compiler(COMPILE, "cpu")
    with pytest.raises(UserError, match="--isolated split with --compile"):
        msgspec.structs.replace(request(COMPILE), isolated="split").check()


def test_a_prediction_says_what_compiled_layers_are() -> None:
    assert _compiled_notes("channels_last") == ()
    assert any("timed with each compiled alone" in note for note in _compiled_notes("channels_last+compile"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "batch"), [("Net", 4), ("Pairs", 2)])
def test_the_compilers_kernels_give_the_same_gradients(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, name: str, batch: int
) -> None:
    """In double precision, where rounding cannot hide a wrong kernel, nor be taken for one."""
    try:
        refuse_without_compiler(COMPILE, "cpu")
    except UserError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(compiling_module, "BACKEND", "inductor")
    torch._dynamo.reset()
    model = load_model(f"nets_compiled_test:{name}", None)
    trained, network = Trained(model, batch), trace_network(model)
    exact = trained.to(torch.float64).by()
    with Compiling() as whole:
        assert_same(exact, trained.by(compiled(model.module, "whole")), rtol=1e-9, atol=1e-12)
    assert whole.record(0, name, batch, "whole").graphs == 1
    layers = CompiledLayers(network, trained.loss)
    assert_same(exact, trained.by(stand_in=layers), rtol=1e-9, atol=1e-12)
    compile_in_place(model.module)
    assert_same(exact, trained.by(), rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(1200)
def test_kernels_are_made_where_models_are_trained(workplace: Path) -> None:
    try:
        refuse_without_compiler(COMPILE, "cpu")
    except UserError as error:
        pytest.skip(str(error))

    def train(*arguments: str) -> list[float]:
        common = ("--iterations", "4", "--bucket-cap-mb", "1", "-o", "-".join(arguments))
        command = [sys.executable, "-m", "paradl_bench", "train", *arguments, *common, "--hang-timeout", "900"]
        done = subprocess.run(command, cwd=workplace, capture_output=True, text=True, timeout=1000, check=False)
        assert done.returncode == 0, done.stderr
        run = read_run(workplace / "-".join(arguments))
        assert run.issued_equals_plan
        assert len(run.compiled) == run.ranks * ("--compile" in arguments)
        assert not run.compiled or not run.memory
        return list(run.losses)

    # Where compiling takes an iteration more, tracking memory does in the other run: both train.
    for model, strategy in (("nets_compiled_test:Net", "serial"), ("nets_compiled_test:Deep", "d2")):
        given = (model, "--strategy", strategy, "--batch", "4")
        losses = [train(*given), train(*given, "--compile")]
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
        assert losses[0][0] != losses[0][-1]


def test_a_compiled_runs_summary_says_that_memory_was_not_tracked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    phases = [[(0.1, 0.2, 0.0, 0.01)] * 6] * 2
    record = CompileRecord(rank=0, model="chain", batch=8, what="whole", compile_s=1.0, graphs=1)
    shown = {}
    for name, compiled_by in (("plain", ()), ("compiled", (record,))):
        run = write_training_run(tmp_path / name, make_network(), phases_s=phases, compiled=compiled_by)
        print_training_summary(run, as_json=False)
        shown[name] = "memory was not tracked" in capsys.readouterr().out
    assert shown == {"plain": False, "compiled": True}


def test_predictions_of_compiled_profiles_carry_the_label(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from predict.cli import group

    network = make_network()
    profile = make_profile(network, layer_times=layer_times(network), model_times=model_times(network))
    times = {
        name: tuple(msgspec.structs.replace(time, kernel_settings="compile") for time in getattr(profile, name))
        for name in ("layer_times", "model_times")
    }
    write_profile(tmp_path / "p.json", msgspec.structs.replace(profile, **times))
    words = ["--from-profile", str(tmp_path / "p.json"), "--model", "chain", "--strategy", "serial", "--batch", "8"]
    done = CliRunner().invoke(group, [*words, "--json"])
    assert done.exit_code == 0, done.output
    (row,) = msgspec.json.decode(done.output)
    assert row["kernel_settings"] == "compile"
    assert set(_compiled_notes("compile")) <= set(row["notes"])
    assert CliRunner().invoke(group, [*words, "--no-compile"]).exit_code != 0
