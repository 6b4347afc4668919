"""BERT, GPT-2 and T5: sizes as published, inputs as in pre-training, and what goes wrong with either."""

from __future__ import annotations

import builtins
import math
import sys
from typing import Any

import pytest
from profile_factory import make_profile

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from paradl_bench.core.errors import UserError
from paradl_bench.measure.layers.isolated import isolated_operations
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.graph import RETURNS_INPUT
from paradl_bench.network.models.catalog import LoadedModel, load_model, model_names
from paradl_bench.network.models.language_models import build_language_model
from paradl_bench.network.models.token_tasks import IGNORED, MaskedTokens, NextToken, TwoSequences
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.ranks.clocks import CpuClock
from paradl_bench.strategies.pipeline.crossings import constants
from paradl_bench.strategies.pipeline.stages import cut_into_stages, places_of_shared
from predict.costs.compute.layer_roofline import Roofline

SMALL: dict[str, dict[str, Any]] = {
    "bert": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": None, "eos_token_id": None},
    "t5": {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2},
}


def small_model(family: Any) -> torch.nn.Module:
    return build_language_model(family, vocab_size=101, **SMALL[family])


def bert() -> torch.nn.Module:
    return small_model("bert")


def gpt2() -> torch.nn.Module:
    return small_model("gpt2")


def t5() -> torch.nn.Module:
    return small_model("t5")


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        # Devlin et al. 2019: 110 and 340; Radford et al. 2019, as corrected: 124 and 355; Raffel et al. 2020:
        # 60, 220 and 770, which counts what the checkpoints tie; those hold 60.5, 222.9 and 737.7.
        ("bert-base", 109.5),
        ("bert-large", 335.2),
        ("gpt2", 124.4),
        ("gpt2-345m", 354.8),
        ("gpt2-medium", 354.8),
        ("t5-small", 60.5),
        ("t5-base", 222.9),
        ("t5-large", 737.7),
    ],
)
def test_parameters_are_those_of_the_published_models(name: str, millions: float) -> None:
    model = load_model(name, (32,), device="meta")
    assert elements_of(model) / 1e6 == pytest.approx(millions, abs=0.06)
    assert model.input_dtype == "int64"
    assert {name, f"{name}-untied"} <= set(model_names())


@pytest.mark.parametrize("name", ["bert-base", "gpt2", "t5-small"])
def test_every_parameter_of_a_published_model_is_traced(name: str) -> None:
    """Larger ones of a family are more of the same blocks."""
    model = load_model(name, (32,), device="meta")
    network = trace_network(model)
    assert network.parameter_elements == elements_of(model)
    assert sorted(network.gradient_order) == sorted(parameter.name for parameter in network.parameters)
    assert network.input_dtype == "int64"


def elements_of(model: LoadedModel) -> int:
    return sum(parameter.numel() for parameter in model.module.parameters())


