"""Writing files so that a reader, or a machine that lost power, sees the old content or the new, never half."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from pathlib import Path

NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
"""What file systems say that know no second name for a file."""


def write_atomic(path: Path, data: bytes) -> None:
    """Replaces a file's content: draft in the same folder, flush, rename, flush the folder."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        with open(draft, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def create_atomic(path: Path, data: bytes, mode: int = 0o666) -> bool:
    """Gives a new file its content in one go; False: there is one, and it stays. Of several that try, one does."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.draft")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        is_new = _link(draft, path)
    finally:
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
