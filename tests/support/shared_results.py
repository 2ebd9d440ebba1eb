"""Costly results that all processes of one test run share: one of them works one out, the others wait for it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable

import pytest


def shared(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[], str]) -> str:
    """What `make` returns, which is called once in a test run. One that fails is tried again by whoever asks next."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers
    file = folder / f"{name}.json"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            file.write_text(json.dumps(make()))
    return json.loads(file.read_text())
