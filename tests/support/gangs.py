"""Gangs of real trainer ranks: as many processes, which run one function of a test and hand back what it returns.

    found = run_gang(2, train, "llama", exact=True)     # [what rank 0 returned, what rank 1 returned]

The function gets the gang, or None where there is one rank and no gang, and the other arguments. It must be a function
of this module or of a test module, and is called in processes of its own, with one thread each.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from offbeat.trainer.ranks import Gang, RankPlace, join_gang, meet

WITHIN_S = 120.0
_context = multiprocessing.get_context("fork")  # importing torch anew would take seconds


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def place_of(rank: int, size: int, port: int) -> RankPlace:
    return RankPlace(rank, size, rank, size, "127.0.0.1", port)


def run_gang(size: int, work: Callable[..., Any], *args: Any, alone: bool = False, **options: Any) -> list[Any]:
    """What each rank returned. With `alone`, a gang of one has no process group, as a trainer of one rank."""
    with tempfile.TemporaryDirectory() as folder:
        gang = Started(size, work, *args, alone=alone, folder=Path(folder), **options)
        return gang.results()


class Started:
    """A gang under way; its processes can be killed or stopped."""

    def __init__(self, size, work, *args, alone=False, folder: Path, come_within_s=60.0, lost_after_s=20.0, **options):
        self.folder, port = folder, free_port()
        self.ranks = []
        for rank in range(size):
            place = None if alone else place_of(rank, size, port)
            given = (folder, rank, place, come_within_s, lost_after_s, work, args, options)
            self.ranks.append(_context.Process(target=_in_child, args=given))
            self.ranks[-1].start()

    def results(self) -> list[Any]:
        statuses = self.ended()
        logs = [(self.folder / f"rank{i}.log").read_text() for i in range(len(self.ranks))]
        assert statuses == [0] * len(statuses), "\n".join(logs)
        return [torch.load(self.folder / f"rank{i}.pt", weights_only=False) for i in range(len(self.ranks))]

    def ended(self, within_s: float = WITHIN_S) -> list[int | None]:
        try:
            for process in self.ranks:
                process.join(within_s)
            return [process.exitcode for process in self.ranks]
        finally:
            for process in self.ranks:
                if process.is_alive():
                    os.kill(process.pid, signal.SIGKILL)
                    process.join()

    def log(self, rank: int) -> str:
        return (self.folder / f"rank{rank}.log").read_text()


def _in_child(folder, rank, place, come_within_s, lost_after_s, work, args, options) -> None:
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = sys.stderr = os.fdopen(log, "w", buffering=1)  # in place of those that pytest reads
    status = 1
    try:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        gang: Gang | None = None
        if place is not None:
            store = meet(place, come_within_s)
            gang = join_gang(place, store, torch.device("cpu"), timeout_s=60.0, lost_after_s=lost_after_s)
        torch.save(work(gang, *args, **options), folder / f"rank{rank}.pt")
        if gang is not None:
            gang.end()
        status = 0
    except Exception:  # noqa: BLE001 - a test function may raise anything
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
