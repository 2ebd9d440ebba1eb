"""Weights from peers: whoever is near is asked first, the root last.

The coordinator says whom to ask, in which order (`offbeat.control.relay`). A peer that does not answer, answers too
slowly, or does not have what it is asked for costs one attempt; the next goes on where it broke off. What has arrived
is checked against its name before it counts. A peer that sent something else is not asked again for a while; where
several have contributed, the piece is fetched anew from one alone, so that no honest peer is taken for a liar for long.

Guarantees: `piece` and `manifest` return what was asked for, verified, or raise what the root raised; every wait has an
end, except for those that the root takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import aiohttp
from blake3 import blake3

from offbeat.errors import OffbeatError
from offbeat.files import cannot_write
from offbeat.rollout.peer_ranking import ROOT, Ranking
from offbeat.weights.background import in_thread
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
MAX_MANIFEST_BYTES = 64 * 1024 * 1024
MAX_REMEMBERED = 1000
WRITE_BYTES = 1024 * 1024
EARLIER = "earlier"
"""Stands for whoever gave what lay in a file before we came."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a peer is borne with."""

    poll_s: float = 5.0
    """It may wait for a piece so long before it answers that it has none yet: who is silent for longer is dead."""
    answer_within_s: float = 5.0
    """Beyond that, in the middle of a piece, too; and for a connection to be made."""
    expected_s: float = 300.0
    """While it says again and again that a piece is on its way to it."""
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
        key: str = "",
        *,
        num_at_once: int = NUM_AT_ONCE,
        patience: Patience | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._root, self._key, self._patience = root, key, patience or Patience()
        self._ranking, self._clock = Ranking(clock), clock
        self._turns = asyncio.Semaphore(num_at_once)
        self._session: aiohttp.ClientSession | None = None
        self._gave_manifest: dict[str, str] = {}
        """Who gave one, by the manifest's digest."""
        self.num_bytes: Counter[str] = Counter()
        """Of pieces, by the address that they came from; "" is the root."""

    def use(self, peers: Sequence[str], key: str | None = None) -> None:
        """From now on these are asked, in this order, and then the root; `key` is what they want to see."""
        self._ranking.use([url.rstrip("/") for url in peers])
        self._key = self._key if key is None else key

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
            async with self._open(url, f"/manifests/{number}/{digest}") as response:
                sealed = await _read_at_most(response, MAX_MANIFEST_BYTES)
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
        async with self._open(url, f"/pieces/{filling.digest}", span) as response:
            sent = response.headers.get("Content-Range")
            if span and sent != f"bytes {start}-{end - 1}/{end}":
                raise PeerFailed(f"sent {sent} instead of {span['Range']}")
            start_s, gathered = self._clock(), bytearray()
            try:
                async for data in response.content.iter_any():
                    gathered += data
                    num_read = filling.have - start + len(gathered)
                    if num_read > end - start:
                        gathered.clear()
                        raise PeerFailed(f"sent more than the {end - start} bytes that it was asked for")
                    self._check_pace(url, num_read, self._clock() - start_s)
                    if len(gathered) >= WRITE_BYTES:
                        await _add(filling, gathered)
            finally:
                await _add(filling, gathered)  # however it ends
        if filling.have < end:
            raise PeerFailed(f"ended after {filling.have} of {end} bytes")
        return start_s

    def _check_pace(self, url: str, num_bytes: int, seconds: float) -> None:
        if seconds > self._patience.slow_after_s and num_bytes < seconds * self._ranking.least_bytes_per_s(url):
            raise PeerSlow(num_bytes / seconds)

    @contextlib.asynccontextmanager
    async def _open(
        self, url: str, path: str, headers: dict[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A good answer, as soon as the peer has one."""
        patience = self._patience
        deadline_s = self._clock() + patience.expected_s
        within_s = patience.answer_within_s
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=within_s, sock_read=patience.poll_s + within_s)
        held = {**(headers or {}), "Authorization": f"Bearer {self._key}", "Accept-Encoding": "identity"}
        while True:
            async with self._opened().get(
                url + path,
                params={"wait_s": f"{patience.poll_s:.3f}"},
                headers=held,
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                if response.status == (206 if headers else 200):
                    yield response
                    return
                if response.status != 503 or self._clock() > deadline_s:
                    why = (await _read_at_most(response, 4096)).decode(errors="replace")
                    raise PeerFailed(f"{response.status}: {why}")
            await asyncio.sleep(AGAIN_S)

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(auto_decompress=False)
        return self._session


async def _read_at_most(response: aiohttp.ClientResponse, num_bytes: int) -> bytes:
    gathered = bytearray()
    async for data in response.content.iter_any():
        gathered += data
        if len(gathered) > num_bytes:
            raise PeerFailed(f"sent more than {num_bytes} bytes")
    return bytes(gathered)


async def _add(filling: Filling, gathered: bytearray) -> None:
    """Writes beside the event loop what was gathered."""
    try:
        await in_thread(filling.add, gathered)
    except OSError as error:
        raise cannot_write(filling.into, error, "then start the worker again") from error
    gathered.clear()
