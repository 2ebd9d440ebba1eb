"""An S3-compatible server for the tests of this folder, started when the first of them asks."""

from collections.abc import Iterator

import pytest
from s3_server import KEY, SECRET, S3Server


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
