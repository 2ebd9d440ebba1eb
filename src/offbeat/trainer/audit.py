"""Audits: compares the log-probs that engines reported with the trainer's own.

With equal weights, engine and trainer differ only by rounding. Fresh tokens, sampled from the weights with which the
step begins, are compared with log-probs that every step computes anyway. For a share of the older tokens, the weights
of their own version are loaded for a moment (`witness`). Tokens that attended to keys and values of weights older than
their own version cannot be compared.

A sample is not trained on if its compared tokens are off by too much on average, or if too many tokens of one segment
are off. The findings also decide whether a segment's worker is quarantined (`offbeat.rules.quarantine`).
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from blake3 import blake3
from safetensors import SafetensorError
from torch import Tensor

from offbeat.files import link_folder
from offbeat.rules.quarantine import OFF_GAP, looks_forged
from offbeat.trainer.packing import Microbatch, Sample, infer, to_device
from offbeat.trainer.policy import Forward, Policy
from offbeat.weights.version import Version, WeightFolder, weights_file

log = logging.getLogger(__name__)


class SegmentFinding(NamedTuple):
    """Audit of the segment that begins at token `start` of the sample with index `sample`. `num_tokens` log-probs were
    compared; `num_off` of them differ from the trainer's by more than `OFF_GAP`."""

    sample: int
    start: int
    num_tokens: int
    num_off: int


@dataclass(frozen=True)
class Findings:
    """Result of an audit: which samples must not be trained on, and how many tokens were compared in each segment. The
    tensors stay on the device of the log-probs, so reading their values waits for that device."""

    is_off: Tensor
    """True for each sample that must not be trained on."""
    counts: Tensor
    """Shape (2, segments): for each segment, the number of compared tokens, and how many of these are off, which means
    a difference above `OFF_GAP`."""
    places: tuple[tuple[int, int], ...]
    """For each segment, the index of its sample among the audited samples, and its first response position."""

    @property
    def segments(self) -> tuple[SegmentFinding, ...]:
        return found_segments(self.places, self.counts.tolist())


def found_segments(places: Sequence[tuple[int, int]], counts: Sequence[Sequence[float]]) -> tuple[SegmentFinding, ...]:
    """Returns the segments with at least one compared token, from the values of `Findings.places` and `.counts`."""
    rows = zip(places, *counts, strict=True)
    return tuple(SegmentFinding(i, start, int(num), int(off)) for (i, start), num, off in rows if num)


def audit(
    samples: Sequence[Sample], now: Tensor, max_gap: float, witnessed: Sequence[np.ndarray | None] = ()
) -> Findings:
    """Compares the log-probs that engines reported with the trainer's. A sample fails if the mean absolute difference
    over its compared tokens exceeds `max_gap`, or if one of its segments looks forged.

    `now` holds the trainer's log-probs of all response tokens at the start of the step, one sample after the other.
    They are used only for fresh tokens, which were sampled from the same weights. `witnessed` holds for each sample the
    log-probs of its older tokens under the weights that sampled them: NaN where not computed, None if nowhere computed.
    """
    owner = np.repeat(np.arange(len(samples)), [sample.num_tokens for sample in samples])
    older = np.full(len(owner), np.nan, np.float32)
    for i, found in enumerate(witnessed):
        if found is not None:
            older[owner == i] = found
    starts = _joined([sample.starts for sample in samples], np.int64)
    begins = np.ones(len(owner), np.bool_)
    begins[1:] = (owner[1:] != owner[:-1]) | (starts[1:] != starts[:-1])
    first = np.flatnonzero(begins)

    def there(array: np.ndarray) -> Tensor:
        return to_device(array, now.device)

    def sums(index: Tensor, size: int, values: Tensor) -> Tensor:
        return torch.zeros(size, dtype=torch.float64, device=now.device).index_add(0, index, values.double())

    is_fresh = there(_joined([sample.is_fresh for sample in samples], np.bool_))
    seen = there(older)
    own = torch.where(seen.isnan(), torch.where(is_fresh, now, torch.nan), seen)
    compared = ~own.isnan()
    gaps = torch.where(compared, (own - there(_joined([sample.logprobs for sample in samples], np.float32))).abs(), 0.0)
    owners, segment = there(owner), there(np.cumsum(begins) - 1)
    is_off = sums(owners, len(samples), gaps) > max_gap * sums(owners, len(samples), compared)
    num_compared, num_off = sums(segment, len(first), compared), sums(segment, len(first), gaps > OFF_GAP)
    forged = sums(there(owner[first]), len(samples), looks_forged(num_compared, num_off))
    places = tuple(zip(owner[first].tolist(), starts[first].tolist(), strict=True))
    return Findings(is_off | (forged > 0), torch.stack([num_compared, num_off]), places)


