"""Mends, within vLLM, what its control calls leave undone; the server is started with `--worker-extension-cls`.

On CPUs vLLM keeps weights packed for multiplication. A reload packs again what it loaded. An output layer that shares
the embedding's weights loads nothing of its own, so it would go on with those of the version before, without a word.
"""

from typing import Any


class Extension:
    """Mixed into vLLM's workers: each method can be called by name."""

    model_runner: Any

    def offbeat_pack_head(self) -> bool:
        """Packs the output layer again where it is not its own; tells whether."""
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
