"""Writing files so that a reader, or a machine that lost power, sees the old content or the new, never half."""

from __future__ import annotations

import os
from pathlib import Path


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
