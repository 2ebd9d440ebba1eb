"""Samples to learn from, and what a model makes of each alone."""

import numpy as np
import torch

from offbeat.trainer.packing import Sample


def make_samples(rng: np.random.Generator, groups: list[tuple[int, list[int]]]) -> list[Sample]:
    samples = []
    for group, (prompt_tokens, lengths) in enumerate(groups):
        prompt = rng.integers(0, 40, prompt_tokens)
        for length in lengths:
            samples.append(
                Sample(
                    group=group,
                    prompt=prompt,
                    response=rng.integers(0, 40, length),
                    logprobs=-rng.random(length).astype(np.float32),
                    mask=np.ones(length, bool),
                    reward=float(rng.random()),
                )
            )
    return samples


def one_by_one(model, sample: Sample, temperature: float) -> torch.Tensor:
    """What the packed row must equal: this sample alone, through transformers' own attention."""
    tokens = torch.as_tensor(np.concatenate([sample.prompt, sample.response]))[None]
    logits = model(tokens).logits[0, len(sample.prompt) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1).gather(1, tokens[0, len(sample.prompt) :, None])[:, 0]
