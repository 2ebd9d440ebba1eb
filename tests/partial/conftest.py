"""The bug classes of partial rollouts, a file each."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory):
    """Versions 0 to 3, on disk."""
    from partial_scenes import write_version

    from offbeat.weights.publish import Publisher

    store = Publisher(tmp_path_factory.mktemp("weights"))
    return [write_version(store, number, number, number - 1 if number else None) for number in range(4)]
