"""Whether a model's forward pass, as training makes it, is the model's own: a few tokens, when a trainer starts.

Three short samples go through it together; two of them, one that shares its prompt and one behind the others, also go
alone through transformers' own code. That is four passes over a dozen tokens: milliseconds on a GPU, and on a CPU the
time in which the weights are read four times.
"""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel

from offbeat.errors import UserError
from offbeat.learn.forward import outputs
from offbeat.learn.packing import pack
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


@torch.no_grad()
def check(model: PreTrainedModel, usage: Usage) -> None:
    """Refuses a model of which a sample's log-probs depend on what it is trained beside."""
    samples = _samples(model)
    with telling(model, "a forward pass"), without_random(model):
        batch = pack(samples, range(len(samples)), model.device)
        logits = outputs(model, batch, usage).logits[batch.target_row]
        together = logits.split([sample.num_tokens for sample in samples])
        for sample, found in list(zip(samples, together, strict=True))[1:]:
            tokens = np.concatenate([sample.prompt, sample.response[:-1]])
            alone = own_logits(model, torch.as_tensor(tokens, device=model.device)[None])
            gap, allowed = distance(found, alone[0, len(sample.prompt) - 1 :]), max_distance(model)
            if gap is not None and not gap <= allowed:
                raise UserError(
                    f"model.path: {kind_of(model)}: beside others a sample's log-probs are off by {gap:.2g} of their "
                    f"spread (allowed {allowed:g}), so it cannot be trained; take a model that docs/models.md lists"
                )


def _samples(model: PreTrainedModel) -> list[Sample]:
    """Of lengths that are padded to the same where they are padded, and one with the shortest prompt there is."""
    tokens = np.array(probe_tokens(model, 17))
    prompt, others = tokens[:3], np.split(tokens[3:], (5, 8, 9))
    return [_sample(0, prompt, others[0]), _sample(0, prompt, others[1]), _sample(1, others[2], others[3])]


def _sample(group: int, prompt: np.ndarray, response: np.ndarray) -> Sample:
    """Tokens, and nothing to learn from them."""
    return Sample(group, prompt, response, np.zeros(len(response), np.float32), np.ones(len(response), bool), 0.0)
