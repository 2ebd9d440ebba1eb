"""The passes of a step over its samples: which rank runs which micro-batch (`offbeat.trainer.rounds`), and when.

With several ranks every rank makes the same number of passes. A rank without a micro-batch in the last round runs the
shortest sample once more, and its result is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from offbeat.trainer.packing import Microbatch, Sample, pack, plan
from offbeat.trainer.policy import Forward, Policy
from offbeat.trainer.ranks import Arrays
from offbeat.trainer.rounds import Turn, by_cost, cost, turns


def passes(
    policy: Policy, samples: Sequence[Sample], chosen: Sequence[int], tokens_per_microbatch: int
) -> Iterator[tuple[Turn, Microbatch]]:
    """Yields this rank's micro-batches of the samples with the indices `chosen`."""
    some, shares_prompts = [samples[i] for i in chosen], policy.usage.packs
    plans = [[chosen[i] for i in local] for local in plan(some, tokens_per_microbatch, shares_prompts=shares_prompts)]
    order = by_cost([_cost([samples[i] for i in own], policy.width) for own in plans])
    for turn in turns(order, policy.ranks.rank, policy.ranks.size):
        own = [_shortest(samples, chosen)] if turn.index is None else plans[turn.index]
        yield turn, pack(samples, own, policy.device)


class Inferred(NamedTuple):
    """Result of a pass for one sample, with one number for each response token."""

    logprobs: np.ndarray
    values: np.ndarray | None
    """Estimates of the value head; None without one."""


def infer(
    policy: Policy,
    samples: Sequence[Sample],
    chosen: Sequence[int],
    tokens_per_microbatch: int,
    run: Callable[[Microbatch], Forward],
) -> dict[int, Inferred]:
    """Runs a pass without gradients over the chosen samples; returns the results of all ranks, by sample. `run` makes
    the pass."""
    items: list[tuple[int, Arrays]] = []
    for turn, batch in passes(policy, samples, chosen, tokens_per_microbatch):
        found = run(batch)
        if turn.index is not None:
            arrays = {"samples": np.array(batch.samples), "logprobs": found.logprobs.cpu().numpy()}
            if found.values is not None:
                arrays["values"] = found.values.cpu().numpy()
            items.append((turn.place, arrays))
    results: dict[int, Inferred] = {}
    for _, arrays in policy.ranks.merge(items):
        own = arrays["samples"].tolist()
        ends = np.cumsum([samples[i].num_tokens for i in own])[:-1]
        logprobs = np.split(arrays["logprobs"], ends)
        values = np.split(arrays["values"], ends) if "values" in arrays else [None] * len(own)
        results.update({i: Inferred(one, value) for i, one, value in zip(own, logprobs, values, strict=True)})
    return results


def _cost(samples: Sequence[Sample], width: int) -> int:
    lengths = [len(sample.prompt) + sample.num_tokens for sample in samples]
    prompts = {sample.prompt_id: len(sample.prompt) for sample in samples}
    return cost(sum(prompts.values()) + sum(sample.num_tokens for sample in samples), lengths, width)


def _shortest(samples: Sequence[Sample], chosen: Sequence[int]) -> int:
    """Returns the index of the shortest sample that has a token to predict, if any has one."""
    return min(chosen, key=lambda i: (samples[i].num_tokens == 0, len(samples[i].prompt) + samples[i].num_tokens, i))
