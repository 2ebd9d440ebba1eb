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
from functools import partial

import torch
from transformers import LlamaForCausalLM

from benchmarks import report
from benchmarks.embedded.contestants import (
    EXACT_SLOTS,
    GROUP_SIZE,
    NUM_REQUESTS,
    NUM_SLOTS,
    PADDED_BATCH,
    SHAPES,
    Job,
    continuous_batching,
    embedded,
    jobs,
    new_engine,
    new_model,
    padded_generate,
    useful_tokens,
)

OVER_GENERATE, OVER_GENERATE_BATCH = 5.0, 2.5
"""Targets: useful tokens per second of the embedded engine over those of each rival."""
RIVAL_SETTINGS = [(32, 32), (16, 32), (32, 256), (64, 32), (64, 256), (128, 32)]
"""Pairs of requests at a time and tokens per page; continuous batching runs with the best, in a quick run with the
first."""


QUICK_JOBS = {"generate": 2 * PADDED_BATCH, "generate_batch": NUM_REQUESTS // 2}
"""Requests that the slow ones get in a quick run: their rate does not depend on how many follow."""


def rate(contestant: Callable[[list[Job]], None], work: list[Job]) -> float:
    """Returns useful tokens per second."""
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
    """Returns the rates of every contestant, one value per round."""
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
