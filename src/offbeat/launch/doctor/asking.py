"""Asks a probe: a process of its own, with a deadline, so that nothing that it meets can take the doctor along.

Guarantee: `ask` returns within its deadline and a moment, with the probe's record or with a line that says why there is
none: the probe raised, crashed, hung or said something else. Its whole process group is ended then, and also when the
doctor is interrupted.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from offbeat.launch.doctor.seen import Failed

T = TypeVar("T")
END_WITHIN_S = 1.0
"""For a killed process to be gone; one that hangs on a dead disk is left behind."""
MAX_TOLD = 300


async def ask(kind: type[T], probe: str, *words: str, within_s: float, heard: str = "") -> T | Failed:
    """The record that the probe of this name makes of these words, and of what it hears on standard input."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "offbeat.launch.doctor.child", probe, *words),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(within_s):
            out, err = await process.communicate(heard.encode())
    except TimeoutError:
        return Failed(f"no answer within {within_s:g} s")
    finally:
        await _end(process)
    if process.returncode:
        return Failed(_reason(process.returncode, err.decode(errors="replace")))
    return _read(kind, out.decode(errors="replace"))


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError, PermissionError):  # the group may be gone; it is empty where all went well
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(TimeoutError):
        async with asyncio.timeout(END_WITHIN_S):
            await process.wait()


def _reason(status: int, err: str) -> str:
    if status < 0:
        return f"it crashed: {signal.Signals(-status).name}"
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    told = lines[-1] if lines else f"it ended with status {status}"
    return told if len(told) <= MAX_TOLD else f"{told[:MAX_TOLD]}…"


def _read(kind: type[T], out: str) -> T | Failed:
    """The record in the last line: what comes before, a package has printed."""
    lines = out.splitlines()
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    try:
        return adapter.validate_json(lines[-1] if lines else "")
    except ValidationError:
        return Failed("its answer makes no sense")
