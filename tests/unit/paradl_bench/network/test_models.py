"""Models by name: torchvision's, a user's factory, and what goes wrong with either."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from paradl_bench.core.errors import UserError
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.models.catalog import load_model, model_names

FACTORY = """
import torch
def build():
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 3))
    net.input_shape = (1, 8, 8)
    return net
def wrong(): return 7
def needs(x): return x
def fails(): raise RuntimeError("no weights")
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "user_nets_of_a_test.py").write_text(FACTORY)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    sys.modules.pop("user_nets_of_a_test", None)
    return "user_nets_of_a_test"


def test_a_factory_brings_its_input_shape_and_classes(user_module: str) -> None:
    model = load_model(f"{user_module}:build")
    inputs, targets = model.make_batch(5, seed=0)
    assert model.input_shape == (1, 8, 8)
    assert tuple(inputs.shape) == (5, 1, 8, 8)
    assert int(targets.max()) < 3
    assert model.loss(model.module(inputs), targets).dim() == 0


def test_batches_and_weights_repeat_with_their_seed() -> None:
    first, second = load_model("squeezenet1_1", (3, 32, 32)), load_model("squeezenet1_1", (3, 32, 32))
    for mine, other in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert bool((mine == other).all())
    assert bool((first.make_batch(2, 3)[0] == second.make_batch(2, 3)[0]).all())
    assert not bool((first.make_batch(2, 3)[0] == second.make_batch(2, 4)[0]).all())


def test_cosmoflow_has_its_papers_layers_and_accepts_small_volumes() -> None:
    """ParaDL, Table 5: about two million parameters at 4x256^3."""
    whole = load_model("cosmoflow", (4, 256, 256, 256), device="meta").module
    convolutions = [m for m in whole.modules() if isinstance(m, torch.nn.Conv3d)]
    dense = [m for m in whole.modules() if isinstance(m, torch.nn.Linear)]
    assert (len(convolutions), len(dense)) == (7, 3)
    assert sum(p.numel() for p in whole.parameters()) == pytest.approx(2e6, rel=0.15)
    small = load_model("cosmoflow", (4, 32, 16, 16))
    inputs, targets = small.make_batch(2, seed=0)
    assert small.module(inputs).shape == (2, 4)
    assert small.loss(small.module(inputs), targets).dim() == 0
    assert "cosmoflow" in model_names()
    with pytest.raises(UserError, match="takes volumes"):
        load_model("cosmoflow", (3, 64, 64))


def test_unknown_names_come_with_choices(user_module: str) -> None:
    with pytest.raises(UserError, match="did you mean resnet18"):
        load_model("resnet81")
    with pytest.raises(UserError, match="build"):
        load_model(f"{user_module}:buidl")
    with pytest.raises(UserError, match="cannot import"):
        load_model("no_such_module_here:build")
    with pytest.raises(UserError, match=r"returns an nn\.Module"):
        load_model(f"{user_module}:wrong")
    with pytest.raises(UserError, match="calling needs"):
        load_model(f"{user_module}:needs")


def test_what_own_code_raises_is_told_with_its_line(user_module: str, tmp_path: Path) -> None:
    """Also of a failure that building without memory is first taken for."""
    for device in ("cpu", "meta"):
        with pytest.raises(UserError, match=r"fails\(\) failed: RuntimeError: no weights \(user_nets.*py, line 9\)"):
            load_model(f"{user_module}:fails", device=device)
    (tmp_path / "user_nets_with_a_slip.py").write_text("def build(:\n")
    with pytest.raises(UserError, match="importing user_nets_with_a_slip failed: SyntaxError"):
        load_model("user_nets_with_a_slip:build")


# Millions of parameters, and GFLOPs of forward of one image (two a multiply-add), as torchvision states them: those of
# products alone. Ours count biases, normalisation and activations too.
TORCHVISION = {
    "alexnet": (61.10, 1.43),
    "vgg11": (132.86, 15.22),
    "vgg13": (133.05, 22.62),
    "vgg16": (138.36, 30.94),
    "vgg19": (143.67, 39.26),
    "resnet18": (11.69, 3.63),
    "resnet34": (21.80, 7.33),
    "resnet50": (25.56, 8.18),
    "resnet101": (44.55, 15.60),
    "resnet152": (60.19, 23.03),
    "googlenet": (6.62, 3.00),
    "densenet121": (7.98, 5.67),
    "mobilenet_v2": (3.50, 0.60),
}


@pytest.mark.parametrize("name", TORCHVISION)
def test_the_papers_networks_are_those_that_were_published(name: str) -> None:
    millions, gflops = TORCHVISION[name]
    network = trace_network(load_model(name, device="meta"))
    assert network.parameter_elements / 1e6 == pytest.approx(millions, abs=0.006)
    products = sum(layer.fw_flops for layer in network.layers if layer.kind in ("conv", "linear"))
    assert products / 1e9 == pytest.approx(gflops, rel=0.012)
    assert products <= network.fw_flops < 1.1 * products
    assert not [layer.name for layer in network.layers if layer.kind == "opaque" or layer.batchless]
    assert network.layers[-1].kind == "loss"
    assert sorted(network.gradient_order) == sorted(parameter.name for parameter in network.parameters)
    assert "input" in {name for layer in network.layers for name in layer.inputs}