def witness(
    policy: Policy,
    samples: Sequence[Sample],
    share: float,
    weights_of: Callable[[int], Path | None],
    tokens_per_microbatch: int,
) -> dict[int, np.ndarray]:
    """Computes the log-probs of older tokens under the versions that sampled them; `choose` picks about `share` of the
    tokens. Returns arrays by sample index, with one entry per response token: NaN for tokens that were not picked.
    `weights_of` returns a version's weights file, or None if the file was not kept; then the version's tokens are not
    compared."""
    found: dict[int, np.ndarray] = {}
    files = {number: file for number in _num_stale(samples) if (file := weights_of(number)) is not None}
    for number, chosen in choose(samples, share, files):
        try:
            with policy.weights_of(files[number]):
                logprobs = _logprobs(policy, samples, chosen, tokens_per_microbatch)
        except (OSError, SafetensorError) as error:
            log.warning("tokens of version %d are not audited, because its weights cannot be read: %s", number, error)
            continue
        for i, own in logprobs.items():
            is_of = _is_of(samples[i], number)
            found.setdefault(i, np.full(len(own), np.nan, np.float32))[is_of] = own[is_of]
    return found


def _logprobs(
    policy: Policy, samples: Sequence[Sample], chosen: Sequence[int], tokens_per_microbatch: int
) -> dict[int, np.ndarray]:
    run = partial(_run, policy)
    return {i: one.logprobs for i, one in infer(policy, samples, chosen, tokens_per_microbatch, run).items()}


def _run(policy: Policy, batch: Microbatch) -> Forward:
    return Forward(policy.logprobs(batch))


def choose(samples: Sequence[Sample], share: float, at_hand: Mapping[int, object]) -> Iterator[tuple[int, list[int]]]:
    """Chooses older tokens to audit. Yields pairs: a version's number, and the indices of the samples whose tokens of
    this version are to be compared. The keys of `at_hand` are the versions whose weights are available.

    With `share` 0, no tokens are chosen. Otherwise all samples that are not `is_proven` are chosen, and enough of the
    proven ones to hold about `share` of the older tokens. The proven ones are taken from few versions, because each
    version has to be loaded.

    The choice is seeded by a hash of the batch, so a resumed run audits the same batch in the same way. No worker can
    know whether its answer will be audited, because that depends on the other answers.
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
        of_it = [i for i, sample in enumerate(samples) if _is_of(sample, number).any()]
        chosen = {i for i in of_it if not samples[i].is_proven}
        for i in rng.permutation([i for i in of_it if i not in chosen]).tolist():
            if left <= 0:
                break
            chosen.add(i)
            left -= int(_is_of(samples[i], number).sum())
        if chosen:
            yield number, sorted(chosen)


def _num_stale(samples: Sequence[Sample]) -> dict[int, int]:
    """Returns the number of older tokens in `samples` that an audit can compare, by the version that sampled them."""
    known = [sample.version[sample.is_stale] for sample in samples if sample.version is not None]
    numbers, counts = np.unique(_joined(known, np.int64), return_counts=True)
    return dict(zip(numbers.tolist(), counts.tolist(), strict=True))


def _is_of(sample: Sample, version: int) -> np.ndarray:
    if sample.version is None:
        return np.zeros(sample.num_tokens, np.bool_)
    return sample.is_stale & (sample.version == version)


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)


class Witnesses(WeightFolder):
    """Folder with the weights of the latest `num_kept` versions, for audits of older tokens.

    The files are hard links to the published files, or copies where links are impossible. Audits skip a missing
    version.
    """

    def __init__(self, folder: Path, num_kept: int):
        super().__init__(folder)
        self.num_kept = num_kept

    def add(self, version: Version) -> None:
        """Adds a version, and removes the oldest one if there are more than `num_kept`."""
        numbers = sorted({int(path.name) for path in self.folder.glob("[0-9]*")} | {version.number})
        self.keep(numbers[-self.num_kept :])
        try:
            link_folder(version.path, self.path(version.number))
        except OSError as error:
            shutil.rmtree(self.path(version.number), ignore_errors=True)
            log.warning(
                "tokens of version %d will not be audited, because its weights cannot be kept: %s",
                version.number,
                error,
            )

    def file(self, number: int) -> Path | None:
        """Returns the file with the tensors of version `number`; None if the version is not kept."""
        file = weights_file(self.path(number))
        return file if file.is_file() else None
