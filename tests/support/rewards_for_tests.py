"""Rewards that misbehave in every way the pool must survive; the response says how."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path


def obey(response):
    what, _, rest = response.partition(" ")
    return ACTIONS[what](rest)


def raise_error(rest):
    raise ValueError(f"cannot judge {rest}")


def hang(rest):
    time.sleep(600)


def hang_in_c(rest):
    return bool(re.match(r"(a+)+$", "a" * 64 + "b"))


def leave_a_child(rest):
    """Starts a process that outlives us unless our group is killed, notes both, and hangs."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    note(rest, os.getpid(), child.pid)
    time.sleep(600)


def note(path, *pids):
    draft = Path(path + ".draft")
    draft.write_text(" ".join(map(str, pids)))
    draft.rename(path)


def chatter(rest):
    print("printed by a reward")
    os.write(1, b"\x00\x00\x00\x01written past Python\n")
    subprocess.run(["echo", "echoed by a process"], check=True)
    return 0.5


def crash_once(rest):
    if not Path(rest).exists():
        Path(rest).touch()
        os._exit(7)
    return 1.0


ACTIONS = {
    "value": float,
    "raise": raise_error,
    "exit": lambda rest: sys.exit(rest),
    "hang": hang,
    "hang_in_c": hang_in_c,
    "child": leave_a_child,
    "crash": lambda rest: os._exit(3),
    "segfault": lambda rest: os.kill(os.getpid(), signal.SIGSEGV),
    "chatter": chatter,
    "text": lambda rest: "high",
    "nothing": lambda rest: None,
    "true": lambda rest: True,
    "parts": lambda rest: {"format": 0.25, "right": 1},
    "bad_part": lambda rest: {"format": 0.25, "right": float("nan")},
    "no_parts": lambda rest: {},
    "pid": lambda rest: os.getpid(),
    "sleep": lambda rest: time.sleep(float(rest)) or 1.0,
    "big": lambda rest: 10**400,
}


async def obey_async(response):
    what, _, rest = response.partition(" ")
    if what == "wait":
        await asyncio.sleep(float(rest))
        return 1.0
    if what == "own_timeout":
        raise TimeoutError("the judge is down")
    return ACTIONS[what](rest)


def everything(**kwargs):
    return {name: float(value if isinstance(value, int) else len(value)) for name, value in kwargs.items()}


def judge_without_asking(response, solution):
    return 0.0


number_of_judges = 3


def close_descriptors(rest):
    first, last = map(int, rest.split())
    os.closerange(first, last)
    return 1.0


def close_streams(rest):
    sys.stdout.close()
    sys.stderr.close()
    return 1.0


def overwrite_streams(rest):
    """Whatever is printed from now on would land in the user's file."""
    with open(rest, "ab") as file:
        for descriptor in (0, 1, 2):
            os.dup2(file.fileno(), descriptor)
    return 1.0


def scribble(rest):
    """Writes to whatever is open, as a library does that has mixed its numbers up."""
    for descriptor in range(3, 1024):
        with contextlib.suppress(OSError):
            os.write(descriptor, bytes.fromhex(rest))
    return 1.0


def flood(rest):
    for _ in range(int(rest)):
        os.write(1, b"x" * (1 << 20))
    return 1.0


def leave_a_daemon(rest):
    """Leaves a process in a session of its own behind, whose parent is gone, and notes it; then does as it is told."""
    path, then = rest.split()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            note(path, os.getpid())
            time.sleep(600)
        os._exit(0)
    os.wait()
    while not Path(path).exists():
        time.sleep(0.01)
    return ACTIONS[then]("1.0")


ACTIONS |= {
    "close": close_descriptors,
    "close_streams": close_streams,
    "overwrite_streams": overwrite_streams,
    "scribble": scribble,
    "flood": flood,
    "daemon": leave_a_daemon,
    "print": lambda rest: print(rest, flush=True) or 1.0,
    "kill_parent": lambda rest: os.kill(os.getppid(), signal.SIGKILL) or time.sleep(600),
}
