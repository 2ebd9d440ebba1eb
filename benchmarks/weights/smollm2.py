"""Finds SmolLM2 for these measurements: in a given folder, or unpacked into the repository's cache."""

from __future__ import annotations

from pathlib import Path

from benchmarks import report
from offbeat.model import smollm2


def folder(given: Path | None) -> Path:
    if given is not None:
        return given
    cached = report.REPOSITORY / ".cache" / "smollm2"
    if not (cached / "config.json").is_file():
        smollm2.write(cached)
    return cached
