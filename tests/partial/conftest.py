"""The bug classes of partial rollouts, a file each; they borrow helpers from the tests of workers and of the ledger."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
sys.path += [str(TESTS / folder) for folder in ("rollout", "serve", "ledger")]  # after those of the tests' own


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory):
    """Versions 0 to 3, on disk."""
    from partial_scenes import write_version

    from offbeat.weights.publish import Publisher

    store = Publisher(tmp_path_factory.mktemp("weights"))
    return [write_version(store, number, number, number - 1 if number else None) for number in range(4)]
