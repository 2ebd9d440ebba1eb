"""State shared by all calls: the coordinator, whether the server is open, and waits that can be cancelled.

A call that waits for work is cancelled as soon as its caller disconnects, so that no task is lost. It is also cancelled
when the server closes, so that closing need not wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive

from offbeat.client import wire
from offbeat.coordinator.api.access import Access
from offbeat.coordinator.api.bodies import BodyReader
from offbeat.coordinator.api.errors import Refusal
from offbeat.coordinator.api.limits import ServerSettings
from offbeat.coordinator.api.metrics import CallFigures
from offbeat.coordinator.api.weights import Weights
from offbeat.coordinator.coordinator import Coordinator
from offbeat.ledger.errors import Unknown
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.workers import Role, WorkerRecord, WorkerState
from offbeat.weights.piece_store import FolderStore, PieceStore
from offbeat.weights.version import Version, WeightFolder

T = TypeVar("T")

COME_BACK_S = 1.0
"""Seconds in the Retry-After header while the server starts or closes."""
MAX_COORDINATE = 2**63 - 1
MAX_DIGITS = len(str(MAX_COORDINATE))


class ServerState(StrEnum):
    STARTING = "starting"
    """The ledger is being prepared; every call is refused."""
    OPEN = "open"
    CLOSING = "closing"
    """Calls in progress are answered; new calls, and calls that wait for work, are refused."""


@dataclass(frozen=True)
class ServedRun:
    """The run that the API serves."""

    coordinator: Coordinator
    name: str
    config: Mapping[str, Any]
    """The configuration with all defaults filled in, which is sent to everyone that joins."""
    ledger_path: str
    weights: WeightFolder
    pieces: PieceStore | None = None
    """Store of weight pieces; None: pieces are in the folder of `weights`."""
    peer_networks: Sequence[str] = ()
    """Networks in which a worker may name a peer address that differs from the address it calls from."""
    page: ASGIApp | None = None
    """Application of the run's page, which admits its own callers; None: no page is served."""
    behind_proxy: bool = False
    """Whether calls come through a proxy. If so, a loopback address may be the proxy's instead of the caller's."""


class ApiState:
    """State of the API of one run; used only on the event loop."""

    def __init__(self, served: ServedRun, settings: ServerSettings, clock: Callable[[], float] = time.monotonic):
        self.served, self.settings, self.clock = served, settings, clock
        self.coordinator = served.coordinator
        self.reader = Ledger(served.ledger_path, read_only=True)
        self.access = Access(self.reader, settings, clock, self.coordinator.seen)
        self.bodies = BodyReader(settings)
        pieces = served.pieces or FolderStore(served.weights.folder)
        self.weights = Weights(served.weights, pieces, self.published, self.reader.signers)
        self.figures = CallFigures()
        self.max_trajectory_bytes = wire.max_trajectory_bytes(self.coordinator.settings.max_new_tokens)
        self.server_state = ServerState.STARTING
        self._closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def open(self) -> None:
        self.server_state = ServerState.OPEN

    def drain(self) -> None:
        self.server_state = ServerState.CLOSING
        if not self._closing.done():
            self._closing.set_result(None)

    def close(self) -> None:
        self.reader.close()

    def check_open(self) -> None:
        if self.server_state is not ServerState.OPEN:
            raise not_open(self.server_state)

    async def until_closing(self, receive: Receive) -> Message:
        """Returns the next message from a caller. When the server closes, this is that the caller has gone."""
        message = asyncio.ensure_future(receive())
        ends: set[asyncio.Future[Any]] = {message, self._closing}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if message.done():
            return message.result()
        message.cancel()
        return {"type": "http.disconnect"}

    def published(self, number: int) -> Version | None:
        try:
            return self.reader.version(number)
        except Unknown:
            return None

    async def move(self, worker: WorkerRecord, state: WorkerState) -> None:
        """Changes the state of a worker, with effect from its next call."""
        await self.coordinator.call(self.coordinator.ledger.move_worker, worker.name, state)
        self.access.refresh()

    async def wait_for(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        """Returns the result of `work`, which may take long. Cancels `work` and raises once the caller disconnects or
        the server closes. The body of `request` must have been read."""
        working = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(request.receive())
        ends: set[asyncio.Future[Any]] = {working, gone, self._closing}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            if gone.done():
                raise ClientDisconnect
            raise not_open(self.server_state)
        finally:
            gone.cancel()
            if not working.done():
                working.cancel()
                await asyncio.wait({working})
                if not working.cancelled():
                    working.exception()  # marks the exception as retrieved: the caller has gone


Handler = Callable[[ApiState, WorkerRecord, Request], Awaitable[Response]]


@dataclass(frozen=True)
class Route:
    """One call of the API, and the roles that may make it."""

    method: str
    path: str
    handler: Handler
    roles: Collection[Role]


def not_open(state: ServerState) -> Refusal:
    return Refusal(503, f"the coordinator is {state.value}; try again in a moment", retry_after_s=COME_BACK_S)


def coordinate(request: Request, name: str) -> int:
    """Returns the number in path parameter `name`; raises `Unknown` if it is not a valid number."""
    text = request.path_params[name]
    if not (text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS) or int(text) > MAX_COORDINATE:
        raise Unknown(f"{name} {text[:40]!r} does not exist; it must be a number from 0 to {MAX_COORDINATE}")
    return int(text)
