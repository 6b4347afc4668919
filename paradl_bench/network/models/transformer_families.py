"""Language models as transformers implements them, from a configuration alone: nothing is downloaded.

Each takes one tensor of token ids and returns logits (batch, tokens, vocabulary), so that tracing, pipelines and probes
see one input and one output. Attention is torch's ``scaled_dot_product_attention``, transformers' own default.
All tokens of a sample are attended to (of decoders: those before): batches are not padded, so no
mask is built, and nothing is searched for packed sequences, which would read values back from the device in each
iteration. Dropout is that of the configuration: it is a part of pre-training's time.

Experts run in the way that transformers takes by default: tokens are sorted by expert, and the products of each expert
with its tokens are one grouped product (``grouped_mm``). Rows, and so shapes and FLOPs, are as many wherever the router
sends tokens, and none is dropped. transformers' other way, a loop over the experts that were hit, has operations that
depend on the data, and can't be traced.

Output layers share the token embedding's weights as the configuration says. Where ``tied`` is given that is changed and
nothing else: T5's decoder's output is scaled by the root of its width either way.

Not modelled: BERT's next-sentence task and pooling layer, key and value caches, sequences of unlike lengths, windows
that are shorter than the sequence, losses that balance experts, and DeepSeek-V3's prediction of further tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from transformers.integrations.moe import ExpertsInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from paradl_bench.network.models.token_tasks import MaskedTokens, NextToken, TokenTask, TwoSequences

# transformers builds masks for the implementations that it knows by name; this one it calls without.
WITHOUT_MASKS = "sdpa_without_masks"
AttentionInterface.register(WITHOUT_MASKS, sdpa_attention_forward)


def _experts(module: Any, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What the experts of a module make of tokens (tokens, width), each of its own ones (tokens, k), weighted."""
    order = experts.flatten().argsort()
    numbers = torch.arange(module.num_experts, device=tokens.device)
    ends = torch.searchsorted(experts.flatten()[order], numbers, right=True, out_int32=True)
    rows = tokens[order // experts.size(-1)]
    inner = module._apply_gate(_grouped_product(rows, module.gate_up_proj, ends))
    made = _grouped_product(inner, module.down_proj, ends) * weights.flatten()[order].unsqueeze(-1)
    # Counted from the end, the dim is the same with all samples' tokens in one as with one sample's.
    return made[order.argsort()].view(*experts.shape, -1).sum(-2)


def _grouped_product(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Of rows (rows, in) with the matrix (out, in) of their group; group ``i`` ends before row ``ends[i]``.

    By torch's own kernel, where it can: it takes no double precision, and rows that fill 16 bytes alone; without memory
    it takes bf16 alone, and on a GPU one of compute capability 8. Else by transformers' operator, a product a group.
    """
    flipped = matrices.transpose(-2, -1)
    able = rows.is_cpu or (rows.is_cuda and torch.cuda.get_device_capability(rows.device) >= (8, 0))
    widths = all(extent * matrices.element_size() % 16 == 0 for extent in flipped.shape[1:])
    if able and widths and matrices.dtype != torch.float64:
        product: torch.Tensor = torch.nn.functional.grouped_mm(rows.to(matrices.dtype), flipped, offs=ends)
        return product
    by_group: torch.Tensor = torch.ops.transformers.grouped_mm_fallback(rows.to(matrices.dtype), flipped, ends)
    return by_group


EXPERTS = "grouped_products"
ExpertsInterface.register(EXPERTS, _experts)

_BERT_MASK_TOKEN = 103
_T5_SEQUENCE = 512

EqualBlocks = tuple[str, ...]
"""Paths of the lists of modules whose blocks a model runs one after the other, each on what the one before returned."""


class _Bert:
    """A masked language model."""

    config: Any
    equal_blocks: EqualBlocks = ("bert.encoder.layer",)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of token ids (batch, tokens)."""
        logits: torch.Tensor = super().forward(input_ids=ids).logits  # type: ignore[misc]
        return logits

    @property
    def token_task(self) -> TokenTask:
        """What it is trained on."""
        positions = self.config.max_position_embeddings
        return MaskedTokens(
            vocabulary=self.config.vocab_size,
            sequence=positions,
            positions=positions,
            mask_token=min(_BERT_MASK_TOKEN, self.config.vocab_size - 1),
        )


class _Causal:
    """A causal language model."""

    config: Any
    equal_blocks: EqualBlocks = ("model.layers",)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of token ids (batch, tokens)."""
        logits: torch.Tensor = super().forward(input_ids=ids, use_cache=False).logits  # type: ignore[misc]
        return logits

    @property
    def token_task(self) -> TokenTask:
        """What it is trained on."""
        positions = self.config.max_position_embeddings
        window = getattr(self.config, "sliding_window", None) or 0
        sequence = min(positions, window or positions)
        return NextToken(vocabulary=self.config.vocab_size, sequence=sequence, positions=positions, window=window)


class _Gpt2(_Causal):
    equal_blocks = ("transformer.h",)


class _T5:
    """A sequence-to-sequence model.

    Both sequences are embedded first, by the one table, so that what follows can be cut into stages.
    """

    config: Any
    shared: torch.nn.Module
    equal_blocks: EqualBlocks = ("encoder.block", "decoder.block")

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        # Untied, encoder and decoder would keep tables of their own, which nothing reads.
        self.set_input_embeddings(self.shared)  # type: ignore[attr-defined]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the decoder's tokens; ids (batch, 2, tokens), the encoder's first."""
        embedded = [self.shared(ids[:, index]) for index in range(2)]
        forward: Callable[..., Any] = super().forward  # type: ignore[misc]
        logits: torch.Tensor = forward(
            inputs_embeds=embedded[0], decoder_inputs_embeds=embedded[1], use_cache=False
        ).logits
        return logits

    @property
    def token_task(self) -> TokenTask:
        """What it is trained on."""
        return TwoSequences(
            vocabulary=self.config.vocab_size, sequence=_T5_SEQUENCE, start_token=self.config.pad_token_id or 0
        )


_CLASSES: dict[str, tuple[type, str, str]] = {
    "bert": (_Bert, "BertConfig", "BertForMaskedLM"),
    "deepseek_v2": (_Causal, "DeepseekV2Config", "DeepseekV2ForCausalLM"),
    "deepseek_v3": (_Causal, "DeepseekV3Config", "DeepseekV3ForCausalLM"),
    "gpt2": (_Gpt2, "GPT2Config", "GPT2LMHeadModel"),
    "llama": (_Causal, "LlamaConfig", "LlamaForCausalLM"),
    "mistral": (_Causal, "MistralConfig", "MistralForCausalLM"),
    "mixtral": (_Causal, "MixtralConfig", "MixtralForCausalLM"),
    "qwen2": (_Causal, "Qwen2Config", "Qwen2ForCausalLM"),
    "qwen2_moe": (_Causal, "Qwen2MoeConfig", "Qwen2MoeForCausalLM"),
    "qwen3": (_Causal, "Qwen3Config", "Qwen3ForCausalLM"),
    "qwen3_moe": (_Causal, "Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "t5": (_T5, "T5Config", "T5ForConditionalGeneration"),
}
"""Of each family what it reads and returns here, and transformers' configuration and model of that name."""


@cache
def family_classes(family: str) -> tuple[Any, Any]:
    """Configuration and model of a family; only its own modules of transformers are imported."""
    reads, configuration, model = _CLASSES[family]
    package = f"transformers.models.{family}"
    base = getattr(import_module(f"{package}.modeling_{family}"), model)
    # transformers looks into the source of a class's module for what can be set of it, as how experts run.
    model_class = type(model, (reads, base), {"__module__": base.__module__, "__doc__": reads.__doc__})
    return getattr(import_module(f"{package}.configuration_{family}"), configuration), model_class
