"""Serves this worker's pieces and manifests to its peers.

    GET /pieces/DIGEST               200, or 206 for a Range; 404: neither here nor expected; 503: not here yet, with a
                                     number in the header Offbeat-Arrived that changes as downloads progress
    GET /manifests/NUMBER/DIGEST     the same

A request for a piece that is not here yet waits as long as the caller asks (`?wait_s=`) and the limits allow. It waits
a short time even for a piece that is not expected, because a relay may learn of a version later than the peers it
feeds.

Guarantees: every byte sent is verified, because a piece is read whole and checked against its name before its first
byte is sent. The number of callers and of pieces held for them is bounded. Only this machine can connect unless
`beyond_loopback` is set.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from aiohttp import web
from blake3 import blake3

from offbeat.errors import OffbeatError, UserError
from offbeat.net import RangeError, byte_range, is_loopback
from offbeat.waiting import Notifier
from offbeat.weights.piece_store import PieceDamaged, PieceMissing, PieceStore, StoreError

log = logging.getLogger(__name__)

PATH = re.compile(r"/pieces/(?P<piece>[0-9a-f]{64})|/manifests/(?P<number>\d{1,16})/(?P<manifest>[0-9a-f]{64})")
WAIT = re.compile(r"\d{1,4}(\.\d{1,3})?")
WRITE_BYTES = 256 * 1024
FRESH_S, STALE_S = 10.0, 60.0
"""Seconds for which a list of accepted keys is used: normally, and while the coordinator cannot be reached."""
ASK_EVERY_S, ASK_WITHIN_S = 1.0, 4.0
"""Least seconds between two requests to the coordinator for accepted keys, and most seconds until it answers. Peers
allow their own requests a little more time than `ASK_WITHIN_S`."""
ARRIVED = "Offbeat-Arrived"
"""Header of a 503 answer ("not here yet"); a change of its value means that downloads here make progress."""
STOP_WITHIN_S = 0.1
"""Time to finish answers when the server stops; 0 would mean no limit."""


@dataclass(frozen=True, kw_only=True)
class PeerLimits:
    max_connections: int = 64
    """Most connections. A further one replaces the oldest whose caller has not shown an accepted key."""
    max_requests: int = 64
    """Most requests in progress or waiting at a time."""
    max_sent: int = 8
    """Most pieces being sent at a time; each is held in memory and has at most 32 MiB."""
    max_wait_s: float = 30.0
    """Longest wait of a request for its piece, shorter than the time limits of proxies; callers then ask again."""
    unexpected_wait_s: float = 2.0
    """Longest wait for a piece that this worker is neither downloading nor about to download."""
    check_every_s: float = 0.1
    """Interval at which a waiting request checks the store even without a `notify`."""
    silence_s: float = 30.0
    """Longest time that a caller may stop reading an answer, or stay connected without showing an accepted key."""


class Guests:
    """Decides which peers (other workers) may fetch here, by a list of key hashes that `ask` gets from the coordinator.

    A list is used for `FRESH_S`, so that a worker that left or is in quarantine is soon refused. It is used for
    `STALE_S` while the coordinator cannot be reached. An unknown key may be that of a new worker, so the coordinator is
    asked again.
    """

    def __init__(self, ask: Callable[[], Awaitable[Collection[str]]], clock: Callable[[], float] = time.monotonic):
        self._ask, self._clock = ask, clock
        self._hashes: frozenset[str] = frozenset()
        self._answered_s = self._tried_s = -math.inf
        self._asking = asyncio.Lock()

    async def admits(self, key: str) -> bool:
        came_s = self._clock()
        if not self._knows(key):
            async with self._asking:
                if not self._knows(key) and self._tried_s < came_s:  # another call may have asked meanwhile
                    await asyncio.sleep(max(self._tried_s + ASK_EVERY_S - came_s, 0.0))
                    await self._refresh()
        return self._clock() - self._answered_s <= STALE_S and _hash(key) in self._hashes

    def _knows(self, key: str) -> bool:
        return self._clock() - self._answered_s <= FRESH_S and _hash(key) in self._hashes

    async def _refresh(self) -> None:
        self._tried_s = self._clock()
        try:
            async with asyncio.timeout(ASK_WITHIN_S):
                self._hashes = frozenset(await self._ask())
            self._answered_s = self._clock()
        except (OffbeatError, OSError) as error:  # TimeoutError is an OSError
            log.info("the coordinator did not send the list of accepted keys: %s: %s", type(error).__name__, error)


class PeerServer:
    """HTTP server from which peers fetch a worker's pieces; call `notify` whenever something was added to `store`."""

    def __init__(
        self,
        store: PieceStore,
        admits: Callable[[str], Awaitable[bool]],
        *,
        expects: Callable[[str], bool] = lambda digest: False,
        arrived: Callable[[], int] = lambda: 0,
        host: str = "127.0.0.1",
        port: int = 0,
        beyond_loopback: bool = False,
        limits: PeerLimits | None = None,
    ):
        """`admits` tells whether a caller's key is accepted, `expects` whether the piece with a given digest is on its
        way; `arrived` returns a number that changes as downloads make progress. Port 0 takes any free port."""
        if not beyond_loopback and not is_loopback(host):
            raise UserError(
                f"--peer-address {host}: keys and weights would cross the network in the clear; add --allow-plain "
                "within a private network, or listen on 127.0.0.1 and tunnel the connections"
            )
        self._store, self._limits, self._admits = store, limits or PeerLimits(), admits
        self._expects, self._num_arrived = expects, arrived
        self.host, self.port = host, port
        self.num_sent_bytes = 0
        self._num_requests = 0
        self._sending = asyncio.Semaphore(self._limits.max_sent)
        self._arrivals = Notifier()
        self._unproven: dict[web.RequestHandler, None] = {}
        """Connections whose caller has not shown an accepted key, oldest first."""

    async def start(self) -> None:
        self._http = web.Server(
            self._answer, handler_cancellation=True, access_log=None, keepalive_timeout=self._limits.silence_s
        )
        try:
            self._listener = await asyncio.get_running_loop().create_server(self._connect, self.host, self.port)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(
                f"cannot listen for peers at {self.host}, port {self.port}: {reason}; choose another port, or 0 for any"
            ) from error
        self.host, self.port = self._listener.sockets[0].getsockname()[:2]

    async def stop(self) -> None:
        """Closes all connections and frees the port."""
        self._listener.close()
        await self._http.shutdown(timeout=STOP_WITHIN_S)
        await self._listener.wait_closed()

    @property
    def url(self) -> str:
        return peer_url(self.host, self.port)

    def notify(self) -> None:
        """Wakes waiting requests. Call it after a piece or manifest was added to the store, or a piece is no longer
        expected. Call it in the event loop's thread."""
        self._arrivals.notify()

    def _connect(self) -> asyncio.BaseProtocol:
        if len(self._http.connections) >= self._limits.max_connections:
            oldest = next(iter(self._unproven), None)
            if oldest is None:
                return _HangUp()
            self._drop_unproven(oldest)  # so peers get through however many connections a stranger opens
        connection = self._http()
        self._unproven[connection] = None
        asyncio.get_running_loop().call_later(self._limits.silence_s, self._drop_unproven, connection)
        return connection

    def _drop_unproven(self, connection: web.RequestHandler) -> None:
        if connection in self._unproven:
            del self._unproven[connection]
            connection.force_close()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer" or not await self._admits(key):
            return _refusal(401, "the Authorization header holds no key that this peer accepts")
        self._unproven.pop(request.protocol, None)
        found = PATH.fullmatch(request.path)
        if request.method != "GET" or found is None:
            return _refusal(404, "this peer serves only GET /pieces/DIGEST and GET /manifests/NUMBER/DIGEST")
        if self._num_requests >= self._limits.max_requests:
            return _refusal(429, f"this peer already has {self._num_requests} requests; ask again later")
        self._num_requests += 1
        try:
            return await self._find(request, found)
        finally:
            self._num_requests -= 1

    async def _find(self, request: web.BaseRequest, found: re.Match[str]) -> web.StreamResponse:
        asked = request.query.get("wait_s", "0")
        if WAIT.fullmatch(asked) is None:
            return _refusal(400, f"wait_s={asked[:20]}: must be a number of seconds below 10000, such as 2.5")
        wait_s = min(float(asked), self._limits.max_wait_s)
        wanted = _Wanted(found["piece"] or found["manifest"], int(found["number"]) if found["number"] else None)
        if not (is_here := await self._wait_for(wanted, wait_s)):
            if is_here is None:
                come = {ARRIVED: str(await asyncio.to_thread(self._num_arrived))}
                return _refusal(503, f"{wanted.digest}: still on its way to this peer; ask again", come)
            return _refusal(404, f"{wanted.digest}: this peer does not have it")
        try:
            await asyncio.wait_for(self._sending.acquire(), max(wait_s, 1.0))
        except TimeoutError:
            return _refusal(429, f"this peer already sends {self._limits.max_sent} pieces; ask again")
        try:
            return await self._send(request, await asyncio.to_thread(wanted.read, self._store))
        except PieceMissing:  # deleted meanwhile
            return _refusal(404, f"{wanted.digest}: this peer has just deleted it")
        except (PieceDamaged, StoreError) as error:
            log.warning("a peer asked for a piece that cannot be sent: %s", error)
            return _refusal(404, f"{wanted.digest}: this peer cannot read it from its disk")
        finally:
            self._sending.release()

    async def _wait_for(self, wanted: _Wanted, wait_s: float) -> bool | None:
        """Waits up to `wait_s` for `wanted`; returns True if it is here, None if it is still on its way, else False."""
        start_s = time.monotonic()
        while True:
            changed, is_expected = self._arrivals.changed, self._expects(wanted.digest)
            # Asked before the store is read: what arrives meanwhile must not be taken for absent.
            if await asyncio.to_thread(wanted.is_in, self._store):
                return True
            may_wait_s = wait_s if is_expected else min(wait_s, self._limits.unexpected_wait_s)
            left_s = start_s + may_wait_s - time.monotonic()
            if left_s <= 0:
                return None if is_expected else False
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._change(wanted.digest, changed), min(left_s, self._limits.check_every_s))

    async def _change(self, digest: str, changed: asyncio.Event) -> None:
        """Waits for `changed`, then until the piece `digest` is not expected: it has arrived, or its download ended."""
        await changed.wait()
        await self._arrivals.wait_for(lambda: not self._expects(digest))

    async def _send(self, request: web.BaseRequest, data: bytes) -> web.StreamResponse:
        try:
            wanted = byte_range(request.headers.get("Range"), len(data))
        except RangeError as error:
            return _refusal(error.status, str(error))
        start, stop = wanted or (0, len(data))
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        if wanted is not None:
            response.set_status(206)
            response.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        response.content_length = stop - start
        try:
            await response.prepare(request)
            for at in range(start, stop, WRITE_BYTES):
                piece = memoryview(data)[at : min(at + WRITE_BYTES, stop)]
                await asyncio.wait_for(response.write(piece), self._limits.silence_s)
                self.num_sent_bytes += len(piece)
        except TimeoutError:
            request.protocol.force_close()
        return response


class _Wanted(NamedTuple):
    """A requested piece or manifest; `number` is the manifest's version, None for a piece."""

    digest: str
    number: int | None

    def is_in(self, store: PieceStore) -> bool:
        if self.number is None:
            return store.size(self.digest) is not None
        with contextlib.suppress(PieceMissing, PieceDamaged, StoreError):
            return bool(store.get_manifest(self.number, self.digest))
        return False

    def read(self, store: PieceStore) -> bytes:
        """Returns all bytes of the piece or manifest, verified."""
        return store.get(self.digest) if self.number is None else store.get_manifest(self.number, self.digest)


class _HangUp(asyncio.Protocol):
    """Protocol that closes a new connection at once, for when too many are open."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def peer_url(host: str, port: int) -> str:
    """Returns the URL of a peer; `host` is an IP address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _refusal(status: int, why: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(status=status, text=why, headers=headers)


def _hash(key: str) -> str:
    return blake3(key.encode(errors="surrogateescape")).hexdigest()
