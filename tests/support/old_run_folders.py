"""Run folders that an older Offbeat made, to be resumed by this one.

`old_runs/8bc9d68.tar.xz` holds two runs of that commit, their model of 3,000 parameters and their reward function:
`alone`, one process, killed after five steps with partial trajectories, its ledger still in the write-ahead log; and
`swarm`, a coordinator, a trainer and a worker as processes, which finished its four steps. To make one for another
commit: `git archive COMMIT src`, then run that source with such settings (they are in each config.json).
"""

from __future__ import annotations

import tarfile
from pathlib import Path

ARCHIVE = Path(__file__).parent / "old_runs" / "8bc9d68.tar.xz"
SCHEMA = 5


def unpack(folder: Path) -> Path:
    """The folder that a resumed run must be started in: paths in its configuration are relative."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder
