"""A server in memory that does what a script tells it, in modelled time.

What it samples can be checked from outside: a token is its own place in the text, its log-prob minus the number of the
version that was loaded when it was sampled.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import groupby

from benchmarks.common.clock import now_s
from offbeat.engines.dialect import Call, Chunk, Facts, Span
from offbeat.engines.protocol import EngineError, Finish, KvMode
from offbeat.waiting import Notifier
from offbeat.weights.version import Version


class Answer:
    """A call inside the server."""

    def __init__(self, call: Call):
        self.call = call
        self.labels: list[str] = []
        """Of each token: what the weights were called."""
        self.said: asyncio.Queue[Chunk | EngineError | None] = asyncio.Queue()
        self.num_said = self.num_taken = 0

    @property
    def spans(self) -> list[Span]:
        runs = [[at for at, _ in run] for _, run in groupby(enumerate(self.labels), key=lambda item: item[1])]
        return [Span(self.labels[run[0]], run[0], run[-1] + 1) for run in runs]


class ScriptedServer:
    """Implements `Dialect`. Calls are known by the ids of their requests, which have no hyphen."""

    def __init__(self, *, has_spans: bool = True, has_labels: bool = True):
        kv_modes = frozenset(KvMode) if has_spans else frozenset({KvMode.SAME, KvMode.REFILL})
        self.facts = Facts("scripted 1.0", "float32", 512, has_spans, has_labels, kv_modes)
        self.told: list[str] = []
        """All that it was told, in order; what it was asked is in `num_checks` and `num_labels`."""
        self.calls: list[Call] = []
        self.sent_s: list[float] = []
        self.inside: dict[str, Answer] = {}
        self.number, self.name = -1, "default"
        """The version that is loaded, and what it is called."""
        self.is_paused = False
        self.ends_aborted = self.takes_labels = True
        self.trouble: EngineError | None = None
        """What it says instead, whatever it is asked."""
        self.num_checks = self.num_labels = self.num_closes = 0
        self._gates: dict[str, asyncio.Event] = {}
        self._failures: defaultdict[str, list[EngineError]] = defaultdict(list)
        self._changes = Notifier()

    # For scripts

    async def until(self, condition: Callable[[], object]) -> None:
        await self._changes.wait_for(condition)

    async def until_inside(self, *names: str) -> None:
        await self.until(lambda: self.inside.keys() >= set(names))

    async def until_again(self, name: str, num_calls: int) -> None:
        """Until a request is inside by its so manieth call."""
        await self.until(lambda: name in self.inside and len(self.calls_of(name)) == num_calls)

    def hold(self, what: str) -> asyncio.Event:
        """The next time that it is told this, it does nothing until the event comes."""
        return self._gates.setdefault(what, asyncio.Event())

    def fail(self, what: str, *errors: EngineError) -> None:
        """The next times that it is told this, these are its answers."""
        self._failures[what] += errors

    async def sample(self, name: str, count: int = 1) -> None:
        """Returns once the tokens have come where they were sent."""
        assert not self.is_paused
        answer = self.inside[name]
        start = len(answer.call.tokens) + len(answer.labels)
        answer.labels += [self.name] * count
        await self.say(name, Chunk(range(start, start + count), [-float(self.number)] * count))

    async def say(self, name: str, chunk: Chunk) -> None:
        answer = self.inside[name]
        answer.num_said += 1
        answer.said.put_nowait(chunk)
        await self.until(lambda: answer.num_taken == answer.num_said or self.inside.get(name) is not answer)

    def end(self, name: str, finish: Finish = Finish.STOP) -> None:
        answer = self.inside[name]
        answer.said.put_nowait(Chunk(finish=finish, spans=answer.spans if self.facts.has_spans else ()))

    def drop(self, name: str, error: EngineError | None = None) -> None:
        """The answer breaks off by an error, or without one simply ends."""
        self.inside[name].said.put_nowait(error)

    def calls_of(self, name: str) -> list[Call]:
        return [call for call in self.calls if _request_of(call.id) == name]

    # For the engine

    async def probe(self) -> Facts:
        return self.facts

    async def generate(self, call: Call) -> AsyncIterator[Chunk]:
        name = _request_of(call.id)
        self.calls.append(call)
        self.sent_s.append(now_s())
        await self._hear("send", name)
        answer = self.inside[name] = Answer(call)
        self._changes.notify()
        try:
            while said := await answer.said.get():
                if isinstance(said, EngineError):
                    raise said
                yield said
                answer.num_taken += 1
                self._changes.notify()
        finally:
            if self.inside[name] is answer:
                del self.inside[name]
            self._changes.notify()

    async def abort(self, ids: Sequence[str]) -> None:
        await self._hear("abort", *(_request_of(id) for id in ids))
        for name, answer in self.inside.items():
            if answer.call.id in ids and self.ends_aborted:
                self.end(name, Finish.ABORT)

    async def pause(self, *, keeps_kv: bool) -> None:
        self.is_paused = True
        await self._hear("pause", *(["keeping KV"] if keeps_kv else []))

    async def stage(self, version: Version) -> None:
        await self._hear("stage", str(version.number))

    async def load(self, version: Version, label: str) -> None:
        assert self.is_paused
        await self._hear("load", str(version.number))
        self.number = version.number
        if self.facts.has_labels and self.takes_labels:
            self.name = label

    async def resume(self) -> None:
        self.is_paused = False
        await self._hear("resume")

    async def label(self) -> str:
        self.num_labels += 1
        name = self.name
        await self._answer("label")
        return name

    async def check(self) -> None:
        self.num_checks += 1
        await self._answer("check")

    async def close(self) -> None:
        self.num_closes += 1

    async def _hear(self, what: str, *details: str) -> None:
        self.told.append(" ".join((what, *details)))
        await self._answer(what)

    async def _answer(self, what: str) -> None:
        self._changes.notify()
        if gate := self._gates.pop(what, None):
            await gate.wait()
        if self._failures[what]:
            raise self._failures[what].pop(0)
        if self.trouble is not None:
            raise self.trouble


def _request_of(id: str) -> str:
    return id.split("-")[1]
