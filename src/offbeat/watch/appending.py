"""Files that only grow, a line at a time, such as metrics and events.

A line is handed to the operating system before `line` returns, unless the file is `buffered`. A process killed while it
writes may leave half a line; the next one to open the file cuts that off, so readers meet whole lines only. A line that
cannot be written is an error that names the file: a run must not go on unobserved.
"""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path

from offbeat.files import cannot_write

TAIL_BYTES = 1 << 16
"""How far back half a line is looked for at a time."""


class Appender:
    """Appends lines from any thread."""

    def __init__(self, path: Path, *, buffered: bool = False):
        self.path, self.buffered = path, buffered
        self._lock = threading.Lock()
        try:
            cut_half_line(path)
            self._file = io.BufferedWriter(io.FileIO(path, "ab"))
        except OSError as error:
            raise cannot_write(self.path, error) from error

    @property
    def num_bytes(self) -> int:
        """The file's size, counting what is still buffered."""
        return self._file.tell()

    def line(self, text: str) -> None:
        try:
            with self._lock:
                self._file.write(text.encode() + b"\n")
                if not self.buffered:
                    self._file.flush()
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def flush(self) -> None:
        try:
            with self._lock:
                self._file.flush()
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            raise cannot_write(self.path, error) from error


def cut_half_line(path: Path) -> None:
    """Cuts a file back to its last whole line."""
    if not path.is_file():
        return
    with open(path, "r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - TAIL_BYTES)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                file.truncate(start + newline + 1)
                return
            end = start
        file.truncate(0)
