"""The requests, and the engines that answer them: transformers' two ways and the embedded engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from offbeat.engines.embedded import EmbeddedEngine
from offbeat.engines.protocol import Request
from offbeat.trajectory import Sampling

VOCAB_SIZE, GROUP_SIZE, PADDED_BATCH = 512, 8, 64
NUM_SLOTS, EXACT_SLOTS, NUM_REQUESTS = 256, 64, 512
MEDIAN_TOKENS, SIGMA, CAP_TOKENS, MAX_PROMPT_TOKENS = 24, 1.0, 256, 24
CONTEXT_TOKENS = CAP_TOKENS + MAX_PROMPT_TOKENS
SHAPES = {"1M": (128, 384, 4, 4, 2), "4M": (256, 1024, 4, 8, 4)}
"""Hidden size, inner size, layers, heads, KV heads."""


@dataclass(frozen=True)
class Job:
    """A prompt and how many tokens it wants."""

    prompt: np.ndarray
    num_tokens: int


def jobs(count: int, seed: int = 0) -> list[Job]:
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.normal(np.log(MEDIAN_TOKENS), SIGMA, count)).round().clip(1, CAP_TOKENS).astype(int)
    prompts = [rng.integers(0, VOCAB_SIZE, rng.integers(8, MAX_PROMPT_TOKENS + 1)) for _ in range(count // GROUP_SIZE)]
    return [Job(prompts[i // GROUP_SIZE], int(length)) for i, length in enumerate(lengths)]


def new_model(size: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    hidden, inner, layers, heads, kv_heads = SHAPES[size]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=2 * CONTEXT_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def padded_generate(model: Any, work: list[Job]) -> None:
    with torch.inference_mode():
        for start in range(0, len(work), PADDED_BATCH):
            batch = work[start : start + PADDED_BATCH]
            longest = max(len(job.prompt) for job in batch)
            tokens = torch.zeros((len(batch), longest), dtype=torch.int64)
            mask = torch.zeros_like(tokens)
            for row, job in enumerate(batch):
                tokens[row, longest - len(job.prompt) :] = torch.from_numpy(job.prompt)
                mask[row, longest - len(job.prompt) :] = 1
            wanted = max(job.num_tokens for job in batch)
            model.generate(tokens, attention_mask=mask, max_new_tokens=wanted, do_sample=True, top_k=0, pad_token_id=0)


def continuous_batching(model: LlamaForCausalLM, work: list[Job], num_requests: int, page_tokens: int) -> None:
    sampling = GenerationConfig(
        max_new_tokens=CAP_TOKENS, do_sample=True, temperature=1.0, top_k=0, eos_token_id=-1, pad_token_id=0
    )
    pages_per_request = -(-CONTEXT_TOKENS // page_tokens)
    config = ContinuousBatchingConfig(
        page_size=page_tokens,
        num_blocks=pages_per_request * num_requests,
        max_batch_tokens=max(256, 2 * num_requests),
        max_requests_per_batch=num_requests,
    )
    with model.continuous_batching_context_manager(
        generation_config=sampling, continuous_batching_config=config, block=True, timeout=5
    ) as manager:
        for i, job in enumerate(work):
            manager.add_request(job.prompt.tolist(), request_id=str(i), max_new_tokens=job.num_tokens)
        num_tokens = num_ended = 0
        while num_ended < len(work):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                num_ended += 1
                num_tokens += len(result.generated_tokens)
            elif result is None and not manager.is_running():
                raise RuntimeError(f"continuous batching stopped after {num_ended} of {len(work)} requests")
    assert num_tokens == useful_tokens(work), f"{num_tokens} tokens came back of {useful_tokens(work)}"


def embedded(engine: EmbeddedEngine, work: list[Job]) -> None:
    async def run() -> int:
        requests = [
            Request(str(i), job.prompt, seed=i, sampling=Sampling(max_new_tokens=job.num_tokens))
            for i, job in enumerate(work)
        ]
        generations = await asyncio.gather(*map(engine.generate, requests))
        return sum(len(segment.tokens) for generation in generations for segment in generation.segments)

    num_tokens = asyncio.run(run())
    assert num_tokens == useful_tokens(work), f"{num_tokens} tokens came back of {useful_tokens(work)}"


def useful_tokens(work: list[Job]) -> int:
    return sum(job.num_tokens for job in work)


def new_engine(size: str, num_slots: int, exact: bool) -> EmbeddedEngine:
    return EmbeddedEngine(
        new_model(size), num_slots=num_slots, max_context_tokens=CONTEXT_TOKENS, exact=exact, version=0
    )
