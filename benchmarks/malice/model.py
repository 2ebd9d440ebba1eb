"""The smallest model that the audit can tell from others, with the tokenizer of the model that ships with Offbeat."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.model.loading import TINY, load_tokenizer, save_hf

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

VOCAB_SIZE, STOP_TOKEN, PAD_TOKEN = 258, 257, 256
DIGITS = tuple(range(48, 58))
"""Tokens of the digits 0 to 9, which the reward counts and forgers therefore write."""
MAX_CONTEXT_TOKENS = 128
SHARPNESS = 0.5
"""Spread of the weights. Sampled tokens then have log-probs of about -3 and others of about -10: with the usual 0.02
all tokens are about as likely, and no audit could tell a forged one."""


def tiny_model(seed: int) -> LlamaForCausalLM:
    """Makes a model with two layers of width 32; models of different seeds are unrelated."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=MAX_CONTEXT_TOKENS,
        tie_word_embeddings=False,
        initializer_range=SHARPNESS,
        eos_token_id=STOP_TOKEN,
        pad_token_id=PAD_TOKEN,
    )
    model = LlamaForCausalLM(config).eval()
    model.config.use_cache = False
    return model


def write_model(folder: Path) -> None:
    save_hf(tiny_model(seed=0), load_tokenizer(TINY), folder)
