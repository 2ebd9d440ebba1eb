"""Endpoints of engine servers, at which no other user of the machine can call a server or impersonate it.

A server's control calls change its weights and unpickle their input. vLLM protects few of its paths with a key, so it
listens at a Unix socket in a folder that only this user can enter. SGLang cannot; it listens at a loopback port and
requires a key for every call but /health and /metrics. Another process may take the port before it is bound, so the
server also proves its identity by a secret model name. Key and name are drawn for each start and passed in the
environment: every user can read a command line.
"""

from __future__ import annotations

import secrets
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from offbeat.engines.http_calls import UNIX, Server, ServerAway
from offbeat.engines.protocol import EngineError
from offbeat.errors import UserError

HOST = "127.0.0.1"
SOCKET = "engine"
MAX_SOCKET_PATH_BYTES = 103
"""Longest socket path on every system; Linux allows 4 more."""
KEY, NAME = "OFFBEAT_SERVER_KEY", "OFFBEAT_SERVER_NAME"
"""Variables of the server's environment, as in sglang/inside/offbeat_in_sglang.py."""
CHECK_WITHIN_S = 5.0


class Endpoint(Protocol):
    """Address and credentials of one start of a server."""

    url: str
    key: str | None
    words: Sequence[str]
    """Options of the server's command line."""
    environment: dict[str, str]
    folder: str
    """Folder to delete after the server's end; "": none."""

    async def is_ours(self, server: Server) -> bool:
        """Whether the server that answers is the one we started; raises `ServerAway` without an answer."""
        ...


class SocketEndpoint:
    """A Unix socket in a folder that other users cannot enter."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="offbeat-")
        path = str(Path(self.folder) / SOCKET)
        if len(path.encode()) > MAX_SOCKET_PATH_BYTES:
            Path(self.folder).rmdir()
            raise UserError(f"TMPDIR = {tempfile.gettempdir()}: too long for the path of a socket; set a shorter one")
        self.url = f"{UNIX}{path}"
        self.key: str | None = None
        self.words: Sequence[str] = ("--uds", path)
        self.environment: dict[str, str] = {}

    async def is_ours(self, server: Server) -> bool:
        return True


class PortEndpoint:
    """A loopback port, with a key and a name that only our server knows."""

    def __init__(self) -> None:
        self.folder, port = "", _free_port()
        key, self._name = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self.url = f"http://{HOST}:{port}"
        self.key: str | None = key
        self.words: Sequence[str] = ("--host", HOST, "--port", str(port))
        self.environment = {KEY: key, NAME: self._name}

    async def is_ours(self, server: Server) -> bool:
        try:
            answer = await server.get("/v1/models", within_s=CHECK_WITHIN_S)
            return any(secrets.compare_digest(str(model["id"]), self._name) for model in answer["data"])
        except ServerAway:
            raise
        except (EngineError, LookupError, TypeError):
            return False


def new_endpoint(engine: str) -> Endpoint:
    return SocketEndpoint() if engine == "vllm" else PortEndpoint()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
