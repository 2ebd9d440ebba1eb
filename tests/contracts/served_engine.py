"""An engine under test, and the tiny model whose own forward pass is the truth about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from offbeat.rollout.engine import Engine, Version

VOCAB_SIZE = 128
MAX_CONTEXT_TOKENS = 2048


@dataclass(frozen=True)
class Served:
    """An engine to test: how to open it, and which versions it may be told to load."""

    open: Callable[[], Engine]
    versions: tuple[Version, Version]
    models: tuple[PreTrainedModel, PreTrainedModel]
    """The versions' own forward passes."""
    flat: Version
    """A version for which every token is equally likely, so that noise alone chooses."""
    logprob_tolerance: float


def tiny_llama(seed: int) -> LlamaForCausalLM:
    """Weights large enough that two versions disagree clearly about every token."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_CONTEXT_TOKENS,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()
