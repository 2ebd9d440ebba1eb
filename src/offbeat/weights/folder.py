"""Where versions lie on disk, for those who move weights and never open them."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

FILE_NAME = "model.safetensors"


class WeightFolder:
    """One sub-folder per version, named by its number."""

    def __init__(self, folder: Path):
        self.folder = folder.absolute()  # versions are read from wherever their reader stands

    def path(self, number: int) -> Path:
        return self.folder / f"{number:08d}"

    def draft(self, number: int) -> Path:
        """Where a version is written before it is whole."""
        return self.folder / f".{number:08d}.draft"

    def keep(self, numbers: Iterable[int]) -> None:
        """Deletes every other version."""
        wanted = {self.path(number).name for number in numbers}
        for folder in self.folder.glob("[0-9]*"):
            if folder.name not in wanted:
                shutil.rmtree(folder, ignore_errors=True)
