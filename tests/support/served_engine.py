"""An engine under test, and what knows the truth about it: for most, a tiny model's own forward pass."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from offbeat.engines.protocol import Engine, Request, Version

VOCAB_SIZE = 128
MAX_CONTEXT_TOKENS = 2048


@dataclass(frozen=True)
class Served:
    """An engine to test: how to open it, and which versions it may be told to load."""

    open: Callable[[], Awaitable[Engine]]
    versions: tuple[Version, Version]
    logprobs: Callable[[int, Request, np.ndarray], np.ndarray]
    """The log-probs of a response under a version, after the request's temperature."""
    flat: Version
    """A version for which every token is equally likely, so that noise alone chooses."""
    logprob_tolerance: float
    models: tuple[PreTrainedModel, PreTrainedModel] | None = None
    """The versions as models, where the engine has one."""


def tiny_llama(seed: int, *, tied: bool = False) -> LlamaForCausalLM:
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
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


def forward_logprobs(model: PreTrainedModel, request: Request, response: np.ndarray) -> np.ndarray:
    """Log-probs of a response, by the model's own forward pass, after the request's temperature."""
    whole = torch.tensor(np.concatenate([request.tokens, response]), dtype=torch.int64)
    with torch.no_grad():
        logits = model(whole.unsqueeze(0)).logits[0].float() / (request.sampling.temperature or 1.0)
    first = len(request.tokens) - 1
    return logits.log_softmax(-1)[first:-1].gather(1, whole[first + 1 :, None]).squeeze(1).numpy()
