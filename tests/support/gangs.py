"""Gangs of real trainer ranks: as many processes, which run one function of a test and hand back what it returns.

    found = run_gang(2, train, "llama", exact=True)     # [what rank 0 returned, what rank 1 returned]

The function gets the gang, or None where there is one rank and no gang, and the other arguments. It must be a function
of a test module, and is called in processes of its own, with one thread each.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import inspect
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WITHIN_S = 120.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment_of(rank: int, size: int, port: int) -> dict[str, str]:
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", **{name: str(n) for name, n in place.items()}}


def run_gang(size: int, work: Callable[..., Any], *args: Any, alone: bool = False, **options: Any) -> list[Any]:
    """Returns each rank's result. With `alone`, a gang of one has no process group, as a trainer of one rank."""
    with tempfile.TemporaryDirectory() as folder:
        gang = Started(size, work, *args, alone=alone, folder=Path(folder), **options)
        return gang.results()


class Started:
    """A gang under way; its processes can be killed or stopped."""

    def __init__(self, size, work, *args, alone=False, folder: Path, lost_after_s=60.0, device="cpu", **options):
        self.folder, port = folder, free_port()
        self.ranks: list[subprocess.Popen[bytes]] = []
        task = (inspect.getsourcefile(work), work.__name__, alone, lost_after_s, device, args, options)
        (folder / "task").write_bytes(pickle.dumps(task))
        for rank in range(size):
            with (folder / f"rank{rank}.log").open("wb") as log:
                environment = {**os.environ, **environment_of(rank, size, port)}
                command = [sys.executable, __file__, str(folder), str(rank)]
                self.ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))

    def results(self) -> list[Any]:
        statuses = self.ended()
        assert statuses == [0] * len(statuses), "\n".join(self.log(rank) for rank in range(len(self.ranks)))
        return [pickle.loads((self.folder / f"rank{rank}.result").read_bytes()) for rank in range(len(self.ranks))]

    def ended(self, within_s: float = WITHIN_S) -> list[int | None]:
        """The exit status of each rank; None for one that still ran after so long, and is killed."""
        until_s, statuses = time.monotonic() + within_s, []
        for process in self.ranks:
            try:
                statuses.append(process.wait(max(until_s - time.monotonic(), 0.1)))
            except subprocess.TimeoutExpired:
                statuses.append(None)
        for process in self.ranks:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
        return statuses

    def log(self, rank: int) -> str:
        return (self.folder / f"rank{rank}.log").read_text()


def main(folder: Path, rank: int) -> None:
    import torch

    from offbeat.trainer.ranks import RankPlace, join_gang, meet

    faulthandler.dump_traceback_later(0.75 * WITHIN_S)  # for a rank that hangs
    source, name, alone, lost_after_s, device, args, options = pickle.loads((folder / "task").read_bytes())
    sys.path[:0] = [str(Path(__file__).parent), str(Path(source).parent)]
    spec = importlib.util.spec_from_file_location(Path(source).stem, source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.set_num_threads(1)
    gang, size = None, int(os.environ["WORLD_SIZE"])
    if not alone:
        place = RankPlace.of(os.environ) or RankPlace(0, 1, 0, 1, "127.0.0.1", int(os.environ["MASTER_PORT"]))
        assert (place.rank, place.size) == (rank, size)
        gang = join_gang(place, meet(place, WITHIN_S), torch.device(device), timeout_s=60.0, lost_after_s=lost_after_s)
    (folder / f"rank{rank}.result").write_bytes(pickle.dumps(getattr(module, name)(gang, *args, **options)))
    if gang is not None:
        gang.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
