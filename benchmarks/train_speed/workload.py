"""The batch that all ways train on, the model, and the FLOP of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from benchmarks.common.shapes import SHAPES, Shape
from offbeat.trainer.packing import Sample


@dataclass(frozen=True)
class Size:
    """The shape, and a batch of answers with log-normal lengths."""

    shape: str
    num_groups: int
    group_size: int
    num_prompt_tokens: int
    median_tokens: int
    cap_tokens: int
    microbatch_tokens: tuple[int, ...]
    """Micro-batch sizes to try with Offbeat; the first is also tried with gradient checkpointing."""
    rounds: int
    sigma: float = 0.8


FULL = Size("1.5b", 16, 8, 256, 600, 4000, (32768, 16384), rounds=3)
QUICK = Size("tiny", 4, 4, 8, 24, 96, (1024, 512), rounds=2)


def batch(size: Size, seed: int = 1) -> list[Sample]:
    """Returns random tokens and rewards, with the log-probs of a model for which all tokens are equally likely."""
    rng, num_tokens = np.random.default_rng(seed), SHAPES[size.shape].num_tokens
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
    """Makes a model, with the same random weights at each call."""
    torch.manual_seed(0)
    with device:
        model = Qwen2ForCausalLM._from_config(Qwen2Config.from_dict(shape.config()), dtype=dtype)
    model.config.use_cache = False
    return model.eval()


def step_flops(shape: Shape, samples: Sequence[Sample]) -> float:
    """FLOP that a step on these samples needs: three passes over prompts and answers with causal attention.

    Padding and recomputed activations do not count; the output layer counts for answers alone.
    """
    lengths = np.array([len(sample.prompt) + sample.num_tokens for sample in samples], float)
    num_answer_tokens, head = sum(sample.num_tokens for sample in samples), shape.num_tokens * shape.hidden
    attention = shape.num_layers * shape.hidden * (lengths**2).sum()
    return 6 * ((shape.num_parameters - head) * lengths.sum() + head * num_answer_tokens + attention)
