"""Probes of the machine: cores, memory, limits, clocks, GPU drivers and ports."""

from __future__ import annotations

import os
import platform
import resource
import socket
import time
from pathlib import Path

from offbeat.launch.doctor.seen import Machine, Ports

LOOPBACK = "127.0.0.1"
DRIVERS = {"NVIDIA": "/proc/driver/nvidia/version", "AMD": "/dev/kfd"}
SHM = Path("/dev/shm")
CGROUP = Path("/sys/fs/cgroup")
TICK_S = 0.01


def look_at_machine() -> Machine:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shm = os.statvfs(SHM) if SHM.is_dir() else None
    before = time.monotonic()
    time.sleep(TICK_S)
    total, free = _memory()
    return Machine(
        cpu=_cpu(),
        num_cores=_num_cores(),
        total_bytes=total,
        free_bytes=free,
        max_files=soft,
        max_files_hard=hard,
        shm_bytes=shm.f_blocks * shm.f_frsize if shm else None,
        shm_free_bytes=shm.f_bavail * shm.f_frsize if shm else None,
        gpu_drivers=[maker for maker, file in DRIVERS.items() if os.path.exists(file)],
        wall_s=time.time(),
        monotonic_moves=time.monotonic() > before,
    )


def look_at_ports(host: str, port: str) -> Ports:
    """Listens for a moment where the coordinator would; at port 0, anywhere on this machine."""
    return Ports(_listen(LOOPBACK, 0), _listen(host, int(port)) if int(port) else "")


def _listen(host: str, port: int) -> str:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the coordinator does
            listener.bind(address)
            listener.listen()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _num_cores() -> int:
    """Those that we may run on, and no more than a container's share of time adds up to."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(CGROUP / "cpu.max").partition(" ")
    return max(1, min(cores, round(int(quota) / int(period)))) if quota.isdigit() and period.isdigit() else cores


def _memory() -> tuple[int | None, int | None]:
    """Total and free; a container's limit counts where it is lower."""
    lines = [line.split() for line in _read(Path("/proc/meminfo")).splitlines()]
    told = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) == 3}
    if not told:
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return (pages, None) if pages > 0 else (None, None)
    total, free = told["MemTotal"], told["MemAvailable"]
    limit, used = _read(CGROUP / "memory.max"), _read(CGROUP / "memory.current")
    if limit.isdigit() and used.isdigit() and int(limit) < total:
        total, free = int(limit), min(free, max(0, int(limit) - int(used)))
    return total, free


def _cpu() -> str:
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _read(file: Path) -> str:
    """A file's text; none where there is no such file here."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
