"""Shows what a run does before its first step: on a terminal in one line, which is rewritten, in a log in a few
lines."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

Stage = Callable[[str], None]

TERMINAL_EVERY_S = 0.5
LOG_AFTER_S, LOG_EVERY_S = 2.0, 15.0
"""In a log, a stage is named once it has taken `LOG_AFTER_S` seconds, and again every `LOG_EVERY_S` seconds."""


@contextmanager
def loading(what: str | None = None, *, is_quiet: bool = False, file: TextIO | None = None) -> Iterator[Stage]:
    """Prints that `what` is being loaded (None: no such line), and yields a function to call with the name of each
    stage when it begins. A thread prints the stages and their time, so that even a slow import shows a sign of life.
    `file` None means standard output."""
    if is_quiet:
        yield lambda name: None
        return
    signs = _Signs(file or sys.stdout, what)
    signs.start()
    try:
        yield signs.stage
    finally:
        signs.end()


class _Signs(threading.Thread):
    def __init__(self, file: TextIO, what: str | None):
        super().__init__(name="offbeat-loading", daemon=True)
        self._file, self._is_terminal = file, file.isatty()
        self._over, self._lock = threading.Event(), threading.Lock()
        self._start_s = time.monotonic()
        self._stage, self._width = "", 0
        self._due_s = self._start_s + LOG_AFTER_S
        if what is not None:
            print(f"{what}; loading", file=file, flush=True)

    def stage(self, name: str) -> None:
        with self._lock:
            self._stage, self._due_s = name, time.monotonic() + LOG_AFTER_S

    def end(self) -> None:
        self._over.set()
        self.join()
        if self._width:
            self._rewrite("")

    def run(self) -> None:
        while not self._over.wait(TERMINAL_EVERY_S):
            with self._lock:
                now_s = time.monotonic()
                text = f"{self._stage}, {now_s - self._start_s:.0f} s"
                if self._is_terminal:
                    self._rewrite(text)
                elif self._stage and now_s >= self._due_s:
                    self._due_s = now_s + LOG_EVERY_S
                    self._write(f"{text}\n")

    def _rewrite(self, text: str) -> None:
        self._write(f"\r{text:<{self._width}}" + ("" if text else "\r"))
        self._width = len(text)

    def _write(self, text: str) -> None:
        try:
            self._file.write(text)
            self._file.flush()
        except (OSError, ValueError):  # a full disk, or closed: the run itself goes on
            pass
