"""HTTP client for an engine's server, with connections that stay open, deadlines, and errors that name the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from offbeat.engines.protocol import EngineError
from offbeat.errors import UserError

CALL_WITHIN_S = 30.0
"""Default deadline of a call in seconds, for calls that the server answers without work."""
CONNECT_WITHIN_S = 10.0
MAX_LINE_BYTES = 64 * 2**20
"""Largest size of one event of a stream."""
UNIX = "unix:"
"""Prefix of the URL of a server at a Unix socket; the socket's path follows."""
KEEPALIVE_S = 4.0
"""Seconds to keep an idle connection: fewer than most servers keep it, so that no call uses a connection that the
server is closing."""
MAX_QUOTED = 300
NO_LISTENER = (ConnectionRefusedError, FileNotFoundError)
"""Errors raised when nothing listens at the port, and when the socket file is missing."""
NOT_JSON = (ValueError, RecursionError)
"""Errors of decoding JSON; msgspec's own errors and the one for invalid UTF-8 are subclasses of ValueError."""


class ServerAway(EngineError):
    """The server gave no answer: it cannot be reached, the connection broke, or it took too long."""

    def __init__(self, message: str, *, is_refused: bool = False, is_cut: bool = False):
        super().__init__(message)
        self.is_refused = is_refused
        """Whether nothing listens at the server's address."""
        self.is_cut = is_cut
        """Whether an open connection broke."""


class ServerRefused(EngineError):
    """The server answered with an error status."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class Server:
    """Client of one server; opens connections on demand and keeps them. Once closed, every call raises `ServerAway`."""

    def __init__(self, url: str, *, api_key: str | None = None):
        _check(url)
        self.url = url.rstrip("/")
        self._base = "http://localhost" if url.startswith(UNIX) else self.url
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise UserError(
                f"{self.url}: the engine's key (OFFBEAT_ENGINE_KEY) has characters that HTTP cannot send, such as a "
                "line break; set it again without them"
            )
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False

    async def get(self, path: str, *, within_s: float = CALL_WITHIN_S, **query: str) -> Any:
        return await self._call("GET", path, query, None, within_s)

    async def post(self, path: str, body: Any = None, *, within_s: float = CALL_WITHIN_S, **query: str) -> Any:
        return await self._call("POST", path, query, body, within_s)

    async def send(self, path: str, body: Any, *, within_s: float = CALL_WITHIN_S) -> None:
        """Sends a POST and ignores the answer's body, which need not be JSON."""
        await self._fetch("POST", path, {}, body, within_s)

    async def text(self, path: str, *, within_s: float = CALL_WITHIN_S) -> str:
        return (await self._fetch("GET", path, {}, None, within_s)).decode(errors="replace")

    async def events(self, path: str, body: Any) -> AsyncIterator[bytes]:
        """Sends a POST and yields the data of each server-sent event as it arrives. There is no deadline; the caller
        must close the iterator, which ends the call."""
        lines = Lines()
        try:
            async with self._request("POST", path, {}, body) as answer:
                if answer.status >= 300:
                    async with asyncio.timeout(CALL_WITHIN_S):
                        raise self._refused(path, answer, await answer.read())
                async for piece in answer.content.iter_any():
                    for line in lines.feed(piece):
                        if line.startswith(b"data:"):
                            yield line[5:].strip()
                    if lines.num_bytes_left > MAX_LINE_BYTES:
                        raise EngineError(
                            f"{self.url}{path}: the server sent an event longer than {MAX_LINE_BYTES} bytes"
                        )
        except (aiohttp.ClientError, OSError) as error:
            raise self._away(path, error) from error
        if left := lines.left.strip():  # without a length, the end of a stream and a broken connection look the same
            raise ServerAway(f"{self.url}{path}: the server's answer broke off inside an event: {_quote(left)}")

    async def close(self) -> None:
        self._is_closed = True
        if self._session is not None:
            await self._session.close()

    async def _call(self, method: str, path: str, query: Mapping[str, str], body: Any, within_s: float) -> Any:
        answer = await self._fetch(method, path, query, body, within_s)
        try:
            return msgspec.json.decode(answer) if answer else None
        except NOT_JSON as error:
            raise EngineError(f"{self.url}{path}: the server's answer is not JSON: {_quote(answer)}") from error

    async def _fetch(self, method: str, path: str, query: Mapping[str, str], body: Any, within_s: float) -> bytes:
        """Makes a call, and repeats it once if the connection broke before the answer: the server may close an idle
        connection just as it is used. All calls made through this client are safe to repeat."""
        try:
            return await self._fetch_once(method, path, query, body, within_s)
        except ServerAway as error:
            if not error.is_cut:
                raise
        return await self._fetch_once(method, path, query, body, within_s)

    async def _fetch_once(self, method: str, path: str, query: Mapping[str, str], body: Any, within_s: float) -> bytes:
        try:
            # aiohttp's own timeout is not used: there, 0 means no deadline.
            async with asyncio.timeout(within_s), self._request(method, path, query, body) as answer:
                content: bytes = await answer.read()
        except aiohttp.ClientError as error:  # includes its own connection timeout
            raise self._away(path, error) from error
        except TimeoutError as error:
            raise ServerAway(f"{self.url}{path}: the server gave no answer within {within_s:g} s") from error
        except OSError as error:
            raise self._away(path, error) from error
        if answer.status >= 300:
            raise self._refused(path, answer, content)
        return content

    def _request(self, method: str, path: str, query: Mapping[str, str], body: Any) -> Any:
        """Returns a context manager that sends the request and gives the answer. Does not follow redirects: a POST
        would become a GET."""
        data = None if body is None else msgspec.json.encode(body)
        return self._open().request(method, self._base + path, params=query, data=data, allow_redirects=False)

    def _open(self) -> aiohttp.ClientSession:
        if self._is_closed:
            raise ServerAway(f"{self.url}: this client of the server is closed")
        if self._session is None:
            limits: dict[str, Any] = {"limit": 0, "keepalive_timeout": KEEPALIVE_S}
            path = self.url.removeprefix(UNIX) if self.url.startswith(UNIX) else None
            connector = aiohttp.UnixConnector(path, **limits) if path else aiohttp.TCPConnector(**limits)
            headers = {"Content-Type": "application/json", **self._headers}
            timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_WITHIN_S)
            self._session = aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout)
        return self._session

    def _away(self, path: str, error: BaseException) -> ServerAway:
        why = " ".join(str(error).split()) or "the connection broke off"
        if isinstance(error, aiohttp.ClientConnectorError):
            is_refused, is_cut = isinstance(error.os_error, NO_LISTENER), False
        else:
            is_refused, is_cut = False, isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
        return ServerAway(f"{self.url}{path}: {type(error).__name__}: {why}", is_refused=is_refused, is_cut=is_cut)

    def _refused(self, path: str, answer: aiohttp.ClientResponse, content: bytes) -> ServerRefused:
        where = answer.headers.get("Location")
        why = f"a redirect to {where}" if where else _quote(content) or "no reason given"
        return ServerRefused(f"{self.url}{path}: the server answered with status {answer.status}: {why}", answer.status)


