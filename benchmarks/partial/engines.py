"""Engines that generate samples step by step, on a modelled or on a real clock.

All engines share the bookkeeping: every running sample gets one token per step, so its number of tokens follows from
the step at which it was added. `step` continues until at least one sample ends, because no policy acts before. `add`
prefills all tokens of a sample; `abort` forgets its keys and values. An engine enforces lengths, but reveals none.

`VirtualEngine` takes its seconds from a `StepTime`, so it is deterministic and thousands of times as fast as a real
engine.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.partial.laws import PROMPT_TOKENS, Lengths
from benchmarks.partial.samples import Sample
from offbeat.engines.embedded.attention import num_long_rows

READ_BUCKET_TOKENS, PREFILL_TOKENS = 16, 4096
"""Bucket size and prefill size of the embedded engine, which its model must count in the same way."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of an engine's work: `base_s` per decode step, `per_row_s` per row (running answer) in the decode step,
    `per_token_s` per token of context that its rows read, and `prefill_s` per prefilled token."""

    base_s: float
    per_row_s: float
    per_token_s: float
    prefill_s: float

    def seconds(self, counts: Counts) -> float:
        decode_s = self.base_s * counts.num_steps + self.per_row_s * counts.num_rows
        context_s = self.per_token_s * counts.num_context_tokens
        return decode_s + context_s + self.prefill_s * counts.num_prefilled_tokens


@dataclass
class Counts:
    """Work of an engine since it was made."""

    num_steps: int = 0
    num_rows: int = 0
    """Number of tokens generated: one for each row and step."""
    num_context_tokens: int = 0
    num_prefilled_tokens: int = 0
    """Prefilled tokens of prompts and of continued samples, with padding."""
    num_reprefilled_tokens: int = 0
    """Prefilled tokens of continued samples, with padding."""


class Engine(ABC):
    """Bookkeeping of all engines. `version` is the last one given to `update`."""

    def __init__(self, lengths: Lengths):
        self.lengths, self.version, self.counts = lengths, 0, Counts()
        self._running: dict[Sample, int] = {}
        """Step up to which a sample's tokens are recorded, by running sample."""
        self._ends: list[tuple[int, int, Sample]] = []
        """Heap of running samples by the step at which they end."""
        self._far: list[tuple[int, int, Sample]] = []
        self._near: list[tuple[int, int, Sample]] = []
        """Heaps of rows that are read far, and of the others, with the longest context first; ended rows may be among
        them. The key is the step less the context, which stays the same, because a context grows by one per step."""
        self._num_far = 0
        """Number of rows that are read far. If one of them ends, another takes its place."""
        self._num_added = 0

    @property
    @abstractmethod
    def now_s(self) -> float: ...

    @abstractmethod
    def pause(self, seconds: float, meanwhile: Callable[[], None]) -> None:
        """Stands still for `seconds`, or for the time that `meanwhile` takes if that is longer."""

    @abstractmethod
    def _prefill(self, samples: Sequence[Sample]) -> None: ...

    @abstractmethod
    def _decode(self, num_steps: int, num_ending: int) -> None: ...

    @abstractmethod
    def _forget(self, samples: Sequence[Sample]) -> None: ...

    @property
    def num_running(self) -> int:
        return len(self._running)

    def is_running(self, sample: Sample) -> bool:
        return sample in self._running

    def add(self, samples: Sequence[Sample]) -> None:
        """Starts or continues samples; the current version computes their keys and values."""
        if not samples:
            return
        self._count_prefill(samples)
        self._prefill(samples)
        for sample in samples:
            assert not sample.is_done
            assert sample not in self._running
            sample.kv_version = self.version
            self._running[sample] = self.counts.num_steps
            left = self.length_of(sample) - sample.num_tokens
            assert left > 0
            self._num_added += 1
            heapq.heappush(self._ends, (self.counts.num_steps + left, self._num_added, sample))
        self._read_apart()

    def step(self) -> list[Sample]:
        """Decodes until some samples end, and returns these; empty if nothing runs."""
        if not self._ends:
            return []
        at, ending = self._ends[0][0], []
        while self._ends and self._ends[0][0] == at:
            ending.append(heapq.heappop(self._ends)[2])
        num_steps = at - self.counts.num_steps
        self._count_decode(num_steps)
        self._decode(num_steps, len(ending))
        self.counts.num_steps += num_steps
        self.counts.num_rows += num_steps * len(self._running)
        for sample in ending:
            self._write_down(sample)
            assert sample.num_tokens == self.length_of(sample)
            sample.is_done, sample.kv_version = True, None
            del self._running[sample]
        return ending

    def abort(self, samples: Iterable[Sample] | None = None) -> list[Sample]:
        """Removes samples (None: all) from the engine; they keep their tokens."""
        stopped = list(self._running if samples is None else samples)
        for sample in stopped:
            self._write_down(sample)
            del self._running[sample]
            sample.kv_version = None
        self._forget(stopped)
        for heap in (self._ends, self._far, self._near):
            heap[:] = [entry for entry in heap if entry[2] in self._running]
            heapq.heapify(heap)
        return stopped

    def update(self, version: int) -> None:
        """Sets the version of all further tokens; running samples keep their keys and values."""
        self.settle()
        self.version = version

    def settle(self) -> None:
        """Records the tokens of all running samples."""
        for sample in self._running:
            self._write_down(sample)

    def length_of(self, sample: Sample) -> int:
        return self.lengths.of(sample.group.prompt, sample.group.epoch, sample.member)

    def _write_down(self, sample: Sample) -> None:
        sample.grow(self.counts.num_steps - self._running[sample], self.version)
        self._running[sample] = self.counts.num_steps

    def _read_apart(self) -> None:
        """Chooses the rows that are read far from now on, as the embedded engine does when requests start."""
        now = self.counts.num_steps
        samples = list(self._running)
        contexts = np.array([sample.num_context_tokens + now - self._running[sample] for sample in samples])
        self._num_far = num_long_rows(contexts.tolist())
        order = np.argsort(-contexts, kind="stable").tolist()
        entries = [(now - int(contexts[index]), index, samples[index]) for index in order]
        self._far, self._near = entries[: self._num_far], entries[self._num_far :]  # sorted lists are heaps

    def _count_decode(self, num_steps: int) -> None:
        """Counts the context tokens read. Each row is read up to the longest row of its part (read far, or not), in
        whole buckets. A row that takes the place of an ended one is read far."""
        for heap in (self._far, self._near):
            while heap and heap[0][2] not in self._running:
                heapq.heappop(heap)
        num_far = min(self._num_far, len(self._running))
        longest = [heap[0][0] for heap in (self._far, self._near) if heap]
        parts = [(num_far, min(longest))]
        if num_far < len(self._running):
            parts.append((len(self._running) - num_far, self._near[0][0]))
        for num_rows, offset in parts:
            context = self.counts.num_steps - offset
            read = _sum_of_reads(context + num_steps - 1) - _sum_of_reads(context - 1)
            self.counts.num_context_tokens += read * num_rows

    def _count_prefill(self, samples: Sequence[Sample]) -> None:
        """Counts prefilled tokens. A prompt that a running sample has is copied; a continued sample is computed
        again."""
        held = {sample.group for sample in self._running}
        fresh = {sample.group for sample in samples if sample.num_tokens == 0} - held
        resumed = [sample.num_context_tokens for sample in samples if sample.num_tokens]
        everything = padded_tokens([*resumed, *[PROMPT_TOKENS] * len(fresh)])
        self.counts.num_prefilled_tokens += everything
        self.counts.num_reprefilled_tokens += everything - padded_tokens([PROMPT_TOKENS] * len(fresh))


