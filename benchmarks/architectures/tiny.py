"""Tiny random models of every causal architecture that transformers has.

A configuration is made from the architecture's own defaults: sizes become small, one layer of each kind is kept, and a
window becomes shorter than the tested sequences. `SPECIAL` has further keys for a few architectures. Weights are drawn
larger than in transformers, and none stays 0 or 1, so that a mistake in any part of the model shows in its log-probs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

WINDOW_TOKENS = 6
VOCAB_SIZE = 67
CONTEXT_TOKENS = 64

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size", "dim_model_base"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "attention_hidden_size", "lru_width", "cross_attention_hidden_size"), 32),
    **dict.fromkeys(("mamba_d_ssm", "input_embedding_size", "output_embedding_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "num_blocks", "num_layers_per_stack"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "swa_num_attention_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("linear_num_value_heads", "mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "linear_num_key_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "dim_head", "d_head", "attention_head_size", "rotary_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "kv_channels"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "index_head_dim", "indexer_head_dim", "global_head_dim"), 8),
    "qk_rope_head_dim": 4,
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 16),
    "v_head_dim": 6,
    "qk_head_dim": 12,
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank", "laurel_rank", "gated_norm_rank"), 16),
    **dict.fromkeys(("adapter_rank", "hc_lowrank", "router_hidden_size", "prompt_mid_dim"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "dff"), 48),
    **dict.fromkeys(("ffn_hidden_size", "dim_ff", "d_inner", "feed_forward_size", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 24),
    **dict.fromkeys(("shared_intermediate_size", "moe_shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("dense_intermediate_size", "prefix_dense_intermediate_size"), 24),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "zero_expert_num"), 1),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_groups", "mamba_n_groups", "mamba_ngroups"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 1),
    **dict.fromkeys(("num_kv_shared_layers", "max_window_layers", "num_nextn_predict_layers"), 0),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank"), 4),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),
    # With few heads many scores of an indexer are 0 alike, and the row's length decides which tokens it picks.
    **dict.fromkeys(("index_n_heads", "indexer_n_heads"), 16),
    **dict.fromkeys(("index_topk", "indexer_budget"), 8),
    **dict.fromkeys(("sliding_window", "window_size", "attention_window_size", "sliding_window_size"), WINDOW_TOKENS),
    "keep_window_size": WINDOW_TOKENS,
    "attention_chunk_size": 2 * WINDOW_TOKENS,
    "local_attention": 2 * WINDOW_TOKENS,
    "use_sliding_window": True,
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input"), VOCAB_SIZE),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), CONTEXT_TOKENS),
    **dict.fromkeys(("context_length", "max_target_positions", "model_max_length"), CONTEXT_TOKENS),
    "hidden_size_per_layer_input": 8,
    "query_pre_attn_scalar": 8,
    "layer_group_size": 2,
    **dict.fromkeys(("router_jitter_noise", "input_jitter_noise"), 0.2),
    "is_decoder": True,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 1),
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 2),
    "pad_token_id": 0,
}
"""Values of configuration keys, which are set if an architecture has the key."""

LAYER_KINDS = ("layer_types", "layers_block_type", "block_types", "mlp_layer_types")
"""Lists with a kind for each layer."""

SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "dbrx": {"attn_config": {"kv_n_heads": 2}, "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_head": 8},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hrm_text": {"layer_types": None},
    "inkling_text": {"d_rel": 4, "rel_extent": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "mamba2": {"head_dim": 16},
    **{name: {"layer_types": ["full_attention", "sliding_attention"]} for name in ("qwen2", "qwen3")},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_block_size": 2,
        "index_topk_blocks": 2,
        "index_n_heads": 2,
    },
    "qwen4_exp_text": {"ple_embed_dim": 16},
    "reformer": {"axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 16]},
    "xlstm": {"chunk_size": 8},
    "xmod": {"default_language": "en_XX"},
    **{name: {"attention_hidden_size": 64} for name in ("zamba", "zamba2")},
    "zaya": {"num_experts_per_tok": 1},
}
"""Keys that an architecture needs in addition to `SIZES`, or instead."""


def names() -> list[str]:
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(name: str, **changes: Any) -> PretrainedConfig:
    return _shrunk(CONFIG_MAPPING[name], {**SPECIAL.get(name, {}), **changes})


def tiny_model(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model in evaluation mode; equal seeds give equal weights."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(name, **changes)).float().eval()
    redraw(model, seed)
    return model


@torch.no_grad()
def redraw(model: torch.nn.Module, seed: int) -> None:
    """Makes every weight matter: matrices are drawn wider, and vectors, such as those of norms, are disturbed."""
    random = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=random)
        if parameter.ndim > 1:
            parameter.copy_(0.2 * noise)
        else:
            parameter.add_(0.1 * noise)


def _shrunk(kind: type[PretrainedConfig], special: Mapping[str, Any]) -> PretrainedConfig:
    """Returns keys that make a configuration small; nested configurations are shrunk in the same way."""
    default = kind()
    told = vars(default)
    given: dict[str, Any] = {key: value for key, value in SIZES.items() if _fits(key, told, value)}
    if "qk_rope_head_dim" in given:  # latent attention: a head is the rotated part's, and none is shared
        latent = {"head_dim": given["qk_rope_head_dim"], "num_key_value_heads": given["num_attention_heads"]}
        given |= {key: value for key, value in latent.items() if key in given}
    lists = {key: list(dict.fromkeys(told[key])) for key in LAYER_KINDS if isinstance(told.get(key), list)}
    if lists:
        num_layers = max(2, *map(len, lists.values()))
        given |= {key: [kinds[i % len(kinds)] for i in range(num_layers)] for key, kinds in lists.items()}
        given |= {key: num_layers for key in ("num_hidden_layers", "n_layer", "num_layers") if key in given}
    for key in kind.sub_configs:
        if isinstance(told.get(key), PretrainedConfig):
            given[key] = _shrunk(type(told[key]), special.get(key, {}))
    given |= {key: value for key, value in special.items() if key not in kind.sub_configs}
    return kind(**given)


DERIVED = ("head_dim", "num_key_value_heads", "sliding_window", "n_group", "topk_group")
"""Keys that are set even if their default is None."""


def _fits(key: str, told: Mapping[str, Any], value: object) -> bool:
    """Whether a configuration has a key with a default of the same type."""
    default = told.get(key)
    if default is None:
        return key in told and key in DERIVED
    return isinstance(default, bool) == isinstance(value, bool) and isinstance(default, int | float)
