"""Configurations of language models: a ``config.json`` as the Hugging Face Hub keeps one, or a size known by name.

A file is data and nothing else. ``model_type`` picks a family of the table here, and only the fields that the family's
struct names are handed on: no code that a file names (``auto_map``) is loaded, and no kernel. Other fields say nothing
of the network (token ids, how a checkpoint was saved) and are passed over, but for those of ``_ONLY``. Torch-free.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from paradl_bench.core.bounds import AnyFloat, Share, check_elements
from paradl_bench.core.errors import UserError, unknown_choice
from paradl_bench.core.files.documents import validation_text
from paradl_bench.core.files.storage import decode_json, read_whole

MOST_BYTES = 1 << 20
"""Of a file: published ones hold a few KB."""

Width = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
Blocks = Annotated[int, msgspec.Meta(ge=1, le=1 << 10)]
Heads = Annotated[int, msgspec.Meta(ge=1, le=1 << 12)]
Experts = Annotated[int, msgspec.Meta(ge=1, le=1 << 12)]
Index = Annotated[int, msgspec.Meta(ge=0, le=1 << 10)]
Vocabulary = Annotated[int, msgspec.Meta(ge=2, le=1 << 24)]
Positions = Annotated[int, msgspec.Meta(ge=2, le=1 << 24)]
Epsilon = Annotated[float, msgspec.Meta(gt=0, le=1)]
Scale = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
Activation = Literal[
    "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu", "swish", "tanh"
]


class Configuration(NamedTuple):
    """A model to build.

    Attributes:
        family: its ``model_type``. settings: of transformers' configuration of the family, those that were given.
    """

    family: str
    settings: dict[str, Any]


class Rope(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rotary positions, as ``rope_scaling`` or ``rope_parameters``.

    Those whose frequencies depend on what is read (``dynamic``, ``longrope``) are none of the choices: a trace could
    not tell them.
    """

    rope_type: Literal["default", "linear", "llama3", "yarn"] | None = None
    type: Literal["default", "linear", "llama3", "yarn"] | None = None
    rope_theta: Scale | Annotated[int, msgspec.Meta(ge=1, le=1 << 40)] | None = None
    factor: Scale | None = None
    original_max_position_embeddings: Positions | None = None
    low_freq_factor: Scale | None = None
    high_freq_factor: Scale | None = None
    beta_fast: Scale | None = None
    beta_slow: Scale | None = None
    mscale: AnyFloat | None = None
    mscale_all_dim: AnyFloat | None = None
    attention_factor: Scale | None = None
    truncate: bool | None = None


class _Family(msgspec.Struct, frozen=True, kw_only=True):
    vocab_size: Vocabulary
    tie_word_embeddings: bool | None = None


class Bert(_Family, frozen=True, kw_only=True):
    """BERT, with its head for masked tokens."""

    hidden_size: Width
    num_hidden_layers: Blocks
    num_attention_heads: Heads
    intermediate_size: Width
    hidden_act: Activation = "gelu"
    hidden_dropout_prob: Share = 0.1
    attention_probs_dropout_prob: Share = 0.1
    max_position_embeddings: Positions = 512
    type_vocab_size: Width = 2
    layer_norm_eps: Epsilon = 1e-12

    def __post_init__(self) -> None:
        _divides("num_attention_heads", self.num_attention_heads, "hidden_size", self.hidden_size)


class Gpt2(_Family, frozen=True, kw_only=True):
    """GPT-2, and what is built like it: GPT-3, Megatron-LM's GPT."""

    n_embd: Width
    n_layer: Blocks
    n_head: Heads
    n_inner: Width | None = None
    n_positions: Positions = 1024
    activation_function: Activation = "gelu_new"
    resid_pdrop: Share = 0.1
    embd_pdrop: Share = 0.1
    attn_pdrop: Share = 0.1
    layer_norm_epsilon: Epsilon = 1e-5
    scale_attn_weights: bool = True

    def __post_init__(self) -> None:
        _divides("n_head", self.n_head, "n_embd", self.n_embd)


class T5(_Family, frozen=True, kw_only=True):
    """T5, also as of version 1.1 (``gated-gelu``, ``tie_word_embeddings`` false)."""

    d_model: Width
    d_kv: Width
    d_ff: Width
    num_layers: Blocks
    num_heads: Heads
    num_decoder_layers: Blocks | None = None
    relative_attention_num_buckets: Annotated[int, msgspec.Meta(ge=4, le=1 << 16)] = 32
    relative_attention_max_distance: Annotated[int, msgspec.Meta(ge=4, le=1 << 24)] = 128
    dropout_rate: Share = 0.1
    layer_norm_epsilon: Epsilon = 1e-6
    feed_forward_proj: Literal["relu", "gelu", "silu", "gated-gelu", "gated-silu", "gated-relu"] = "relu"
    pad_token_id: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)] | None = None

    def __post_init__(self) -> None:
        distance, buckets = self.relative_attention_max_distance, self.relative_attention_num_buckets
        if distance <= buckets // 2:
            raise ValueError(f"relative_attention_max_distance {distance} is not above half of {buckets} buckets")
        if (self.pad_token_id or 0) >= self.vocab_size:
            raise ValueError(f"pad_token_id {self.pad_token_id} is beyond vocab_size {self.vocab_size}")


