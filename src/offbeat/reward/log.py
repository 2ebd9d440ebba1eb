"""What reward processes print, in a file that stays within bounds.

Processes write to a pipe, and a thread copies it to the file, so that a reward which prints without end costs a bounded
part of the disk. A file that has grown to `MAX_LOG_BYTES` becomes `NAME.1`, in place of the one before, and a new one
is begun: the latest words are always there. A log on a full disk is cut short and costs no sample.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

from offbeat.files import cannot_write

MAX_LOG_BYTES = 32 << 20
READ_BYTES = 1 << 16
CLOSE_WITHIN_S = 5.0
LAST_BYTE = b"\0"


class RewardLog:
    """Hand it to a process as its standard error; `close` keeps what was printed until then."""

    def __init__(self, path: Path):
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise cannot_write(path, error) from error
        self._lock = threading.Lock()
        self._read, self._write = os.pipe()
        self._is_closing = False
        self._copying = threading.Thread(target=self._copy, name="reward-log", daemon=True)
        self._copying.start()

    def fileno(self) -> int:
        return self._write

    def write(self, text: str) -> None:
        """Adds a line of the pool's own."""
        self._keep(text.encode())

    def close(self) -> None:
        self._is_closing = True
        os.write(self._write, LAST_BYTE)  # its end may never come: what a reward has left behind may hold the pipe
        os.close(self._write)
        self._copying.join(CLOSE_WITHIN_S)
        if not self._copying.is_alive():
            os.close(self._read)
        with self._lock, suppress(OSError):
            self._file.close()

    def _copy(self) -> None:
        while data := os.read(self._read, READ_BYTES):
            is_last = self._is_closing and data.endswith(LAST_BYTE)
            self._keep(data.removesuffix(LAST_BYTE) if is_last else data)
            if is_last:
                return

    def _keep(self, data: bytes) -> None:
        with self._lock, suppress(OSError, ValueError):  # ValueError: it is closed
            if self._file.tell() + len(data) > MAX_LOG_BYTES:
                self._file.close()
                os.replace(self.path, self.path.with_name(f"{self.path.name}.1"))
                self._file = self.path.open("ab", buffering=0)
            self._file.write(data)
