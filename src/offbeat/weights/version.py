"""Versions: records, folders on disk, adapters, and digests, by which two machines know that they hold equal weights.

A tensor's digest is blake3 over the digests of its parts of at most 16 MiB, so that it can be computed in parallel. A
version's digest is blake3 over the sorted names, dtypes, shapes and digests of its tensors. The digest is the same
whether the tensors are in memory or in a safetensors file. Reading files does not need torch.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from blake3 import blake3

from offbeat.errors import OffbeatError
from offbeat.files import replace_folder
from offbeat.weights.safetensor_file import file_metadata, read_layout

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Version:
    """A published set of weights, which every engine and the trainer's own forward pass use."""

    number: int
    """Number that only grows and is never reused."""
    step: int
    parent: int | None
    digest: str
    path: Path
    manifest: str = ""
    """Digest of the version's manifest; "": it was published only as files."""
    base: Path | None = None
    """For an adapter whose base weights the engine lacks: local path of the base; else None."""


FILE_NAME = "model.safetensors"
ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""Files of an adapter's folder, as peft names them."""


def weights_file(folder: Path) -> Path:
    """Returns the path of the safetensors file in a version's folder: the adapter's if there is one, or the model's."""
    adapter = folder / ADAPTER_FILE
    return adapter if adapter.is_file() else folder / FILE_NAME


class WeightFolder:
    """A folder with one sub-folder per version, named by the version's number."""

    def __init__(self, folder: Path):
        self.folder = folder.absolute()  # readers may have another working directory

    def path(self, number: int) -> Path:
        return self.folder / f"{number:08d}"

    def keep(self, numbers: Iterable[int]) -> None:
        """Deletes every version whose number is not in `numbers`."""
        wanted = {self.path(number).name for number in numbers}
        for folder in self.folder.glob("[0-9]*"):
            if folder.name not in wanted:
                shutil.rmtree(folder, ignore_errors=True)


def put_in_place(draft: Path, final: Path) -> None:
    """Renames a finished draft folder to `final`, replacing a folder that is there."""
    try:
        replace_folder(draft, final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        aside = final.with_name(f".{final.name}.old.draft")
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(final, aside)
        replace_folder(draft, final)
        shutil.rmtree(aside, ignore_errors=True)


BASE = "offbeat_base"
"""Key of the base's digest in the metadata of an adapter's file."""


@dataclass(frozen=True)
class Adapter:
    """Data shared by all adapter versions of a run: their base, which never changes, and their configuration.

    A version's folder has the form that peft and vLLM read: a file of tensors and a configuration. The metadata of the
    tensors' file holds the digest of the base; the version's digest covers base, tensors and configuration.
    """

    base: str
    """Digest of the base weights."""
    config: str
    """Content of the configuration file."""
    base_tensors: Callable[[], Mapping[str, Tensor]]
    """Function that returns the base weights, by name, for workers that lack them."""

    @property
    def metadata(self) -> dict[str, str]:
        return {BASE: self.base}


def base_digest(folder: Path) -> str | None:
    """Returns the digest of the base of the adapter in a folder; None: the folder holds no adapter."""
    file = folder / ADAPTER_FILE
    if not file.is_file():
        return None
    if not (found := file_metadata(file).get(BASE)):
        raise ValueError(f"{file}: the file's metadata does not name the adapter's base")
    return found


def folder_digest(folder: Path) -> str:
    """Computes the digest of the version in a folder; raises ValueError or OSError if it cannot be read."""
    base, tensors = base_digest(folder), file_digest(weights_file(folder))
    if base is None:
        return tensors
    return adapter_digest(base, tensors, (folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))


class WeightsError(OffbeatError):
    """Weights are missing, or differ from the published ones."""


def verify(version: Version) -> None:
    """Raises `WeightsError` if the files of a version are missing or do not have the published digest."""
    file = weights_file(version.path)
    if not file.is_file():
        raise WeightsError(f"version {version.number}: its file {file} is missing")
    try:
        digest = folder_digest(version.path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(
            f"version {version.number}: {file} cannot be read: {' '.join(str(error).split())}"
        ) from error
    if digest != version.digest:
        raise WeightsError(
            f"version {version.number}: {file} has digest {digest[:12]}, not the published {version.digest[:12]}"
        )


PIECE_BYTES = 16 * 1024 * 1024
DTYPES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "BOOL": "bool", "U8": "uint8", "I8": "int8"},
    **{"I16": "int16", "I32": "int32", "I64": "int64", "U16": "uint16", "U32": "uint32", "U64": "uint64"},
}
"""Names of types in torch, by their names in safetensors files."""


def bytes_digest(data: Any) -> str:
    """Computes the digest of a tensor; `data` is a buffer of its bytes."""
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
    """Computes the digest of the tensors in a safetensors file; raises ValueError if it is cut short or not of that
    format."""
    with open(path, "rb") as file:
        return open_file_digest(file)


def files_digest(paths: Iterable[Path]) -> str:
    """Computes one digest of the tensors in all files of a model."""
    found: dict[str, tuple[str, list[int], str]] = {}
    for path in paths:
        with open(path, "rb") as file:
            found |= _tensors(file)
    return whole_digest(found)


def open_file_digest(file: BinaryIO) -> str:
    return whole_digest(_tensors(file))


def _tensors(file: BinaryIO) -> dict[str, tuple[str, list[int], str]]:
    """Returns dtype, shape and digest of each tensor in a file, by name, for `whole_digest`."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
        found = {}
        for name, stored in read_layout(view).items():
            with view[stored.start : stored.stop] as data:
                found[name] = (DTYPES[stored.dtype], stored.shape, bytes_digest(data))
        return found


def adapter_digest(base: str, tensors: str, config: str) -> str:
    """Computes the digest of an adapter version from the digests of its base and its tensors, and its configuration."""
    return blake3(f"adapter\0{base}\0{tensors}\0{config}".encode()).hexdigest()


def whole_digest(tensors: Mapping[str, tuple[str, list[int], str]]) -> str:
    """Computes the digest of a version from dtype (torch's name), shape and digest of each tensor, by name."""
    whole = blake3()
    for name in sorted(tensors):
        dtype, shape, digest = tensors[name]
        whole.update(f"{name}\0{dtype}\0{shape}\0{digest}\n".encode())
    return whole.hexdigest()
