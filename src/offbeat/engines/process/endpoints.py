"""Endpoints of engine servers that no other user of the machine can call or impersonate.

A server's control calls change its weights and unpickle their input, so they must be protected. Our vLLM process
listens at a Unix socket in a folder that other users cannot enter. SGLang supports no sockets; it listens at a loopback
port and requires a key for every call but /health and /metrics. Another process may take the port before SGLang binds
it, so the server also proves its identity by a secret model name. Key and name are random for each start and passed in
the environment, because every user can read a command line.
"""

from __future__ import annotations

import secrets
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offbeat.engines.http_calls import UNIX, Server, ServerAway
from offbeat.engines.protocol import EngineError
from offbeat.engines.vllm.direct import Channel
from offbeat.errors import UserError

HOST = "127.0.0.1"
HEALTH = "/health"
SOCKET = "engine"
MAX_SOCKET_PATH_BYTES = 103
"""Longest socket path that every operating system allows."""
KEY, NAME = "OFFBEAT_SERVER_KEY", "OFFBEAT_SERVER_NAME"
"""Environment variables of the server; sglang/inside/offbeat_in_sglang.py reads them by the same names."""
CHECK_WITHIN_S = 5.0


@dataclass(frozen=True)
class Endpoint:
    """Address and credentials for one start of an HTTP server; every start gets new ones."""

    url: str
    words: Sequence[str]
    """Command-line options that make the server listen at `url`."""
    folder: str = ""
    """Folder to delete after the server has ended; "": none."""
    key: str | None = None
    name: str = ""
    """Model name that only our server knows; "": not needed, because no other process can listen here."""

    @property
    def environment(self) -> dict[str, str]:
        return {KEY: self.key, NAME: self.name} if self.key else {}

    async def answers(self) -> bool:
        """Whether the server that answers at `url` is the one we started; raises an `EngineError` if none answers
        yet."""
        server = Server(self.url, api_key=self.key)
        try:
            await server.text(HEALTH, within_s=CHECK_WITHIN_S)
            return await self._is_ours(server)
        finally:
            await server.close()

    async def _is_ours(self, server: Server) -> bool:
        if not self.name:
            return True
        try:
            answer = await server.get("/v1/models", within_s=CHECK_WITHIN_S)
            return any(secrets.compare_digest(str(model["id"]), self.name) for model in answer["data"])
        except ServerAway:
            raise
        except (EngineError, LookupError, TypeError):
            return False


class DirectEndpoint(Endpoint):
    """Address for one start of our vLLM process."""

    async def answers(self) -> bool:
        channel = Channel(self.url)
        try:
            await channel.ask("label", within_s=CHECK_WITHIN_S)
        finally:
            await channel.close()
        return True


def direct_endpoint() -> DirectEndpoint:
    path = new_socket()
    return DirectEndpoint(f"{UNIX}{path}", ("--socket", path), str(Path(path).parent))


def new_socket() -> str:
    """Returns a path for a Unix socket, in a new folder that other users cannot enter."""
    folder = tempfile.mkdtemp(prefix="offbeat-")
    path = str(Path(folder) / SOCKET)
    if len(path.encode()) > MAX_SOCKET_PATH_BYTES:
        Path(folder).rmdir()
        raise UserError(f"TMPDIR = {tempfile.gettempdir()}: too long for a socket in it; set it to a shorter path")
    return path


def port_endpoint() -> Endpoint:
    """Returns an endpoint at a free loopback port, with a key and a name that only our server knows."""
    port, key, name = _free_port(), secrets.token_urlsafe(32), secrets.token_urlsafe(32)
    return Endpoint(f"http://{HOST}:{port}", ("--host", HOST, "--port", str(port)), key=key, name=name)


def new_endpoint(engine: str) -> Endpoint:
    return direct_endpoint() if engine == "vllm" else port_endpoint()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
