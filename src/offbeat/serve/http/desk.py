"""What every call needs: the coordinator behind it, whether we are open, and a way to wait that ends.

A call that waits for work is given up as soon as its caller has gone, so that no task is handed to nobody, and as soon
as we close, so that closing takes no longer than the shortest call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.requests import ClientDisconnect

from offbeat.ledger.errors import Unknown
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.workers import Role, Worker, WorkerState
from offbeat.serve.coordinator import Coordinator
from offbeat.serve.http import wire
from offbeat.serve.http.access import Access
from offbeat.serve.http.bodies import Bodies
from offbeat.serve.http.limits import ServerSettings
from offbeat.serve.http.metrics import CallFigures
from offbeat.serve.http.pieces import Pieces
from offbeat.serve.http.refusals import Refusal
from offbeat.serve.http.weights import WholeFiles
from offbeat.weights.folder import WeightFolder
from offbeat.weights.pieces import FolderStore, PieceStore
from offbeat.weights.version import Version

T = TypeVar("T")

COME_BACK_S = 1.0
"""When to try again while we start or close."""
MAX_COORDINATE = 2**63 - 1
MAX_DIGITS = len(str(MAX_COORDINATE))


class Doors(StrEnum):
    STARTING = "starting"
    """The ledger is being brought in order; nobody is let in yet."""
    OPEN = "open"
    CLOSING = "closing"
    """Calls that are being answered are answered; new ones and waiting ones are sent away."""


@dataclass(frozen=True)
class Served:
    """The run behind the desk."""

    coordinator: Coordinator
    name: str
    config: Mapping[str, Any]
    """As resolved; whoever joins is told all of it."""
    ledger_path: str
    weights: WeightFolder
    pieces: PieceStore | None = None
    """Without one, in the folder of weights."""
    peer_networks: Sequence[str] = ()
    """Where workers may say that they are, although they call from elsewhere."""
    behind_proxy: bool = False
    """Then every caller seems to be this machine, and being it proves nothing."""


class Desk:
    """One run's state towards callers; lives on the event loop."""

    def __init__(self, served: Served, settings: ServerSettings, clock: Callable[[], float] = time.monotonic):
        self.served, self.settings, self.clock = served, settings, clock
        self.coordinator = served.coordinator
        self.reader = Ledger(served.ledger_path, read_only=True)
        self.access = Access(self.reader, settings, clock)
        self.bodies = Bodies(settings)
        self.files = WholeFiles(served.weights, self.published)
        self.pieces = Pieces(served.pieces or FolderStore(served.weights.folder), self.published, self.signers)
        self.figures = CallFigures()
        self.max_trajectory_bytes = wire.max_trajectory_bytes(self.coordinator.settings.max_new_tokens)
        self.doors = Doors.STARTING
        self._closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def open(self) -> None:
        self.doors = Doors.OPEN

    def begin_to_close(self) -> None:
        self.doors = Doors.CLOSING
        if not self._closing.done():
            self._closing.set_result(None)

    def close(self) -> None:
        self.reader.close()

    def check_open(self) -> None:
        if self.doors is not Doors.OPEN:
            raise sent_away(self.doors)

    def published(self, number: int) -> Version | None:
        try:
            return self.reader.version(number)
        except Unknown:
            return None

    def signers(self) -> list[str]:
        """The keys that manifests of this run are signed with."""
        return self.reader.signers()

    async def settle(self, version: Version) -> Version:
        """A version that is about to be published, with its place here; refused unless all of it is there."""
        if not version.manifest:
            return await self.files.settle(version)
        await self.pieces.check(version)
        return replace(version, path=self.served.weights.path(version.number))

    async def move(self, worker: Worker, state: WorkerState) -> None:
        """Brings a worker to a state; its next call finds it there."""
        await self.coordinator.call(self.coordinator.ledger.move_worker, worker.name, state)
        self.access.look_again()

    async def patiently(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        """Awaits a call that may wait long. The request's body must have been read."""
        working = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(request.receive())
        ends: set[asyncio.Future[Any]] = {working, gone, self._closing}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            if gone.done():
                raise ClientDisconnect
            raise sent_away(self.doors)
        finally:
            gone.cancel()
            if not working.done():
                working.cancel()
                await asyncio.wait({working})
                if not working.cancelled():
                    working.exception()  # looked at: nobody is there to hear it


Handler = Callable[[Desk, Worker, Request], Awaitable[Response]]


@dataclass(frozen=True)
class Route:
    """One call: how it is named, who may make it, and what answers it."""

    method: str
    path: str
    handler: Handler
    roles: Collection[Role]


def sent_away(doors: Doors) -> Refusal:
    return Refusal(503, f"the coordinator is {doors.value}", retry_after_s=COME_BACK_S)


def coordinate(request: Request, name: str) -> int:
    """A number in the path."""
    text = request.path_params[name]
    if not (text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS) or int(text) > MAX_COORDINATE:
        raise Unknown(f"{name} {text[:40]!r}: there is none")
    return int(text)
