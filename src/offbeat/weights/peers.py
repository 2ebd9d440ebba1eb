"""Fetches weights from peers: near peers are asked first, the root (the coordinator or its store) last.

If a peer does not answer, is too slow, or lacks the piece, the next source continues from the bytes received so far. If
several peers contributed to a piece with wrong bytes, it is fetched again from one of them alone. So no honest peer is
blamed for long. A peer that is itself still receiving the piece is given time while it reports progress, but at most
about the time that a few pieces take at the lowest accepted rate.

Guarantees: `piece` and `manifest` deliver the verified content or raise the root's error. Every wait for a peer has a
deadline; the root has its own. A key is shown only to the peer that it is for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import aiohttp
from blake3 import blake3

from offbeat.errors import OffbeatError
from offbeat.files import cannot_write
from offbeat.waiting import in_thread
from offbeat.weights.download import NUM_PARALLEL, Sources
from offbeat.weights.peer_server import ARRIVED
from offbeat.weights.piece_store import PieceDamaged, is_intact

ROOT = ""
"""Stands for the root (the coordinator or its store) in place of a peer's address."""
WEIGHT = 0.3
"""Weight of the latest value in moving averages."""
FAR_SLOWER = 0.25
"""A source below this share of the best source's rate is asked after the others, even if these cross slow links."""
FIRST_REST_S, LONGEST_REST_S = 1.0, 60.0
"""Seconds for which a peer rests (is asked last): after a first failure, and the longest after repeated failures."""
DAMAGED_REST_S = 300.0
"""Seconds for which a peer is not asked at all after it sent wrong bytes."""
FORGOTTEN_AFTER_S = 60.0
"""Age in seconds at which a measured rate is no longer used."""
LEAST_BYTES = 64 * 1024
"""Smallest transfer, in bytes, whose rate counts: smaller ones measure latency, not bandwidth."""
LEAST_BYTES_PER_S = 4096.0
"""Lowest rate accepted from any peer, however slow the other sources are."""
UNKNOWN_BYTES_PER_S = 64 * 1024.0
"""Lowest rate accepted from a peer while no other source has been measured."""


@dataclass
class SourceRecord:
    """Measured rate and failures of one source of weights, a peer or the root."""

    bytes_per_s: float | None = None
    """Moving average of the transfer rate; None: not measured."""
    success: float = 1.0
    """Moving average over transfers, which count 1 if they succeed and 0 if they fail."""
    num_failures: int = 0
    """Consecutive failures."""
    rests_until_s: float = 0.0
    is_damaged: bool = False
    """Whether the source is not asked at present because it sent wrong bytes."""
    seen_s: float = 0.0
    """Time of the last measurement of the rate."""


