"""Background upkeep: after checkpoints, deletes old trajectories and backs up the ledger; deletes unneeded weights.

A failed backup is reported but does not end the run: the ledger itself is intact.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any

from offbeat.errors import OffbeatError
from offbeat.ledger.ledger import Ledger
from offbeat.weights.collect import EVERY, collect
from offbeat.weights.manifest import Manifest
from offbeat.weights.piece_store import PieceStore
from offbeat.weights.signing import open_sealed
from offbeat.weights.version import WeightFolder

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MaintenanceSettings:
    """How long trajectories are kept, and where the ledger is backed up."""

    num_steps: int | None = None
    """Trajectories of this many steps before the checkpoint are kept; None: those of all steps."""
    backup: str | None = None
    """Folder or URL to copy the ledger to; None: no backups."""


class LedgerMaintenance:
    """Prunes and backs up one ledger. `call` runs a function on the ledger's thread; `report` receives each event."""

    def __init__(
        self,
        ledger: Ledger,
        settings: MaintenanceSettings,
        call: Callable[..., Awaitable[Any]],
        report: Callable[..., None],
    ):
        self.ledger, self.settings, self._call, self._report = ledger, settings, call, report
        self._working = asyncio.Lock()

    async def after_checkpoint(self, step: int) -> None:
        async with self._working:
            if self.settings.num_steps is not None:
                pruned = await self._call(self.ledger.prune, step, self.settings.num_steps)
                if pruned.num_bodies:
                    self._report(
                        {"event": "prune", "step": step, "bodies": pruned.num_bodies, "bytes": pruned.num_bytes}
                    )
            else:
                await self._call(self.ledger.sweep)  # deletes large partials that have been continued
            if self.settings.backup is not None:
                await self._copy(step, self.settings.backup)

    async def _copy(self, step: int, target: str) -> None:
        try:
            made = await asyncio.to_thread(self.ledger.backup, target)  # uses a connection of its own
        except Exception as error:  # noqa: BLE001  # each store raises its own errors; no failed backup may end the run
            log.warning(
                "the ledger could not be backed up to %s: %s; the run continues without this backup", target, error
            )
            self._report({"event": "backup_failed", "step": step, "target": target, "error": str(error)})
        else:
            self._report({"event": "backup", "step": step, "target": target, "bytes": made.num_bytes})


class WeightGarbageCollector:
    """Deletes weights that no worker or trainer can ask for any more: files of whole versions at every new version, and
    the pieces in which versions are transferred at every `EVERY`-th version.

    One deletion of pieces runs at a time. If it fails, the error is logged and the deletion is tried again with a later
    version.
    """

    def __init__(self, folder: WeightFolder | None, pieces: PieceStore | None = None):
        self._folder, self._pieces = folder, pieces
        self._working = asyncio.Lock()

    async def files(self, in_use: Collection[int]) -> None:
        if self._folder is not None:
            await asyncio.to_thread(self._folder.keep, in_use)

    def is_due(self, number: int) -> bool:
        return self._pieces is not None and number % EVERY == 0

    async def pieces(self, needed: Collection[int], signers: Collection[str]) -> None:
        """Deletes stored pieces and manifests of versions. Spares the versions in `needed`, the newest version, and
        every version from which one of these is reconstructed. Also spares manifests that were not signed with a key in
        `signers`, the keys of this run's trainers: they may belong to another run."""
        if self._pieces is None:
            return

        def opened(sealed: bytes) -> Manifest:
            return Manifest.decode(open_sealed(sealed, signers))

        async with self._working:
            try:
                await asyncio.to_thread(collect, self._pieces, needed, opened)
            except (OffbeatError, OSError) as error:
                log.warning("unneeded weights could not be deleted: %s; trying again at a later version", error)
