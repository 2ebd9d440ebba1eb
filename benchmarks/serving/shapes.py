"""Models to serve: the shapes of real ones, and weights that nobody trained, since speed does not depend on them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from offbeat.model.loading import resolve
from offbeat.weights.digest import file_digest
from offbeat.weights.folder import FILE_NAME
from offbeat.weights.version import Version

DEVIATION = 0.02
STEP = 1.01
"""By what a weight of one version differs from that of the next."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Shape:
    """Of a model with tied embeddings."""

    hidden: int
    inner: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    num_tokens: int
    """In its vocabulary."""

    @property
    def num_parameters(self) -> int:
        """Norms and biases left out."""
        head = self.hidden // self.num_heads
        attention = 2 * self.hidden * (self.hidden + head * self.num_kv_heads)
        return self.num_tokens * self.hidden + self.num_layers * (attention + 3 * self.hidden * self.inner)

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "vocab_size": self.num_tokens,
            "max_position_embeddings": 32768,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "bos_token_id": 0,
            "eos_token_id": 0,
        }


SHAPES = {
    "tiny": Shape(128, 256, 4, 2, 1, 512),
    "135m": Shape(576, 1536, 30, 9, 3, 49152),
    "1.5b": Shape(1536, 8960, 28, 12, 2, 151936),
}
"""The second is SmolLM2-135M's, the third Qwen2.5-1.5B's."""


class Models:
    """Two versions of one shape below a folder, which take turns: what is loaded is never what is there already."""

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
        """What a server starts from."""
        return self._folders[0]

    def next(self) -> Version:
        """A version with a number of its own."""
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
