"""Versions that are adapters: a few tensors of their own on a base that never changes.

The folder of one is what peft and vLLM read: the tensors, and a configuration beside them. The tensors' file names the
digest of the base in its metadata, so the folder proves what it is: its digest is that of base, tensors and
configuration together. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.weights.digest import adapter_digest, file_digest
from offbeat.weights.folder import ADAPTER_CONFIG, ADAPTER_FILE, weights_file
from offbeat.weights.safetensor_file import file_metadata

if TYPE_CHECKING:
    from torch import Tensor

BASE = "offbeat_base"
"""In the metadata of an adapter's file."""


@dataclass(frozen=True)
class Adapter:
    """What all adapters of a run have in common."""

    base: str
    """The digest of the weights that they stand on."""
    config: str
    """What stands in their configuration file."""
    base_tensors: Callable[[], Mapping[str, Tensor]]
    """Those weights, for workers that have them not."""

    @property
    def metadata(self) -> dict[str, str]:
        return {BASE: self.base}


def base_digest(folder: Path) -> str | None:
    """What the adapter in a folder stands on; None where there is no adapter in it."""
    file = folder / ADAPTER_FILE
    if not file.is_file():
        return None
    if not (found := file_metadata(file).get(BASE)):
        raise ValueError("it does not say which base it stands on")
    return found


def folder_digest(folder: Path) -> str:
    """The digest of the version in a folder; raises ValueError or OSError where there is none that can be read."""
    base, tensors = base_digest(folder), file_digest(weights_file(folder))
    if base is None:
        return tensors
    return adapter_digest(base, tensors, (folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
