"""A model's number of parameters, from the headers of its files or from the hub. Imports no torch."""

from __future__ import annotations

import math
from pathlib import Path

from offbeat.errors import UserError
from offbeat.model.loading import cached_folder, hub_parameters, is_hub_name, resolve
from offbeat.weights.safetensor_file import file_layout


def num_parameters(path: str) -> int | None:
    """Returns a model's number of parameters from the headers of its files or, if it is not on this machine, from the
    hub; None if the hub does not know it. Raises `UserError` for a file that is damaged or cannot be read."""
    folder = cached_folder(path) if is_hub_name(path) else resolve(path)
    files = [] if folder is None else sorted(folder.glob("*.safetensors"))
    if not files:
        return hub_parameters(path)
    return sum(_num_elements(file) for file in files)


def _num_elements(file: Path) -> int:
    try:
        with file.open("rb") as opened:
            return sum(math.prod(tensor.shape) for tensor in file_layout(opened).values())
    except OSError as error:
        raise UserError(
            f"model.path: {file} cannot be read: {error.strerror}; check its permissions and its disk, or copy it again"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        why = " ".join(str(error).split())
        raise UserError(f"model.path: {file} is damaged ({why}); copy it again") from error
