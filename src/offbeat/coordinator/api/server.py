"""Serves the coordinator's API on a socket, inside a running event loop.

Guarantees: the server listens beyond this machine only with TLS, behind a proxy that terminates TLS, or if
`Address.is_plain` is set. Signal handlers are left alone. Between `start` and `open`, every call gets status 503. After
`stop`, no call is in progress and the port is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import uvicorn

from offbeat.coordinator.api.app import App
from offbeat.coordinator.api.connection_guard import guarded
from offbeat.coordinator.api.limits import ServerSettings
from offbeat.coordinator.api.state import ApiState, ServedRun
from offbeat.errors import UserError
from offbeat.net import is_this_machine


@dataclass(frozen=True, kw_only=True)
class Address:
    """Address to listen on, and the TLS certificate."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 takes any free port."""
    certificate: Path | None = None
    key: Path | None = None
    behind_proxy: bool = False
    """Whether a proxy in front terminates TLS and forwards the caller's address."""
    is_plain: bool = False
    """Whether to serve without TLS on a private network, so that secrets cross it unencrypted."""

    @property
    def has_tls(self) -> bool:
        return self.certificate is not None

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        return is_this_machine(self.host)

    def check(self) -> None:
        """Raises `UserError` if secrets would be sent unencrypted, or if the certificate does not work."""
        if (self.certificate is None) != (self.key is None):
            raise UserError("only one of serve.certificate and serve.key is set; set both or neither")
        if not (self.has_tls or self.behind_proxy or self.is_plain or is_this_machine(self.host)):
            raise UserError(
                f"serve.host = {self.host!r} is reachable from other machines, so TLS is needed; set serve.certificate "
                "and serve.key, or serve.behind_proxy if a proxy ends TLS, or listen on 127.0.0.1; within a private "
                'network, serve.certificate = "plain" turns TLS off'
            )
        for key, file in (("certificate", self.certificate), ("key", self.key)):
            if file is not None and not file.is_file():
                raise UserError(f"serve.{key} = {str(file)!r}: no such file; give a PEM file")
        if self.certificate is not None and self.key is not None:
            try:
                ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(self.certificate, self.key)
            except (OSError, ssl.SSLError) as error:
                raise UserError(
                    f"serve.certificate = {self.certificate} and serve.key = {self.key} cannot be used: {error}; give "
                    "a certificate and its private key as PEM files"
                ) from error


class HttpServer:
    """Serves the API of one run on one socket."""

    def __init__(self, served: ServedRun, address: Address, settings: ServerSettings | None = None):
        address.check()
        self.address, self.settings = address, settings or ServerSettings()
        self._served = replace(served, behind_proxy=address.behind_proxy)
        self._uvicorn: _Uvicorn | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts to listen; calls are refused with a Retry-After header until `open`."""
        listener = _bind(self.address)
        self.port: int = listener.getsockname()[1]
        self.state = ApiState(self._served, self.settings)
        self._uvicorn = _Uvicorn(self._config())
        self._serving = asyncio.create_task(self._uvicorn.serve(sockets=[listener]))
        listening = asyncio.create_task(self._uvicorn.listening.wait())
        await asyncio.wait({self._serving, listening}, return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        if self._serving.done():
            self._serving.result()

    def open(self) -> None:
        self.state.open()

    @property
    def url(self) -> str:
        host = f"[{self.address.host}]" if ":" in self.address.host else self.address.host
        return f"{'https' if self.address.has_tls else 'http'}://{host}:{self.port}"

    async def stop(self) -> None:
        """Ends the calls that wait for work or news, gives calls in progress `stop_within_s` seconds to finish, then
        closes all connections."""
        if self._uvicorn is None or self._serving is None:
            return
        self.state.drain()
        self._uvicorn.should_exit = True
        await self._serving
        for connection in list(self._uvicorn.server_state.connections):
            connection.transport.abort()
        await asyncio.gather(*self._uvicorn.server_state.tasks, return_exceptions=True)
        self.state.close()
        self._uvicorn = self._serving = None

    def _config(self) -> uvicorn.Config:
        address, settings = self.address, self.settings
        return uvicorn.Config(
            App(self.state),
            http=guarded(settings),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=address.behind_proxy,
            backlog=2048,
            limit_concurrency=settings.max_connections,
            timeout_keep_alive=settings.keep_alive_s,  # type: ignore[arg-type]  # uvicorn only passes it to call_later
            timeout_graceful_shutdown=settings.stop_within_s,  # type: ignore[arg-type]
            ssl_certfile=address.certificate,
            ssl_keyfile=None if address.key is None else os.fspath(address.key),
        )


class _Uvicorn(uvicorn.Server):
    """uvicorn server that installs no signal handlers and sets `listening` once it listens."""

    def __init__(self, config: uvicorn.Config):
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


def _bind(address: Address) -> socket.socket:
    try:
        family, _, _, _, name = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(name[:2], family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        reason = str(getattr(error, "strerror", None) or error).split(" (while")[0]
        raise UserError(
            f"serve.host = {address.host!r}, serve.port = {address.port}: cannot listen there: {reason}; choose "
            "another address, or port 0 for any free port"
        ) from error
