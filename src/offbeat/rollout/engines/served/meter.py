"""Counts what a server does for this worker, as far as its answers tell.

A server that samples a token has taken a row through a step, which read the text before it; nothing is padded. How many
steps that were no answer tells. Whether a prefix was computed or found is known where answers tell it (`num_cached`);
where one does not, it is unknown from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from offbeat.rollout.engine import EngineFigures
from offbeat.rollout.engines.served.dialect import Call, Chunk


class MeteredCall:
    """One call while it is inside the server."""

    def __init__(self, call: Call):
        self.num_prompt, self.num_tokens = len(call.tokens), 0
        self._is_prefilled = False

    def take(self, chunk: Chunk) -> EngineFigures:
        """What a part of the answer says was done for it."""
        num_new, num_before = len(chunk.tokens), self.num_prompt + self.num_tokens
        prefilled: int | None = 0
        resumed: int | None = 0
        if num_new and not self._is_prefilled:
            self._is_prefilled, resumed = True, chunk.num_cached
            prefilled = None if resumed is None else self.num_prompt - resumed
        self.num_tokens += num_new
        return EngineFigures(
            num_steps=None,
            num_rows=num_new,
            num_context_tokens=num_new * num_before + num_new * (num_new - 1) // 2,
            num_prefilled_tokens=prefilled,
            num_resumed_tokens=resumed,
        )

    def refill(self) -> EngineFigures:
        """All of it is computed again, because weights changed under it."""
        num_tokens = self.num_prompt + self.num_tokens if self._is_prefilled else 0
        return EngineFigures(num_prefilled_tokens=num_tokens)


class Meter:
    """See the module. Busy is a server that has calls inside and does not stand still."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._sums = EngineFigures(num_steps=None)
        self._inside: dict[str, MeteredCall] = {}
        self._is_still = False
        self._counted_s = clock()

    @property
    def figures(self) -> EngineFigures:
        self._count_time()
        return self._sums

    @contextmanager
    def inside(self, call: Call) -> Iterator[None]:
        self._count_time()
        self._inside[call.id] = MeteredCall(call)
        try:
            yield
        finally:
            self._count_time()
            del self._inside[call.id]

    def take(self, call: Call, chunk: Chunk) -> None:
        self._sums += self._inside[call.id].take(chunk)

    def refill(self, call: Call) -> None:
        self._sums += self._inside[call.id].refill()

    def stand_still(self, is_still: bool) -> None:
        self._count_time()
        self._is_still = is_still

    def _count_time(self) -> None:
        now_s = self._clock()
        if self._inside and not self._is_still:
            self._sums += EngineFigures(busy_seconds=now_s - self._counted_s)
        self._counted_s = now_s
