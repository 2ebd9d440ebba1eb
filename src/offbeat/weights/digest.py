"""Digests of weights, which prove that two machines hold the same version.

A tensor's digest is blake3 over the digests of its pieces of at most 16 MiB, so that several readers can make it in
parallel; a version's digest is blake3 over the sorted names, dtypes, shapes and digests of its tensors. It is the same
whether the tensors are in memory or in a safetensors file, and files are read without torch.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from blake3 import blake3

from offbeat.weights.safetensor_file import read_layout

if TYPE_CHECKING:
    from torch import Tensor

PIECE_BYTES = 16 * 1024 * 1024
DTYPES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "BOOL": "bool", "U8": "uint8", "I8": "int8"},
    **{"I16": "int16", "I32": "int32", "I64": "int64", "U16": "uint16", "U32": "uint32", "U64": "uint64"},
}
"""torch's names of types, by their safetensors names."""


def bytes_digest(data: Any) -> str:
    """Digest of a tensor's bytes, in any buffer."""
    pieces = blake3()
    for start in range(0, max(len(data), 1), PIECE_BYTES):
        pieces.update(blake3(data[start : start + PIECE_BYTES]).digest())
    return pieces.hexdigest()


def tensor_digest(tensor: Tensor) -> str:
    import torch

    return bytes_digest(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    return whole_digest(
        {
            name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor_digest(tensor))
            for name, tensor in tensors.items()
        }
    )


def file_digest(path: Path) -> str:
    """The digest of the tensors in a safetensors file; raises ValueError if it is none, or is cut short."""
    with open(path, "rb") as file:
        return open_file_digest(file)


def files_digest(paths: Iterable[Path]) -> str:
    """The digest of the tensors in several files of one model."""
    found: dict[str, tuple[str, list[int], str]] = {}
    for path in paths:
        with open(path, "rb") as file:
            found |= _tensors(file)
    return whole_digest(found)


def open_file_digest(file: BinaryIO) -> str:
    return whole_digest(_tensors(file))


def _tensors(file: BinaryIO) -> dict[str, tuple[str, list[int], str]]:
    """The tensors of a file, as `whole_digest` takes them."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
        found = {}
        for name, stored in read_layout(view).items():
            with view[stored.start : stored.stop] as data:
                found[name] = (DTYPES[stored.dtype], stored.shape, bytes_digest(data))
        return found


def adapter_digest(base: str, tensors: str, config: str) -> str:
    """Digest of an adapter version, from the digests of base and tensors and the configuration that joins them."""
    return blake3(f"adapter\0{base}\0{tensors}\0{config}".encode()).hexdigest()


def whole_digest(tensors: Mapping[str, tuple[str, list[int], str]]) -> str:
    """Digest of a version, from dtype (torch's name), shape and digest of each tensor by name."""
    whole = blake3()
    for name in sorted(tensors):
        dtype, shape, digest = tensors[name]
        whole.update(f"{name}\0{dtype}\0{shape}\0{digest}\n".encode())
    return whole.hexdigest()
