"""Layout of safetensors files, and parallel reads and writes of them.

Guarantees: the layout does not depend on the order in which tensors are given; the safetensors library can read the
files. Every tensor is aligned (wide types come first), and the first one starts at a page boundary. So files of one
model can share blocks on disk and can be mapped into memory. Reading trusts nothing: a tensor beyond the end of the
file, or a missing header, raises ValueError.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeVar

if TYPE_CHECKING:
    import numpy as np

MAX_HEADER_BYTES = 100_000_000
"""Size limit of a file's header, as in the safetensors library."""
PAGE_BYTES = 4096
METADATA = {"format": "pt"}
"""Metadata of every file; loaders require it."""


class Stored(NamedTuple):
    """Type, shape and place of a tensor in a file."""

    dtype: str
    shape: list[int]
    start: int
    """Offset of the tensor's first byte in the file; `stop` is the offset after its last byte."""
    stop: int


def lay_out(
    tensors: Iterable[tuple[str, str, list[int], int]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, Stored]]:
    """Returns a new file's header, and each tensor's place; `tensors` are (name, dtype, shape, size in bytes)."""
    end, entries = 0, {}
    for name, dtype, shape, num_bytes in sorted(tensors, key=lambda tensor: (-_alignment(*tensor[2:]), tensor[0])):
        entries[name] = Stored(dtype, shape, end, end + num_bytes)
        end += num_bytes
    described = {
        name: {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [entry.start, entry.stop]}
        for name, entry in entries.items()
    }
    text = json.dumps({"__metadata__": {**METADATA, **(metadata or {})}, **described}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE_BYTES)
    head = len(text).to_bytes(8, "little") + text
    return head, {
        name: entry._replace(start=entry.start + len(head), stop=entry.stop + len(head))
        for name, entry in entries.items()
    }


def read_layout(view: memoryview) -> dict[str, Stored]:
    """Returns type, shape and place of each tensor in a file, by name; `view` must hold the whole file."""
    header, first = _header(view)
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        if not 0 <= start <= stop <= len(view) - first:
            raise ValueError(f"tensor {name} lies beyond the end of the file")
        found[name] = Stored(entry["dtype"], list(entry["shape"]), first + start, first + stop)
    return found


def file_layout(file: BinaryIO) -> dict[str, Stored]:
    """Returns type, shape and place of each tensor in an open file, by name."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
        return read_layout(view)


def file_metadata(path: Path) -> dict[str, str]:
    """Reads the metadata in the header of a file."""
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as view,
    ):
        return dict(_header(view)[0].get("__metadata__") or {})


def _header(view: memoryview) -> tuple[dict[str, Any], int]:
    """Returns the header of the file in `view`, as a dict, and the offset at which the tensors' bytes begin."""
    length = int.from_bytes(view[:8], "little")
    if not 0 < length <= min(MAX_HEADER_BYTES, len(view) - 8):
        raise ValueError("the file has no safetensors header")
    header = json.loads(bytes(view[8 : 8 + length]))
    if not isinstance(header, dict):
        raise ValueError("the safetensors header is not a JSON object")
    return header, 8 + length


def _alignment(shape: list[int], num_bytes: int) -> int:
    """Returns the size of an element in bytes, by which tensors are sorted. For an empty tensor returns 8, so that it
    comes first, where every offset is aligned."""
    num_elements = math.prod(shape)
    return num_bytes // num_elements if num_elements else 8


# Positioned reads, writes and copies, safe in any thread. Each handles all of its bytes or raises OSError.

CANNOT_COPY = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)
"""Numbers of the errors that file systems without copy_file_range give."""
BLOCK_BYTES = 1024 * 1024
"""Most bytes of one write: on ext4, one call with 16 MiB took two to three times as long as 16 calls with 1 MiB."""


def read_at(file: BinaryIO, start: int, num_bytes: int) -> np.ndarray:
    import numpy as np  # imported late: a dry run reads digests and needs no numpy

    data = np.empty(num_bytes, np.uint8)
    view, done = data.data, 0
    while done < num_bytes:
        count = os.preadv(file.fileno(), [view[done:]], start + done)
        if not count:
            raise OSError(errno.EIO, f"the file ends after {start + done} bytes, too early", file.name)
        done += count
    return data


def write_at(file: BinaryIO, start: int, data: Any) -> None:
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")
    done = 0
    while done < len(view):
        done += os.pwrite(file.fileno(), view[done : done + BLOCK_BYTES], start + done)


def begin_flush(file: BinaryIO, start: int, num_bytes: int) -> None:
    """Lets the disk begin with what was written there, so that a later fsync waits for less; only Linux can."""
    if num_bytes >= BLOCK_BYTES and (begin := _sync_file_range()) is not None:
        begin(file.fileno(), start, num_bytes, SYNC_FILE_RANGE_WRITE)  # a mere hint: fsync reports what goes wrong


SYNC_FILE_RANGE_WRITE = 2


@cache
def _sync_file_range() -> Any:
    import ctypes

    found = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None
    if found is not None:
        found.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return found


def copy_at(source: BinaryIO, origin: int, target: BinaryIO, start: int, num_bytes: int) -> None:
    """Copies bytes from offset `origin` of one file to `start` of another; the file system may share blocks instead."""
    done = 0
    while done < num_bytes and hasattr(os, "copy_file_range"):  # only on Linux
        rest = num_bytes - done
        try:
            count = os.copy_file_range(source.fileno(), target.fileno(), rest, origin + done, start + done)
        except OSError as error:
            if error.errno not in CANNOT_COPY:
                raise
            break
        if not count:
            break  # end of the source, which `read_at` reports, or a file system that does not copy
        done += count
    while done < num_bytes:
        data = read_at(source, origin + done, min(BLOCK_BYTES, num_bytes - done))
        write_at(target, start + done, data)
        done += len(data)


MAX_THREADS = 8
"""Most threads of `in_parallel`. Each holds about 50 MiB; more would mostly wait for memory or the disk."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_parallel(work: Callable[[Item], Result], items: Iterable[Item]) -> Generator[Result, None, None]:
    """Applies `work` to every item in threads, and yields the results in order; raises the first error and stops.

    Threads help because numpy, zstd, blake3 and the file system release the interpreter lock. Few items are in progress
    at a time, so memory stays bounded. However the generator ends, no thread is left running.
    """
    num_threads = min(_num_cores(), MAX_THREADS)
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="weights")
    under_way: deque[Future[Result]] = deque()
    try:
        for item in items:
            under_way.append(pool.submit(work, item))
            if len(under_way) > num_threads + 1:  # one item is queued, so that no thread idles
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _num_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