class _Decoder(_Family, frozen=True, kw_only=True):
    """What models after Llama share."""

    hidden_size: Width
    intermediate_size: Width
    num_hidden_layers: Blocks
    num_attention_heads: Heads
    num_key_value_heads: Heads | None = None
    head_dim: Width | None = None
    hidden_act: Activation = "silu"
    max_position_embeddings: Positions
    rms_norm_eps: Epsilon = 1e-6
    rope_theta: Scale | Annotated[int, msgspec.Meta(ge=1, le=1 << 40)] | None = None
    rope_scaling: Rope | None = None
    rope_parameters: Rope | None = None
    attention_dropout: Share = 0.0

    def __post_init__(self) -> None:
        if self.head_dim is None:
            _divides("num_attention_heads", self.num_attention_heads, "hidden_size", self.hidden_size)
        width = self.head_dim or self.hidden_size // self.num_attention_heads
        if width % 2:
            raise ValueError(f"a head of {width} features is odd: rotary positions take pairs")
        if self.num_key_value_heads is not None:
            heads = self.num_attention_heads
            _divides("num_key_value_heads", self.num_key_value_heads, "num_attention_heads", heads)


class Llama(_Decoder, frozen=True, kw_only=True):
    """Llama, 1 to 3."""

    attention_bias: bool = False
    mlp_bias: bool = False


class _Grouped(_Decoder, frozen=True, kw_only=True):
    """Models whose files always say how many heads keys and values have: what is taken else differs by family."""

    num_key_value_heads: Heads | None


class Mistral(_Grouped, frozen=True, kw_only=True):
    """Mistral."""

    sliding_window: Positions | None = None


class Qwen2(_Grouped, frozen=True, kw_only=True):
    """Qwen2 and 2.5."""

    use_sliding_window: bool = False
    sliding_window: Positions | None = None
    max_window_layers: Index | None = None


class Qwen3(Qwen2, frozen=True, kw_only=True):
    """Qwen3."""

    attention_bias: bool = False


class _Experts(_Grouped, frozen=True, kw_only=True):
    """What models whose tokens go to experts share."""

    num_experts_per_tok: Experts

    def check_experts(self, name: str, experts: int, width: int) -> None:
        """Hold the experts to what there is, and their weights to what a memory may have."""
        if self.num_experts_per_tok > experts:
            raise ValueError(f"num_experts_per_tok {self.num_experts_per_tok} is more than {name} {experts}")
        check_elements((experts, 2 * width, self.hidden_size))


class Mixtral(_Experts, frozen=True, kw_only=True):
    """Mixtral."""

    num_local_experts: Experts
    sliding_window: Positions | None = None
    router_jitter_noise: Share = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_experts("num_local_experts", self.num_local_experts, self.intermediate_size)


class Qwen3Moe(_Experts, frozen=True, kw_only=True):
    """Qwen3 with experts."""

    num_experts: Experts
    moe_intermediate_size: Width
    decoder_sparse_step: Blocks = 1
    mlp_only_layers: tuple[Index, ...] | None = None
    norm_topk_prob: bool = False
    use_sliding_window: bool = False
    sliding_window: Positions | None = None
    attention_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_experts("num_experts", self.num_experts, self.moe_intermediate_size)


class Qwen2Moe(Qwen3Moe, frozen=True, kw_only=True):
    """Qwen1.5 and Qwen2 with experts, one of them shared by all tokens."""

    shared_expert_intermediate_size: Width
    max_window_layers: Index | None = None
    qkv_bias: bool = True


