"""Calls to one engine's server over HTTP: few, kept connections, a deadline for each, errors that name the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from offbeat.errors import UserError
from offbeat.rollout.engine import EngineError

CALL_WITHIN_S = 30.0
"""For calls that only ask or tell something."""
CONNECT_WITHIN_S = 10.0
MAX_LINE_BYTES = 64 * 2**20
"""The longest event of a stream."""
UNIX = "unix:"
"""How the URL of a server begins that listens at a socket of this machine; its path follows."""
KEEPALIVE_S = 4.0
"""Shorter than what common servers grant an idle connection, so that none is reused while it is being closed."""
MAX_QUOTED = 300
NOBODY = (ConnectionRefusedError, FileNotFoundError)
"""What a port says where nobody listens, and a socket that is not there."""
NOT_JSON = (ValueError, RecursionError)
"""What decoding raises: its own error and that of bytes that are no text are of the first kind."""


class ServerAway(EngineError):
    """The server gave no answer: it cannot be reached, broke off, or took too long."""

    def __init__(self, message: str, *, is_refused: bool = False, is_cut: bool = False):
        super().__init__(message)
        self.is_refused = is_refused
        """Nobody listens at its address."""
        self.is_cut = is_cut
        """A connection that there was is gone."""


class ServerRefused(EngineError):
    """The server answered, and what it said is no."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class Server:
    """One server, by its URL; connections are opened when they are needed and kept. Once closed it is away for good."""

    def __init__(self, url: str, *, api_key: str | None = None):
        _check(url)
        self.url = url.rstrip("/")
        self._base = "http://localhost" if url.startswith(UNIX) else self.url
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise UserError(f"{self.url}: the engine's key holds what cannot be sent, such as an end of line")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False

    async def get(self, path: str, *, within_s: float = CALL_WITHIN_S, **query: str) -> Any:
        return await self._call("GET", path, query, None, within_s)

    async def post(self, path: str, body: Any = None, *, within_s: float = CALL_WITHIN_S, **query: str) -> Any:
        return await self._call("POST", path, query, body, within_s)

    async def tell(self, path: str, body: Any, *, within_s: float = CALL_WITHIN_S) -> None:
        """For what is answered by words that are for people."""
        await self._fetch("POST", path, {}, body, within_s)

    async def text(self, path: str, *, within_s: float = CALL_WITHIN_S) -> str:
        return (await self._fetch("GET", path, {}, None, within_s)).decode(errors="replace")

    async def events(self, path: str, body: Any) -> AsyncIterator[bytes]:
        """The data of each server-sent event, as it comes. There is no deadline: whoever reads knows what else the
        server does meanwhile, and closes this."""
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
                        raise EngineError(f"{self.url}{path}: an event of more than {MAX_LINE_BYTES} bytes")
        except (aiohttp.ClientError, OSError) as error:
            raise self._away(path, error) from error
        if left := lines.left.strip():  # without a length, an end and a broken connection look the same
            raise ServerAway(f"{self.url}{path}: broke off in the middle of an event: {_quote(left)}")

    async def close(self) -> None:
        self._is_closed = True
        if self._session is not None:
            await self._session.close()

    async def _call(self, method: str, path: str, query: Mapping[str, str], body: Any, within_s: float) -> Any:
        said = await self._fetch(method, path, query, body, within_s)
        try:
            return msgspec.json.decode(said) if said else None
        except NOT_JSON as error:
            raise EngineError(f"{self.url}{path}: not JSON: {_quote(said)}") from error

    async def _fetch(self, method: str, path: str, query: Mapping[str, str], body: Any, within_s: float) -> bytes:
        """Asks once more where the connection was cut before the answer: a server, or this process, that stood still
        for a while closes an idle connection just as it is used. No call here does harm when it is made twice."""
        try:
            return await self._fetch_once(method, path, query, body, within_s)
        except ServerAway as error:
            if not error.is_cut:
                raise
        return await self._fetch_once(method, path, query, body, within_s)

    async def _fetch_once(self, method: str, path: str, query: Mapping[str, str], body: Any, within_s: float) -> bytes:
        try:
            # Not aiohttp's own deadline, to which none is left means that there is none.
            async with asyncio.timeout(within_s), self._request(method, path, query, body) as answer:
                said = await answer.read()
        except aiohttp.ClientError as error:  # among them that no connection came about, long before the deadline
            raise self._away(path, error) from error
        except TimeoutError as error:
            raise ServerAway(f"{self.url}{path}: no answer within {within_s:g} s") from error
        except OSError as error:
            raise self._away(path, error) from error
        if answer.status >= 300:
            raise self._refused(path, answer, said)
        return said

    def _request(self, method: str, path: str, query: Mapping[str, str], body: Any) -> Any:
        """To be entered for the answer. Redirections are not followed: a POST would become a GET on the way."""
        data = None if body is None else msgspec.json.encode(body)
        return self._open().request(method, self._base + path, params=query, data=data, allow_redirects=False)

    def _open(self) -> aiohttp.ClientSession:
        if self._is_closed:
            raise ServerAway(f"{self.url}: it was closed")
        if self._session is None:
            connector = self._connector()
            headers = {"Content-Type": "application/json", **self._headers}
            timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_WITHIN_S)
            self._session = aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout)
        return self._session

    def _connector(self) -> aiohttp.BaseConnector:
        if self.url.startswith(UNIX):
            return aiohttp.UnixConnector(self.url.removeprefix(UNIX), limit=0, keepalive_timeout=KEEPALIVE_S)
        return aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)

    def _away(self, path: str, error: BaseException) -> ServerAway:
        said = " ".join(str(error).split()) or "broke off"
        if isinstance(error, aiohttp.ClientConnectorError):
            is_refused, is_cut = isinstance(error.os_error, NOBODY), False
        else:
            is_refused, is_cut = False, isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
        return ServerAway(f"{self.url}{path}: {type(error).__name__}: {said}", is_refused=is_refused, is_cut=is_cut)

    def _refused(self, path: str, answer: aiohttp.ClientResponse, said: bytes) -> ServerRefused:
        where = answer.headers.get("Location")
        why = f"it redirects to {where}" if where else _quote(said) or "no reason given"
        return ServerRefused(f"{self.url}{path}: {answer.status}: {why}", answer.status)


