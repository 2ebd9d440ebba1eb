"""Findings about what surrounds a run: disk, clocks, limits, ports. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterator

from offbeat.config.arithmetic import size
from offbeat.launch.doctor.finding import Finding, Level, room
from offbeat.launch.doctor.needs import Needs
from offbeat.launch.doctor.seen import Failed, Seen

RELEASE_YEAR = 2026
"""A clock that is behind it was never set: certificates would be refused, and names of runs mislead."""
SLOW_FSYNC_S = 0.05
"""Every answer waits for a flush before it is acknowledged."""
MAX_CLOCK_GAP_S = 2.0
MIN_FILES = 1024
"""A connection for each worker, files of the ledger, of weights and of reward processes."""
NO_LIMIT = 2**62
"""What stands for none is -1 on some systems and the largest number on others."""
MIN_SHM_BYTES = 2**30
"""What the processes of one engine hand each other; containers are often given 64 MB."""


def disk(seen: Seen, needs: Needs) -> Iterator[Finding]:
    told = seen.place
    if isinstance(told, Failed):
        is_ours = told.failed.startswith("run.dir")
        remedy = "--run.dir FOLDER names a local folder that you may write to" if is_ours else ""
        yield Finding("disk", told.failed, Level.STOPS, remedy)
        return
    num_parameters = None if isinstance(seen.model, Failed) else seen.model.num_parameters
    wanted = needs.disk_bytes(num_parameters)
    what = "a run takes at most" if num_parameters else "trajectories take at most"
    room = f"{size(told.free_bytes)} free of {size(told.total_bytes)} in {told.folder}; {what} {size(wanted)}"
    is_short = wanted > told.free_bytes
    remedy = "free space, --run.dir FOLDER elsewhere, or --checkpoint.keep 1" if is_short else ""
    yield Finding("disk", room, Level.WARNS if is_short else Level.FINE, remedy)
    if told.network:
        yield Finding(
            "file system",
            f"{told.network}, over the network, where SQLite can lose data",
            Level.STOPS,
            "--run.dir FOLDER on a local disk; --ledger.backup and --weights.store may be anywhere",
        )
    slow = told.fsync_s > SLOW_FSYNC_S
    yield Finding(
        "fsync",
        f"{told.fsync_s * 1000:.1f} ms" + ("; answers wait for it before they are acknowledged" if slow else ""),
        Level.WARNS if slow else Level.FINE,
        "--run.dir FOLDER on a faster disk" if slow else "",
    )


def clocks(seen: Seen, needs: Needs) -> Iterator[Finding]:
    if isinstance(seen.machine, Failed):
        return
    told = seen.machine
    now = time.gmtime(told.wall_s)
    yield Finding("clock", time.strftime("%Y-%m-%d %H:%M:%S UTC", now))
    if now.tm_year < RELEASE_YEAR:
        yield Finding("clock", f"stands in {now.tm_year}", Level.WARNS, "sudo timedatectl set-ntp true")
    if not told.monotonic_moves:
        yield Finding("clock", "the monotonic clock stands still, and every deadline with it", Level.STOPS, "reboot")
    if not isinstance(seen.place, Failed) and abs(seen.place.clock_gap_s) > MAX_CLOCK_GAP_S:
        gap = seen.place.clock_gap_s
        yield Finding(
            "clock",
            f"the file system's is {abs(gap):.0f} s {'ahead of' if gap > 0 else 'behind'} this machine's",
            Level.WARNS,
            "sudo timedatectl set-ntp true, here and on the file server",
        )


def limits(seen: Seen, needs: Needs) -> Iterator[Finding]:
    if isinstance(seen.machine, Failed):
        return
    told = seen.machine
    few = 0 <= told.max_files < MIN_FILES
    yield Finding(
        "open files",
        f"at most {told.max_files:,}" if 0 <= told.max_files < NO_LIMIT else "no limit",
        Level.WARNS if few else Level.FINE,
        f"ulimit -n {MIN_FILES * 4}" if few else "",
    )
    if told.shm_bytes is None or told.shm_free_bytes is None:
        return
    short = told.shm_free_bytes < MIN_SHM_BYTES and needs.is_served and not needs.engine_url
    yield Finding(
        "shared memory",
        room(told.shm_free_bytes, told.shm_bytes),
        Level.WARNS if short else Level.FINE,
        "mount -o remount,size=8G /dev/shm; for a container, --shm-size 8g" if short else "",
    )


def ports(seen: Seen, needs: Needs) -> Iterator[Finding]:
    told = seen.ports
    is_needed = needs.has_roles or needs.port > 0
    if isinstance(told, Failed):
        yield Finding("ports", told.failed, Level.WARNS)
        return
    if told.loopback_fault:
        level = Level.STOPS if is_needed else Level.WARNS
        yield Finding("ports", f"none of 127.0.0.1: {told.loopback_fault}", level, "let processes listen on 127.0.0.1")
    elif not told.serve_fault:
        yield Finding("ports", f"{needs.host}:{needs.port} is free" if needs.port else "127.0.0.1 has free ones")
    if told.serve_fault:
        place = f'serve.host = "{needs.host}", serve.port = {needs.port}'
        yield Finding("ports", f"{place}: {told.serve_fault}", Level.STOPS, "--serve.port 0, or end what listens there")