class VirtualEngine(Engine):
    """Engine whose time is computed by a `StepTime`."""

    def __init__(self, lengths: Lengths, model: StepTime):
        super().__init__(lengths)
        self.model, self._paused_s = model, 0.0

    @property
    def now_s(self) -> float:
        return self._paused_s + self.model.seconds(self.counts)

    def pause(self, seconds: float, meanwhile: Callable[[], None]) -> None:
        meanwhile()
        self._paused_s += seconds

    def _prefill(self, samples: Sequence[Sample]) -> None: ...

    def _decode(self, num_steps: int, num_ending: int) -> None: ...

    def _forget(self, samples: Sequence[Sample]) -> None: ...


def padded_tokens(lengths: Sequence[int]) -> int:
    """Number of tokens, with padding, that the embedded engine prefills: the longest rows first, a few at a time."""
    rest, total = sorted(lengths, reverse=True), 0
    while rest:
        rows = max(1, PREFILL_TOKENS // rest[0])
        total += rest[0] * len(rest[:rows])
        rest = rest[rows:]
    return total


def _sum_of_reads(longest: int) -> int:
    """Number of tokens read of one row while its context grows from nothing to `longest`, step by step."""
    buckets, rest = divmod(longest, READ_BUCKET_TOKENS)
    return READ_BUCKET_TOKENS * (READ_BUCKET_TOKENS * buckets * (buckets + 1) // 2 + rest * (buckets + 1))
