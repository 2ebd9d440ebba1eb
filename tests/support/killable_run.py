"""One life of a run in a process of its own, for a test that kills it: `killable_run.py FOLDER SAVE_EVERY ORDER`.

Every call that the ledger acknowledged is printed after it returned, as a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from blake3 import blake3
from ledger_life import Disk, live

from offbeat.ledger.ledger import Ledger


def tell(*what: object) -> None:
    os.write(1, (json.dumps(what) + "\n").encode())


class Acknowledging(Ledger):
    def admit(self, new):
        groups = super().admit(new)
        tell("admitted", [group.ordinal for group in new])
        return groups

    def submit(self, trajectories):
        outcomes = super().submit(trajectories)
        for trajectory, _, _ in trajectories:
            tell("stored", trajectory.task, blake3(trajectory.encode()).hexdigest())
        return outcomes

    def score(self, results):
        count = super().score(results)
        for result in results:
            tell("scored", result.task, None if result.rewards is None else result.rewards[0].value)
        return count

    def publish(self, version):
        super().publish(version)
        tell("published", version.number, version.digest)

    def commit(self, step, version, audited=()):
        super().commit(step, version, audited)
        tell("published", version.number, version.digest)


class FileDisk(Disk):
    """A disk that really is one."""

    def __init__(self, folder: Path):
        super().__init__(folder / "ledger.sqlite")
        self.file = folder / "checkpoint.json"
        if self.file.exists():
            step, number, weights = json.loads(self.file.read_text())
            self.checkpoint = (step, number, weights)

    def save(self, step: int, number: int, weights: str) -> None:
        super().save(step, number, weights)
        self.file.with_suffix(".new").write_text(json.dumps(self.checkpoint))
        self.file.with_suffix(".new").replace(self.file)


def main(folder: str, save_every: str, order: str) -> None:
    disk = FileDisk(Path(folder))
    for _ in live(
        disk,
        save_every=int(save_every),
        saves_before_commit=int(order) % 2 == 0,
        capacity=3,
        order=int(order),
        open_ledger=Acknowledging,
    ):
        pass
    tell("done", disk.trained)


if __name__ == "__main__":
    main(*sys.argv[1:])
