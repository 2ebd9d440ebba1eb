"""A client's connection to the coordinator: every request has a deadline, and is retried until it is answered.

Calls are idempotent or fenced, so a retry is always safe. Every body carries its digest, in both directions. Temporary
failures are the HTTP statuses 408, 429 and 5xx except 504, a broken connection, a damaged body, and an answer of a
proxy, which has no digest. They are retried for up to `patience_s` seconds, with growing, jittered pauses. Any other
error answer is raised as the error that the coordinator raised.
"""

from __future__ import annotations

import asyncio
import contextlib
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

from offbeat.client import wire
from offbeat.errors import DeadlineError, OffbeatError, RunInterrupted, RunOver, RunStopped, UserError
from offbeat.ledger.errors import Conflict, Fenced, Forbidden, Refused, Unknown
from offbeat.net import is_loopback
from offbeat.waiting import on_bytes

log = logging.getLogger(__name__)

T = TypeVar("T")

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
"""HTTP statuses below 500 after which a call is retried. From 500 on, all are retried except 504, with which the
coordinator says that a deadline of its own has passed."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 15.0
MAX_RETRY_AFTER_S = 60.0
"""Longest Retry-After, in seconds, that is obeyed, because the sender may not be a coordinator."""
OUTAGE_AFTER_S = 5.0
"""Seconds without any answer after which a warning is logged; until then the coordinator may just be restarting."""
MAX_SILENT_S = 600.0
"""Longest time between two warnings of one outage; the first warnings follow each other sooner."""
WORTH_A_WARNING_S = 60.0
"""Seconds after which the retries of one call are logged as warnings even if other calls succeed meanwhile."""
TLS_WITHIN_S = 5.0
"""Seconds to wait for an answer when the client, after a failed call, checks whether the coordinator speaks TLS, and
with which certificate."""
WRONG_NAME = (62, 64)
"""OpenSSL's error codes for a certificate that has another host name (62) or another IP address (64)."""
REQUEST_WITHIN_S = 60.0
"""Seconds within which a call must be answered, in addition to the time for which it asks the coordinator to wait."""
STREAM_WITHIN_S = 3600.0
"""Longest duration, in seconds, of a request that transfers a file or piece. After that, another request continues the
download where it stopped, or repeats the upload."""
SILENCE_S = 60.0
MAX_CONNECTIONS = 64
IDLE_S = 30.0
"""Idle seconds until a connection is closed; fewer than the coordinator waits, so that no call uses a connection that
the coordinator is closing."""
COMPRESS_FROM_BYTES = 1024
MAX_ANSWER_BYTES = 16 * 1024**3
"""Largest decompressed answer; generous, because the coordinator is trusted and a batch may be large."""
MAX_ERROR_BYTES = 64 * 1024
"""Longest error body that is read; anything longer, such as an HTML page, is not from a coordinator."""


class DamagedInTransit(ConnectionError):
    """The answer was damaged or did not come from the coordinator; the call is retried."""


