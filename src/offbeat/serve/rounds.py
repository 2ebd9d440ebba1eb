"""Rounds, where work stops when a batch is complete: which one is under way, and who takes part in it with what.

A round is named by the version that began it. It is over as soon as the batch of that version's step is claimed, and
whoever waits for that hears of it at once. All of this is read off the ledger, so that a restart at any moment finds
rounds as they were. What is remembered here only spares tokens from being older than they need to be.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from offbeat.ledger.ledger import Ledger
from offbeat.serve.waiting import Bell, News


class Rounds:
    """`read` makes a call to the ledger that only reads, on the ledger's thread."""

    def __init__(self, ledger: Ledger, read: Callable[[Callable[[], Any]], Awaitable[Any]], bell: Bell):
        self._ledger, self._read, self._bell = ledger, read, bell
        self._news = News()
        self._took_part: dict[str, tuple[int, int | None]] = {}
        """In which round each worker did last, and with which version."""

    def ring(self) -> None:
        """A round may have begun, or ended."""
        self._news.ring()

    async def current(self) -> int | None:
        """The round under way; None between two, and where work does not come in rounds."""
        return await self._read(self._ledger.current_round) if self._ledger.stops else None

    async def is_over(self, number: int, wait_s: float) -> bool:
        """Whether a round is over, as soon as it is; False after `wait_s`."""
        deadline_s = time.monotonic() + wait_s
        while True:
            changed = self._news.changed
            if await self.current() != number:
                return True
            if not await self._bell.wait(changed, deadline_s):
                return False

    def may_join(self, worker: str, number: int | None, have_version: int | None) -> bool:
        """Whether a worker may begin or carry on what is trained on, and not only what is judged.

        Between rounds nobody may. In a round one that still has the version that it had in another is to load first:
        it has nothing else to do. One that has loaded since may join though its version is not the newest any more, or
        one on a slow line, to which each comes too late, would never work."""
        if not self._ledger.stops:
            return True
        if number is None:
            return False
        before, version = self._took_part.get(worker, (number, None))
        return before == number or have_version in (number, None) or have_version != version

    def joined(self, worker: str, number: int | None, have_version: int | None) -> None:
        if number is not None:
            self._took_part[worker] = (number, have_version)

    def left(self, worker: str) -> None:
        self._took_part.pop(worker, None)
