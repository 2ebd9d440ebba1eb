"""Shapes of real models; weights are random, since speed does not depend on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """Shape of a model, in transformers' Qwen2 architecture."""

    hidden: int
    inner: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    num_tokens: int
    """In its vocabulary."""
    is_tied: bool = True
    """Whether input and output embeddings are one matrix."""

    @property
    def num_parameters(self) -> int:
        """Norms and biases left out."""
        head = self.hidden // self.num_heads
        attention = 2 * self.hidden * (self.hidden + head * self.num_kv_heads)
        embeddings = (1 if self.is_tied else 2) * self.num_tokens * self.hidden
        return embeddings + self.num_layers * (attention + 3 * self.hidden * self.inner)

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
            "tie_word_embeddings": self.is_tied,
            "torch_dtype": "bfloat16",
            "bos_token_id": 0,
            "eos_token_id": 0,
        }


SHAPES = {
    "tiny": Shape(128, 256, 4, 2, 1, 512),
    "135m": Shape(576, 1536, 30, 9, 3, 49152),
    "0.5b": Shape(896, 4864, 24, 14, 2, 151936),
    "1.5b": Shape(1536, 8960, 28, 12, 2, 151936),
    "4b": Shape(2560, 9728, 36, 32, 8, 151936),
    "7.6b": Shape(3584, 18944, 28, 28, 4, 152064, is_tied=False),
    "12b": Shape(4096, 18944, 40, 32, 8, 151936, is_tied=False),
}
"""SmolLM2-135M's, Qwen2.5-0.5B's, Qwen2.5-1.5B's, one of 4B, Qwen2.5-7B's, and one of 12B."""
