"""The rounds that a worker's tasks belong to: it hears at once when one is over, and of which those are.

A round is named by the version that began it, so that later ones have larger numbers. What belongs to a round that is
over may not begin any more, however late the answer with which it came.
"""

from __future__ import annotations

from offbeat.rollout.waiting import Changes
from offbeat.serve.client import WorkerClient

OVER_WAIT_S = 20.0
"""How long one call may wait for the end of a round: nothing else waits for it."""


class Rounds:
    """The rounds of one worker; without rounds it waits for ever and asks nobody."""

    def __init__(self, client: WorkerClient, changes: Changes):
        self._client, self._changes = client, changes
        self._current: int | None = None
        self._last_over = -1

    def entered(self, number: int | None) -> None:
        """Tasks of a round came with a lease."""
        if number is not None and number > self._last_over:
            self._current = number if self._current is None else max(number, self._current)
            self._changes.tell()

    @property
    def is_under_way(self) -> bool:
        """Whether a round is, that work is done for."""
        return self._current is not None

    def is_over(self, number: int | None) -> bool:
        return number is not None and number <= self._last_over

    async def next_over(self) -> int:
        """Waits until the round is over that work is done for."""
        while True:
            await self._changes.until(lambda: self._current is not None)
            number = self._current
            assert number is not None
            if await self._client.round_over(number, OVER_WAIT_S):
                self._last_over = number
                self._current = None if self._current == number else self._current
                return number
