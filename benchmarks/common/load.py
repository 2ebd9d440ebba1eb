"""CPU time that other processes used during a benchmark. Figures measured on a busy machine are doubtful."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

PROC_STAT = Path("/proc/stat")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Load:
    """Counts from its construction on. Child processes count as ours once they have ended and were waited for."""

    def __init__(self) -> None:
        self._start_s, self._busy_s, self._steal_s, self._ours_s = time.monotonic(), *_machine_s(), _ours_s()

    def shares(self) -> dict[str, float]:
        """Shares of all cores' time used by other processes, and stolen by the host; 0 where /proc/stat is missing."""
        busy_s, steal_s = _machine_s()
        cores_s = (time.monotonic() - self._start_s) * (os.cpu_count() or 1)
        others_s = busy_s - self._busy_s - (_ours_s() - self._ours_s)
        return {
            "others_share_of_cores": round(max(others_s, 0.0) / cores_s, 3),
            "steal_share_of_cores": round((steal_s - self._steal_s) / cores_s, 3),
        }


def _machine_s() -> tuple[float, float]:
    """Returns the CPU seconds of all cores so far: those used by any process, and those stolen by the host."""
    if not PROC_STAT.is_file():
        return _ours_s(), 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, PROC_STAT.read_text().split()[1:9])
    return (user + nice + system + irq + softirq) / TICKS_PER_S, steal / TICKS_PER_S


def _ours_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
