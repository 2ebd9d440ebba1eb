"""One caller's line to the coordinator: every request has a deadline, and is made again until it is answered.

Calls are idempotent or fenced, so making one again is always safe. Every body carries its digest, in both directions.
What asks for patience (429, 5xx, a body that was too slow or damaged on its way, a broken connection) is tried again
with growing, jittered pauses, for as long as `patience_s`; so is whatever a proxy or a captive portal answers in the
coordinator's place, which is known by the digest that it lacks. Whatever else the coordinator refuses is raised as the
error that it was on the other side.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import random
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from offbeat.errors import DeadlineError, OffbeatError, RunOver, RunStopped, UserError
from offbeat.ledger.errors import Conflict, Fenced, Forbidden, Refused, Unknown
from offbeat.serve.http import coding, wire

log = logging.getLogger(__name__)

T = TypeVar("T")
Body = bytes | Callable[[], AsyncIterator[bytes]] | None

ERRORS: dict[int, type[OffbeatError]] = {
    **dict.fromkeys((400, 413, 415, 422), Refused),
    401: UserError,
    403: Forbidden,
    404: Unknown,
    409: Conflict,
    410: Fenced,
}
BROKEN = (aiohttp.ClientError, TimeoutError, OSError)
AGAIN = (408, 429)
"""And 5xx, but 504: there the coordinator waited in vain, and says for what."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 15.0
MAX_RETRY_AFTER_S = 60.0
"""However long we are told to stay away: whoever says so may be no coordinator."""
WORTH_A_WARNING_S = 60.0
"""Of waiting; before that a coordinator may just be starting again."""
REQUEST_WITHIN_S = 60.0
"""Beyond the wait that a call asks for."""
STREAM_WITHIN_S = 3600.0
"""For a file; it goes on from where it was."""
SILENCE_S = 60.0
MAX_CONNECTIONS = 64
IDLE_S = 30.0
"""Shorter than the server's, so that no call goes into a connection that is being closed."""
COMPRESS_FROM_BYTES = 1024
MAX_ANSWER_BYTES = 16 * 1024**3
"""The coordinator is trusted; a batch may be large."""
MAX_ERROR_BYTES = 64 * 1024
"""Of an answer that says no; an HTML page may be longer, and says nothing to us."""
LARGE_BYTES = 256 * 1024
"""From here on, work on a body would hold up heartbeats and is done on another thread."""


class Damaged(ConnectionError):
    """An answer that is not what the coordinator sent, or not the coordinator's at all; the call is made again."""


