"""Writes files atomically, so that readers see the old content or the new, even after a power cut; sets who may read
them; and names the remedies for disk errors."""

from __future__ import annotations

import errno
import io
import os
import secrets
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import reduce
from operator import or_
from pathlib import Path

from offbeat.errors import DiskError

NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
"""Numbers of the errors that file systems without hard links give."""
REMEDIES = {
    errno.ENOSPC: "free space on its disk",
    errno.EDQUOT: "free space within your quota, or have it raised",
    errno.EROFS: "make its file system writable",
    errno.EACCES: "give yourself the right to write there",
    errno.EPERM: "give yourself the right to write there",
    errno.EFBIG: "free space, or raise the limit on the size of files (ulimit -f)",
    errno.EIO: "check that its disk works",
}
"""Remedies for a file that cannot be written, by error number."""
MASKS = {"private": 0o077, "group": 0o027, "everyone": 0o022}
"""Umask for each value of `run.access`."""
_masks_lock = threading.Lock()
_masks_held: list[int] = []
_mask_before = 0


def cannot_write(path: Path | str, error: OSError, then: str = "then resume the run") -> DiskError:
    """Returns the error for a file that cannot be written. Its one-line message names the file, the cause, the remedy,
    and what to do after the remedy (`then`)."""
    return DiskError(f"{path}: cannot be written: {error.strerror or error}; {remedy(error)}, {then}")


def remedy(error: Exception) -> str:
    """Returns in words what a user can do about a disk error. An error without a number (errno) is taken for a full
    disk."""
    return REMEDIES.get(getattr(error, "errno", None) or errno.ENOSPC, "correct the cause")


def disk_trouble(error: BaseException, then: str = "then resume the run") -> DiskError | None:
    """Returns the error of `cannot_write` if `error` is a disk error; None for any other error, which may be a bug.
    `then` is what to do after the remedy."""
    if not isinstance(error, OSError) or error.errno not in REMEDIES:
        return None
    return cannot_write(error.filename or "standard output, or a file without a name", error, then)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the file name `path` to an `OSError` that the block raises, because errors of writes name no file."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


@contextmanager
def readable_by(who: str) -> Iterator[None]:
    """Sets the umask of this process and its children so that only `who`, a key of `MASKS`, can read new files. Blocks
    of several threads may overlap: the strictest mask applies, and the last block to end restores the original one."""
    global _mask_before
    with _masks_lock:
        before = os.umask(reduce(or_, _masks_held, MASKS[who]))
        if not _masks_held:
            _mask_before = before
        _masks_held.append(MASKS[who])
    try:
        yield
    finally:
        with _masks_lock:
            _masks_held.remove(MASKS[who])
            os.umask(reduce(or_, _masks_held) if _masks_held else _mask_before)


def make_folder(path: Path) -> None:
    """Creates a folder with the current umask. Missing parent folders are created so that everyone can read them."""
    own = os.umask(MASKS["everyone"])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    finally:
        os.umask(own)
    path.mkdir(exist_ok=True)


def write_atomic(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Replaces a file's content atomically and durably: writes a draft in the same folder, flushes and renames it, and
    flushes the folder."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    with naming(path):
        try:
            draft.unlink(missing_ok=True)  # an old draft with our process id would keep its mode
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        except BaseException:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            raise
        fsync_folder(path.parent)


def create_atomic(path: Path, data: bytes, mode: int = 0o666) -> bool:
    """Creates a file together with its content and returns True. If the file already exists, leaves it as it is and
    returns False. Of several concurrent callers, only one gets True; on a file system without hard links, several may
    get True."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.draft")
    with naming(path):
        try:
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            is_new = _link(draft, path)
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
        fsync_folder(path.parent)  # also for another's file: its writer may have died before this
    return is_new


def _link(draft: Path, path: Path) -> bool:
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        if path.exists():
            return False
        os.replace(draft, path)  # not exclusive: two concurrent callers may both succeed
    return True


def link_or_copy(source: Path, target: Path) -> None:
    """Makes `target` a hard link to `source`, or a copy if a link is impossible. Either way, `target` still exists
    after `source` is deleted."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in NO_LINKS | {errno.EXDEV, errno.EMLINK}:
            raise
        shutil.copyfile(source, target)


def link_folder(folder: Path, other: Path) -> None:
    """Replaces the folder `other` with one that has links to, or copies of, the files in `folder`."""
    shutil.rmtree(other, ignore_errors=True)
    other.mkdir(parents=True)
    for file in folder.iterdir():
        link_or_copy(file, other / file.name)


def replace_folder(draft: Path, final: Path) -> None:
    """Renames the folder `draft`, whose files must already be flushed, to `final`, which must not exist."""
    fsync_folder(draft)
    os.replace(draft, final)
    fsync_folder(final.parent)


def fsync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_folder(path: Path) -> None:
    """Makes the entries of a folder durable: created, renamed and deleted files."""
    fsync_file(path)


TAIL_BYTES = 1 << 16
"""Number of bytes read at a time in search of the last line break."""


class Appender:
    """Appends lines to a file, from any thread.

    A line is passed to the operating system before `line` returns, unless `buffered`. An incomplete line of a killed
    process is cut off when the file is opened again. A line that cannot be written raises an error, because a run must
    not continue without its records.
    """

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
        """Size of the file, including buffered lines."""
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
    """Truncates a file after its last complete line."""
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