@pytest.mark.parametrize("extent", [128, 256, 512])
def test_volumes_of_every_size_are_described(extent: int) -> None:
    """Convolutions compute in proportion to the volume; a sample of 4x512^3 is 2 GiB, of which none is made."""
    network = trace_network(load_model("cosmoflow", (4, extent, extent, extent), device="meta"))
    first = network.layers[0]
    assert first.output_shape == (16, extent, extent, extent)
    assert first.fw_flops == 2 * 27 * 4 * 16 * extent**3 + 16 * extent**3
    assert [layer.kind for layer in network.layers].count("pool") == 7
    assert 1.6e6 < network.parameter_elements < 3.8e6


def documented_model() -> str:
    """The example of a token model in docs/extending.md."""
    text = (Path(__file__).parents[4] / "docs" / "extending.md").read_text()
    return text.partition("# mine.py\n")[2].partition("```")[0]


def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> str:
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_the_documented_token_model_is_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = own_module(tmp_path, monkeypatch, "documented_tokens", documented_model())
    network = trace_network(load_model(f"{name}:Tiny"))
    assert network.input_shape == (32,)
    assert network.input_dtype == "int64"
    assert trace_network(load_model(f"{name}:Tiny", (64,))).input_shape == (64,)


OWN = """
from torch import nn

class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
    def forward(self, ids):
        return self.embedding(ids)

def images():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 3))

def lazy():
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(3))

def needs(width):
    return nn.Linear(width, width)
"""


@pytest.mark.parametrize(
    ("factory", "right"),
    [
        ("Tokens", "it seems to read token ids: set its token_task"),
        ("images", "its input is unknown: give --input-shape (channels first, as 1x28x28"),
        ("needs", "it is called without arguments"),
        ("lazy", "1.weight has no shape yet: call the model once on an input before the factory returns it"),
    ],
)
def test_what_a_model_of_ones_own_lacks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factory: str, right: str
) -> None:
    name = own_module(tmp_path, monkeypatch, "own_models_that_lack", OWN)
    with pytest.raises(UserError) as error:
        trace_network(load_model(f"{name}:{factory}"))
    assert right in str(error.value)


def test_a_shape_that_nobody_gave_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = own_module(tmp_path, monkeypatch, "own_models_guessed", OWN)
    load_model(f"{name}:images", (1, 8, 8)).say_guess()
    load_model("squeezenet1_1", device="meta").say_guess()
    assert capsys.readouterr().err == ""
    load_model(f"{name}:images").say_guess()
    assert capsys.readouterr().err == f"{name}:images: no --input-shape: 3x224x224 is taken\n"


def test_a_shape_that_was_given_is_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = own_module(tmp_path, monkeypatch, "own_models_given", OWN)
    with pytest.raises(UserError) as error:
        trace_network(load_model(f"{name}:images", (3, 8, 8)))
    assert "its input is unknown" not in str(error.value)


def test_a_factory_may_import_transformers_where_torch_lacks_torchvisions_operators(tmp_path: Path) -> None:
    """In a process of its own, which has imported none of them before."""
    pytest.importorskip("transformers")
    (tmp_path / "own_gpt.py").write_text(
        "from transformers import GPT2Config, GPT2LMHeadModel\n"
        "from paradl_bench.network.models.token_tasks import NextToken\n"
        "def build():\n"
        "    sizes = dict(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8)\n"
        "    model = GPT2LMHeadModel(GPT2Config(use_cache=False, **sizes))\n"
        "    model.token_task = NextToken(vocabulary=16, sequence=8, positions=8)\n"
        "    return model\n"
    )
    command = [sys.executable, "-m", "paradl_bench", "describe", "own_gpt:build", "--json"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["input_dtype"] == "int64"


def test_copies_are_taken_of_a_module_that_stands_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "standing.py").write_text(
        "from torch import nn\n\nnet = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))\n"
        "net[2].weight = net[0].weight\nnet[1].weight.requires_grad_(False)\nnet.input_shape = (8,)\n"
    )
    monkeypatch.chdir(tmp_path)
    # The file is imported for tracing first, and what it made then is what runs.
    traced, model = load_model("standing:net", device="meta"), load_model("standing:net")
    assert traced.input_shape == model.input_shape == (8,)
    assert trace_network(traced).parameter_bytes == trace_network(model).parameter_bytes == 4 * (64 + 3 * 8)
    for each in (traced, model):
        assert each.module[2].weight is each.module[0].weight
        assert not each.module[1].weight.requires_grad
    assert {value.is_meta for value in traced.module.state_dict().values()} == {True}
    with torch.no_grad():
        model.module[0].weight.zero_()
    assert load_model("standing:net").module[0].weight.any()
