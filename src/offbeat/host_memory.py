"""Memory of this machine, or of its container."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
M_MMAP_THRESHOLD = -3
"""The option of glibc's `mallopt` that sets from which size on memory is mapped."""


def host_memory() -> tuple[int, int]:
    """Returns free and total memory in bytes: of the container if it limits memory below the machine's, otherwise of
    this machine."""
    values = dict(re.findall(r"^(\w+):\s+(\d+) kB$", _read_text(Path("/proc/meminfo")), re.MULTILINE))
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = int(values["MemAvailable"]) * 1024 if "MemAvailable" in values else total
    limit, used = _read_text(CGROUP / "memory.max"), _read_text(CGROUP / "memory.current")
    if limit.isdigit() and used.isdigit() and int(limit) < total:
        cached = re.search(r"^inactive_file (\d+)$", _read_text(CGROUP / "memory.stat"), re.MULTILINE)
        needed = int(used) - (int(cached[1]) if cached else 0)  # files that were read or written count as used
        total, free = int(limit), min(free, max(0, int(limit) - needed))
    return free, total


def return_freed_blocks(num_bytes: int) -> bool:
    """Makes glibc return each freed block of at least `num_bytes` to the system; returns whether it does.

    Otherwise glibc keeps freed blocks of up to 32 MB in its heap, where a new aligned tensor does not fit into the gap
    that an equally large one has left. A process that gathers a model's layers again and again then comes to hold twice
    the whole model."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None  # glibc alone has it
    return mallopt is not None and bool(mallopt(M_MMAP_THRESHOLD, num_bytes))


def _read_text(file: Path) -> str:
    return file.read_text().strip() if file.is_file() else ""
