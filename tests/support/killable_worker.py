"""A worker in a process of its own, for a test that kills it: `killable_worker.py SPOOL WEIGHTS`.

Its coordinator is the other end of its pipes: what it submits is printed as a line of JSON and never answered.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from fake_coordinator import Desk, a_task

from offbeat.ledger.records import Outcome
from offbeat.testing.paced import PacedEngine, PacedSettings
from offbeat.trajectory import Trajectory
from offbeat.weights.version import Version
from offbeat.worker.spool import Spool
from offbeat.worker.worker import Worker


class Deaf(Desk):
    async def submit(self, trajectory: Trajectory, fence: int) -> Outcome:
        os.write(1, (json.dumps([trajectory.task, fence, trajectory.tokens.tolist()]) + "\n").encode())
        await asyncio.Event().wait()
        raise AssertionError("nobody answers")


async def main(spool: str, version: str) -> None:
    desk = Deaf()
    number, digest, path = json.loads(version)
    desk.publish(Version(number, number, None, digest, Path(path)))
    desk.add(*(a_task(n, 5 + 3 * n) for n in range(4)))
    engine = PacedEngine(PacedSettings(base_s=0.005, num_slots=4))
    await Worker("w", engine, desk, spool=Spool(Path(spool))).run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
