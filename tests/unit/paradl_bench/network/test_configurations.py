"""Models from a ``config.json``: what transformers builds of it, equal blocks traced once, and files that are wrong."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest
from small_language_models import SMALL, write_configuration

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from paradl_bench.core.errors import UserError
from paradl_bench.measure.tracing.tracing import trace_network, trace_whole
from paradl_bench.measure.tracing.trimmed_model import trim
from paradl_bench.network.equal_blocks import KEPT, Stretch, with_all_blocks
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.models.catalog import LoadedModel, load_model
from paradl_bench.network.models.configurations import FAMILIES, read_configuration
from paradl_bench.network.models.language_sizes import language_model_names, size_of

SEQUENCE = 16


def load(path: str, device: str = "cpu") -> LoadedModel:
    return load_model(path, (SEQUENCE,), device=device)


def of_transformers(model: LoadedModel, **settings: Any) -> torch.nn.Module:
    """transformers' own model of the same configuration and weights, with its masks, and its loop over experts."""
    family = model.module.config.model_type
    base: Any = type(model.module).__bases__[1]
    package = import_module(f"transformers.models.{family}.configuration_{family}")
    configuration = getattr(package, type(model.module.config).__name__)
    chosen = {"attn_implementation": "eager", "experts_implementation": "eager"} | settings
    reference: torch.nn.Module = base(configuration(**SMALL[family] | chosen))
    reference.load_state_dict(model.module.state_dict())
    return reference.double().eval()


