"""The policy's output layer: log-probs of given tokens without holding the logits of all of them in memory.

With a vocabulary of 152,000, the logits of 16,384 tokens take 10 GB in float32, and a plain backward pass holds three
more copies. `OutputHead` computes the logits a chunk of tokens at a time. It keeps one number per token, the log of the
sum of the exponentials, and computes each chunk's logits again in the backward pass. The gradient of the output layer's
weights is added up in float32, directly in the gradient of the weights' float32 copy (master).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from offbeat.model.usage import own_logits

CHUNK_BYTES = 1_250_000_000
"""Memory for a chunk's logits and the tensors computed from them. Each chunk reads and writes the whole gradient of the
output layer, so small chunks are slow."""
FUSED_BYTES, PLAIN_BYTES = 4, 8
"""Bytes of memory per logit. If the operations on logits are fused (compiled), a logit and its gradient are held, both
in bfloat16; otherwise a logit and a number computed from it, both in float32."""
CHUNK_MULTIPLE = 128
"""A chunk's number of tokens is a multiple of this where possible, to fit the tiles of matrix products."""


@dataclass
class OutputHead:
    """A model's output layer, and how its logits are adjusted: bounded by `softcap`, then multiplied by `scale`."""

    layer: nn.Linear
    scale: float = 1.0
    softcap: float | None = None
    gradient_of: Callable[[Tensor], Tensor | None] = lambda weight: weight
    """Returns, for a weight, the float32 tensor whose `grad` receives the weight's gradient; None if it is not
    trained."""
    fuses: bool = False
    """Whether to compile the operations on logits; compiled, they read the logits once instead of six times."""

    @classmethod
    @torch.no_grad()
    def of(cls, model: PreTrainedModel, tokens: Tensor) -> OutputHead | None:
        """Returns the model's output head; None if the model computes its logits in another way. To find out, compares
        the head's logits with those of the model's own forward pass over a row of `tokens`."""
        layer = model.get_output_embeddings()
        if type(layer) is not nn.Linear:
            return None
        config = model.config.get_text_config()
        cap = getattr(config, "final_logit_softcapping", None)
        scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1)
        head = cls(layer, scale, cap)
        seen: list[Tensor] = []
        hook = layer.register_forward_hook(lambda module, args, output: seen.append(args[0]))
        try:
            logits = own_logits(model, tokens)
        finally:
            hook.remove()
        if len(seen) != 1 or seen[0].shape[:-1] != logits.shape[:-1]:
            return None
        own = _adjusted(layer(seen[0]), head.scale, head.softcap).float()
        return head if own.shape == logits.shape and torch.allclose(own, logits.float(), rtol=1e-2, atol=1e-3) else None

    @contextmanager
    def deferred(self) -> Iterator[list[Tensor]]:
        """Makes the model skip its output layer within the block, so that the model's logits are meaningless there. The
        input of the layer in each forward pass is appended to the yielded list."""
        hidden: list[Tensor] = []

        def keep(states: Tensor) -> Tensor:
            hidden.append(states)
            return states[..., :1].detach()

        self.layer.forward = keep  # type: ignore[method-assign,assignment]
        try:
            yield hidden
        finally:
            del self.layer.forward

    def logprobs(self, hidden: Tensor, rows: Tensor, targets: Tensor, temperature: float) -> Tensor:
        """Returns the log-probs of the tokens `targets`. `hidden`, (positions, width), is the output layer's input;
        `rows` holds for each target the index in `hidden` of the position that predicts it."""
        found: Tensor = _ChunkedLogprobs.apply(hidden, rows, targets, temperature, self)
        return found

    @property
    def chunk_tokens(self) -> int:
        tokens = CHUNK_BYTES // ((FUSED_BYTES if self.fuses else PLAIN_BYTES) * self.layer.out_features)
        return max(tokens // CHUNK_MULTIPLE * CHUNK_MULTIPLE, min(tokens, CHUNK_MULTIPLE), 1)


def exceeds_chunk(num_targets: int, vocabulary: int) -> bool:
    """Whether the logits of `num_targets` tokens take more memory than a chunk may, so that chunks save memory."""
    return num_targets * vocabulary * PLAIN_BYTES > CHUNK_BYTES


class _ChunkedLogprobs(torch.autograd.Function):
    """Log-probs of targets, computed in chunks; see `OutputHead`. Only `hidden` gets its gradient through autograd."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, rows: Tensor, targets: Tensor, temperature: float, head: OutputHead
    ) -> Tensor:
        logprobs, sums = torch.empty(2, len(targets), dtype=torch.float32, device=hidden.device)
        measure = _compiled(_measure) if head.fuses else _measure
        for start in range(0, len(targets), head.chunk_tokens):
            part = slice(start, start + head.chunk_tokens)
            logits = linear(hidden.index_select(0, rows[part]), head.layer.weight, head.layer.bias)
            logprobs[part], sums[part] = measure(logits, targets[part], temperature, head.scale, head.softcap)
            del logits  # before the next chunk's are made
        ctx.save_for_backward(hidden, rows, targets, sums)
        ctx.temperature, ctx.head = temperature, head
        return logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, rows, targets, sums = ctx.saved_tensors
        head: OutputHead = ctx.head
        weight, bias = head.layer.weight, head.layer.bias
        back = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        slope = _compiled(_slope) if head.fuses else _slope
        for start in range(0, len(targets), head.chunk_tokens):
            part = slice(start, start + head.chunk_tokens)
            chosen = hidden.index_select(0, rows[part])
            logits = linear(chosen, weight, bias)
            wrong = slope(logits, targets[part], sums[part], grads[0][part], ctx.temperature, head.scale, head.softcap)
            back.index_add_(0, rows[part], (wrong @ weight).float())
            if (owner := head.gradient_of(weight)) is not None:
                _add_product(_gradient(owner), wrong.t(), chosen)
            if bias is not None and (owner := head.gradient_of(bias)) is not None:
                _gradient(owner).add_(wrong.float().sum(0))
            del logits, wrong  # before the next chunk's are made
        return back.to(hidden.dtype), None, None, None, None


def _adjusted(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Returns the model's logits, given the output of its output layer: first soft-capped, then scaled."""
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return logits if scale == 1.0 else logits * scale


def _measure(
    logits: Tensor, targets: Tensor, temperature: float, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Returns the targets' log-probs, and for each target the log of the sum of the exponentials of its logits, all
    after cap, scale and temperature."""
    adjusted = _adjusted(logits, scale, softcap).float()
    if temperature != 1.0:
        adjusted = adjusted / temperature
    sums = torch.logsumexp(adjusted, dim=-1)
    return adjusted.gather(1, targets[:, None])[:, 0] - sums, sums


def _slope(
    logits: Tensor,
    targets: Tensor,
    sums: Tensor,
    grads: Tensor,
    temperature: float,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Returns the loss's gradient with respect to the output layer's `logits`, in their dtype. `grads` is the gradient
    with respect to the targets' log-probs; `sums` is the second result of `_measure`."""
    adjusted = _adjusted(logits, scale, softcap).float()
    shares = torch.exp((adjusted if temperature == 1.0 else adjusted / temperature) - sums[:, None])
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    found = (is_target.to(shares.dtype) - shares) * (grads * (scale / temperature))[:, None]
    if softcap is not None:
        found = found * (1 - (adjusted / (scale * softcap)).square())
    return found.to(logits.dtype)


_made: dict[Callable[..., Any], Callable[..., Any]] = {}


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    if function not in _made:
        _made[function] = torch.compile(function, dynamic=True)
    return _made[function]


def _gradient(owner: Tensor) -> Tensor:
    if owner.grad is None:
        owner.grad = torch.zeros_like(owner)
    return owner.grad


def _add_product(total: Tensor, one: Tensor, other: Tensor) -> None:
    """Adds the matrix product of `one` and `other` to the float32 `total`; on a GPU, without memory for the product."""
    total = total.view(len(one), -1)
    if one.dtype == total.dtype:
        total.addmm_(one, other)
    elif one.device.type == "cuda":
        torch.ops.aten.addmm.dtype_out(total, one, other, total.dtype, out=total)
    else:
        total.add_(one.float() @ other.float())
