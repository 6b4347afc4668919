"""Configurations of small language models, one of each family, as a ``config.json`` holds them; without dropout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_LLAMA = {
    "vocab_size": 53,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_EXPERTS = {"moe_intermediate_size": 20, "num_experts_per_tok": 2}
_DEEPSEEK = _LLAMA | _EXPERTS | {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
}  # fmt: skip

SMALL: dict[str, dict[str, Any]] = {
    "bert": {
        "vocab_size": 53, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 64,
    },
    "deepseek_v2": _DEEPSEEK | {"topk_method": "group_limited_greedy"},
    "deepseek_v3": _DEEPSEEK,
    "gpt2": {
        "vocab_size": 53, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "llama": _LLAMA,
    "mistral": _LLAMA | {"sliding_window": 32},
    "mixtral": _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2": _LLAMA,
    "qwen2_moe": _LLAMA | _EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 24},
    "qwen3": _LLAMA | {"head_dim": 12},
    "qwen3_moe": _LLAMA | _EXPERTS | {"num_experts": 4, "head_dim": 12},
    "t5": {
        "vocab_size": 53, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_decoder_layers": 2,
        "num_heads": 4, "dropout_rate": 0.0,
    },
}  # fmt: skip
"""By ``model_type``."""

_BLOCKS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers")


def write_configuration(folder: Path, family: str, *, blocks: int | None = None, **fields: Any) -> str:
    """Write a family's ``config.json``, and return its path: a model's name; ``blocks`` in each list of them."""
    settings = SMALL[family] | fields
    if blocks is not None:
        settings |= {name: blocks for name in _BLOCKS if name in settings}
    path = folder / f"{family}.json"
    path.write_text(json.dumps({"model_type": family, **settings}))
    return str(path)
