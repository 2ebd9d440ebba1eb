"""A simple training step with transformers and torch alone: padded micro-batches, GRPO, AdamW."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from offbeat.trainer.advantages import group_normalised
from offbeat.trainer.packing import Sample


class PlainTrainer:
    """Trains a few answers at a time, padded to the longest; `by_length` batches answers of similar length."""

    def __init__(self, model: PreTrainedModel, samples_per_microbatch: int, lr: float, *, by_length: bool):
        self.model, self.samples_per_microbatch, self.by_length = model, samples_per_microbatch, by_length
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr, weight_decay=0.0, fused=True)

    def step(self, samples: Sequence[Sample]) -> float:
        """Makes one update on a batch; returns the norm of its gradient."""
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
