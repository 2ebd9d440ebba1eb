"""Weights from peers: whoever is near is asked first, the root last.

The coordinator says whom to ask, in which order (`offbeat.control.relay`). A peer that does not answer, answers too
slowly, or does not have what it is asked for costs one attempt; the next goes on where it broke off. What has arrived
is checked against its name before it counts. A peer that sent something else is not asked again for a while; where
several have contributed, the piece is fetched anew from one alone, so that no honest peer is taken for a liar for long.

A peer that has not got a piece yet is waited for as long as it says that something comes in, and no longer than the
piece may take at the least pace: one that stands still, or lies about it, is left within seconds or, at worst, within
the time that a line as slow as can be borne would take.

Guarantees: `piece` and `manifest` return what was asked for, verified, or raise what the root raised; every wait has an
end, except for those that the root takes; a key is shown to the peer that it is for, and to nobody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import aiohttp
from blake3 import blake3

from offbeat.errors import OffbeatError
from offbeat.files import cannot_write
from offbeat.rollout.peer_ranking import ROOT, Ranking
from offbeat.rollout.peer_server import ARRIVED
from offbeat.weights.background import in_thread
from offbeat.weights.incoming import NUM_PARALLEL
from offbeat.weights.pieces import PieceDamaged, is_intact
from offbeat.weights.sources import Sources

log = logging.getLogger(__name__)
T = TypeVar("T")

NUM_AT_ONCE = 2
"""Pieces on their way from the root: one alone would leave the line idle between two; of more, all come later, and
whoever waits for the first of them to be handed on waits longer. Peers are asked for what they are still waiting for
themselves, and hand it on as it comes."""
AGAIN_S = 0.05
"""Between two calls for what is on its way to a peer, which has waited with the first of them."""
MAX_REASON_BYTES = 4096
MAX_MANIFEST_BYTES = 64 * 1024 * 1024
MAX_REMEMBERED = 1000
WRITE_BYTES = 1024 * 1024
EARLIER = "earlier"
"""Stands for whoever gave what lay in a file before we came."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a peer is borne with."""

    poll_s: float = 2.0
    """It may wait for a piece so long before it answers that it has none yet: who is silent for longer is dead."""
    answer_within_s: float = 5.0
    """Beyond that, in the middle of a piece, too; and for a connection to be made."""
    still_s: float = 6.0
    """While it says that a piece is on its way to it, and nothing comes in there."""
    slow_after_s: float = 3.0
    """Its pace is judged after so long."""


class PeerFailed(OffbeatError):
    """A peer cannot give what it was asked for."""


class PeerSlow(PeerFailed):
    """A peer was broken off because of its pace."""

    def __init__(self, bytes_per_s: float):
        super().__init__(f"only {bytes_per_s:.0f} bytes/s")
        self.bytes_per_s = bytes_per_s


FAILURES = (PeerFailed, aiohttp.ClientError, TimeoutError, ConnectionError)
"""What is a peer's fault, or the line's; anything else, such as a full disk, is ours."""


@dataclass
class Filling:
    """A piece on its way into a file."""

    digest: str
    num_bytes: int
    into: Path
    have: int = 0
    """How many bytes are there."""
    givers: set[str] = field(default_factory=set)
    """Whose they are."""

    def look(self) -> None:
        """Sees what is there; too much is nothing."""
        self.have = self.into.stat().st_size if self.into.exists() else 0
        if self.have > self.num_bytes:
            self.clear()

    def add(self, data: bytes | bytearray) -> None:
        with open(self.into, "ab" if self.have else "wb") as file:
            file.write(data)
        self.have += len(data)

    def clear(self) -> None:
        self.into.unlink(missing_ok=True)
        self.have, self.givers = 0, set()

    def is_right(self) -> bool:
        if self.have != self.num_bytes or not self.into.exists():
            return False
        return blake3(max_threads=blake3.AUTO).update_mmap(self.into).hexdigest() == self.digest


