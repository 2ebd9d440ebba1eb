"""An S3-compatible server for the tests of this folder, started when the first of them asks; pieces and stores of
peers."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from peer_machines import name
from s3_server import KEY, SECRET, S3Server

from offbeat.weights.piece_store import FolderStore


@pytest.fixture(scope="session")
def s3_process() -> Iterator[S3Server]:
    for package in ("fsspec", "s3fs", "moto", "flask_cors"):
        pytest.importorskip(package, reason=f"a real S3 server and its client need {package}")
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def s3(s3_process: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """With a bucket named `bucket`, and this process told how to reach it."""
    import fsspec

    options = {"endpoint_url": s3_process.endpoint, "key": KEY, "secret": SECRET}
    monkeypatch.setitem(fsspec.config.conf, "s3", options)
    s3_process.make_bucket("bucket")
    yield s3_process
    s3_process.break_()


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