class Connection:
    """Makes calls to the coordinator at `url`, as the worker, judge or trainer that joined with `secret` (None before
    joining). Retries a call for `patience_s` seconds; None: for ever. `allow_plain` allows http to another machine."""

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
        """Generation: the number that a trainer gets from `reconcile` and sends with each later call. 0 before that,
        and for other roles."""
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"{url!r} is not the URL of a coordinator; give one such as https://host:port")
        self.is_local = is_loopback(parts.hostname)
        if parts.scheme == "http" and not self.is_local and not allow_plain:
            raise UserError(
                f"{url}: the worker's secret would be sent unencrypted; use https, or --allow-plain within a private "
                "network"
            )
        self.outage = Outage(self.url, patience_s)
        self._ca_file = ca_file
        self._tls = _tls(ca_file) if parts.scheme == "https" else True
        self._has_tried_other_scheme = False
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # --- calls ---

    async def call(
        self, path: str, record: Any, answer: type[T], *, wait_s: float = 0.0, secret: str | None = None
    ) -> T:
        """POSTs `record` and returns the answer, decoded as type `answer`. The coordinator may wait up to `wait_s`
        seconds before it answers. `secret`, if given, replaces the connection's secret in this call."""
        within_s = wait_s + REQUEST_WITHIN_S
        return self.decoded(
            await self.send("POST", path, wire.encode(record), within_s=within_s, secret=secret), answer
        )

    async def post(self, path: str, record: Any) -> None:
        """POSTs `record`, for a call whose answer is empty."""
        await self.send("POST", path, wire.encode(record))

    async def get(self, path: str, answer: type[T]) -> T:
        return self.decoded(await self.send("GET", path), answer)

    def decoded(self, data: bytes, answer: type[T]) -> T:
        try:
            return wire.decode(data, answer)
        except wire.Malformed as error:
            raise OffbeatError(
                f"{self.url}: the coordinator's answer cannot be read ({error}); use the coordinator's version of "
                "Offbeat"
            ) from error

    async def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        within_s: float = REQUEST_WITHIN_S,
        secret: str | None = None,
    ) -> bytes:
        """Sends a request, with a msgpack body or none, until it is answered; returns the answer's body."""
        headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
        if body is not None:
            headers["Content-Type"] = wire.MSGPACK
            if len(body) >= COMPRESS_FROM_BYTES and not self.is_local:
                body = await on_bytes(body, wire.compress)
                headers["Content-Encoding"] = wire.ZSTD
            headers[wire.CONTENT_DIGEST] = await on_bytes(body, wire.content_digest)
        return await self._answered(method, path, headers, body, within_s)

    async def put(self, path: str, data: bytes, digest: bytes) -> None:
        """Uploads `data`, whose blake3 digest is `digest`; retries until it has arrived."""
        headers = {"Content-Type": wire.OCTETS, wire.CONTENT_DIGEST: wire.digest_header(digest)}
        await self._answered("PUT", path, headers, data, STREAM_WITHIN_S)

    async def _answered(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None, within_s: float
    ) -> bytes:
        """Sends a request until it is answered; returns the answer's body, checked and decompressed."""
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
    async def open(self, path: str, headers: Mapping[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        """Requests a file and yields the response; the caller reads the bytes and handles broken connections."""
        async with self._good("GET", path, headers, None, STREAM_WITHIN_S, self.retry(f"GET {path}")) as response:
            if response.content_type != wire.OCTETS:
                raise DamagedInTransit(
                    f"{response.content_type} came in place of a file; a proxy seems to answer for the coordinator"
                )
            yield response

    @contextlib.asynccontextmanager
    async def _good(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None, within_s: float, retry: Retry
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Sends a request until it succeeds; yields the response, its body unread. Raises errors that a retry cannot
        mend."""
        while True:
            try:
                response = await self._request(method, path, headers, body, within_s)
            except aiohttp.ClientConnectorCertificateError as error:  # a retry would not help
                raise UserError(await self._untrusted(error.certificate_error)) from error
            except BROKEN as error:
                await self._refuse_other_scheme(error)
                await retry.pause(_in_words(error))
                continue
            async with response:
                if response.status < 300:
                    self.outage.answered()
                    yield response
                    return
                try:
                    why, kind = await _read_error(response)
                except BROKEN as error:
                    await retry.pause(f"{response.status}: {_in_words(error)}", _retry_after_s(response))
                    continue
                if not _is_temporary(response.status, kind):
                    raise self._error(response.status, why, kind)
                await retry.pause(f"{response.status}: {why}", _retry_after_s(response))

    async def _untrusted(self, error: Exception) -> str:
        """Returns a text that says why the coordinator's certificate is not trusted, and what to do."""
        if getattr(error, "verify_code", None) in WRONG_NAME:
            any_name = _tls(self._ca_file)
            any_name.check_hostname = False
            found = await self._certificate(any_name) or {}
            names = [name for _, name in found.get("subjectAltName", ())]
            return (
                f"{self.url}: its TLS certificate is not for {urlsplit(self.url).hostname}, but for "
                f"{', '.join(names) or 'no name'}; join with a URL whose host name is in the certificate, or give the "
                "coordinator a certificate for this host name"
            )
        return (
            f"{self.url}: its TLS certificate cannot be verified ({error}); if you signed it yourself, pass --ca-file "
            "FILE"
        )

    async def _refuse_other_scheme(self, error: BaseException) -> None:
        """Raises `UserError` if the URL says http and the coordinator speaks TLS, or the other way round. `error` is
        what a failed call has raised. The coordinator is asked only once per connection."""
        is_https = self.url.startswith("https:")
        if self._has_tried_other_scheme or (is_https and not isinstance(error, aiohttp.ClientConnectorSSLError)):
            return
        self._has_tried_other_scheme = True
        if is_https:
            if await self._speaks_http():
                url = f"http{self.url[5:]}"
                remedy = (
                    f"join with {url}" if self.is_local else f"if the network is private: --join {url} --allow-plain"
                )
                raise UserError(f"{self.url}: speaks http, not https; {remedy}")
            return
        any_certificate = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        any_certificate.check_hostname, any_certificate.verify_mode = False, ssl.CERT_NONE
        if await self._certificate(any_certificate) is not None:
            raise UserError(f"{self.url}: speaks https; join with https{self.url.removeprefix('http')}")

    async def _speaks_http(self) -> bool:
        """Whether the coordinator answers in HTTP without TLS within `TLS_WITHIN_S`."""
        parts = urlsplit(self.url)
        try:
            async with asyncio.timeout(TLS_WITHIN_S):
                reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 443)
                try:
                    writer.write(b"HEAD / HTTP/1.0\r\n\r\n")
                    return (await reader.read(5)) == b"HTTP/"
                finally:
                    writer.close()
        except OSError:  # TimeoutError is among them
            return False

    async def _certificate(self, tls: ssl.SSLContext) -> Mapping[str, Any] | None:
        """Returns the coordinator's certificate (empty if `tls` does not verify it), or None if there is no answer in
        TLS within `TLS_WITHIN_S`."""
        parts = urlsplit(self.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            async with asyncio.timeout(TLS_WITHIN_S):
                _, writer = await asyncio.open_connection(parts.hostname, port, ssl=tls)
        except OSError:  # ssl.SSLError and TimeoutError are among them
            return None
        try:
            return dict(writer.get_extra_info("peercert") or {})
        finally:
            writer.close()

    async def _read(self, response: aiohttp.ClientResponse, what: str) -> bytes:
        """Reads, checks and decompresses the body of a response; `what` names the request in errors."""
        data = await response.read()
        await _check(response, data)
        if response.headers.get("Content-Encoding") != wire.ZSTD:
            return data
        try:
            found = await on_bytes(data, lambda data: wire.decompress(data, MAX_ANSWER_BYTES))
        except wire.Malformed as error:
            raise OffbeatError(f"{self.url}: {what}: {error}; use the coordinator's version of Offbeat") from error
        if found is None:
            raise OffbeatError(
                f"{self.url}: {what}: the answer has more than {MAX_ANSWER_BYTES} bytes; use smaller batches (lower "
                "batch.groups_per_step)"
            )
        return found

    async def _request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None, within_s: float
    ) -> aiohttp.ClientResponse:
        session = self._opened()
        held = {**headers, "Accept-Encoding": "identity" if self.is_local else wire.ZSTD}
        if self.secret is not None and "Authorization" not in held:
            held["Authorization"] = f"Bearer {self.secret}"
        if self.generation:
            held[wire.GENERATION] = str(self.generation)
        silence_s = SILENCE_S if within_s == STREAM_WITHIN_S else None  # a call may wait silently, a transfer may not
        timeout = aiohttp.ClientTimeout(total=within_s, sock_connect=SILENCE_S, sock_read=silence_s)
        return await session.request(
            method, self.url + path, headers=held, data=body, timeout=timeout, allow_redirects=False
        )

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=MAX_CONNECTIONS, keepalive_timeout=IDLE_S, ssl=self._tls)
            self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        return self._session

    def _error(self, status: int, why: str, kind: str | None) -> OffbeatError:
        for error in (RunInterrupted, RunOver, RunStopped, UserError):
            if kind == error.__name__:
                return error(why)
        if status == 504:
            return DeadlineError(why)
        if status == 401 or status not in ERRORS:
            why = f"{self.url}: {why}" if status == 401 else f"{self.url}: {status}: {why}"
        return ERRORS.get(status, OffbeatError)(why)

    def retry(self, what: str) -> Retry:
        return Retry(f"{self.url}: {what}", self.patience_s, self.outage)


class Outage:
    """Measures outages, in which no call to the coordinator is answered. Logs a warning after `OUTAGE_AFTER_S` seconds,
    then ever more rarely, and another when the outage is over. All calls of a connection share one `Outage`, so that
    calls that fail together are logged once."""

    def __init__(self, url: str, patience_s: float | None, clock: Callable[[], float] = time.monotonic):
        self._url, self._patience_s, self._clock = url, patience_s, clock
        self._since_s: float | None = None
        self._next_s = OUTAGE_AFTER_S
        """Length of the outage, in seconds, at which the next warning is logged."""

    @property
    def length_s(self) -> float:
        """Seconds since the first call that was not answered; 0 if the latest call was answered."""
        return 0.0 if self._since_s is None else self._clock() - self._since_s

    def failed(self, why: str) -> None:
        now_s = self._clock()
        self._since_s = now_s if self._since_s is None else self._since_s
        lasted_s = now_s - self._since_s
        if lasted_s >= self._next_s:
            until = "it answers" if self._patience_s is None else f"{self._patience_s:.0f} s have passed (--patience)"
            log.warning("%s: has not answered for %.0f s: %s; trying again until %s", self._url, lasted_s, why, until)
            self._next_s = lasted_s + min(max(lasted_s, 2 * OUTAGE_AFTER_S), MAX_SILENT_S)

    def answered(self) -> None:
        if self._since_s is not None and self._next_s > OUTAGE_AFTER_S:
            log.warning("%s: answers again, after %.0f s", self._url, self._clock() - self._since_s)
        self._since_s, self._next_s = None, OUTAGE_AFTER_S


class Retry:
    """Pauses between attempts at one call. `pause` raises `DeadlineError` if the next attempt would come more than
    `patience_s` seconds after the first (None: never)."""

    def __init__(self, what: str, patience_s: float | None, outage: Outage):
        self._what, self._patience_s, self._outage = what, patience_s, outage
        self._start_s, self._pause_s = time.monotonic(), FIRST_PAUSE_S

    async def pause(self, why: str, retry_after_s: float | None = None) -> None:
        waited_s = time.monotonic() - self._start_s
        pause_s = (retry_after_s or 0.0) + self._pause_s * random.uniform(0.5, 1.0)
        if self._patience_s is not None and waited_s + pause_s > self._patience_s:
            raise DeadlineError(f"{self._what}: not answered for {waited_s:.0f} s: {why}")
        self._outage.failed(why)
        is_alone = waited_s >= WORTH_A_WARNING_S and self._outage.length_s < OUTAGE_AFTER_S
        log.log(
            logging.WARNING if is_alone else logging.INFO, "%s: %s; trying again in %.1f s", self._what, why, pause_s
        )
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        await asyncio.sleep(pause_s)


async def _check(response: aiohttp.ClientResponse, data: bytes) -> None:
    """Raises `DamagedInTransit` if `data` does not match the digest in the response's header."""
    digest = wire.read_digest(response.headers, wire.CONTENT_DIGEST)
    if digest is None:
        raise DamagedInTransit(
            f"an answer came without a {wire.CONTENT_DIGEST} header; a proxy seems to answer for the coordinator"
        )
    if wire.digest_header(digest) != await on_bytes(data, wire.content_digest):
        raise DamagedInTransit(f"the answer does not match its {wire.CONTENT_DIGEST} header: it was damaged in transit")


def _is_temporary(status: int, kind: str | None) -> bool:
    return kind == wire.DAMAGED or status in AGAIN or (status >= 500 and status != 504)


def _retry_after_s(response: aiohttp.ClientResponse) -> float | None:
    found = response.headers.get("Retry-After", "")
    return min(float(found), MAX_RETRY_AFTER_S) if found.isascii() and found.isdecimal() else None


async def _read_error(response: aiohttp.ClientResponse) -> tuple[str, str | None]:
    """Returns text and kind of the error in a response; raises `DamagedInTransit` if it is not from the coordinator."""
    data = b""
    async for part in response.content.iter_any():
        data += part
        if len(data) > MAX_ERROR_BYTES:
            raise DamagedInTransit(
                f"the error answer has more than {MAX_ERROR_BYTES} bytes; a proxy seems to answer for the coordinator"
            )
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
        raise UserError(f"{ca_file}: the CA file holds no certificates that can be read: {error}") from error
