"""Where an engine's server listens, so that no other user of the machine can call it, or pass for it.

A server's control calls change its weights and unpickle what they are sent. vLLM guards few of its paths with a key, so
it listens at a Unix socket in a folder that only this user can enter. SGLang has no such socket. It listens at a port
of loopback and asks for a key with every call but /health and /metrics. A port can be taken by anyone until it is
bound, so it also has to prove, by a name that nobody else was told, that it is the server that we started. Key and name
are drawn for each start, and reach the server by its environment: every user can read a command line.
"""

from __future__ import annotations

import secrets
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from offbeat.errors import UserError
from offbeat.rollout.engine import EngineError
from offbeat.rollout.engines.served.http import UNIX, Server, ServerAway

HOST = "127.0.0.1"
SOCKET = "engine"
MAX_SOCKET_PATH_BYTES = 103
"""What every system can name a socket by; Linux takes 4 more."""
KEY, NAME = "OFFBEAT_SERVER_KEY", "OFFBEAT_SERVER_NAME"
"""Variables of the server's environment, as in inside_sglang/offbeat_in_sglang.py."""
LOOK_WITHIN_S = 5.0


class Door(Protocol):
    """One start's way in."""

    url: str
    key: str | None
    words: Sequence[str]
    """For the server's command line."""
    environment: dict[str, str]
    folder: str
    """To be deleted once the server is gone; "": none."""

    async def is_ours(self, server: Server) -> bool:
        """Whether whoever answers is the server that we started; raises `ServerAway` where nobody does."""
        ...


class SocketDoor:
    """A Unix socket in a folder of its own, which the kernel closes to other users."""

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


class PortDoor:
    """A port of loopback, with a key and a name that only our server knows."""

    def __init__(self) -> None:
        self.folder, port = "", _free_port()
        key, self._name = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self.url = f"http://{HOST}:{port}"
        self.key: str | None = key
        self.words: Sequence[str] = ("--host", HOST, "--port", str(port))
        self.environment = {KEY: key, NAME: self._name}

    async def is_ours(self, server: Server) -> bool:
        try:
            told = await server.get("/v1/models", within_s=LOOK_WITHIN_S)
            return any(secrets.compare_digest(str(model["id"]), self._name) for model in told["data"])
        except ServerAway:  # not yet, or not any more
            raise
        except (EngineError, LookupError, TypeError):
            return False


def door_of(engine: str) -> Door:
    """A new one for a server of `engine`."""
    return SocketDoor() if engine == "vllm" else PortDoor()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
