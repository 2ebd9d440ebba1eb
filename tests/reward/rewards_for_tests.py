"""Rewards that misbehave in every way the pool must survive; the response says how."""

import asyncio
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
    return {name: float(len(value)) for name, value in kwargs.items()}


def judge_without_asking(response, solution):
    return 0.0


number_of_judges = 3
