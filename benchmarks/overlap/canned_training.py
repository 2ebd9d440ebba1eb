"""Trains on canned answers as fast as they come: `python -m benchmarks.overlap.canned_training SPEC.json`."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.overlap.ceiling import GENERATED, STOP, TRAINED, Counters
from offbeat.config import load
from offbeat.errors import OffbeatError
from offbeat.launch import model_parts
from offbeat.trainer.packing import Sample
from offbeat.trainer.step import train_step

LOOK_EVERY_S = 0.0005


def samples_of(
    lengths: list[tuple[int, int]], group_size: int, vocabulary: int, rng: np.random.Generator
) -> list[Sample]:
    """Returns samples of these lengths, whose tokens and rewards are random."""
    samples = []
    for number, (num_prompt, num_response) in enumerate(lengths):
        if number % group_size == 0:
            prompt = rng.integers(0, vocabulary, num_prompt)
        logprobs, mask = np.full(num_response, -math.log(vocabulary), np.float32), np.ones(num_response, bool)
        response = rng.integers(0, vocabulary, num_response)
        samples.append(Sample(number // group_size, prompt, response, logprobs, mask, float(rng.random())))
    return samples


def steps_of(spec: dict[str, Any], vocabulary: int) -> Iterator[list[Sample]]:
    lengths, rng = cycle(map(tuple, spec["lengths"])), np.random.default_rng(0)
    while True:
        yield samples_of(list(islice(lengths, spec["samples_per_step"])), spec["group_size"], vocabulary, rng)


def main() -> int:
    spec = json.loads(Path(sys.argv[1]).read_text())
    config, counters = load(spec["config"], spec["words"]), Counters(Path(spec["counters"]))
    model_parts.prepare_torch(config)
    policy, _ = model_parts.make_policy(config)
    settings = dataclasses.replace(model_parts.trainer_settings(config).step, max_sample_gap=None)  # nobody drew these
    size = model_parts.make_microbatch_size(config, policy, Path(spec["folder"]), lambda *args, **facts: None)
    ends_s, waits_s, tokens = [], [], []
    steps = steps_of(spec, policy.model.config.vocab_size)
    for samples in islice(steps, spec["num_warmup"] + spec["num_steps"]):
        num_tokens, start_s = sum(sample.num_tokens for sample in samples), time.monotonic()
        while counters[GENERATED] - counters[TRAINED] < num_tokens:
            if counters[STOP]:
                raise OffbeatError("nothing generates any more")
            time.sleep(LOOK_EVERY_S)
        waits_s.append(time.monotonic() - start_s)
        train_step(policy, samples, settings, config.optimizer.lr, size=size)
        if policy.device.type == "cuda":
            torch.cuda.synchronize()
        counters[TRAINED] += num_tokens
        ends_s.append(time.monotonic())
        tokens.append(num_tokens)
    first = spec["num_warmup"]
    seconds = ends_s[-1] - ends_s[first - 1]
    result = {
        "tokens_per_s": sum(tokens[first:]) / seconds,
        "step_s": seconds / spec["num_steps"],
        "wait_share": sum(waits_s[first:]) / seconds,
        "length": statistics.mean(tokens[first:]) / spec["samples_per_step"],
        "microbatch_tokens": size.tokens,
    }
    Path(spec["result"]).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
