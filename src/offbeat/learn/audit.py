"""Whether log-probs can be believed: the trainer computes them itself, and compares.

Fresh tokens were sampled from the very weights that the step begins with, whose log-probs the step computes anyway. For
a share of the older ones the weights of their own version are put in place for a moment (`witness`). Where the weights
are the same, engine and trainer differ by arithmetic alone; tokens that attended to keys and values of older weights
have no weights of their own, and are compared with nothing.

A sample whose compared tokens are too far off on average is not learnt from. And for each segment the tokens that were
compared, and those that are off, are counted: they speak for or against whoever handed it in (`offbeat.control.trust`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from blake3 import blake3
from safetensors import SafetensorError

from offbeat.control.trust import OFF_GAP
from offbeat.learn.packing import pack, plan
from offbeat.learn.policy import Policy
from offbeat.learn.samples import Sample

log = logging.getLogger(__name__)


class SegmentFinding(NamedTuple):
    """What was found of one segment."""

    sample: int
    start: int
    num_tokens: int
    """Compared."""
    num_off: int


@dataclass(frozen=True)
class Findings:
    """What an audit of some samples found."""

    is_off: np.ndarray
    """For each sample, whether it is not to be learnt from."""
    segments: tuple[SegmentFinding, ...]
    """Those with a token that was compared; `sample` counts from 0 among the samples given."""


def audit(
    samples: Sequence[Sample], now: np.ndarray, max_gap: float, witnessed: Sequence[np.ndarray | None] = ()
) -> Findings:
    """Compares what samples say with `now`, the log-probs at the step's start of all their tokens one after the other,
    and with `witnessed`: for each sample the log-probs of older tokens by their own weights, NaN where there are none.
    """
    lengths = [sample.num_tokens for sample in samples]
    owner = np.repeat(np.arange(len(samples)), lengths)
    own = np.where(_joined([sample.is_fresh for sample in samples], np.bool_), now, np.nan)
    compared = ~np.isnan(own)
    for i, found in enumerate(witnessed):
        if found is not None:
            here = np.flatnonzero(owner == i)[~np.isnan(found)]
            own[here], compared[here] = found[~np.isnan(found)], True
    gaps = np.where(compared, np.abs(own - _joined([sample.logprobs for sample in samples], np.float32)), 0.0)
    is_off = np.bincount(owner, gaps, len(samples)) > max_gap * np.bincount(owner, compared, len(samples))
    starts = _joined([sample.starts for sample in samples], np.int64)
    begins = np.ones(len(owner), np.bool_)
    begins[1:] = (owner[1:] != owner[:-1]) | (starts[1:] != starts[:-1])
    place, first = np.cumsum(begins) - 1, np.flatnonzero(begins)
    num_compared = np.bincount(place, compared, len(first)).astype(int)
    num_off = np.bincount(place, gaps > OFF_GAP, len(first)).astype(int)
    return Findings(
        is_off,
        tuple(
            SegmentFinding(int(owner[at]), int(starts[at]), int(num_compared[i]), int(num_off[i]))
            for i, at in enumerate(first)
            if num_compared[i]
        ),
    )


def witness(
    policy: Policy,
    samples: Sequence[Sample],
    share: float,
    weights_of: Callable[[int], Path | None],
    tokens_per_microbatch: int,
) -> dict[int, np.ndarray]:
    """Log-probs of older tokens by the weights of their own version, by sample: of about `share` of a batch's older
    tokens. `weights_of` finds a version's file. NaN where a token was not looked at."""
    found: dict[int, np.ndarray] = {}
    files = {number: file for number in _num_stale(samples) if (file := weights_of(number)) is not None}
    for number, chosen in choose(samples, share, files):
        try:
            with policy.weights_of(files[number]):
                logprobs = _logprobs(policy, samples, chosen, tokens_per_microbatch)
        except (OSError, SafetensorError) as error:
            log.warning("version %d cannot be read for an audit: %s", number, error)
            continue
        for i, own in logprobs.items():
            is_of = _is_of(samples[i], number)
            found.setdefault(i, np.full(len(own), np.nan, np.float32))[is_of] = own[is_of]
    return found


def _logprobs(
    policy: Policy, samples: Sequence[Sample], chosen: Sequence[int], tokens_per_microbatch: int
) -> dict[int, np.ndarray]:
    found: dict[int, np.ndarray] = {}
    for local in plan([samples[i] for i in chosen], tokens_per_microbatch):
        batch = pack(samples, [chosen[i] for i in local], policy.device)
        ends = np.cumsum([samples[i].num_tokens for i in batch.samples])[:-1]
        found.update(zip(batch.samples, np.split(policy.logprobs(batch).cpu().numpy(), ends), strict=True))
    return found


def choose(samples: Sequence[Sample], share: float, at_hand: Mapping[int, object]) -> Iterator[tuple[int, list[int]]]:
    """Which versions are looked at, of those at hand, and which samples with tokens of each: few versions rather than
    few samples, because each has to be loaded.

    They are drawn by a hash of the batch. So the same batch is audited in the same way after a resume, and whoever
    hands in an answer cannot know whether it will be looked at: that depends on the others of its batch.
    """
    num_stale = {number: count for number, count in _num_stale(samples).items() if number in at_hand}
    if not num_stale or share <= 0:
        return
    digest = blake3()
    for sample in samples:
        digest.update(sample.response.tobytes()).update(sample.logprobs.tobytes())
    rng = np.random.default_rng(int.from_bytes(digest.digest(length=8), "little"))
    numbers, counts = np.array(list(num_stale)), np.array(list(num_stale.values()), float)
    left = share * counts.sum()
    for number in rng.choice(numbers, len(numbers), replace=False, p=counts / counts.sum()).tolist():
        chosen = []
        for i in rng.permutation([i for i, sample in enumerate(samples) if _is_of(sample, number).any()]).tolist():
            if left <= 0:
                break
            chosen.append(i)
            left -= int(_is_of(samples[i], number).sum())
        if chosen:
            yield number, sorted(chosen)


def _num_stale(samples: Sequence[Sample]) -> dict[int, int]:
    """How many older tokens of each version could be compared."""
    known = [sample.version[sample.is_stale] for sample in samples if sample.version is not None]
    numbers, counts = np.unique(_joined(known, np.int64), return_counts=True)
    return dict(zip(numbers.tolist(), counts.tolist(), strict=True))


def _is_of(sample: Sample, version: int) -> np.ndarray:
    if sample.version is None:
        return np.zeros(sample.num_tokens, np.bool_)
    return sample.is_stale & (sample.version == version)


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)
