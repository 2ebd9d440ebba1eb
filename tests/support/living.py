"""Whether a process of a test still runs."""

from pathlib import Path


def is_alive(pid: int) -> bool:
    """Whether a process can still do anything. A dead one is listed until its parent has noticed, and may vanish
    between opening its file and reading it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
