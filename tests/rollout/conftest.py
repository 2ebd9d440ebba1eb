"""What the tests of a worker and of its peers share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from peer_machines import name

from offbeat.weights.pieces import FolderStore
from offbeat.weights.version import Version


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Version]:
    """Versions 0 to 5, on disk."""
    import torch  # here, because most tests beside these do without it

    from offbeat.weights.publish import Publisher

    store = Publisher(tmp_path_factory.mktemp("weights"))
    return [store.write(n, n, n - 1 if n else None, {"w": torch.full((2,), float(n))}) for n in range(6)]


@pytest.fixture
def data() -> bytes:
    """A piece."""
    return os.urandom(300_000)


@pytest.fixture
def root_store(tmp_path: Path, data: bytes) -> FolderStore:
    """That of the coordinator, which has the piece."""
    store = FolderStore(tmp_path / "root")
    store.put(name(data), data)
    return store


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    """That of a peer, empty."""
    return FolderStore(tmp_path / "peer")
