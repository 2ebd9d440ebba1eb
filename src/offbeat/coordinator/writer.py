"""Group commit: the only thread that uses the coordinator's ledger, and the queue of calls to it.

Calls that arrive while the thread is busy share the next transaction and its disk flush. Workers can therefore make
more calls per second than the disk can do flushes. Each call is answered once its transaction is on disk; a call that
fails changes nothing and does not affect the others. Submissions are combined into one ledger call, which is made
first; the other calls keep their order. Every caller gets an answer, even if the writer itself fails.

Long calls, and calls with transactions of their own, go through `alone`, after all earlier calls are on disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from offbeat.ledger.errors import Damaged, LedgerError
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import Outcome, Submission

P = ParamSpec("P")
R = TypeVar("R")

MAX_SHARED = 256
"""One transaction has at most this many submissions and this many other calls, because later calls wait for it."""


class _Call:
    def __init__(self, work: Callable[[], Any], *, is_alone: bool = False):
        self.work, self.is_alone = work, is_alone
        self._answers: list[asyncio.Future[Any]] = []
        """Futures of all callers that share this call."""

    def answer(self) -> asyncio.Future[Any]:
        self._answers.append(asyncio.get_running_loop().create_future())
        return self._answers[-1]

    def resolve(self, result: Any) -> None:
        for answer in self._answers:
            _resolve(answer, result)

    def fail(self, error: BaseException) -> None:
        """Gives `error` to every caller that has no answer yet, as a `LedgerError` if it is not an `Exception`."""
        for answer in self._answers:
            _resolve(
                answer,
                error
                if isinstance(error, Exception)
                else LedgerError(f"the ledger's writer ended before it made this call: {error!r}"),
            )


class _Submit(_Call):
    """Several submissions, made as one ledger call and answered one by one."""

    def __init__(self, ledger: Ledger, submitted: Sequence[tuple[Submission, asyncio.Future[Any]]]):
        super().__init__(lambda: ledger.submit([submission for submission, _ in submitted]))
        self._answers = [answer for _, answer in submitted]

    def resolve(self, result: Any) -> None:
        outcomes = [result] * len(self._answers) if isinstance(result, Exception) else result
        for answer, outcome in zip(self._answers, outcomes, strict=True):
            _resolve(answer, outcome)


def _resolve(answer: asyncio.Future[Any], result: Any) -> None:
    if answer.done():
        return  # the caller has gone
    if isinstance(result, StopIteration):  # a future cannot hold StopIteration
        answer.set_exception(RuntimeError(f"a ledger call raised {result!r}; this is a bug"))
    elif isinstance(result, Exception):
        answer.set_exception(result)
    else:
        answer.set_result(result)


class Writer:
    """Makes the calls to one ledger on a thread of its own, many of them in one transaction."""

    def __init__(self, ledger: Ledger, on_damage: Callable[[Damaged], None] = lambda error: None):
        """`on_damage` is called with the error when any call finds that the ledger cannot be read or written."""
        self.ledger, self._on_damage = ledger, on_damage
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._submissions: list[tuple[Submission, asyncio.Future[Outcome]]] = []
        self._calls: list[_Call] = []
        self._reads: dict[Callable[..., Any], _Call] = {}
        """Waiting read-only calls by function, so that equal reads share one answer."""
        self._writing: asyncio.Task[None] | None = None

    async def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Makes a short ledger call, in a transaction shared with other calls."""
        return await self._add(_Call(partial(function, *args, **kwargs)))

    async def alone(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Makes a ledger call that shares its transaction with no other call."""
        return await self._add(_Call(partial(function, *args, **kwargs), is_alone=True))

    async def read(self, function: Callable[[], R]) -> R:
        """Makes a read-only ledger call. Callers that wait for the same `function` share one call."""
        waiting = self._reads.get(function)
        if waiting is not None:
            return await waiting.answer()
        self._reads[function] = _Call(function)
        return await self._add(self._reads[function])

    async def submit(self, submission: Submission) -> Outcome:
        """Returns once the submission is on disk; raises the ledger's error if it is refused."""
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._submissions.append((submission, answer))
        self._begin()
        return await answer

    def _add(self, call: _Call) -> asyncio.Future[Any]:
        self._calls.append(call)
        self._begin()
        return call.answer()

    def _begin(self) -> None:
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write())

    async def _write(self) -> None:
        """Makes all waiting calls, including those of cancelled callers, in one transaction after another."""
        calls: list[_Call] = []
        try:
            await asyncio.sleep(0)  # lets further calls of this loop iteration join
            while self._calls or self._submissions:
                calls = self._next_calls()
                try:
                    results = await asyncio.get_running_loop().run_in_executor(self._thread, self._make, calls)
                    for call, result in zip(calls, results, strict=True):
                        if isinstance(result, Damaged):
                            self._on_damage(result)
                        call.resolve(result)
                except Exception as error:  # noqa: BLE001 - closed, or a bug: callers get it, later calls are made
                    for call in calls:
                        call.fail(error)
        except BaseException as error:
            self._reads.clear()
            waiting, self._calls = [*calls, _Submit(self.ledger, self._submissions), *self._calls], []
            self._submissions = []
            for call in waiting:
                call.fail(error)
            raise
        finally:
            self._writing = None

    def _next_calls(self) -> list[_Call]:
        """Returns the calls of the next transaction: either one `alone` call, or submissions and shared calls."""
        if self._calls and self._calls[0].is_alone:
            return [self._calls.pop(0)]
        count = next((i for i, call in enumerate(self._calls) if call.is_alone), len(self._calls))
        calls, self._calls = self._calls[: min(count, MAX_SHARED)], self._calls[min(count, MAX_SHARED) :]
        self._reads = {call.work: call for call in self._calls if call.work in self._reads}
        submitted, self._submissions = self._submissions[:MAX_SHARED], self._submissions[MAX_SHARED:]
        return [_Submit(self.ledger, submitted), *calls] if submitted else calls

    def _make(self, calls: Sequence[_Call]) -> list[Any]:
        """Makes `calls` on the writer thread; returns the result or error of each."""
        try:
            with self.ledger.naming_damage():
                if len(calls) == 1:
                    return [calls[0].work()]
                return self.ledger.together([call.work for call in calls])
        except Exception as error:  # noqa: BLE001 - raised at each caller
            return [error] * len(calls)

    async def close(self) -> None:
        """Waits until every call is answered, then ends the thread."""
        while self._writing is not None:
            await asyncio.wait({self._writing})
        self._thread.shutdown()
