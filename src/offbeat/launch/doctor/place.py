"""Probe of the disk where runs are kept: space, kind, how long a flush takes, and what time it believes it is."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from offbeat.errors import UserError
from offbeat.launch.doctor.seen import Place
from offbeat.ledger.database import network_file_system

NUM_FLUSHES = 5
PAGE = bytes(4096)


def look_at_place(folder: str) -> Place:
    """Writes a small file there, or in the nearest folder above that exists, and takes it away again."""
    wanted = Path(folder).absolute()
    place = next(path for path in (wanted, *wanted.parents) if path.exists())
    if not place.is_dir():
        raise UserError(f'run.dir = "{folder}": {place} is a file; give a folder')
    try:
        fsync_s, clock_gap_s = _write(place)
    except OSError as error:
        raise UserError(f'run.dir = "{folder}": nothing can be written in {place}: {error.strerror}') from error
    space = shutil.disk_usage(place)
    return Place(str(wanted), space.total, space.free, network_file_system(place), fsync_s, clock_gap_s)


def _write(place: Path) -> tuple[float, float]:
    """The median time of a flush, and by how much the file system's clock is ahead."""
    taken = []
    with tempfile.TemporaryFile(dir=place, prefix=".offbeat-doctor-") as file:
        for _ in range(NUM_FLUSHES):
            begin = time.monotonic()
            before = time.time()
            file.write(PAGE)
            file.flush()
            os.fsync(file.fileno())
            after = time.time()
            taken.append(time.monotonic() - begin)
        stamp = os.fstat(file.fileno()).st_mtime
    gap = min(stamp - before, 0.0) + max(stamp - after, 0.0)  # none where it lies between the two
    return statistics.median(taken), gap
