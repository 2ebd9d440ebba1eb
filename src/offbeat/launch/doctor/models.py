"""Probes of torch and its devices, and of the model's files."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.errors import UserError
from offbeat.launch.doctor.seen import Device, Model, Torch
from offbeat.model.loading import WINDOW_KEYS, resolve
from offbeat.weights.safetensor_file import file_layout

if TYPE_CHECKING:
    import torch

SIDE = 64


def look_at_torch(wanted: str) -> Torch:
    """torch, every device with a small product computed on it, and the device that `wanted` means."""
    import torch

    from offbeat.model.devices import available_devices, pick_device

    picked, refused = "", ""
    try:
        picked = str(pick_device(wanted))
    except UserError as error:
        refused = str(error)
    return Torch(torch.__version__, _build(), [_device(name) for name in available_devices()], picked, refused)


def look_at_model(path: str) -> Model:
    """A model's files, as far as they are on this machine; nothing is fetched."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    folder = resolve(path)
    told = json.loads((folder / "config.json").read_text())
    text = told.get("text_config") or told
    windows = [text[key] for key in WINDOW_KEYS if isinstance(text.get(key), int)]
    names = told.get("architectures") or [told.get("model_type", "unknown")]
    sizes = [_num_elements(file) for file in sorted(folder.glob("*.safetensors"))]
    return Model(str(folder), names[0], sum(sizes), windows[0] if windows else None)


def _num_elements(file: Path) -> int:
    """In all tensors of a file; one that was cut off is refused."""
    try:
        with file.open("rb") as opened:
            return sum(math.prod(tensor.shape) for tensor in file_layout(opened).values())
    except ValueError as error:
        raise UserError(f"{file}: {error}; copy it again") from error


def _build() -> str:
    import torch

    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return "MPS" if torch.backends.mps.is_built() else "CPU"


def _device(name: str) -> Device:
    import torch

    from offbeat.model.devices import device_name, memory_bytes

    device = torch.device(name)
    capability = ""
    try:
        if device.type == "cuda":
            told = torch.cuda.get_device_properties(device)
            capability = getattr(told, "gcnArchName", "") if torch.version.hip else f"{told.major}.{told.minor}"
        free, total = memory_bytes(device) or (None, None)
        return Device(name, device_name(device), total, free, capability, _fault(device))
    except RuntimeError as error:  # what torch raises for all that a driver or a device can have
        return Device(name, name, capability=capability, fault=str(error).strip().splitlines()[0])


def _fault(device: torch.device) -> str:
    """Devices of a kind that this build has no code for are listed all the same; only use shows it."""
    import torch

    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    ones = torch.ones(SIDE, SIDE, dtype=dtype, device=device)
    is_right = bool((ones @ ones == SIDE).all())
    return "" if is_right else "a product of two matrices comes out wrong"