class Connection:
    """Calls one URL, as one worker once `secret` is set."""

    def __init__(
        self,
        url: str,
        secret: str | None = None,
        *,
        ca_file: Path | None = None,
        patience_s: float | None = None,
        allow_plain: bool = False,
    ):
        self.url, self.secret, self.patience_s = url.rstrip("/"), secret, patience_s
        self.generation = 0
        """Of a trainer that has reconciled."""
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"{url!r}: not the URL of a coordinator; it looks like https://host:port")
        self.is_local = _is_loopback(parts.hostname)
        if parts.scheme == "http" and not self.is_local and not allow_plain:
            raise UserError(
                f"{url}: the secret would cross the network in the clear; use https, or --allow-plain within a private "
                "network"
            )
        self._tls = _tls(ca_file) if parts.scheme == "https" else True
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # --- calls ---

    async def call(
        self, path: str, record: Any, answer: type[T], *, wait_s: float = 0.0, secret: str | None = None
    ) -> T:
        """POSTs a record and returns the answer; the coordinator may wait `wait_s` for something to tell. `secret`
        stands in for the connection's own, as a token does before there is one."""
        within_s = wait_s + REQUEST_WITHIN_S
        return self.decoded(
            await self.send("POST", path, wire.encode(record), within_s=within_s, secret=secret), answer
        )

    async def tell(self, path: str, record: Any) -> None:
        await self.send("POST", path, wire.encode(record))

    async def get(self, path: str, answer: type[T]) -> T:
        return self.decoded(await self.send("GET", path), answer)

    def decoded(self, data: bytes, answer: type[T]) -> T:
        try:
            return wire.decode(data, answer)
        except coding.Malformed as error:
            raise OffbeatError(f"{self.url}: an answer that cannot be read ({error}); use the same Offbeat") from error

    async def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        within_s: float = REQUEST_WITHIN_S,
        secret: str | None = None,
    ) -> bytes:
        """One call with a body of msgpack or none, made until it is answered; returns the answer's body."""
        headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
        if body is not None:
            headers["Content-Type"] = wire.MSGPACK
            if len(body) >= COMPRESS_FROM_BYTES and not self.is_local:
                body = await _on_bytes(body, coding.compress)
                headers["Content-Encoding"] = coding.ZSTD
            headers[coding.CONTENT_DIGEST] = await _on_bytes(body, coding.content_digest)
        return await self._answered(method, path, headers, body, within_s)

    async def put(self, path: str, body: Body, num_bytes: int, digest: bytes) -> None:
        """Sends bytes of this length and digest, until they have arrived."""
        headers = {
            "Content-Type": wire.OCTETS,
            "Content-Length": str(num_bytes),
            coding.CONTENT_DIGEST: coding.digest_header(digest),
        }
        await self._answered("PUT", path, headers, body, STREAM_WITHIN_S)

    async def _answered(self, method: str, path: str, headers: Mapping[str, str], body: Body, within_s: float) -> bytes:
        """The body of the coordinator's answer, whole and undamaged."""
        retry = self.retry(f"{method} {path}")
        while True:
            try:
                async with self._good(method, path, headers, body, within_s, retry) as response:
                    return await self._read(response, f"{method} {path}")
            except OffbeatError:
                raise
            except BROKEN as error:
                await retry.pause(_in_words(error))

    @contextlib.asynccontextmanager
    async def open(
        self, path: str, headers: Mapping[str, str], *, within_s: float = STREAM_WITHIN_S
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A file whose bytes are yet to be read; what breaks or is damaged while they are, is the reader's to mend."""
        async with self._good("GET", path, headers, None, within_s, self.retry(f"GET {path}")) as response:
            if response.content_type != wire.OCTETS:
                raise Damaged(f"{response.content_type} came in place of a file; something on the way answers for us")
            yield response

    @contextlib.asynccontextmanager
    async def _good(
        self, method: str, path: str, headers: Mapping[str, str], body: Body, within_s: float, retry: Retry
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer that says yes, and whose body is yet to be read."""
        while True:
            try:
                response = await self._request(method, path, headers, body, within_s)
            except aiohttp.ClientConnectorCertificateError as error:  # waiting does not make it another certificate
                raise UserError(
                    f"{self.url}: its certificate proves nothing to us ({error.certificate_error}); if it is your own, "
                    "give the CA file that signed it"
                ) from error
            except BROKEN as error:
                await retry.pause(_in_words(error))
                continue
            async with response:
                if response.status < 300:
                    yield response
                    return
                try:
                    why, kind = await _told(response)
                except BROKEN as error:
                    await retry.pause(f"{response.status}: {_in_words(error)}", _retry_after_s(response))
                    continue
                if not _asks_for_patience(response.status, kind):
                    raise self._error(response.status, why, kind)
                await retry.pause(f"{response.status}: {why}", _retry_after_s(response))

    async def _read(self, response: aiohttp.ClientResponse, what: str) -> bytes:
        """The body of an answer, checked and decompressed."""
        data = await response.read()
        await _check(response, data)
        if response.headers.get("Content-Encoding") != coding.ZSTD:
            return data
        try:
            found = await _on_bytes(data, lambda data: coding.decompress(data, MAX_ANSWER_BYTES))
        except coding.Malformed as error:
            raise OffbeatError(f"{self.url}: {what}: {error}; use the same Offbeat") from error
        if found is None:
            raise OffbeatError(
                f"{self.url}: {what}: an answer of more than {MAX_ANSWER_BYTES} bytes; have it send less at a time, as "
                "with a smaller batch.groups_per_step"
            )
        return found

    async def _request(
        self, method: str, path: str, headers: Mapping[str, str], body: Body, within_s: float
    ) -> aiohttp.ClientResponse:
        session = self._opened()
        held = {**headers, "Accept-Encoding": "identity" if self.is_local else coding.ZSTD}
        if self.secret is not None and "Authorization" not in held:
            held["Authorization"] = f"Bearer {self.secret}"
        if self.generation:
            held[coding.GENERATION] = str(self.generation)
        silence_s = SILENCE_S if within_s == STREAM_WITHIN_S else None  # a call may wait in silence, a stream may not
        timeout = aiohttp.ClientTimeout(total=within_s, sock_connect=SILENCE_S, sock_read=silence_s)
        data = body() if callable(body) else body
        return await session.request(
            method, self.url + path, headers=held, data=data, timeout=timeout, allow_redirects=False
        )

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=MAX_CONNECTIONS, keepalive_timeout=IDLE_S, ssl=self._tls)
            self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        return self._session

    def _error(self, status: int, why: str, kind: str | None) -> OffbeatError:
        for told in (RunOver, RunStopped, UserError):
            if kind == told.__name__:
                return told(why)
        if status == 504:
            return DeadlineError(why)
        if status == 401 or status not in ERRORS:
            why = f"{self.url}: {why}" if status == 401 else f"{self.url}: {status}: {why}"
        return ERRORS.get(status, OffbeatError)(why)

    def retry(self, what: str) -> Retry:
        return Retry(f"{self.url}: {what}", self.patience_s)


class Retry:
    """Pauses between attempts at one call, until patience is at its end."""

    def __init__(self, what: str, patience_s: float | None):
        self._what, self._patience_s = what, patience_s
        self._start_s, self._pause_s = time.monotonic(), FIRST_PAUSE_S

    async def pause(self, why: str, retry_after_s: float | None = None) -> None:
        waited_s = time.monotonic() - self._start_s
        pause_s = (retry_after_s or 0.0) + self._pause_s * random.uniform(0.5, 1.0)
        if self._patience_s is not None and waited_s + pause_s > self._patience_s:
            raise DeadlineError(f"{self._what}: not answered for {waited_s:.0f} s: {why}")
        level = logging.INFO if waited_s < WORTH_A_WARNING_S else logging.WARNING
        log.log(level, "%s: %s; again in %.1f s", self._what, why, pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        await asyncio.sleep(pause_s)


async def _check(response: aiohttp.ClientResponse, data: bytes) -> None:
    """Raises `Damaged` unless this is what the coordinator sent."""
    digest = coding.read_digest(response.headers, coding.CONTENT_DIGEST)
    if digest is None:
        raise Damaged(f"{response.content_type} without a {coding.CONTENT_DIGEST}; something on the way answers for it")
    if coding.digest_header(digest) != await _on_bytes(data, coding.content_digest):
        raise Damaged("the answer was damaged on its way")


async def _on_bytes(data: bytes, work: Callable[[bytes], T]) -> T:
    """Does some work on bytes, on another thread where they are many."""
    return work(data) if len(data) <= LARGE_BYTES else await asyncio.to_thread(work, data)


def _asks_for_patience(status: int, kind: str | None) -> bool:
    return kind == coding.DAMAGED or status in AGAIN or (status >= 500 and status != 504)


def _retry_after_s(response: aiohttp.ClientResponse) -> float | None:
    found = response.headers.get("Retry-After", "")
    return min(float(found), MAX_RETRY_AFTER_S) if found.isascii() and found.isdecimal() else None


async def _told(response: aiohttp.ClientResponse) -> tuple[str, str | None]:
    """The line and the kind of the coordinator's error; `Damaged` where it is not the coordinator's."""
    data = b""
    async for part in response.content.iter_any():
        data += part
        if len(data) > MAX_ERROR_BYTES:
            raise Damaged(f"{response.content_type} of more than {MAX_ERROR_BYTES} bytes; no coordinator says so much")
    await _check(response, data)
    try:
        found = msgspec.json.decode(data)
        return str(found["error"]), found.get("kind")
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return response.reason or "no reason given", None


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _tls(ca_file: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise UserError(f"{ca_file}: holds no certificates that can be read: {error}") from error


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
