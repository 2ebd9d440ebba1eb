from __future__ import annotations

import pytest
from http_run import LiveRun


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run for all tests of a file; each joins with workers of its own."""
    with LiveRun(tmp_path_factory.mktemp("run")) as live:
        yield live


@pytest.fixture
def worker(run):
    """The secret of a fresh worker."""
    return run.secret()


@pytest.fixture
def task(run, worker):
    """A task that the worker holds."""
    (leased,) = run.lease(worker)
    return leased


@pytest.fixture
def unchanged(run, request):
    """Asserts at the end that the ledger holds what it held when the test began; ask for it last."""
    run.settle()
    before = run.content()
    yield
    assert run.content() == before
    assert run.ledger.verify().violations == ()
