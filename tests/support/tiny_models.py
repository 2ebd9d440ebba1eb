"""Tiny random models of several architectures, and requests for them."""

from __future__ import annotations

from itertools import count

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto import CONFIG_MAPPING

from offbeat.engines.protocol import Request
from offbeat.trajectory import Sampling

VOCAB_SIZE = 96
CONTEXT_TOKENS = 128
IDS = count()


def tiny_config(kind: str, **changes) -> PretrainedConfig:
    fields = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": CONTEXT_TOKENS,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if kind == "gpt_neox":
        fields.pop("num_key_value_heads")
    return CONFIG_MAPPING[kind](**{**fields, **changes})


def tiny_model(kind: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0, **changes) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(tiny_config(kind, **changes)).to(dtype).eval()


def tokens(seed: int, num_tokens: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, num_tokens)


def ask(prompt, *, seed: int = 0, position: int = 0, **sampling) -> Request:
    sampling.setdefault("max_new_tokens", 16)
    return Request(f"r{next(IDS)}", np.asarray(prompt), seed, Sampling(**sampling), position)
