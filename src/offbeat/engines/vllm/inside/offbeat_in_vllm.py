"""Worker extension (`--worker-extension-cls`), which vLLM needs on CPUs. Only tests run vLLM on CPUs.

On CPUs vLLM keeps a copy of the weights that is packed for multiplication, and a reload packs only the layers whose
tensors it loads. An output layer that shares the embedding's weights has no tensor of its own, so without this
extension it would keep the packed weights of the old version.
"""

from typing import Any


class Extension:
    """Class that vLLM mixes into its worker class. Offbeat calls its methods by name, as it calls those of vLLM."""

    model_runner: Any

    def offbeat_pack_head(self) -> bool:
        """Packs the output layer's weights again if the embedding shares them; returns whether they were packed."""
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
