"""The embedded engine against two ways to generate with transformers alone, on uneven output lengths.

One process, the same random Llama, the same 512 requests in groups of 8, output lengths from a log-normal law (median
24, sigma 1, cap 256) enforced by `max_new_tokens` with no stop token. Contestants, in interleaved rounds:

- `generate`: padded batches of 64 in arrival order (in a quick run, the first two);
- `generate_batch`: transformers' own continuous batching, through the manager that `generate_batch` uses, because only
  that takes a length per request; at the best of several settings, chosen before the rounds (in a quick run, on the
  first half of the requests);
- the embedded engine, plain and `exact`, which also returns log-probs, as the others here do not. `exact` runs all its
  slots at every step, so it has fewer of them; a quick run leaves it out.

Figures are useful tokens per second: padding and what is generated past a request's length do not count.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from benchmarks import report
from offbeat.rollout.engine import Request
from offbeat.rollout.engines.embedded import EmbeddedEngine
from offbeat.trajectory import Sampling

VOCAB_SIZE, GROUP_SIZE, PADDED_BATCH = 512, 8, 64
NUM_SLOTS, EXACT_SLOTS, NUM_REQUESTS = 256, 64, 512
MEDIAN_TOKENS, SIGMA, CAP_TOKENS, MAX_PROMPT_TOKENS = 24, 1.0, 256, 24
CONTEXT_TOKENS = CAP_TOKENS + MAX_PROMPT_TOKENS
OVER_GENERATE, OVER_GENERATE_BATCH = 5.0, 2.5
"""Targets: how many times the useful tokens per second of each rival."""
SHAPES = {"1M": (128, 384, 4, 4, 2), "4M": (256, 1024, 4, 8, 4)}
"""Hidden size, inner size, layers, heads, KV heads."""
RIVAL_SETTINGS = [(32, 32), (16, 32), (32, 256), (64, 32), (64, 256), (128, 32)]
"""Requests at a time and tokens per page, of which continuous batching gets the best; a quick run takes the first."""


@dataclass(frozen=True)
class Job:
    """A prompt and how many tokens it wants."""

    prompt: np.ndarray
    num_tokens: int


QUICK_JOBS = {"generate": 2 * PADDED_BATCH, "generate_batch": NUM_REQUESTS // 2}
"""Requests that the slow ones get in a quick run: their rate does not depend on how many follow."""


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


def rate(contestant: Callable[[list[Job]], None], work: list[Job]) -> float:
    """Useful tokens per second."""
    start_s = time.perf_counter()
    contestant(work)
    return useful_tokens(work) / (time.perf_counter() - start_s)


def best_rival_setting(model: LlamaForCausalLM, work: list[Job]) -> tuple[int, int]:
    def measured(setting: tuple[int, int]) -> float:
        return rate(lambda some: continuous_batching(model, some, *setting), work)

    measured(RIVAL_SETTINGS[0])  # warms up
    best = max(RIVAL_SETTINGS, key=measured)
    print(f"generate_batch is best with {best[0]} requests, {best[1]} tokens a page", file=sys.stderr, flush=True)
    return best


def compare(size: str, work: list[Job], num_rounds: int, quick: bool) -> dict[str, list[float]]:
    """Rates of every contestant, a value per round."""
    setting = RIVAL_SETTINGS[0] if quick else best_rival_setting(new_model(size), work[: len(work) // 4])
    engines = {"embedded": new_engine(size, NUM_SLOTS, exact=False)}
    if not quick:
        engines["embedded exact"] = new_engine(size, EXACT_SLOTS, exact=True)
    model, batching_model = new_model(size), new_model(size)
    contestants: dict[str, Callable[[list[Job]], None]] = {
        "generate": lambda some: padded_generate(model, some),
        "generate_batch": lambda some: continuous_batching(batching_model, some, *setting),
    }
    contestants |= {name: partial(embedded, engine) for name, engine in engines.items()}
    for contestant in contestants.values():
        contestant(work[:GROUP_SIZE])  # warms up
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(num_rounds):
        for name, contestant in contestants.items():
            num_jobs = QUICK_JOBS.get(name, NUM_REQUESTS) if quick else NUM_REQUESTS
            rates[name].append(rate(contestant, work[:num_jobs]))
            print(f"{size} {name}: {rates[name][-1]:,.0f} tokens/s", file=sys.stderr, flush=True)
    for engine in engines.values():
        asyncio.run(engine.close())
    return rates


def new_engine(size: str, num_slots: int, exact: bool) -> EmbeddedEngine:
    return EmbeddedEngine(
        new_model(size), num_slots=num_slots, max_context_tokens=CONTEXT_TOKENS, exact=exact, version=0
    )


def rows_of(size: str, rates: dict[str, list[float]]) -> list[tuple[str, str, str]]:
    def row(name: str, values: list[float], form: str) -> tuple[str, str, str]:
        median, low, high = (format(v, form) for v in (statistics.median(values), min(values), max(values)))
        return f"{size} {name}", median, f"{low} to {high}"

    rows = [row(name, values, ",.0f") for name, values in rates.items()]
    if "embedded exact" in rates:
        shares = [exact / plain for exact, plain in zip(rates["embedded exact"], rates["embedded"], strict=True)]
        rows.append(row("exact over plain", shares, ".2f"))
    return rows


def bars_of(size: str, rates: dict[str, list[float]], quick: bool) -> dict[str, report.Bar]:
    bars = {}
    for rival, target in (("generate", OVER_GENERATE), ("generate_batch", OVER_GENERATE_BATCH)):
        ratios = [ours / theirs for ours, theirs in zip(rates["embedded"], rates[rival], strict=True)]
        bars[f"{size}: embedded over {rival}"] = report.at_least(target, ratios, quick=quick)
    return bars


def main() -> None:
    parser = argparse.ArgumentParser(description="The embedded engine against transformers alone.")
    parser.add_argument("--quick", action="store_true", help="one round, and less of it: ends within a minute")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    work = jobs(NUM_REQUESTS)
    rates = {size: compare(size, work, 1 if options.quick else options.rounds, options.quick) for size in SHAPES}
    bars: dict[str, report.Bar] = {}
    for size in SHAPES:
        bars |= bars_of(size, rates[size], options.quick)
    report.show(
        "embedded",
        ("useful tokens/s", "median", "spread"),
        [row for size in SHAPES for row in rows_of(size, rates[size])],
        bars,
        quick=options.quick,
        threads=options.threads,
        num_slots=NUM_SLOTS,
        num_exact_slots=EXACT_SLOTS,
        tokens_per_second=rates,
    )


if __name__ == "__main__":
    main()
