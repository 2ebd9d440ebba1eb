"""Writing files so that a reader, or a machine that lost power, sees the old content or the new, never half; and so
that only those who may can read them."""

from __future__ import annotations

import errno
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
"""What file systems say that know no second name for a file."""


REMEDIES = {
    errno.ENOSPC: "free space on its disk",
    errno.EDQUOT: "free space within your quota, or have it raised",
    errno.EROFS: "make its file system writable",
    errno.EACCES: "give yourself the right to write there",
    errno.EPERM: "give yourself the right to write there",
    errno.EFBIG: "free space, or raise the limit on the size of files (ulimit -f)",
    errno.EIO: "see that its disk works",
}
"""What to do, by what the system says of a file that cannot be written."""
MASKS = {"private": 0o077, "group": 0o027, "everyone": 0o022}
"""What files and folders are not to allow, by who else may read them (`run.access`)."""
_masks_lock = threading.Lock()
_masks_held: list[int] = []
_mask_before = 0


def cannot_write(path: Path | str, error: OSError, then: str = "then --resume the run") -> DiskError:
    """The one line that tells of a file that cannot be written: which, why, and what to do; `then` says what after."""
    return DiskError(f"{path}: cannot be written: {error.strerror or error}; {remedy(error)}, {then}")


def remedy(error: Exception) -> str:
    """What to do about an error of a disk; most often, also where a library has swallowed its number, it is full."""
    return REMEDIES.get(getattr(error, "errno", None) or errno.ENOSPC, "mend that")


def disk_trouble(error: BaseException, then: str = "then --resume the run") -> DiskError | None:
    """The same for whatever ended something, if that was a disk; None: it was not, and may be a bug."""
    if not isinstance(error, OSError) or error.errno not in REMEDIES:
        return None
    return cannot_write(error.filename or "standard output, or a file without a name", error, then)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Gives an error of the disk the name of the file that was to be written: that of a write itself has none."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


@contextmanager
def readable_by(who: str) -> Iterator[None]:
    """Has this process, and those that it starts, make files and folders for nobody but `who` to read. Blocks of
    several threads may overlap: the strictest holds, and the last to end gives the process its own mask back."""
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
    """Makes a folder as the mask says, and the folders above it as usual: what is in them is others' affair."""
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
            draft.unlink(missing_ok=True)  # of a process that had our number: its mode would stay
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
    """Gives a new file its content in one go; False: there is one, and it stays. Of several that try, one does."""
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
        fsync_folder(path.parent)  # also where it is not ours: whoever made it may have died before this
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
        os.replace(draft, path)  # which leaves two a moment to do so both
    return True


def link_folder(folder: Path, other: Path) -> None:
    """Gives a folder's files further names in `other`, which stay when the folder is deleted; copies where a file can
    have no second name. What was in `other` before is gone."""
    shutil.rmtree(other, ignore_errors=True)
    other.mkdir(parents=True)
    for file in folder.iterdir():
        try:
            os.link(file, other / file.name)
        except OSError as error:
            if error.errno not in NO_LINKS | {errno.EXDEV}:
                raise
            shutil.copyfile(file, other / file.name)


def replace_folder(draft: Path, final: Path) -> None:
    """Puts a finished draft folder, whose files are flushed, in its place; `final` must not exist."""
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