@pytest.mark.parametrize("family", SMALL)
def test_a_model_is_that_of_transformers_and_learns(family: str) -> None:
    """The same weights give what transformers' own class gives, which builds the masks that are left out here."""
    model = load_model(f"{__name__}:{family}", (12,))
    inputs, targets = model.make_batch(3, seed=5)
    module = model.module.eval()
    base: Any = type(module).__bases__[1]
    config = module.config.__class__(**{**module.config.to_dict(), "attn_implementation": "eager"})
    reference = base(config).eval()
    reference.load_state_dict(module.state_dict())
    given = {"input_ids": inputs}
    if family == "t5":
        given = {"input_ids": inputs[:, 0], "decoder_input_ids": inputs[:, 1]}
    torch.testing.assert_close(
        module(inputs), reference(**given, use_cache=False).logits if family != "bert" else reference(**given).logits
    )
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model.loss(module(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_targets_are_those_of_pre_training() -> None:
    generator = torch.Generator().manual_seed(1)
    ids, targets = NextToken(vocabulary=50, sequence=9).make_batch(4, (9,), generator)
    assert ids.shape == targets.shape == (4, 9)
    assert torch.equal(ids[:, 1:], targets[:, :-1])
    ids, targets = MaskedTokens(vocabulary=50, sequence=40, mask_token=3).make_batch(4, (40,), generator)
    predicted = targets != IGNORED
    assert predicted.sum(1).tolist() == [6] * 4
    assert bool((ids[predicted] == 3).all())
    assert not bool((ids == targets)[predicted & (targets != 3)].any())
    ids, targets = TwoSequences(vocabulary=50, sequence=9, start_token=0).make_batch(4, (2, 9), generator)
    assert ids.shape == (4, 2, 9)
    assert torch.equal(ids[:, 1, 1:], targets[:, :-1])
    assert not bool(ids[:, 1, 0].any())


@pytest.mark.parametrize("family", SMALL)
def test_untied_weights_are_the_only_difference(family: Any) -> None:
    """The first loss of either is near that of an even guess: no logit is so large that others' shares vanish."""
    found = {}
    for tied in (True, False):
        torch.manual_seed(3)
        module = build_language_model(family, tied=tied, vocab_size=101, **SMALL[family]).eval()
        model = LoadedModel("any", module, module.token_task.input_shape((12,)), module.token_task)
        inputs, targets = model.make_batch(8, seed=4)
        found[tied] = model.loss(module(inputs), targets).item()
        names = {name for name, _ in module.named_parameters()}
        assert any("lm_head" in name or "decoder.weight" in name for name in names) == (not tied)
    assert list(found.values()) == pytest.approx([math.log(101)] * 2, rel=0.2)


def test_a_loss_over_micro_batches_is_the_whole_one() -> None:
    model = load_model(f"{__name__}:bert", (20,))
    inputs, targets = model.make_batch(4, seed=2)
    logits = model.module.double().eval()(inputs)
    parts = [model.loss(logits[i : i + 2], targets[i : i + 2]) for i in (0, 2)]
    torch.testing.assert_close(sum(parts) / 2, model.loss(logits, targets))


def test_lengths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UserError, match="model 'bert-base': --sequence 1024: it has positions for 512 tokens"):
        load_model("bert-base", (1024,), device="meta")
    with pytest.raises(UserError, match="give --sequence N"):
        load_model("gpt2", (3, 224, 224), device="meta")
    with pytest.raises(UserError, match="give --sequence N"):
        load_model("t5-small", (3, 64), device="meta")
    assert load_model("t5-small", (64,), device="meta").input_shape == (2, 64)


def test_without_transformers_a_line_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.partition(".")[0] == "transformers":
            raise ModuleNotFoundError("No module named 'transformers'", name="transformers")
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delitem(sys.modules, "paradl_bench.network.models.transformer_families", raising=False)
    with pytest.raises(UserError, match=r"pip install 'paradl\[transformers\]'"):
        load_model("bert-large", device="meta")
    assert "bert-large" in model_names()


def test_what_does_nothing_moves_nothing_and_is_passed_over() -> None:
    """T5's conversions to the type that a tensor has already: the product behind reads what was there before."""
    network = trace_network(load_model(f"{__name__}:t5", (12,)))
    untouched = {layer.name for layer in network.layers if layer.attributes.get(RETURNS_INPUT)}
    assert "encoder.block.0.layer.0.layer_norm" in untouched
    for layer in network.layers:
        assert not untouched & set(layer.inputs)
        if layer.name in untouched:
            assert layer.fw_bytes == layer.fw_flops == layer.bw_input_flops == 0


def test_tensors_without_a_batch_are_known() -> None:
    network = trace_network(load_model(f"{__name__}:t5", (12,)))
    layers = {layer.name: layer for layer in network.layers}
    bias = layers["encoder.block.0.layer.0.SelfAttention.relative_attention_bias"]
    assert (bias.batchless, bias.output_shape, bias.batchless_inputs) == (True, (12, 12, 2), (0,))
    assert bias.output_elements_of(5) == 288
    attention = layers["encoder.block.1.layer.0.SelfAttention.scaled_dot_product_attention"]
    assert (attention.batchless, attention.batchless_inputs, attention.input_shapes[3]) == (False, (3,), (1, 2, 12, 12))
    assert attention.input_elements_of(5) == 5 * 3 * 12 * 32 + 2 * 12 * 12
    assert "whole:1x2x12x12" in attention.operation
    roofline = Roofline(make_profile(), network)
    assert roofline.seconds(bias, "FW", 5) == roofline.seconds(bias, "FW", 1)
    assert roofline.seconds(attention, "FW", 5) == pytest.approx(5 * (roofline.seconds(attention, "FW", 1) or 0.0))
    words = [layers["shared"], layers["lm_head"]]
    assert [word.batchless for word in words] == [False, False]


@pytest.mark.parametrize("name", ["bert-base", "gpt2", "t5-small"])
def test_tied_weights_are_held_by_all_stages_that_use_them(name: str) -> None:
    """By first and last, whose gradients add up; models are cut into as many stages as they have blocks."""
    settings = PlanSettings(batch=8)
    tied = trace_network(load_model(name, (32,), device="meta"))
    shared = places_of_shared(tied, cut_into_stages(tied, 12, settings))
    ((table, places),) = ((own, places) for own, places in shared.items() if "relative" not in own)
    assert table.endswith(("word_embeddings.weight", "wte.weight", "shared.weight"))
    assert {0, 11} <= set(places)
    network = trace_network(load_model(f"{name}-untied", (32,), device="meta"))
    stages = cut_into_stages(network, 12, settings)
    assert all(stage.network.parameters for stage in stages)
    made_again = constants(network)
    assert all(made_again.isdisjoint(value.layer for value in stage.sends) for stage in stages)


@pytest.mark.parametrize("family", SMALL)
def test_what_can_run_alone_does(family: str) -> None:
    """Every operation that its kind can build, forward and backward, with the shapes that it has in the model."""
    network = trace_network(load_model(f"{__name__}:{family}", (12,)))
    alone = isolated_operations(network, 3, torch.device("cpu"), which="all")
    kinds = {operation.layer.kind for operation in alone}
    assert {"attention", "norm" if family != "t5" else "reduction", "elementwise", "dropout"} <= kinds
    for operation in alone:
        times = operation.measure(CpuClock())
        split = operation.layer.kind in ("linear", "addmm")
        assert set(times) == ({"FW", "BW_input", "BW_weight"} if split else {"FW", "BW"}), operation.layer.name
