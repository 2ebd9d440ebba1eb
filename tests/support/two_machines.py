"""Two machines on one: network namespaces, each with a loopback device of its own, joined by a cable."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

HOME, AWAY = "10.0.0.1", "10.0.0.2"


class NotPermitted(Exception):
    """Network namespaces cannot be made here; says why."""


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise NotPermitted(f"ip {' '.join(words)}: {done.stderr.strip()}")


@contextmanager
def two_machines() -> Iterator[tuple[list[str], list[str]]]:
    """Yields, for each machine, the words that run a command there; their addresses are `HOME` and `AWAY`."""
    if shutil.which("ip") is None:
        raise NotPermitted("the command ip is missing; install iproute2")
    names = [f"offbeat-{role}-{os.getpid()}" for role in ("home", "away")]
    ends = [f"ob{role}{os.getpid()}"[:15] for role in ("h", "a")]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(names, ends, (HOME, AWAY), strict=True):
            _ip("link", "set", end, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield tuple(["ip", "netns", "exec", name] for name in names)
    finally:
        for name in names:  # which removes the cable
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30, check=False)
