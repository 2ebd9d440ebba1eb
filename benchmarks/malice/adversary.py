"""The base of all adversaries: a name, a pace, a count of answers, and the two ways to reach a coordinator.

Strangers have no token and write bytes to sockets. Members have one and speak through the project's own client and wire
modules, so that they follow the protocol in everything but their lie. Each comes from a loopback address of its own,
as attackers would: what is limited by address then limits them one by one, and not the honest workers with them.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import numpy as np

from offbeat.client import wire
from offbeat.client.connection import Connection
from offbeat.client.http_client import RemoteWorker, join
from offbeat.engines.protocol import Engine
from offbeat.errors import OffbeatError
from offbeat.trajectory import Segment, Task, Trajectory
from offbeat.worker.worker import append, begin, request_for

ANSWER_WITHIN_S = 5.0
"""Seconds for which an adversary waits for an answer before it tries something else."""
PATIENCE_S = 3.0
"""Seconds for which an adversary that was told to come back later asks again."""
JOIN_WITHIN_S = 60.0
LEASE_WAIT_S = 1.0
SILENT, HUNG_UP = "no answer", "hung up"
EXPECTED = (OffbeatError, aiohttp.ClientError, OSError, TimeoutError, EOFError)
"""Errors with which an attack may end; any other error is a mistake in the adversary and is reported."""


@dataclass
class Tally:
    """Attempts of one adversary, and the answers."""

    num_attempts: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    """Counts of HTTP statuses, and of connections that were closed or stayed silent."""
    broken: str = ""
    """The adversary's own mistake, if it made one."""


@dataclass
class Scene:
    """Knowledge that the adversaries of one run share."""

    host: str
    port: int
    folder: Path
    honest: tuple[str, ...]
    """Names of honest workers."""
    used_token: str
    engine: Engine
    """Real engine, for adversaries that start from true tokens."""
    other_engine: Engine
    """Engine with weights that are not the run's."""
    rng: random.Random
    seen: list[tuple[int, int]] = field(default_factory=list)
    """Task and fence of every lease that an adversary was given."""

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def version(self) -> int:
        """The newest version that the accomplice's engine serves."""
        return self.engine.version or 0


class Adversary:
    """One attacker; its docstring is the sentence that says what it attacks."""

    pause_s: ClassVar[float] = 0.5
    """Seconds between two attempts."""
    max_attempts: ClassVar[int] = 1000
    num_tokens: ClassVar[int] = 0
    """Number of join tokens that it needs."""
    forges: ClassVar[bool] = False
    """Whether it submits tokens or log-probs that are not those of the version that it names."""

    def __init__(self, scene: Scene, number: int, tokens: Sequence[str] = ()):
        self.scene, self.number, self.tokens = scene, number, list(tokens)
        self.tally = Tally()
        self.worker: str | None = None
        """Name with which it joined."""

    @classmethod
    def title(cls) -> str:
        return re.sub(r"(?<=.)([A-Z])", r" \1", cls.__name__).lower()

    @classmethod
    def attacks(cls) -> str:
        return " ".join((cls.__doc__ or "").split())

    @property
    def address(self) -> str:
        return f"127.0.1.{self.number + 1}"

    async def prepare(self) -> None:
        """Prepares the attack, for example by joining."""

    async def strike(self) -> None:
        """Makes one attempt."""
        raise NotImplementedError

    async def attack(self, until_s: float) -> None:
        """Strikes repeatedly until a time of the monotonic clock."""
        while (left_s := until_s - time.monotonic()) > 0 and self.tally.num_attempts < self.max_attempts:
            self.tally.num_attempts += 1
            try:
                async with asyncio.timeout(left_s):
                    await self.strike()
            except EXPECTED:
                pass
            except Exception as error:  # noqa: BLE001 - one clumsy adversary must not stop the others, and is told
                self.tally.broken = f"{type(error).__name__}: {error}"
            await asyncio.sleep(self.pause_s * self.scene.rng.uniform(0.5, 1.5))

    async def close(self) -> None:
        pass


class Stranger(Adversary):
    """Writes bytes to a socket."""

    pause_s = 1.0

    async def say(self, *parts: bytes, pause_s: float = 0.0, within_s: float = ANSWER_WITHIN_S) -> str:
        """Sends parts with pauses between, and returns the status that came back, or what came instead of one."""
        found = SILENT
        try:
            async with asyncio.timeout(within_s + pause_s * len(parts)):
                reader, writer = await asyncio.open_connection(
                    self.scene.host, self.scene.port, local_addr=(self.address, 0)
                )
                try:
                    for part in parts:
                        writer.write(part)
                        await writer.drain()
                        await asyncio.sleep(pause_s)
                    words = (await reader.readline()).split()
                    found = words[1].decode("latin-1") if len(words) > 1 else HUNG_UP
                finally:
                    writer.transport.abort()
        except TimeoutError:
            pass
        except OSError:
            found = HUNG_UP
        finally:
            self.tally.answers[found] += 1
        return found


