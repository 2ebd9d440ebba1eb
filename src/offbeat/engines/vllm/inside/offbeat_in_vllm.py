"""Worker extension for vLLM on CPUs (`--worker-extension-cls`). Only tests run vLLM on CPUs.

On CPUs vLLM keeps weights packed for multiplication, and a reload packs only the tensors that it loads. An output layer
that shares the embedding's weights loads none, and would keep the old version's.
"""

from typing import Any


class Extension:
    """Mixed into vLLM's workers; methods are called by name over HTTP."""

    model_runner: Any

    def offbeat_pack_head(self) -> bool:
        """Packs a shared output layer again; returns whether there is one."""
        model = self.model_runner.get_model()
        head = getattr(model, "lm_head", None)
        config = getattr(model, "config", None)
        if head is None or not getattr(config, "tie_word_embeddings", False) or not hasattr(head, "quant_method"):
            return False
        embedding = getattr(getattr(model, "model", None), "embed_tokens", None)
        if embedding is not None and head is not embedding and getattr(embedding, "weight", None) is not None:
            head.weight = embedding.weight
        head.quant_method.process_weights_after_loading(head)
        return True
