"""The one thread that speaks to the ledger.

Calls are made one after the other, in the order in which they came. Submissions that arrive while a commit is under way
share the next, so that a disk which takes milliseconds to flush does not limit a swarm to hundreds a second; each is
acknowledged once that commit is on disk, and one that is refused takes no other along.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import Outcome, Submission

P = ParamSpec("P")
R = TypeVar("R")

MAX_SHARED = 256
"""Submissions in one commit at most: those behind them need not wait for a longer one."""


class Writer:
    def __init__(self, ledger: Ledger):
        self.ledger = ledger
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._inbox: list[tuple[Submission, asyncio.Future[Outcome]]] = []
        self._committing: asyncio.Task[None] | None = None

    async def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs a ledger call on the thread."""

        def work() -> R:
            with self.ledger.naming_damage():
                return function(*args, **kwargs)

        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def submit(self, submission: Submission) -> Outcome:
        """Returns once the submission is on disk, or raises why it may not be stored."""
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._inbox.append((submission, answer))
        if self._committing is None:
            self._committing = asyncio.get_running_loop().create_task(self._commit())
        return await answer

    async def _commit(self) -> None:
        """Writes what has arrived, until nothing is left; callers that have gone are served all the same."""
        await asyncio.sleep(0)  # lets every caller of this moment in
        while self._inbox:
            portion, self._inbox = self._inbox[:MAX_SHARED], self._inbox[MAX_SHARED:]
            outcomes: Sequence[Outcome | Exception]
            try:
                outcomes = await self.call(self.ledger.submit, [submission for submission, _ in portion])
            except Exception as error:  # noqa: BLE001  # each caller hears of it
                outcomes = [error] * len(portion)
            for (_, answer), outcome in zip(portion, outcomes, strict=True):
                if answer.done():
                    continue
                if isinstance(outcome, Exception):
                    answer.set_exception(outcome)
                else:
                    answer.set_result(outcome)
        self._committing = None

    def close(self) -> None:
        self._thread.shutdown()
