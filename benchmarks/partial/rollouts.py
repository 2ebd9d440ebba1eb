"""The basis of every policy: groups begin, run in the engine, and are delivered or wasted; then weights change.

Guarantees, checked at every update: each generated token is delivered, counted as wasted by a cause, or still part of
a living sample; and every delivered sample has ended. The clock and the pause of an update are the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from benchmarks.partial.accounts import Row
from benchmarks.partial.engines import Engine
from benchmarks.partial.laws import NUM_PROMPTS, order_of
from benchmarks.partial.samples import Group, Sample


class Rollouts:
    """Begins, delivers and wastes samples for a policy, and keeps a row of accounts for each step in `rows`."""

    def __init__(self, engine: Engine, groups_per_step: int, update_s: float):
        self.engine, self.groups_per_step, self.update_s = engine, groups_per_step, update_s
        self.group_size = engine.lengths.group_size
        self.version = 0
        self.rows: list[Row] = []
        self.row = Row()
        self.alive: set[Sample] = set()
        """Samples that were begun but neither delivered nor wasted."""
        self._alive_before: set[Sample] = set()
        self._prompts = self._in_order()
        self._num_begun = 0
        self._begun: set[Sample] = set()

    @property
    def samples_per_step(self) -> int:
        return self.groups_per_step * self.group_size

    @property
    def ran(self) -> set[Sample]:
        """Samples that were alive at any time of this step, whatever became of them."""
        return self._alive_before | self._begun

    def begin(self) -> Group:
        """Returns the next group of the data set, of which no sample runs yet."""
        epoch, prompt = next(self._prompts)
        group = Group(self._num_begun, prompt, epoch)
        group.samples = [Sample(group, member) for member in range(self.group_size)]
        self._num_begun += 1
        self.alive.update(group.samples)
        self._begun.update(group.samples)
        self.row.num_begun += self.group_size
        self.row.begun_tokens += sum(map(self.engine.length_of, group.samples))
        return group

    def deliver(self, samples: Iterable[Sample]) -> None:
        samples = list(samples)
        self.row.deliver(samples, self.version)
        self.alive.difference_update(samples)

    def waste(self, samples: Iterable[Sample], cause: str) -> None:
        for sample in samples:
            self.row.num_wasted[cause] += sample.num_tokens
            self.alive.remove(sample)

    def update(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Simulates training on the delivered samples: a pause, in which a policy may think, then a new version. Ends
        the row."""
        self.engine.settle()
        self.engine.pause(self.update_s, meanwhile)
        self.version += 1
        self.engine.update(self.version)
        counts = self.engine.counts
        self.row.now_s, self.row.num_generated = self.engine.now_s, counts.num_rows
        self.row.num_decode_steps, self.row.num_reprefilled = counts.num_steps, counts.num_reprefilled_tokens
        self.rows.append(self.row)
        self.row = Row()
        self._alive_before, self._begun = set(self.alive), set()
        self._check_that_nothing_is_lost()

    def _check_that_nothing_is_lost(self) -> None:
        gone = sum(row.num_tokens + row.num_wasted.total() for row in self.rows)
        held = sum(sample.num_tokens for sample in self.alive)
        generated = self.engine.counts.num_rows
        assert generated == gone + held, f"{generated} tokens generated, {gone} delivered or wasted, {held} held"

    def _in_order(self) -> Iterator[tuple[int, int]]:
        epoch = 0
        while True:
            order = order_of(self.engine.lengths.seed, epoch)
            assert len(order) == NUM_PROMPTS
            yield from ((epoch, prompt) for prompt in order)
            epoch += 1