def request(method: str, path: str, body: bytes = b"", headers: Mapping[str, str | None] | None = None) -> bytes:
    """Returns a request as bytes. It is well-formed if `headers` do not break it; a header None is left out."""
    told: dict[str, str | None] = {
        "Host": "coordinator",
        "Content-Type": wire.MSGPACK,
        "Content-Length": str(len(body)),
        wire.CONTENT_DIGEST: wire.content_digest(body),
        "Connection": "close",
        **(headers or {}),
    }
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in told.items() if value is not None)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


class Line(Connection):
    """A member's connection, from an address of its own. It counts the answers, except those to `groundwork`."""

    def __init__(self, url: str, address: str, tally: Tally, groundwork: Collection[str]):
        super().__init__(url, patience_s=PATIENCE_S)
        self._address, self._tally, self._groundwork = address, tally, groundwork
        self._session: aiohttp.ClientSession | None = None

    async def _request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None, within_s: float
    ) -> aiohttp.ClientResponse:
        try:
            response = await super()._request(method, path, headers, body, min(within_s, 2 * ANSWER_WITHIN_S))
        except TimeoutError:
            self._tally.answers[SILENT] += 1
            raise
        except (aiohttp.ClientError, OSError):
            self._tally.answers[HUNG_UP] += 1
            raise
        if path not in self._groundwork or response.status >= 400:
            self._tally.answers[str(response.status)] += 1
        return response

    async def once(self, method: str, path: str, headers: Mapping[str, str], body: bytes | None) -> None:
        """Makes a call that `Connection` would not make, and reads a little of the answer, whatever it is."""
        async with await self._request(method, path, headers, body, ANSWER_WITHIN_S) as response:
            await response.content.read(1024)

    def _opened(self) -> aiohttp.ClientSession:
        session = self._session
        if session is None:
            connector = aiohttp.TCPConnector(local_addr=(self._address, 0))
            session = self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        return session


class Member(Adversary):
    """Adversary that has joined as a worker."""

    num_tokens = 1
    line: ClassVar[type[Line]] = Line
    groundwork: ClassVar[Collection[str]] = ("/v1/join", "/v1/lease", "/v1/give-back")
    """Calls that it makes to have something to lie about; their answers are no answers to its attack."""

    async def prepare(self) -> None:
        self.connection, self.client = await self._join(self.tokens[0])

    async def _join(self, token: str) -> tuple[Line, RemoteWorker]:
        connection = self.line(self.scene.url, self.address, self.tally, self.groundwork)
        connection.patience_s = JOIN_WITHIN_S
        member = await join(connection, token, f"node-{self.number + 1}")
        connection.patience_s = PATIENCE_S
        self.worker = member.credentials.worker
        folder = self.scene.folder / self.worker
        return connection, RemoteWorker(connection, folder, shares_disk=True)

    async def close(self) -> None:
        await self.connection.close()

    async def lease(self, capacity: int = 1) -> tuple[Task, ...]:
        """Leases tasks and returns them, if there are any."""
        lease = await self.client.lease(capacity, self.scene.version, LEASE_WAIT_S)
        self.scene.seen.extend((task.id, task.fence) for task in lease.tasks)
        return lease.tasks

    async def strike(self) -> None:
        for task in await self.lease():
            try:
                await self.use(task)
            finally:
                await self.client.give_back([(task.id, task.fence)])

    async def use(self, task: Task) -> None:
        """Attacks with a task, which is given back afterwards, because only other adversaries hoard."""
        raise NotImplementedError

    async def answer(self, task: Task, engine: Engine | None = None) -> Trajectory:
        """Returns an answer as an honest worker would give it, with this worker's name."""
        running = begin(task)
        generation = await (engine or self.scene.engine).generate(request_for(running))
        append(running.trajectory, generation)
        trajectory = running.trajectory
        num_before = len(task.prefix.segments) if task.prefix is not None else 0
        own = [replace(segment, worker=self.worker or "") for segment in trajectory.segments[num_before:]]
        return with_segments(trajectory, (*trajectory.segments[:num_before], *own))

    async def told(self, path: str, record: Any) -> None:
        """Makes a call and ignores the answer."""
        await whatever(self.connection.post(path, record))

    async def opened(self, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None) -> None:
        """Makes a call and reads a little of the answer."""
        await self.connection.once(method, path, headers, body)


async def whatever(*calls: Coroutine[Any, Any, object]) -> None:
    """Makes calls in turn, regardless of the answers."""
    try:
        for call in calls:
            with suppress(*EXPECTED):
                await call
    finally:
        for call in calls:
            call.close()


def with_segments(trajectory: Trajectory, segments: Sequence[Segment], **changes: Any) -> Trajectory:
    """Returns a trajectory with other segments, without checks."""
    return replace(trajectory, segments=tuple(segments), **changes)


def last_changed(trajectory: Trajectory, **changes: Any) -> Trajectory:
    """Returns a trajectory with another last segment, without checks."""
    *before, last = trajectory.segments
    return with_segments(trajectory, (*before, replace(last, **changes)))


def noise(rng: random.Random, count: int, high: int) -> np.ndarray:
    return np.array([rng.randrange(high) for _ in range(count)], np.int32)