class Ranking:
    """Decides the order in which sources (peers and the root) are asked. Does no I/O; the clock is injected.

    The coordinator's order, which spares slow links, is kept as long as it works. A peer that fails rests for a while,
    longer each time: it is asked last. A peer that sent wrong bytes rests longest, and is not asked meanwhile. A source
    far slower than another, by its averages of rate and success, comes after the others. The root never rests.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._peers: list[str] = []
        self._records: dict[str, SourceRecord] = {ROOT: SourceRecord()}

    def use(self, peers: Sequence[str]) -> None:
        """Sets the peers and their order. A peer that was already in use keeps its record of rate and failures."""
        self._peers = list(dict.fromkeys(peers))
        self._records = {url: self._records.get(url) or SourceRecord() for url in (*self._peers, ROOT)}

    def order(self) -> list[str]:
        """Returns the sources to ask now, including the root. Resting peers come last; those that rest because of wrong
        bytes are left out."""
        now_s = self._clock()
        resting = [url for url in self._peers if self._records[url].rests_until_s > now_s]
        ready = [url for url in (*self._peers, ROOT) if url not in resting]
        scores = {url: score for url in ready if (score := self.score(url)) is not None}
        slow = {url for url, score in scores.items() if score < FAR_SLOWER * max(scores.values())}
        last_resort = [url for url in resting if not self._records[url].is_damaged]
        return [*sorted(ready, key=lambda url: url in slow), *last_resort]

    def least_bytes_per_s(self, url: str) -> float:
        """Returns the lowest rate accepted from the source `url`, given other sources' rates; slower transfers are
        ended."""
        now_s = self._clock()
        ready = [other for other, record in self._records.items() if record.rests_until_s <= now_s or other == ROOT]
        scores = [score for other in ready if other != url and (score := self.score(other)) is not None]
        return max(LEAST_BYTES_PER_S, FAR_SLOWER * max(scores)) if scores else UNKNOWN_BYTES_PER_S

    def gave(self, url: str, num_bytes: int, seconds: float) -> None:
        record = self._record(url)
        record.num_failures, record.is_damaged, record.rests_until_s = 0, False, 0.0
        record.success += WEIGHT * (1.0 - record.success)
        if num_bytes >= LEAST_BYTES:
            self._measured(record, num_bytes / max(seconds, 1e-6))

    def was_slow(self, url: str, bytes_per_s: float) -> None:
        """Records that a transfer was broken off because it was too slow."""
        self._measured(self._record(url), bytes_per_s)
        self.failed(url)

    def failed(self, url: str) -> None:
        record = self._record(url)
        record.num_failures += 1
        record.success -= WEIGHT * record.success
        self._rest(record, min(FIRST_REST_S * 2 ** min(record.num_failures - 1, 16), LONGEST_REST_S))

    def damaged(self, url: str) -> None:
        """Records that a source sent wrong bytes. Call it only if no other source contributed to the content."""
        self.failed(url)
        record = self._record(url)
        record.is_damaged = True
        self._rest(record, DAMAGED_REST_S)

    def score(self, url: str) -> float | None:
        """Returns the bytes per second to expect from a source; None: never measured, or too long ago."""
        record = self._records[url]
        if record.bytes_per_s is None or self._clock() - record.seen_s > FORGOTTEN_AFTER_S:
            return None
        return record.bytes_per_s * record.success

    def _record(self, url: str) -> SourceRecord:
        return self._records.get(url) or SourceRecord()  # it may have been removed during the transfer

    def _rest(self, record: SourceRecord, seconds: float) -> None:
        record.rests_until_s = max(record.rests_until_s, self._clock() + seconds)

    def _measured(self, record: SourceRecord, bytes_per_s: float) -> None:
        old = record.bytes_per_s
        if old is None or self._clock() - record.seen_s > FORGOTTEN_AFTER_S:
            old = bytes_per_s
        record.bytes_per_s = old + WEIGHT * (bytes_per_s - old)
        record.seen_s = self._clock()


log = logging.getLogger(__name__)
T = TypeVar("T")

NUM_AT_ONCE = 2
"""Most pieces in flight from the root. With one, the line would be idle between pieces; with three, each arrives later,
and other peers wait longer for it. There is no such limit for peers: they are asked even for pieces that they have yet
to receive."""
AGAIN_S = 0.05
"""Pause between two calls for a piece that a peer has not received yet. The peer also lets each call wait."""
MAX_REASON_BYTES = 4096
MAX_MANIFEST_BYTES = 64 * 1024 * 1024
MAX_REMEMBERED = 1000
WRITE_BYTES = 1024 * 1024
EARLIER = "earlier"
"""Stands in `PartialPiece.givers` for the sources of bytes from an earlier attempt, which are unknown."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Time limits for the answers of a peer."""

    poll_s: float = 2.0
    """Longest time that a peer waits for a piece to reach it before it answers "not yet"."""
    answer_within_s: float = 5.0
    """Longest silence of a peer after `poll_s`, or in the middle of an answer. Also the time limit to connect."""
    still_s: float = 6.0
    """Longest time for which a peer that is itself receiving the piece may make no progress."""
    slow_after_s: float = 3.0
    """Time since the start of a transfer from which it can be broken off as too slow."""


class PeerFailed(OffbeatError):
    """A peer could not deliver a piece or manifest."""


class PeerSlow(PeerFailed):
    """A transfer from a peer was broken off because it was too slow."""

    def __init__(self, bytes_per_s: float):
        super().__init__(f"the transfer was too slow, {bytes_per_s:.0f} bytes/s, and was broken off")
        self.bytes_per_s = bytes_per_s


FAILURES = (PeerFailed, aiohttp.ClientError, TimeoutError, ConnectionError)
"""Errors caused by a peer or the network; any other error, such as a full disk, is this worker's own."""