class PeerSources:
    """Sources of one worker: its peers, and behind them the root."""

    def __init__(
        self,
        root: Sources,
        *,
        num_at_once: int = NUM_AT_ONCE,
        patience: Patience | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._root, self._patience = root, patience or Patience()
        self._keys: Mapping[str, str] = {}
        """By the address of the peer that each is for."""
        self._ranking, self._clock = Ranking(clock), clock
        self._turns = asyncio.Semaphore(num_at_once)
        self._session: aiohttp.ClientSession | None = None
        self._gave_manifest: dict[str, str] = {}
        """Who gave one, by the manifest's digest."""
        self.num_bytes: Counter[str] = Counter()
        """Of pieces, by the address that they came from; "" is the root."""

    def use(self, keys: Mapping[str, str]) -> None:
        """From now on the peers at these addresses are asked, in this order, and then the root; each has a key."""
        self._keys = dict(keys)
        self._ranking.use(list(keys))

    @property
    def root_bytes_per_s(self) -> float | None:
        """What the root gave lately; None: nothing."""
        return self._ranking.score(ROOT)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # --- what is asked for ---

    async def manifest(self, number: int, digest: str) -> bytes:
        if not digest:  # only the root can say which of this number it published
            return await self._root.manifest(number, digest)
        if (giver := self._gave_manifest.pop(digest, None)) is not None:
            self._ranking.failed(giver)  # who asks again could not use it: whose seal it is, only the caller can tell
        return await self._from_first(f"manifest {number}", lambda url: self._manifest(url, number, digest))

    async def piece(self, digest: str, num_bytes: int, into: Path) -> None:
        filling = Filling(digest, num_bytes, into)
        await in_thread(filling.look)
        if filling.have:
            filling.givers.add(EARLIER)
        await self._from_first(f"piece {digest}", lambda url: self._piece(url, filling))

    async def _from_first(self, what: str, ask: Callable[[str], Awaitable[T]]) -> T:
        """The answer of the first source that has a good one; else what the root said."""
        from_root: Exception | None = None
        for url in self._ranking.order():
            try:
                return await ask(url)
            except (OffbeatError, *FAILURES) as error:
                if url != ROOT and not isinstance(error, (PieceDamaged, *FAILURES)):
                    raise
                log.info("%s: %s: %s: %s", what, url or "the root", type(error).__name__, error)
                self._blame(url, error)
                from_root = error if url == ROOT else from_root
        assert from_root is not None, "the root is always asked"
        raise from_root

    def _blame(self, url: str, error: Exception) -> None:
        if isinstance(error, PieceDamaged):
            log.warning("%s: sent something else than it was asked for", url or "the root")
            self._ranking.damaged(url)
        elif isinstance(error, PeerSlow):
            self._ranking.was_slow(url, error.bytes_per_s)
        else:
            self._ranking.failed(url)

    # --- one source ---

    async def _manifest(self, url: str, number: int, digest: str) -> bytes:
        if url == ROOT:
            sealed = await self._root.manifest(number, digest)
        else:
            gathered = bytearray()
            async with self._open(url, f"/manifests/{number}/{digest}") as response:
                async for data in self._paced(url, response):
                    gathered += data
                    if len(gathered) > MAX_MANIFEST_BYTES:
                        raise PeerFailed(f"sent more than {MAX_MANIFEST_BYTES} bytes")
            sealed = bytes(gathered)
        if not is_intact(digest, sealed):
            raise PieceDamaged(f"version {number}: the manifest from {url or 'the root'} is not the one asked for")
        self._ranking.gave(url, 0, 0.0)
        if len(self._gave_manifest) >= MAX_REMEMBERED:
            self._gave_manifest.clear()
        self._gave_manifest[digest] = url
        return sealed

    async def _piece(self, url: str, filling: Filling) -> None:
        """Brings a piece to its end from one source; from its beginning, if what others gave proves wrong."""
        while True:
            await self._fill(url, filling)
            if await in_thread(filling.is_right):
                return
            givers = filling.givers
            await in_thread(filling.clear)
            if givers <= {url}:
                raise PieceDamaged(f"piece {filling.digest}: damaged, from {url or 'the root'}")
            for other in givers - {url, EARLIER, ROOT}:
                self._ranking.failed(other)

    async def _fill(self, url: str, filling: Filling) -> None:
        start, start_s = filling.have, self._clock()
        if start == filling.num_bytes and start:
            return
        try:
            if url == ROOT:
                async with self._turns:
                    start_s = self._clock()
                    await self._root.piece(filling.digest, filling.num_bytes, filling.into)
            else:
                start_s = await self._append(url, filling)
        finally:
            if url == ROOT:
                await in_thread(filling.look)
            gained = max(filling.have - start, 0)
            self.num_bytes[url] += gained
            if gained:
                filling.givers.add(url)
        self._ranking.gave(url, gained, self._clock() - start_s)

    async def _append(self, url: str, filling: Filling) -> float:
        """Adds what a peer sends; returns when its first byte came."""
        start, end = filling.have, filling.num_bytes
        span = {"Range": f"bytes={start}-{end - 1}"} if start else {}
        async with self._open(url, f"/pieces/{filling.digest}", span, end) as response:
            sent = response.headers.get("Content-Range")
            if span and sent != f"bytes {start}-{end - 1}/{end}":
                raise PeerFailed(f"sent {sent} instead of {span['Range']}")
            start_s, gathered = self._clock(), bytearray()
            try:
                async for data in self._paced(url, response):
                    gathered += data
                    if filling.have - start + len(gathered) > end - start:
                        gathered.clear()
                        raise PeerFailed(f"sent more than the {end - start} bytes that it was asked for")
                    if len(gathered) >= WRITE_BYTES:
                        await _add(filling, gathered)
            finally:
                await _add(filling, gathered)  # however it ends
        if filling.have < end:
            raise PeerFailed(f"ended after {filling.have} of {end} bytes")
        return start_s

    async def _paced(self, url: str, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """What a peer sends, as long as it sends it fast enough."""
        start_s, num_bytes = self._clock(), 0
        while True:
            async with asyncio.timeout(self._patience.answer_within_s):
                data = await response.content.readany()
            if not data:
                return
            num_bytes += len(data)
            seconds = self._clock() - start_s
            if seconds > self._patience.slow_after_s and num_bytes < seconds * self._ranking.least_bytes_per_s(url):
                raise PeerSlow(num_bytes / seconds)
            yield data

    @contextlib.asynccontextmanager
    async def _open(
        self, url: str, path: str, headers: dict[str, str] | None = None, num_bytes: int = 0
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A good answer, as soon as the peer has one; what is asked for has so many bytes."""
        patience = self._patience
        waiting = _Waiting(
            self._clock,
            still_s=patience.still_s,
            # It fetches others beside this one.
            within_s=patience.still_s + NUM_PARALLEL * num_bytes / self._ranking.least_bytes_per_s(url),
        )
        while True:
            response = await self._ask(url, path, headers or {})
            async with response:
                if response.status == (206 if headers else 200):
                    yield response
                    return
                if response.status != 503:
                    raise PeerFailed(f"{response.status}: {await self._reason(response)}")
                waiting.hear(response.headers.get(ARRIVED, ""))
            await asyncio.sleep(AGAIN_S)

    async def _ask(self, url: str, path: str, headers: dict[str, str]) -> aiohttp.ClientResponse:
        """One call, up to its answer's head."""
        patience = self._patience
        key = self._keys.get(url, "")  # none where it was replaced while it was being asked
        async with asyncio.timeout(patience.poll_s + patience.answer_within_s):
            return await self._opened().get(
                url + path,
                params={"wait_s": f"{patience.poll_s:.3f}"},
                headers={**headers, "Authorization": f"Bearer {key}", "Accept-Encoding": "identity"},
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=patience.answer_within_s),
                allow_redirects=False,
            )

    async def _reason(self, response: aiohttp.ClientResponse) -> str:
        async with asyncio.timeout(self._patience.answer_within_s):
            return (await response.content.read(MAX_REASON_BYTES)).decode(errors="replace")

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(auto_decompress=False)
        return self._session


class _Waiting:
    """For what a peer says is on its way to it: not while it stands still there, and not for ever."""

    def __init__(self, clock: Callable[[], float], *, still_s: float, within_s: float):
        self._clock, self._still_s, self._end_s = clock, still_s, clock() + within_s
        self._arrived, self._moved_s = "", clock()

    def hear(self, arrived: str) -> None:
        """It says that much has come in; raises if that is no reason to go on waiting."""
        now_s = self._clock()
        if arrived != self._arrived:
            self._arrived, self._moved_s = arrived, now_s
        if now_s - self._moved_s > self._still_s:
            raise PeerFailed(f"has waited for it for {self._still_s:g} s, and nothing came in there")
        if now_s > self._end_s:
            raise PeerFailed("still waits for it, longer than it may take")


async def _add(filling: Filling, gathered: bytearray) -> None:
    """Writes beside the event loop what was gathered."""
    try:
        await in_thread(filling.add, gathered)
    except OSError as error:
        raise cannot_write(filling.into, error, "then start the worker again") from error
    gathered.clear()
