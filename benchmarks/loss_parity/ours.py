"""Runs a case through Offbeat's real training step, with a policy that returns given log-probs instead of a model's.

Loss and gradient are those that reach the policy in each update; the gradient is with respect to each token's log-prob.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.loss_parity.cases import MAX_NEW_TOKENS, Answer
from offbeat.config.schema import Config
from offbeat.launch.model_parts import step_settings
from offbeat.model.usage import Usage
from offbeat.trainer.advantages import EQUAL_WITHIN
from offbeat.trainer.packing import Microbatch, Sample
from offbeat.trainer.policy import Forward, LossFunction, Policy
from offbeat.trainer.step import train_step

TRL_STD_FLOOR = 1e-4
REFERENCE = cast(PreTrainedModel, object())
"""Placeholder for the reference model, whose log-probs are given too."""


@dataclass(frozen=True)
class Outcome:
    """One update's loss, and its gradient and advantage for each of its answers."""

    loss: float
    gradients: Sequence[np.ndarray]
    advantages: np.ndarray


class GivenPolicy(Policy):
    """Policy that returns the log-probs of the answers, and records each update's loss and gradients."""

    def __init__(self, answers: Sequence[Answer]):
        self.answers, self.usage = answers, Usage(obstacle=None, hands_on=True, picks_logits=True)
        self.device, self.num_threads, self.width = torch.device("cpu"), torch.get_num_threads(), 1
        self.updates: list[tuple[float, dict[int, np.ndarray]]] = []
        self._begin()

    def _begin(self) -> None:
        self.loss, self.gradients = 0.0, dict[int, np.ndarray]()

    def infer(self, microbatch: Microbatch) -> Forward:
        return Forward(self._of(microbatch, "start"))

    def logprobs(self, microbatch: Microbatch, model: PreTrainedModel | None = None) -> Tensor:
        return self._of(microbatch, "logprobs" if model is None else "reference")

    def forward_backward(self, microbatch: Microbatch, loss: LossFunction, num_real: int = 1) -> Tensor:
        given = self._of(microbatch, "logprobs").requires_grad_()
        value = loss(Forward(given))
        value.backward()
        assert given.grad is not None
        ends = np.cumsum([len(self.answers[i].logprobs) for i in microbatch.samples])[:-1]
        self.gradients.update(zip(microbatch.samples, np.split(given.grad.numpy(), ends), strict=True))
        self.loss += value.item()
        return given.detach()

    def update(self, lr: float) -> float:
        self.updates.append((self.loss, self.gradients))
        self._begin()
        return 0.0

    def _of(self, microbatch: Microbatch, which: str) -> Tensor:
        return torch.as_tensor(np.concatenate([getattr(self.answers[i], which) for i in microbatch.samples]))


def outcomes(loss: Mapping[str, Any], answers: Sequence[Answer], updates: Sequence[Sequence[int]]) -> list[Outcome]:
    """Returns the outcome of each update of a step with the section `[loss]`."""
    config = Config.model_validate(
        {
            "loss": dict(loss),
            "rollout": {"engine": "embedded", "max_prompt_tokens": 1, "max_new_tokens": MAX_NEW_TOKENS},
            "batch": {"updates_per_step": len(updates), "tokens_per_microbatch": 64},
        }
    )
    settings, policy = replace(step_settings(config), max_sample_gap=None), GivenPolicy(answers)  # no engine to audit
    train_step(policy, [_sample(answer) for answer in answers], settings, 0.0, REFERENCE if settings.kl_coef else None)
    rewards, groups = np.array([answer.reward for answer in answers]), np.array([answer.group for answer in answers])
    advantages = settings.advantage(rewards, groups)
    # What has no advantage is not sent backward: its gradient is 0.
    return [
        Outcome(total, [found.get(i, np.zeros(len(answers[i].logprobs))) for i in part], advantages[part])
        for part, (total, found) in zip(map(list, updates), policy.updates, strict=True)
    ]


def normalised_as_trl(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Returns (reward - mean) / (std + 1e-4) within each group; a user's own advantage, for `loss.advantage`."""
    advantages = np.zeros(len(rewards))
    for group in np.unique(groups):
        values = rewards[groups == group]
        if np.ptp(values) > EQUAL_WITHIN:
            advantages[groups == group] = (values - values.mean()) / (values.std(ddof=1) + TRL_STD_FLOOR)
    return advantages


def _sample(answer: Answer) -> Sample:
    tokens = np.arange(len(answer.logprobs))
    return Sample(
        group=answer.group,
        prompt=np.array([1]),
        response=tokens,
        logprobs=answer.behaviour,
        mask=answer.mask,
        reward=answer.reward,
        staleness=np.ones_like(tokens),
    )
