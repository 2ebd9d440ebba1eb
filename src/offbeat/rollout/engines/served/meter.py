"""Counts what a server does for this worker, as far as its answers tell.

A server that samples a token has taken a row through a step, which read the text before it; nothing is padded. A call
that decodes gets one token a step, so that there were as many steps as tokens a call on average, whoever else the
server worked for. Whether a prefix was computed or found is known where answers tell it (`num_cached`); where one does
not, it is unknown from then on.
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
        self.is_decoding = False
        """Whether its prefill is over: it has had a token."""

    def take(self, chunk: Chunk) -> EngineFigures:
        """What a part of the answer says was done for it."""
        num_new, num_before = len(chunk.tokens), self.num_prompt + self.num_tokens
        prefilled: int | None = 0
        resumed: int | None = 0
        if num_new and not self.is_decoding:
            self.is_decoding, resumed = True, chunk.num_cached
            prefilled = None if resumed is None else self.num_prompt - resumed
        self.num_tokens += num_new
        return EngineFigures(
            num_rows=num_new,
            num_context_tokens=num_new * num_before + num_new * (num_new - 1) // 2,
            num_prefilled_tokens=prefilled,
            num_resumed_tokens=resumed,
        )

    def refill(self) -> EngineFigures:
        """All of it is computed again, because weights changed under it."""
        num_tokens = self.num_prompt + self.num_tokens if self.is_decoding else 0
        return EngineFigures(num_prefilled_tokens=num_tokens)


class Meter:
    """See the module. Busy is a server that has calls inside and does not stand still."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._sums = EngineFigures()
        self._inside: dict[str, MeteredCall] = {}
        self._is_still = False
        self._counted_s = clock()
        self._num_rows = 0
        """Tokens since steps were last counted, and below, how long some call and all calls decoded meanwhile."""
        self._decode_s = self._row_s = 0.0
        self._steps_left = 0.0
        """The part of a step that is not counted yet."""

    @property
    def figures(self) -> EngineFigures:
        self._count_time()
        self._count_steps()
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
        self._count_time()
        self._num_rows += len(chunk.tokens)
        self._sums += self._inside[call.id].take(chunk)

    def refill(self, call: Call) -> None:
        self._sums += self._inside[call.id].refill()

    def stand_still(self, is_still: bool) -> None:
        self._count_time()
        self._is_still = is_still

    def _count_time(self) -> None:
        now_s = self._clock()
        passed_s, self._counted_s = now_s - self._counted_s, now_s
        if not self._inside or self._is_still:
            return
        self._sums += EngineFigures(busy_seconds=passed_s)
        if num_decoding := sum(call.is_decoding for call in self._inside.values()):
            self._decode_s += passed_s
            self._row_s += num_decoding * passed_s

    def _count_steps(self) -> None:
        """Tokens over the calls that decoded on average. First tokens alone, of which no time is known, wait."""
        if self._row_s <= 0:
            return
        steps = self._num_rows * self._decode_s / self._row_s + self._steps_left
        self._num_rows, self._decode_s, self._row_s = 0, 0.0, 0.0
        self._steps_left = steps - int(steps)
        self._sums += EngineFigures(num_steps=int(steps))
