"""Models to serve: two versions with random weights in the shape of a real model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.common.shapes import Shape
from offbeat.model.loading import resolve
from offbeat.weights.version import FILE_NAME, Version, file_digest

DEVIATION = 0.02
STEP = 1.01
"""Ratio of a weight in one version to the same weight in the other."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


class Models:
    """Two versions of one shape below a folder, which take turns, so that a load always changes the weights."""

    def __init__(self, shape: Shape, folder: Path):
        self.shape = shape
        self._folders = [folder / "even", folder / "odd"]
        tensors = random_tensors(shape)
        self._digests = []
        for place in self._folders:
            write(shape, tensors, place)
            self._digests.append(file_digest(place / FILE_NAME))
            tensors = {name: tensor * STEP for name, tensor in tensors.items()}
        self._number = 0

    @property
    def folder(self) -> Path:
        """Folder of the model with which a server starts."""
        return self._folders[0]

    def next(self) -> Version:
        """Returns the other version under a new number."""
        self._number += 1
        which = self._number % 2
        return Version(self._number, self._number, self._number - 1, self._digests[which], self._folders[which])


def random_tensors(shape: Shape) -> dict[str, Tensor]:
    with torch.device("meta"):
        wanted = Qwen2ForCausalLM(Qwen2Config.from_dict(shape.config())).state_dict()
    random = torch.Generator().manual_seed(0)

    def made(name: str, tensor: Tensor) -> Tensor:
        made = torch.empty(tensor.shape, dtype=torch.bfloat16)
        return made.fill_(1.0) if "norm" in name else made.normal_(0.0, DEVIATION, generator=random)

    return {name: made(name, tensor) for name, tensor in wanted.items() if name != "lm_head.weight"}  # it is tied


def write(shape: Shape, tensors: Mapping[str, Tensor], folder: Path) -> None:
    folder.mkdir(parents=True)
    save_file(dict(tensors), folder / FILE_NAME, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(shape.config()))
    for name in TOKENIZER:  # token ids alone cross the line, but some servers will not start without words
        shutil.copy(resolve("offbeat-tiny") / name, folder / name)
