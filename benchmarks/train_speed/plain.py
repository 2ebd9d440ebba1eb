"""Training steps as one would write them with transformers and torch alone: GRPO with AdamW, in two forms.

`PlainTrainer` pads its micro-batches. `VarlenTrainer` packs them, each answer with its prompt, uses torch's kernel for
sequences of uneven length and computes logits a chunk at a time; its layers may be compiled. It is the best baseline.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from offbeat.trainer import attention
from offbeat.trainer.advantages import group_normalised
from offbeat.trainer.packing import Sample

HEAD_CHUNK = 4096


class PlainTrainer:
    """Trains a few answers at a time, padded to the longest; `by_length` puts those of like length together."""

    def __init__(self, model: PreTrainedModel, samples_per_microbatch: int, lr: float, *, by_length: bool):
        self.model, self.samples_per_microbatch, self.by_length = model, samples_per_microbatch, by_length
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr, weight_decay=0.0, fused=True)

    def step(self, samples: Sequence[Sample]) -> float:
        """One update on a batch; returns the norm of its gradient."""
        rewards, groups = np.array([(sample.reward, sample.group) for sample in samples]).T
        advantages, num_tokens = group_normalised(rewards, groups), sum(sample.num_tokens for sample in samples)
        order = sorted(range(len(samples)), key=lambda i: samples[i].num_tokens if self.by_length else i)
        for start in range(0, len(order), self.samples_per_microbatch):
            chosen = order[start : start + self.samples_per_microbatch]
            self._loss([samples[i] for i in chosen], advantages[chosen], num_tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def _loss(self, samples: Sequence[Sample], advantages: np.ndarray, num_tokens: int) -> Tensor:
        device, num_prompt = self.model.device, len(samples[0].prompt)
        longest = max(sample.num_tokens for sample in samples)
        tokens = torch.zeros(len(samples), num_prompt + longest, dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        for row, sample in enumerate(samples):
            whole = np.concatenate([sample.prompt, sample.response])
            tokens[row, : len(whole)] = torch.from_numpy(whole)
            mask[row, : len(whole)] = 1
        tokens, mask = tokens.to(device), mask.to(device)
        logits = self.model(input_ids=tokens, attention_mask=mask, logits_to_keep=longest + 1).logits[:, :-1].float()
        answers = tokens[:, num_prompt:]
        logprobs = logits.gather(-1, answers[..., None])[..., 0] - logits.logsumexp(-1)
        ratios = torch.exp(logprobs - logprobs.detach())
        weighted = ratios * torch.from_numpy(advantages).to(device, torch.float32)[:, None] * mask[:, num_prompt:]
        return -weighted.sum() / num_tokens


class VarlenTrainer:
    """Trains rows of up to `row_tokens` tokens without padding; every answer brings its prompt along."""

    def __init__(self, model: PreTrainedModel, row_tokens: int, lr: float, *, compiles: bool):
        self.model, self.row_tokens, self.parameters = model, row_tokens, list(model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr, weight_decay=0.0, fused=True)
        AttentionInterface.register("plain_varlen", self._attend)
        model.set_attn_implementation("plain_varlen")
        if compiles:
            for layer in model.model.layers:
                layer.compile(dynamic=True)
        self.ends, self.longest = torch.zeros(0), 0

    def step(self, samples: Sequence[Sample]) -> float:
        """One update on a batch; returns the norm of its gradient."""
        rewards, groups = np.array([(sample.reward, sample.group) for sample in samples]).T
        advantages, num_tokens = group_normalised(rewards, groups), sum(sample.num_tokens for sample in samples)
        for row in self._rows(samples):
            self._backward([samples[i] for i in row], advantages[row], num_tokens)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def _rows(self, samples: Sequence[Sample]) -> list[list[int]]:
        """Longest first, each answer into the first row with room for it."""
        rows: list[tuple[int, list[int]]] = []
        for i in sorted(range(len(samples)), key=lambda i: -samples[i].num_tokens):
            cost = len(samples[i].prompt) + samples[i].num_tokens
            at = next((at for at, (taken, _) in enumerate(rows) if taken + cost <= self.row_tokens), None)
            if at is None:
                rows.append((cost, [i]))
            else:
                rows[at] = rows[at][0] + cost, [*rows[at][1], i]
        return [row for _, row in rows]

    def _backward(self, samples: Sequence[Sample], advantages: np.ndarray, num_tokens: int) -> None:
        device, tokens = self.model.device, [np.concatenate([one.prompt, one.response]) for one in samples]
        ends = np.cumsum([0, *map(len, tokens)])
        at = [np.arange(end - one.num_tokens - 1, end - 1) for one, end in zip(samples, ends[1:], strict=True)]
        positions = np.concatenate([np.arange(len(own)) for own in tokens])

        def there(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device)

        self.ends, self.longest = there(ends.astype(np.int32)), max(map(len, tokens))
        inputs = {"input_ids": there(np.concatenate(tokens))[None], "position_ids": there(positions)[None]}
        hidden = self.model.model(**inputs, use_cache=False).last_hidden_state[0][there(np.concatenate(at))]
        targets = there(np.concatenate([one.response for one in samples]))
        weights = there(np.repeat(advantages / num_tokens, [one.num_tokens for one in samples]).astype(np.float32))
        apart = hidden.detach().requires_grad_()
        for start in range(0, len(targets), HEAD_CHUNK):
            part = slice(start, start + HEAD_CHUNK)
            logits = torch.nn.functional.linear(apart[part], self.model.lm_head.weight).float()
            logprobs = logits.gather(-1, targets[part, None])[:, 0] - logits.logsumexp(-1)
            (-torch.exp(logprobs - logprobs.detach()) * weights[part]).sum().backward()
        hidden.backward(apart.grad)

    def _attend(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **_: object
    ) -> tuple[Tensor, None]:
        attend = attention.varlen_kernel()
        assert attend is not None
        parts = [states[0].transpose(0, 1) for states in (query, key, value)]
        found = attend(*parts, self.ends, self.ends, self.longest, self.longest, window_size=(-1, 0))
        return found[None], None
