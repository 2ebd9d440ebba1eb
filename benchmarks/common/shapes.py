"""Shapes of real models; weights are random, since speed does not depend on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """Shape of a model with tied embeddings."""

    hidden: int
    inner: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    num_tokens: int
    """Size of the vocabulary."""

    @property
    def num_parameters(self) -> int:
        """Number of parameters without norms and biases."""
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
"""Shapes by name: `135m` is that of SmolLM2-135M, `1.5b` that of Qwen2.5-1.5B."""
