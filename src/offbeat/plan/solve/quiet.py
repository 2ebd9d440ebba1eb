"""Keeps what a compiled library prints out of the process's standard output, where a program's answer belongs.

HiGHS has a line that no option turns off. It writes below Python, so the descriptor itself is led elsewhere for as long
as the library runs; what other threads print meanwhile is lost as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator

STDOUT = 1


@contextlib.contextmanager
def quiet_stdout() -> Iterator[None]:
    """Nothing that is written within reaches standard output."""
    if sys.stdout is not None:
        sys.stdout.flush()
    try:
        kept = os.dup(STDOUT)
    except OSError:  # closed: nothing can be printed anyway
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, STDOUT)
    try:
        yield
    finally:
        if os.name == "posix":
            ctypes.CDLL(None).fflush(None)  # the library's own buffer would otherwise be written later, to the answer
        os.dup2(kept, STDOUT)
        os.close(kept)
        os.close(nowhere)
