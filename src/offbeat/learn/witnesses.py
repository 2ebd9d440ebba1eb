"""Weights of older versions, kept for audits: a batch may hold tokens of each version within the bound.

They are further names of files that were published anyway, beside those, so that they cost no time; each keeps the room
of its version on the disk until it is past the bound. An audit that finds none does without.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from offbeat.files import link_folder
from offbeat.weights.folder import WeightFolder, weights_file
from offbeat.weights.version import Version

log = logging.getLogger(__name__)


class Witnesses(WeightFolder):
    """The latest `num_kept` versions that a trainer published."""

    def __init__(self, folder: Path, num_kept: int):
        super().__init__(folder)
        self.num_kept = num_kept

    def add(self, version: Version) -> None:
        """Keeps a version in place of the oldest."""
        numbers = sorted({int(path.name) for path in self.folder.glob("[0-9]*")} | {version.number})
        self.keep(numbers[-self.num_kept :])
        try:
            link_folder(version.path, self.path(version.number))
        except OSError as error:
            shutil.rmtree(self.path(version.number), ignore_errors=True)
            log.warning("version %d is not kept for audits: %s", version.number, error)

    def file(self, number: int) -> Path | None:
        """The file with a version's tensors; None where it is not kept."""
        file = weights_file(self.path(number))
        return file if file.is_file() else None
