"""Deletes weights that nobody can ask for any more: whole files with every version, pieces every few.

Both run beside the work, one at a time. What cannot be deleted now, as when a bucket is out of reach, is told and tried
again with a later version.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

from offbeat.errors import OffbeatError
from offbeat.weights.collect import EVERY, collect
from offbeat.weights.folder import WeightFolder
from offbeat.weights.manifest import Manifest
from offbeat.weights.pieces import PieceStore
from offbeat.weights.signing import open_sealed

log = logging.getLogger(__name__)


class Clearing:
    """The weights of one run, as the coordinator keeps them."""

    def __init__(self, folder: WeightFolder | None, pieces: PieceStore | None = None):
        self._folder, self._pieces = folder, pieces
        self._working = asyncio.Lock()

    async def files(self, in_use: Collection[int]) -> None:
        if self._folder is not None:
            await asyncio.to_thread(self._folder.keep, in_use)

    def is_due(self, number: int) -> bool:
        return self._pieces is not None and number % EVERY == 0

    async def pieces(self, needed: Collection[int], signers: Collection[str]) -> None:
        """What none of our trainers signed may be another run's, and is left alone."""
        if self._pieces is None:
            return

        def opened(sealed: bytes) -> Manifest:
            return Manifest.decode(open_sealed(sealed, signers))

        async with self._working:
            try:
                await asyncio.to_thread(collect, self._pieces, needed, opened)
            except (OffbeatError, OSError) as error:
                log.warning("weights that nobody needs were not deleted: %s", error)
