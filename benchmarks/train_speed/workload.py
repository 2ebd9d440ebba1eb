"""The batch that all ways train on, the model, and the FLOP of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from benchmarks.common.shapes import Shape
from offbeat.trainer.packing import Sample


@dataclass(frozen=True)
class Size:
    """A batch of answers with log-normal lengths."""

    num_groups: int
    group_size: int
    num_prompt_tokens: int
    median_tokens: int
    cap_tokens: int
    vocabulary: int
    sigma: float = 0.8


FULL = Size(16, 8, 256, 600, 4000, 151000)
QUICK = Size(4, 4, 8, 24, 96, 512)


def batch(size: Size, seed: int = 1) -> list[Sample]:
    """Random tokens and rewards; log-probs are those of a model that finds all tokens alike."""
    rng, num_tokens = np.random.default_rng(seed), size.vocabulary
    samples = []
    for group in range(size.num_groups):
        prompt = rng.integers(0, num_tokens, size.num_prompt_tokens)
        for _ in range(size.group_size):
            length = int(np.clip(size.median_tokens * np.exp(size.sigma * rng.standard_normal()), 4, size.cap_tokens))
            logprobs, mask = np.full(length, -math.log(num_tokens), np.float32), np.ones(length, bool)
            response = rng.integers(0, num_tokens, length)
            samples.append(Sample(group, prompt, response, logprobs, mask, float(rng.random())))
    return samples


def new_model(shape: Shape, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """The same random weights at each call."""
    torch.manual_seed(0)
    with device:
        model = Qwen2ForCausalLM._from_config(Qwen2Config.from_dict(shape.config()), dtype=dtype)
    model.config.use_cache = False
    return model.eval()


def step_flops(shape: Shape, samples: Sequence[Sample], num_row_tokens: int) -> float:
    """FLOP of a step: three passes over `num_row_tokens` tokens, and over causal attention. A prompt's own attention
    counts once. Recomputed activations do not count; the output layer counts for answers alone."""
    own = np.array([sample.num_tokens for sample in samples], float)
    prompts = np.array([len(sample.prompt) for sample in samples], float)
    first = {sample.group: len(sample.prompt) for sample in samples}
    pairs = (own * prompts + own**2 / 2).sum() + sum(length**2 / 2 for length in first.values())
    head = shape.num_tokens * shape.hidden
    body = shape.num_parameters - head * (1 if shape.is_tied else 2)
    return 6 * (body * num_row_tokens + head * own.sum() + 2 * shape.num_layers * shape.hidden * pairs)
