"""Where versions lie on disk, for those who move weights and never open them."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from offbeat.files import replace_folder

FILE_NAME = "model.safetensors"
ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""What an adapter's folder holds instead, as peft has it."""


def weights_file(folder: Path) -> Path:
    """The file with a version's tensors: an adapter's, where the version is one."""
    adapter = folder / ADAPTER_FILE
    return adapter if adapter.is_file() else folder / FILE_NAME


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


def put_in_place(draft: Path, final: Path) -> None:
    """Gives a finished draft its name; what had it before loses it in one step, and only where the draft is there."""
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