@pytest.mark.parametrize("family", SMALL)
def test_outputs_and_parameters_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Masks, which are left out here, and experts, which run grouped, make no difference.

    Models after Llama run norms, and routers, in single precision, whatever they are built in.
    """
    close = {"rtol": 1e-9, "atol": 1e-12} if family in ("bert", "gpt2") else {"rtol": 1e-4, "atol": 1e-6}
    model = load(write_configuration(tmp_path, family))
    reference = of_transformers(model)
    inputs, targets = model.make_batch(3, seed=5)
    given: dict[str, Any] = {"input_ids": inputs}
    if family == "t5":
        given = {"input_ids": inputs[:, 0], "decoder_input_ids": inputs[:, 1]}
    expected = reference(**given).logits
    outputs = model.module.double().eval()(inputs)
    torch.testing.assert_close(outputs, expected, **close)
    model.loss(outputs, targets).backward()
    model.loss(expected, targets).backward()
    theirs = {name: parameter.grad for name, parameter in reference.named_parameters()}
    mine = dict(model.module.named_parameters())
    assert mine.keys() == theirs.keys()
    for name, parameter in mine.items():
        torch.testing.assert_close(parameter.grad, theirs[name], **close)


@pytest.mark.parametrize("family", SMALL)
def test_equal_blocks_traced_once_equal_a_whole_trace(family: str, tmp_path: Path) -> None:
    blocks = KEPT + 2 + (family in ("t5", "deepseek_v2", "deepseek_v3"))
    model = load(write_configuration(tmp_path, family, blocks=blocks), "meta")
    trimmed = trim(model)
    assert trimmed is not None
    assert [stretch.extra for stretch in trimmed.stretches] == ([2, 2] if family == "t5" else [2])
    whole = trace_whole(model)
    assert_alike(trace_network(model), whole)
    counted = sum(parameter.numel() for parameter in of_transformers_on_meta(model).parameters())
    assert whole.parameter_elements == counted


def of_transformers_on_meta(model: LoadedModel) -> torch.nn.Module:
    base: Any = type(model.module).__bases__[1]
    with torch.device("meta"):
        built: torch.nn.Module = base(model.module.config)
    return built


def assert_alike(found: ModelGraph, expected: ModelGraph) -> None:
    for mine, theirs in zip(found.layers, expected.layers, strict=True):
        assert mine == theirs, theirs.name
    assert found == expected


def test_a_block_unlike_its_neighbours_is_traced_itself(tmp_path: Path) -> None:
    model = load(write_configuration(tmp_path, "gpt2", blocks=KEPT + 3), "meta")
    model.module.transformer.h[4].attn.scaling = 0.25
    assert trim(model) is None


def test_a_trace_tells_where_neighbours_differ(tmp_path: Path) -> None:
    network = trace_whole(load(write_configuration(tmp_path, "llama", blocks=KEPT), "meta"))
    stretches = [Stretch("model.layers", 2, 4)]
    extended = with_all_blocks(network, stretches)
    assert extended is not None
    assert len(extended.layers) > len(network.layers)
    at = next(i for i, layer in enumerate(network.layers) if layer.name == "model.layers.3.mlp.act_fn")
    changed = msgspec.structs.replace(network.layers[at], fw_flops=1)
    layers = (*network.layers[:at], changed, *network.layers[at + 1 :])
    assert with_all_blocks(msgspec.structs.replace(network, layers=layers), stretches) is None
    order = list(network.gradient_order)
    order[-1], order[-20] = order[-20], order[-1]
    assert with_all_blocks(msgspec.structs.replace(network, gradient_order=tuple(order)), stretches) is None


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        # As published, but for Mixtral (46.7), DeepSeek-V2 (236) and -V3 (671), whose papers round more.
        ("gpt3-175b", 174.6), ("megatron-22b", 22.07), ("megatron-145b", 145.6), ("megatron-175b", 174.6),
        ("megatron-530b", 529.6), ("megatron-1t", 1008.0), ("llama-2-7b", 6.738), ("llama-2-13b", 13.016),
        ("llama-2-70b", 68.977), ("llama-3-8b", 8.030), ("llama-3-70b", 70.554), ("llama-3-405b", 405.853),
        ("mixtral-8x7b", 46.703), ("deepseek-v2", 235.741), ("deepseek-v3", 671.026),
    ],
)  # fmt: skip
def test_sizes_have_the_parameters_of_the_published_models(name: str, billions: float) -> None:
    model = load_model(name, device="meta")
    elements = sum(parameter.numel() for parameter in model.module.parameters())
    assert elements / 1e9 == pytest.approx(billions, rel=3e-4)


def test_every_size_says_where_its_numbers_are_from() -> None:
    folder = Path(__file__).parents[4] / "paradl_bench" / "network" / "models" / "sizes"
    for path in folder.glob("*.json"):
        assert len(json.loads(path.read_text())["source"]) > 20
        assert path.stem in language_model_names()
    assert "llama-2-7b-untied" not in language_model_names()
    assert size_of("llama-2-7b-untied") is None


def test_a_model_of_a_trillion_parameters_is_traced() -> None:
    network = trace_network(load_model("megatron-1t", device="meta"))
    assert {f"transformer.h.{index}.mlp.c_fc#2" for index in range(128)} <= {layer.name for layer in network.layers}
    # Narayanan et al. 2021, equation 2, and the last norm, which it leaves out.
    sequence, blocks, width, words = 2048, 128, 25600, 51200
    assert network.parameter_elements == blocks * (12 * width**2 + 13 * width) + (words + sequence) * width + 2 * width
    # Equation 3, without recomputation: 72 s l h^2 (1 + s / 6h + V / 12lh) a sequence.
    share = 1 + sequence / (6 * width) + words / (12 * blocks * width)
    assert network.fw_flops + network.bw_flops == pytest.approx(72 * sequence * blocks * width**2 * share, rel=1e-3)


def test_a_window_shorter_than_the_sequence_is_refused(tmp_path: Path) -> None:
    path = write_configuration(tmp_path, "mistral")
    assert load_model(path, device="meta").input_shape == (32,)
    with pytest.raises(UserError, match=r"mistral\.json.*--sequence 33: its layers attend to the last 32 tokens"):
        load_model(path, (33,), device="meta")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "mamba"}, r"unknown model_type of configuration .*mamba.*choices are bert, .*, t5"),
        ({"model_type": None}, r"has no model_type: give a Hugging Face config\.json, of bert, "),
        ({"model_type": ["llama"]}, r"unknown model_type"),
        ({"hidden_size": None}, r"Expected `int`, got `null` - at `\$\.hidden_size`"),
        ({"hidden_size": -32}, r"`int` >= 1 - at `\$\.hidden_size`"),
        ({"hidden_size": 1 << 40}, r"`int` <= 1048576 - at `\$\.hidden_size`"),
        ({"hidden_size": "32"}, r"Expected `int`, got `str` - at `\$\.hidden_size`"),
        ({"hidden_size": 32.0}, r"Expected `int`, got `float` - at `\$\.hidden_size`"),
        ({"num_hidden_layers": 10**6}, r"<= 1024 - at `\$\.num_hidden_layers`"),
        ({"num_attention_heads": 5}, r"hidden_size 32 is no multiple of num_attention_heads 5"),
        ({"num_key_value_heads": 3}, r"num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, r"a head of 7 features is odd"),
        ({"hidden_act": "__import__"}, r"Invalid enum value '__import__' - at `\$\.hidden_act`.*silu"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"'dynamic' - at `\$\.rope_scaling\.type`.*llama3"),
        ({"rope_scaling": {"type": "yarn", "code": "x"}}, r"unknown field `code` - at `\$\.rope_scaling`"),
        ({"rope_scaling": {"rope_type": "llama3"}}, r"transformers takes this for no configuration of llama: "),
        ({"layer_types": ["linear_attention"]}, r"layer_types may hold full_attention and sliding_attention"),
        ({"output_router_logits": True}, r"output_router_logits 'True' is not built here; only False is"),
    ],
)
def test_wrong_fields_are_named_in_a_line(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    fields = {"model_type": "llama"} | SMALL["llama"] | changed
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    with pytest.raises(UserError, match=message) as refused:
        load_model(str(path), (SEQUENCE,), device="meta")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_a_missing_size_is_named_and_never_guessed(field: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({name: value for name, value in SMALL["llama"].items() if name != field} | {"model_type": "llama"})
    )
    with pytest.raises(UserError, match=f"missing required field `{field}`"):
        read_configuration(path)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text('{"model_type": "llama", ')
    large = tmp_path / "large.json"
    large.write_text(json.dumps({"model_type": "llama", "x": "y" * (1 << 20)}))
    listed = tmp_path / "listed.json"
    listed.write_text("[1]")
    twice = tmp_path / "twice.json"
    twice.write_text('{"model_type": "llama", "model_type": "gpt2"}')
    folder = tmp_path / "folder.json"
    folder.mkdir()
    for path, message in (
        (broken, "truncated"),
        (large, "more than 1.00 MiB"),
        (listed, "Expected `object`, got `array`"),
        (twice, "occurs twice"),
        (folder, "it is a folder"),
        (tmp_path / "absent.json", "No such file"),
    ):
        with pytest.raises(UserError, match=message):
            load_model(str(path))
    with pytest.raises(UserError, match=r"is a folder: give the config\.json in it"):
        load_model(str(tmp_path))


def test_no_code_of_a_file_is_loaded(tmp_path: Path) -> None:
    """What names code or kernels is passed over, ``auto_map`` and implementations of attention included."""
    hostile = {
        "auto_map": {"AutoModelForCausalLM": "evil--repo.modeling:Evil"},
        "attn_implementation": "somebody/kernels",
        "_attn_implementation": "somebody/kernels",
        "experts_implementation": "somebody/kernels",
        "torch_dtype": "float16",
        "quantization_config": {"quant_method": "fp8"},
    }
    settings = read_configuration(write_configuration(tmp_path, "llama", **hostile)).settings
    assert settings.keys() == SMALL["llama"].keys()
    assert all(field not in FAMILIES["llama"].__struct_fields__ for field in hostile)
