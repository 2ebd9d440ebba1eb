"""The ledger: the durable record of groups, tasks, trajectories, rewards, batches and versions.

The ledger is the only buffer and the only data cursor: a run that is killed at any moment continues from it. Every
method that changes something is one transaction, which is on disk when the method returns; if the method raises,
nothing changed. Methods are synchronous; one thread at a time may call them, not necessarily the one that opened the
ledger. `offbeat.rules` decides which groups to admit, lease, claim and drop; the ledger loads the candidates and stores
the decision.

When a coordinator starts and no worker from before can still be working, it first calls `release`, which reopens all
leased tasks. Every start of the trainer, new or resumed, then calls `reconcile` and `publish`. After that, every step
goes through `admit`, `lease`, `submit`, `score`, `claim` and `commit`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from offbeat.ledger.database import transactional
from offbeat.ledger.leasing import Leasing
from offbeat.ledger.maintenance import Maintenance
from offbeat.ledger.resume import Resuming
from offbeat.ledger.rewards import Rewards
from offbeat.ledger.submissions import Submissions
from offbeat.ledger.verify import Verification
from offbeat.ledger.workers import Workers


class Ledger(Leasing, Submissions, Rewards, Resuming, Maintenance, Workers, Verification):
    """The whole ledger, over one `Database`. Each base class is a part of it, in a module of its own."""

    @transactional
    def record_fixed_keys(self, fixed: Mapping[str, Any]) -> None:
        """Records the configuration values that may not change during the run; later calls have no effect."""
        self.execute("INSERT OR IGNORE INTO meta VALUES ('rules', ?)", (json.dumps(fixed),))

    def recorded_fixed_keys(self) -> dict[str, Any] | None:
        """Returns the values recorded by `record_fixed_keys`; None if the run never began."""
        row = self.execute("SELECT value FROM meta WHERE key = 'rules'").fetchone()
        return None if row is None else json.loads(row[0])
