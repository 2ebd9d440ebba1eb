"""Tiny random models of three architectures: grouped-query, tied and untied embeddings, different position codes."""

import torch
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

COMMON = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def tiny_model(kind: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**COMMON, num_key_value_heads=2, tie_word_embeddings=True)).eval()
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**COMMON, num_key_value_heads=1, tie_word_embeddings=False)).eval()
    assert kind == "gpt_neox"
    return GPTNeoXForCausalLM(GPTNeoXConfig(**COMMON, rotary_pct=0.5, use_parallel_residual=True)).eval()


KINDS = ["llama", "qwen2", "gpt_neox"]