class _DeepSeek(_Experts, frozen=True, kw_only=True):
    """Keys and values of low rank, experts in groups, some of them shared by all tokens."""

    n_routed_experts: Experts
    n_shared_experts: Experts
    moe_intermediate_size: Width
    first_k_dense_replace: Index
    kv_lora_rank: Width
    q_lora_rank: Width | None
    qk_rope_head_dim: Width
    qk_nope_head_dim: Width
    v_head_dim: Width
    n_group: Experts | None = None
    topk_group: Experts | None = None
    norm_topk_prob: bool | None = None
    routed_scaling_factor: Scale = 1.0
    attention_bias: bool = False

    def __post_init__(self) -> None:
        self.check_experts("n_routed_experts", self.n_routed_experts, self.moe_intermediate_size)
        if self.num_key_value_heads not in (None, self.num_attention_heads):
            raise ValueError("num_key_value_heads differs from num_attention_heads, which keys of low rank do not")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim {self.qk_rope_head_dim} is odd: rotary positions take pairs")
        if (self.n_group is None) != (self.topk_group is None):
            raise ValueError("n_group and topk_group go together")
        if self.n_group is not None and self.topk_group is not None:
            _divides("n_group", self.n_group, "n_routed_experts", self.n_routed_experts)
            within = self.n_routed_experts // self.n_group * self.topk_group
            if self.topk_group > self.n_group or self.num_experts_per_tok > within:
                raise ValueError(f"topk_group {self.topk_group} of {self.n_group} groups do not hold that many experts")


class DeepSeekV2(_DeepSeek, frozen=True, kw_only=True):
    """DeepSeek-V2."""

    topk_method: Literal["greedy", "group_limited_greedy"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.topk_method == "group_limited_greedy" and self.n_group is None:
            raise ValueError("topk_method group_limited_greedy takes n_group and topk_group")


class DeepSeekV3(_DeepSeek, frozen=True, kw_only=True):
    """DeepSeek-V3 and R1, without the modules that predict further tokens."""

    n_group: Experts
    topk_group: Experts
    topk_method: Literal["noaux_tc"] | None = None
    rope_interleave: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_group is not None and self.n_routed_experts // self.n_group < 2:
            raise ValueError(f"n_group {self.n_group} leaves a group less than two experts, by which it is scored")


FAMILIES: dict[str, type[_Family]] = {
    "bert": Bert,
    "deepseek_v2": DeepSeekV2,
    "deepseek_v3": DeepSeekV3,
    "gpt2": Gpt2,
    "llama": Llama,
    "mistral": Mistral,
    "mixtral": Mixtral,
    "qwen2": Qwen2,
    "qwen2_moe": Qwen2Moe,
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3Moe,
    "t5": T5,
}
"""By ``model_type``."""

_ONLY: dict[str, tuple[object, ...]] = {
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "chunk_size_feed_forward": (0,),
    "position_embedding_type": ("absolute",),
    "per_layer_config": (),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "output_router_logits": (False,),
    "partial_rotary_factor": (1, 1.0),
    "moe_layer_freq": (1,),
}
"""Fields that change a network in ways that are not built here: the values that change nothing; null is one."""

_LAYER_TYPES = {"full_attention", "sliding_attention"}


def names_configuration(model: str) -> bool:
    """Whether a model's name is the path of a configuration."""
    return model.lower().endswith(".json")


def read_configuration(path: str | Path) -> Configuration:
    """The configuration of a ``config.json``.

    Raises:
        UserError: it can't be read, is no JSON or of no family that is known, lacks a field, or a field is not what the
            family takes; the message names the field by its path.
    """
    where = f"configuration {path}"
    content = read_whole(Path(path), what="configuration", most_bytes=MOST_BYTES)
    return _checked(decode_json(content, dict[str, Any], where=where), where)


def _checked(fields: dict[str, Any], where: str) -> Configuration:
    family = fields.get("model_type")
    if family is None:
        missing = f"{where} has no model_type: give a Hugging Face config.json"
        raise UserError(f"{missing}, of {', '.join(FAMILIES)}")
    if not isinstance(family, str) or family not in FAMILIES:
        raise unknown_choice(f"model_type of {where}", str(family)[:80], FAMILIES)
    for name, values in _ONLY.items():
        if fields.get(name) is not None and fields[name] not in values:
            right = " or ".join(map(repr, values)) or "null"
            raise UserError(f"{where}: {name} {str(fields[name])[:80]!r} is not built here; only {right} is")
    struct = FAMILIES[family]
    try:
        msgspec.convert(fields, struct)
    except (msgspec.ValidationError, UserError) as error:
        raise UserError(f"{where}: {validation_text(error, struct)}") from None
    kinds = fields.get("layer_types") or []
    if not isinstance(kinds, list) or not {str(kind) for kind in kinds} <= _LAYER_TYPES:
        raise UserError(f"{where}: layer_types may hold {' and '.join(sorted(_LAYER_TYPES))}, and nothing else")
    return Configuration(family, {name: fields[name] for name in struct.__struct_fields__ if name in fields})


def _divides(name: str, parts: int, of: str, whole: int) -> None:
    if whole % parts:
        raise ValueError(f"{of} {whole} is no multiple of {name} {parts}")