class Lines:
    """Cuts what comes in pieces into lines, however long; the stream's own reader refuses long ones."""

    def __init__(self) -> None:
        self._begun: list[bytes] = []
        self.num_bytes_left = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """The lines that this piece ends."""
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
        """A line that has begun and not ended."""
        return b"".join(self._begun)


def _check(url: str) -> None:
    if url.startswith(f"{UNIX}/"):
        return
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # such as a port beyond all ports
        raise UserError(f"{url}: no URL of an engine; one is http://127.0.0.1:8000") from None
    if parts.username is not None or parts.password is not None:
        raise UserError(
            f"the URL of the engine at {parts.hostname} holds a name or password; give the key apart from it"
        )
    if not is_address or parts.query or parts.fragment:
        raise UserError(f"{url}: the engine's URL begins with http:// or https://, a host follows, and no ? or #")


def _quote(said: bytes) -> str:
    """The message of an error, or the beginning of whatever it was."""
    try:
        text = _message(msgspec.json.decode(said))
    except NOT_JSON:
        text = said.decode(errors="replace")
    text = " ".join(text.split())
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}…"


def _message(told: Any) -> str:
    while isinstance(told, dict):
        inner = (told.get(key) for key in ("error", "message", "detail"))
        found = next((value for value in inner if value and isinstance(value, str | dict | list)), None)
        if found is None:
            break
        told = found
    return told if isinstance(told, str) else str(told)
