from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ledger_run import version

from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import LedgerTerms


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """A fresh ledger with version 0 of step 0; whatever a test did to it, its laws hold in the end."""
    with Ledger(
        tmp_path / "ledger.sqlite", LedgerTerms(min_group=2, max_attempts=2), wall_clock=lambda: 1_000_000.0
    ) as opened:
        opened.publish(version(0, 0))
        yield opened
        assert opened.verify().violations == ()
