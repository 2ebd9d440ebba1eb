"""Whether a model's forward pass, as training makes it, is the model's own: a few tokens, when a trainer starts.

Three short samples go through it together, and back to the input; two of them, one that shares its prompt and one that
is behind the others, also go alone through transformers' own code. That is five passes over a dozen tokens, with the
one that `usage` makes: milliseconds on a GPU, and on a CPU the time in which the weights are read five times.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbeat.errors import UserError
from offbeat.learn.forward import outputs
from offbeat.learn.packing import Microbatch, pack
from offbeat.learn.samples import Sample
from offbeat.model.usage import (
    Usage,
    distance,
    kind_of,
    max_distance,
    own_logits,
    probe_tokens,
    telling,
    without_random,
)


def check(model: PreTrainedModel, usage: Usage) -> None:
    """Refuses a model of which a sample's log-probs depend on what it is trained beside, or that has no way back."""
    samples = _samples(model)
    with telling(model, "a pass forward and back"), without_random(model):
        batch = pack(samples, range(len(samples)), model.device)
        logits = _there_and_back(model, batch, usage)[batch.target_row]
        together = logits.split([sample.num_tokens for sample in samples])
        for sample, found in list(zip(samples, together, strict=True))[1:]:
            tokens = np.concatenate([sample.prompt, sample.response[:-1]])
            with torch.no_grad():
                alone = own_logits(model, torch.as_tensor(tokens, device=model.device)[None])
            gap, allowed = distance(found, alone[0, len(sample.prompt) - 1 :]), max_distance(model)
            if gap is not None and not gap <= allowed:
                raise UserError(
                    f"model.path: {kind_of(model)}: beside others a sample's log-probs are off by {gap:.2g} of their "
                    f"spread (allowed {allowed:g}), so it cannot be trained; take a model that docs/models.md lists"
                )


def _there_and_back(model: PreTrainedModel, batch: Microbatch, usage: Usage) -> Tensor:
    """The logits, after their gradient has gone back to the embedded tokens: no weight's gradient takes memory."""
    embedded: list[Tensor] = []

    def begin_here(module: nn.Module, args: object, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1].clone()  # some models go on in place, which a leaf does not bear

    hook = model.get_input_embeddings().register_forward_hook(begin_here)
    try:
        with torch.enable_grad():
            logits = outputs(model, batch, usage).logits
            torch.autograd.grad(logits.sum(), embedded, allow_unused=True)
    finally:
        hook.remove()
    return logits.detach()


def _samples(model: PreTrainedModel) -> list[Sample]:
    """Of lengths that are padded to the same where they are padded, and one with the shortest prompt there is."""
    tokens = np.array(probe_tokens(model, 17))
    prompt, others = tokens[:3], np.split(tokens[3:], (5, 8, 9))
    return [_sample(0, prompt, others[0]), _sample(0, prompt, others[1]), _sample(1, others[2], others[3])]


def _sample(group: int, prompt: np.ndarray, response: np.ndarray) -> Sample:
    """Tokens, and nothing to learn from them."""
    return Sample(group, prompt, response, np.zeros(len(response), np.float32), np.ones(len(response), bool), 0.0)
