"""Large bodies as files beside the ledger, named by the digest of their bytes: `blobs/ab/DIGEST`.

Guarantees: after `write` the file and its folder entry survive a power cut, so that a transaction that names it may
commit; `read` returns the bytes that were written or raises. The name is the content, so a repeated write is harmless;
a crash before the commit leaves at most a file that no row names, which `sweep` removes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from blake3 import blake3

from offbeat.files import cannot_write, fsync_folder
from offbeat.ledger.errors import Damaged, LedgerError

FOLDER = "blobs"
UNFINISHED = ".new"


class Blobs:
    def __init__(self, folder: Path):
        self.folder = folder

    def path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self.folder / name[:2] / name

    def write(self, digest: bytes, body: bytes) -> None:
        path = self.path(digest)
        try:
            self._write(path, body)
        except OSError as error:
            raise Damaged(str(cannot_write(path, error))) from error

    def _write(self, path: Path, body: bytes) -> None:
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True)
            fsync_folder(self.folder.parent)
            fsync_folder(self.folder)
        if not path.exists():
            unfinished = path.with_name(path.name + UNFINISHED)
            with unfinished.open("wb") as file:
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        fsync_folder(path.parent)  # also for an existing file: the process that renamed it may have died here

    def read(self, digest: bytes) -> bytes:
        path = self.path(digest)
        try:
            body = path.read_bytes()
        except OSError as error:
            raise LedgerError(f"{path}: cannot be read ({error.strerror}); bring back a copy") from error
        if blake3(body).digest() != digest:
            raise LedgerError(f"{path}: damaged, its digest differs; bring back a copy")
        return body

    def all(self) -> Iterator[bytes]:
        """Digests of all files."""
        for path in sorted(self.folder.glob("??/*")):
            if not path.name.endswith(UNFINISHED):
                yield bytes.fromhex(path.name)

    def sweep(self, named: set[bytes]) -> int:
        """Removes every file but `named`, and unfinished ones; returns the number of bytes freed."""
        num_bytes = 0
        for path in sorted(self.folder.glob("??/*")):
            if path.name.endswith(UNFINISHED) or bytes.fromhex(path.name) not in named:
                num_bytes += path.stat().st_size
                path.unlink()
        return num_bytes
