"""Files that a reader, or a machine that lost power, sees with the old content or the new, never half; and who may
read them."""

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
"""Errors of file systems without hard links."""
REMEDIES = {
    errno.ENOSPC: "free space on its disk",
    errno.EDQUOT: "free space within your quota, or have it raised",
    errno.EROFS: "make its file system writable",
    errno.EACCES: "give yourself the right to write there",
    errno.EPERM: "give yourself the right to write there",
    errno.EFBIG: "free space, or raise the limit on the size of files (ulimit -f)",
    errno.EIO: "see that its disk works",
}
"""Remedies by the system's error for a file that cannot be written."""
MASKS = {"private": 0o077, "group": 0o027, "everyone": 0o022}
"""Umasks by `run.access`."""
_masks_lock = threading.Lock()
_masks_held: list[int] = []
_mask_before = 0


def cannot_write(path: Path | str, error: OSError, then: str = "then --resume the run") -> DiskError:
    """The one-line error of a file that cannot be written: which, why, the remedy, and what to do `then`."""
    return DiskError(f"{path}: cannot be written: {error.strerror or error}; {remedy(error)}, {then}")


def remedy(error: Exception) -> str:
    """The remedy for a disk error; one without a number, which some libraries swallow, most often means a full disk."""
    return REMEDIES.get(getattr(error, "errno", None) or errno.ENOSPC, "correct that")


def disk_trouble(error: BaseException, then: str = "then --resume the run") -> DiskError | None:
    """`cannot_write` for an error of a disk; None for any other error, which may be a bug."""
    if not isinstance(error, OSError) or error.errno not in REMEDIES:
        return None
    return cannot_write(error.filename or "standard output, or a file without a name", error, then)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the file's name to a disk error: that of a write has none."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


@contextmanager
def readable_by(who: str) -> Iterator[None]:
    """Sets the umask of this process, and of its children, so that only `who` can read new files. Blocks of several
    threads may overlap: the strictest holds, and the last to end restores the process's own mask."""
    global _mask_before
    with _masks_lock:
        before = os.umask(_strictest([*_masks_held, MASKS[who]]))
        if not _masks_held:
            _mask_before = before
        _masks_held.append(MASKS[who])
    try:
        yield
    finally:
        with _masks_lock:
            _masks_held.remove(MASKS[who])
            os.umask(_strictest(_masks_held) if _masks_held else _mask_before)


def _strictest(masks: list[int]) -> int:
    return reduce(or_, masks)


def make_folder(path: Path) -> None:
    """Makes a folder with the current umask, and missing folders above it with the usual one."""
    own = os.umask(MASKS["everyone"])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    finally:
        os.umask(own)
    path.mkdir(exist_ok=True)


def write_atomic(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Replaces a file's content: draft in the same folder, flush, rename, flush the folder."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    with naming(path):
        try:
            draft.unlink(missing_ok=True)  # left by a process with our id: its mode would stay
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
    """Creates a file with its content in one step; False: it exists, and stays. Of several callers, one succeeds."""
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
        fsync_folder(path.parent)  # also where it is not ours: its writer may have died before this
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
        os.replace(draft, path)  # two callers at the same moment may both succeed
    return True


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-links a file, so that `target` stays when `source` is deleted; copies it where a link is impossible."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in NO_LINKS | {errno.EXDEV, errno.EMLINK}:
            raise
        shutil.copyfile(source, target)


def link_folder(folder: Path, other: Path) -> None:
    """Replaces the folder `other` by one with links to, or copies of, the files of `folder`."""
    shutil.rmtree(other, ignore_errors=True)
    other.mkdir(parents=True)
    for file in folder.iterdir():
        link_or_copy(file, other / file.name)


def replace_folder(draft: Path, final: Path) -> None:
    """Renames a finished draft folder, whose files are flushed, to `final`, which must not exist."""
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
    """Makes the names in a folder durable."""
    fsync_file(path)


TAIL_BYTES = 1 << 16
"""Read at a time in search of the last line break."""


class Appender:
    """Appends lines from any thread.

    The operating system has a line before `line` returns, unless the file is `buffered`. Half a line of a killed
    process is cut off at the next opening. A line that cannot be written is an error: a run must not go on unobserved.
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
        """The file's size, buffered lines included."""
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