class Lines:
    """Splits a stream into lines of any length; aiohttp's own reader refuses long lines."""

    def __init__(self) -> None:
        self._begun: list[bytes] = []
        self.num_bytes_left = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Takes the next piece of the stream; returns the lines that it completes."""
        *ends, rest = piece.split(b"\n")
        lines = []
        for end in ends:
            lines.append(b"".join((*self._begun, end)))
            self._begun.clear()
            self.num_bytes_left = 0
        self._begun.append(rest)
        self.num_bytes_left += len(rest)
        return lines

    @property
    def left(self) -> bytes:
        """The bytes fed after the last line break: the start of an incomplete line."""
        return b"".join(self._begun)


def _check(url: str) -> None:
    if url.startswith(f"{UNIX}/"):
        return
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # such as an invalid port
        raise UserError(f"{url}: not the URL of an engine; use one such as http://127.0.0.1:8000") from None
    if parts.username is not None or parts.password is not None:
        raise UserError(
            f"the URL of the engine at {parts.hostname} holds a name or password; leave these out and give the key in "
            "OFFBEAT_ENGINE_KEY"
        )
    if not is_address or parts.query or parts.fragment:
        raise UserError(f"{url}: not the URL of an engine; write http:// or https:// and a host, without ? or #")


def _quote(content: bytes) -> str:
    """Returns the message in a JSON error body, or else the content as text; cut to `MAX_QUOTED` characters."""
    try:
        text = _message(msgspec.json.decode(content))
    except NOT_JSON:
        text = content.decode(errors="replace")
    text = " ".join(text.split())
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}…"


def _message(answer: Any) -> str:
    while isinstance(answer, dict):
        inner = (answer.get(key) for key in ("error", "message", "detail"))
        found = next((value for value in inner if value and isinstance(value, str | dict | list)), None)
        if found is None:
            break
        answer = found
    return answer if isinstance(answer, str) else str(answer)
