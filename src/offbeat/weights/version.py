"""What a version is, for those who only talk about weights and never hold them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Version:
    """A published set of weights: what every engine and the trainer's own forward pass use."""

    number: int
    """Only grows, never reused."""
    step: int
    parent: int | None
    digest: str
    path: Path
    manifest: str = ""
    """The digest of its manifest; none where it was published as a whole file alone."""
    base: Path | None = None
    """Where what an adapter stands on was put on this machine; None: nowhere, for whoever serves it has it already."""