@dataclass
class PartialPiece:
    """A piece that is being downloaded into a file."""

    digest: str
    num_bytes: int
    into: Path
    have: int = 0
    """Bytes in the file so far."""
    givers: set[str] = field(default_factory=set)
    """Sources of the bytes in the file: addresses of peers, `ROOT` or `EARLIER`."""

    def measure(self) -> None:
        """Sets `have` to the file's size; deletes a file that is too long."""
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
    """Fetches weights for one worker: from its peers first, then from the root (the coordinator or its store)."""

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
        """The key to show to each peer, by the peer's address."""
        self._ranking, self._clock = Ranking(clock), clock
        self._turns = asyncio.Semaphore(num_at_once)
        self._session: aiohttp.ClientSession | None = None
        self._gave_manifest: dict[str, str] = {}
        """Source of each manifest, by the manifest's digest."""
        self.num_bytes: Counter[str] = Counter()
        """Bytes of pieces received, by source; "" is the root."""

    def use(self, keys: Mapping[str, str]) -> None:
        """Replaces the peers. `keys` maps the address of each peer to the key to show to that peer. Peers are asked in
        the order of `keys`, before the root, unless `Ranking` moves one back."""
        self._keys = dict(keys)
        self._ranking.use(list(keys))

    @property
    def root_bytes_per_s(self) -> float | None:
        """Bytes per second to expect from the root, by recent transfers; None: not measured."""
        return self._ranking.score(ROOT)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def manifest(self, number: int, digest: str) -> bytes:
        if not digest:  # only the root knows which manifest of this number was published
            return await self._root.manifest(number, digest)
        if (giver := self._gave_manifest.pop(digest, None)) is not None:
            self._ranking.failed(giver)  # asked again: the caller checks signatures and rejected it
        return await self._from_first(f"manifest {number}", lambda url: self._manifest(url, number, digest))

    async def piece(self, digest: str, num_bytes: int, into: Path) -> None:
        piece = PartialPiece(digest, num_bytes, into)
        await in_thread(piece.measure)
        if piece.have:
            piece.givers.add(EARLIER)
        await self._from_first(f"piece {digest}", lambda url: self._piece(url, piece))

    async def _from_first(self, what: str, ask: Callable[[str], Awaitable[T]]) -> T:
        """Asks the sources in order with `ask(url)`; returns the first good answer, or else raises the root's error."""
        from_root: Exception | None = None
        for url in self._ranking.order():
            try:
                return await ask(url)
            except (OffbeatError, *FAILURES) as error:
                if url != ROOT and not isinstance(error, (PieceDamaged, *FAILURES)):
                    raise
                log.info("%s cannot be fetched from %s: %s: %s", what, url or "the root", type(error).__name__, error)
                self._blame(url, error)
                from_root = error if url == ROOT else from_root
        assert from_root is not None, "this is a bug: the root was not asked"
        raise from_root

    def _blame(self, url: str, error: Exception) -> None:
        if isinstance(error, PieceDamaged):
            log.warning("%s sent bytes that do not have the requested digest", url or "the root")
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
                        raise PeerFailed(f"the peer sent a manifest of more than {MAX_MANIFEST_BYTES} bytes")
            sealed = bytes(gathered)
        if not is_intact(digest, sealed):
            raise PieceDamaged(
                f"version {number}: {url or 'the root'} sent a manifest that does not have digest {digest[:12]}, or "
                "whose signature is wrong"
            )
        self._ranking.gave(url, 0, 0.0)
        if len(self._gave_manifest) >= MAX_REMEMBERED:
            self._gave_manifest.clear()
        self._gave_manifest[digest] = url
        return sealed

    async def _piece(self, url: str, piece: PartialPiece) -> None:
        """Downloads the rest of a piece from the source `url`. If the piece then has the wrong digest, downloads all of
        it from `url`, or raises `PieceDamaged` if no other source contributed to it."""
        while True:
            await self._fill(url, piece)
            if await in_thread(piece.is_right):
                return
            givers = piece.givers
            await in_thread(piece.clear)
            if givers <= {url}:
                raise PieceDamaged(f"piece {piece.digest}: the bytes from {url or 'the root'} do not match this digest")
            for other in givers - {url, EARLIER, ROOT}:
                self._ranking.failed(other)

    async def _fill(self, url: str, piece: PartialPiece) -> None:
        start, start_s = piece.have, self._clock()
        if start == piece.num_bytes and start:
            return
        try:
            if url == ROOT:
                async with self._turns:
                    start_s = self._clock()
                    await self._root.piece(piece.digest, piece.num_bytes, piece.into)
            else:
                start_s = await self._append(url, piece)
        finally:
            if url == ROOT:
                await in_thread(piece.measure)
            gained = max(piece.have - start, 0)
            self.num_bytes[url] += gained
            if gained:
                piece.givers.add(url)
        self._ranking.gave(url, gained, self._clock() - start_s)

    async def _append(self, url: str, piece: PartialPiece) -> float:
        """Appends the missing bytes of a piece from a peer; returns the time at which the answer began."""
        start, end = piece.have, piece.num_bytes
        span = {"Range": f"bytes={start}-{end - 1}"} if start else {}
        async with self._open(url, f"/pieces/{piece.digest}", span, end) as response:
            sent = response.headers.get("Content-Range")
            if span and sent != f"bytes {start}-{end - 1}/{end}":
                raise PeerFailed(f"the peer sent range {sent!r} when asked for {span['Range']!r}")
            start_s, gathered = self._clock(), bytearray()
            try:
                async for data in self._paced(url, response):
                    gathered += data
                    if piece.have - start + len(gathered) > end - start:
                        gathered.clear()
                        raise PeerFailed(f"the peer sent more than the {end - start} bytes it was asked for")
                    if len(gathered) >= WRITE_BYTES:
                        await _add(piece, gathered)
            finally:
                await _add(piece, gathered)  # even after an error
        if piece.have < end:
            raise PeerFailed(f"the peer's answer ended after {piece.have} of {end} bytes")
        return start_s

    async def _paced(self, url: str, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """Yields the bytes of a peer's answer as they come; raises `PeerSlow` if they come too slowly."""
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
        """Asks a peer until it has the content, of `num_bytes` bytes, and yields the answer that holds it. Raises
        `PeerFailed` if the peer refuses, or does not get the content in time itself."""
        patience = self._patience
        waiting = _Waiting(
            self._clock,
            still_s=patience.still_s,
            # The peer fetches several pieces at a time.
            within_s=patience.still_s + NUM_PARALLEL * num_bytes / self._ranking.least_bytes_per_s(url),
        )
        while True:
            response = await self._ask(url, path, headers or {})
            async with response:
                if response.status == (206 if headers else 200):
                    yield response
                    return
                if response.status != 503:
                    async with asyncio.timeout(patience.answer_within_s):
                        reason = await response.content.read(MAX_REASON_BYTES)
                    raise PeerFailed(f"the peer answered {response.status}: {reason.decode(errors='replace')}")
                waiting.hear(response.headers.get(ARRIVED, ""))
            await asyncio.sleep(AGAIN_S)

    async def _ask(self, url: str, path: str, headers: dict[str, str]) -> aiohttp.ClientResponse:
        """Sends one request to a peer; returns the answer as soon as its headers are there."""
        patience = self._patience
        key = self._keys.get(url, "")  # none if the peer was removed meanwhile
        if self._session is None:
            self._session = aiohttp.ClientSession(auto_decompress=False)
        async with asyncio.timeout(patience.poll_s + patience.answer_within_s):
            return await self._session.get(
                url + path,
                params={"wait_s": f"{patience.poll_s:.3f}"},
                headers={**headers, "Authorization": f"Bearer {key}", "Accept-Encoding": "identity"},
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=patience.answer_within_s),
                allow_redirects=False,
            )


class _Waiting:
    """Limits the wait for a piece that a peer is itself receiving: at most `still_s` seconds without progress, and
    at most `within_s` seconds in all."""

    def __init__(self, clock: Callable[[], float], *, still_s: float, within_s: float):
        self._clock, self._still_s, self._end_s = clock, still_s, clock() + within_s
        self._arrived, self._moved_s = "", clock()

    def hear(self, arrived: str) -> None:
        """Notes `arrived`, which changes as the peer receives bytes; raises `PeerFailed` once a limit is passed."""
        now_s = self._clock()
        if arrived != self._arrived:
            self._arrived, self._moved_s = arrived, now_s
        if now_s - self._moved_s > self._still_s:
            raise PeerFailed(f"the peer itself has received nothing of the piece for {self._still_s:g} s")
        if now_s > self._end_s:
            raise PeerFailed("the peer itself has not received the piece in time")


async def _add(piece: PartialPiece, gathered: bytearray) -> None:
    """Writes the gathered bytes to the piece's file, in a thread, and clears them."""
    try:
        await in_thread(piece.add, gathered)
    except OSError as error:
        raise cannot_write(piece.into, error, "then start the worker again") from error
    gathered.clear()
