"""Digests of weights: what proves that two machines hold the same version.

A tensor's digest is blake3 over the digests of its pieces of at most 16 MiB, so that several readers can make it in
parallel; a version's digest is blake3 over the sorted names, dtypes, shapes and digests of its tensors. It is the same
whether the tensors are in memory or in a safetensors file, and the file is read without torch: a worker that only has
to know, and a coordinator that only keeps weights, need none.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

if TYPE_CHECKING:
    from torch import Tensor

PIECE_BYTES = 16 * 1024 * 1024
MAX_HEADER_BYTES = 100_000_000
"""As the format's own library has it."""
DTYPES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "BOOL": "bool", "U8": "uint8", "I8": "int8"},
    **{"I16": "int16", "I32": "int32", "I64": "int64", "U16": "uint16", "U32": "uint32", "U64": "uint64"},
}
"""How a safetensors file names what torch calls otherwise."""


def bytes_digest(data: Any) -> str:
    """Of a tensor's bytes, in any buffer."""
    pieces = blake3()
    for start in range(0, max(len(data), 1), PIECE_BYTES):
        pieces.update(blake3(data[start : start + PIECE_BYTES]).digest())
    return pieces.hexdigest()


def tensor_digest(tensor: Tensor) -> str:
    import torch

    return bytes_digest(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    return _whole(
        {
            name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor_digest(tensor))
            for name, tensor in tensors.items()
        }
    )


def file_digest(path: Path) -> str:
    """The digest of the tensors in a safetensors file; raises ValueError if it is none, or is cut short."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = memoryview(mapped)
        try:
            return _file_digest(view)
        finally:
            view.release()


def _file_digest(view: memoryview) -> str:
    length = int.from_bytes(view[:8], "little")
    if not 0 < length <= min(MAX_HEADER_BYTES, len(view) - 8):
        raise ValueError("it has no safetensors header")
    header = json.loads(bytes(view[8 : 8 + length]))
    header.pop("__metadata__", None)
    start, found = 8 + length, {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if not 0 <= begin <= end <= len(view) - start:
            raise ValueError(f"tensor {name} lies beyond the end of the file")
        with view[start + begin : start + end] as data:
            found[name] = (DTYPES[entry["dtype"]], list(entry["shape"]), bytes_digest(data))
    return _whole(found)


def _whole(tensors: Mapping[str, tuple[str, list[int], str]]) -> str:
    whole = blake3()
    for name in sorted(tensors):
        dtype, shape, digest = tensors[name]
        whole.update(f"{name}\0{dtype}\0{shape}\0{digest}\n".encode())
    return whole.hexdigest()
