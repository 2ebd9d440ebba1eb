"""Where tensors lie in a safetensors file: read from its header, or laid out for a new one.

Guarantees: equal tensors get an equal layout, whatever order they come in; the format's own library reads it; every
tensor begins where its elements may (wide types come first) and the first one on a page of its own, so that files of
one model can share blocks on disk and be mapped as they are. Reading trusts nothing: what lies beyond the end of the
file, or has no header, is a ValueError.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

MAX_HEADER_BYTES = 100_000_000
"""As the format's own library has it."""
PAGE_BYTES = 4096
METADATA = {"format": "pt"}
"""Loaders ask for it before they look at the tensors."""


class Stored(NamedTuple):
    """A tensor in a file."""

    dtype: str
    shape: list[int]
    start: int
    """Its first byte, counted from the beginning of the file, and one past its last."""
    stop: int


def lay_out(
    tensors: Iterable[tuple[str, str, list[int], int]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, Stored]]:
    """What a file begins with and where its tensors go, given their names, dtypes, shapes and numbers of bytes."""
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
    """Where the tensors of a file lie that is all in `view`."""
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
    """Where the tensors of an open file lie."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
        return read_layout(view)


def file_metadata(path: Path) -> dict[str, str]:
    """What a file says besides its tensors."""
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as view,
    ):
        return dict(_header(view)[0].get("__metadata__") or {})


def _header(view: memoryview) -> tuple[dict[str, Any], int]:
    """A file's table of tensors, and where the first of them begins."""
    length = int.from_bytes(view[:8], "little")
    if not 0 < length <= min(MAX_HEADER_BYTES, len(view) - 8):
        raise ValueError("it has no safetensors header")
    header = json.loads(bytes(view[8 : 8 + length]))
    if not isinstance(header, dict):
        raise ValueError("its header is no table of tensors")
    return header, 8 + length


def _alignment(shape: list[int], num_bytes: int) -> int:
    """How many bytes an element has; a tensor without any goes first, where nothing is odd yet."""
    num_elements = math.prod(shape)
    return num_bytes // num_elements if num_elements else 8
