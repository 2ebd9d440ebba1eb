"""What is done for the ledger's keep after each durable checkpoint: forget what no resume can need, and copy the rest.

Both run beside the work. A copy that fails, as when a bucket cannot be reached, is an alarm and not the run's end: the
ledger itself is where it was.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from offbeat.ledger.ledger import Ledger

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeepSettings:
    num_steps: int | None = None
    """Steps before the checkpoint whose bodies are kept; None: all."""
    backup: str | None = None
    """A folder or URL that gets a copy of the ledger."""


class Keeper:
    """Looks after one ledger; `call` runs a function on the ledger's thread, `tell` hears of events."""

    def __init__(
        self, ledger: Ledger, settings: KeepSettings, call: Callable[..., Awaitable[Any]], tell: Callable[..., None]
    ):
        self.ledger, self.settings, self._call, self._tell = ledger, settings, call, tell
        self._working = asyncio.Lock()

    async def after_checkpoint(self, step: int) -> None:
        async with self._working:
            if self.settings.num_steps is not None:
                pruned = await self._call(self.ledger.prune, step, self.settings.num_steps)
                if pruned.num_bodies:
                    self._tell({"event": "prune", "step": step, "bodies": pruned.num_bodies, "bytes": pruned.num_bytes})
            else:
                await self._call(self.ledger.sweep)  # large partials that something has continued
            if self.settings.backup is not None:
                await self._copy(step, self.settings.backup)

    async def _copy(self, step: int, target: str) -> None:
        try:
            made = await asyncio.to_thread(self.ledger.backup, target)  # it has a connection of its own
        except Exception as error:  # noqa: BLE001  # every store has errors of its own, and none may end the run
            log.warning("the ledger was not copied to %s: %s", target, error)
            self._tell({"event": "backup_failed", "step": step, "target": target, "error": str(error)})
        else:
            self._tell({"event": "backup", "step": step, "target": target, "bytes": made.num_bytes})
