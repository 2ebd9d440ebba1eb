"""Weights into a vLLM server by way of files, which it reads itself."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from pathlib import Path
from typing import Protocol

from offbeat.rollout.engine import EngineError
from offbeat.rollout.engines.served.http import Server
from offbeat.weights.version import Version

LOAD_WITHIN_S = 600.0


class Transfer(Protocol):
    """A way for weights into a server that is paused."""

    async def stage(self, version: Version) -> None: ...

    async def load(self, server: Server, version: Version) -> None: ...


class FromPath:
    """The server reads the version's files itself, while nothing is generated.

    It reads them by names of their own: a version that the run needs no more may be deleted at any moment, and a reload
    that finds no files leaves the server without weights.
    """

    def __init__(self) -> None:
        self._linked: Path | None = None

    async def stage(self, version: Version) -> None:
        self._drop()
        try:
            self._linked = await asyncio.to_thread(_link, version.path.absolute())
        except OSError as error:
            raise EngineError(
                f"version {version.number}: cannot be read from {version.path}: {error.strerror}"
            ) from error

    async def load(self, server: Server, version: Version) -> None:
        assert self._linked is not None, "stage it first"
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(self._linked)}}
        try:
            await server.post("/collective_rpc", body, within_s=LOAD_WITHIN_S)
        finally:
            self._drop()

    def _drop(self) -> None:
        if self._linked is not None:
            shutil.rmtree(self._linked, ignore_errors=True)
            self._linked = None


def _link(folder: Path) -> Path:
    """A folder beside a version's with the same files in it, which take no space of their own."""
    linked = Path(tempfile.mkdtemp(prefix=f".{folder.name}.served-", dir=folder.parent))
    try:
        for file in folder.iterdir():
            os.link(file, linked / file.name)
    except OSError:
        shutil.rmtree(linked, ignore_errors=True)
        raise
    return linked
