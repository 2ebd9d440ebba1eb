"""Steps on tiny models: batches with everything uneven in them, settings of each preset, gradients taken down."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from learning_models import tiny_model
from learning_samples import make_samples

from offbeat.config.schema import IMPORTANCE, PRESETS
from offbeat.trainer import attention
from offbeat.trainer.advantages import ADVANTAGES, GaeSettings, group_normalised
from offbeat.trainer.losses import POLICY_LOSSES, CorrectionSettings, LossSettings
from offbeat.trainer.packing import Sample, pack
from offbeat.trainer.policy import AdamSettings, Policy
from offbeat.trainer.step import StepSettings

SHAPE = [(5, [3, 9, 1, 4]), (2, [20, 4]), (7, [6, 2, 8]), (3, [5, 5]), (4, [3])]


class RecordingPolicy(Policy):
    """Takes down the gradient of each update."""

    def __init__(self, seed: int = 0, adam: AdamSettings | None = None, *, has_value_head: bool = False):
        super().__init__(tiny_model("llama", seed), adam or AdamSettings(), has_value_head=has_value_head)
        self.gradients: list[torch.Tensor] = []

    def gathered(self) -> torch.Tensor:
        """The gradient so far."""
        grads = [torch.zeros_like(m) if m.grad is None else m.grad for m in self.masters]
        return torch.cat([grad.reshape(-1) for grad in grads]).clone()

    def update(self, lr: float) -> float:
        self.gradients.append(self.gathered())
        return super().update(lr)


def weights(policy: Policy) -> torch.Tensor:
    return torch.cat([master.detach().reshape(-1) for master in policy.masters]).clone()


def own_logprobs(policy: Policy, samples: Sequence[Sample]) -> list[np.ndarray]:
    ends = np.cumsum([sample.num_tokens for sample in samples])[:-1]
    found = policy.logprobs(pack(samples, range(len(samples)), policy.device)).numpy()
    return np.split(found, ends)


def honest(policy: Policy, samples: Sequence[Sample], noise: float = 0.0, seed: int = 0) -> list[Sample]:
    """The samples as if an engine had drawn them from the policy itself, or from something near it."""
    rng = np.random.default_rng(seed)
    return [
        replace(sample, logprobs=(own + rng.normal(0, noise, len(own))).astype(np.float32))
        for sample, own in zip(samples, own_logprobs(policy, samples), strict=True)
    ]


def uneven_samples(noise: float = 0.4) -> list[Sample]:
    """Groups of 4, 2, 3, 2 and 1; tokens that were given or are too old, in one sample all of them; equal rewards."""
    rng = np.random.default_rng(0)
    samples = []
    for i, sample in enumerate(honest(RecordingPolicy(), make_samples(rng, SHAPE), noise)):
        mask = rng.random(sample.num_tokens) < (0.0 if i == 3 else 0.8)
        samples.append(
            replace(
                sample,
                mask=mask,
                staleness=np.where(mask, rng.integers(0, 12, sample.num_tokens), -1),
                sampled=np.ones(sample.num_tokens, bool) if i % 3 == 0 else None,
                reward=0.5 if sample.group == 3 else float(rng.integers(0, 4)) / 3,
            )
        )
    first = samples[1]
    samples[1] = replace(first, rewards=((2, 0.25), (-1, first.reward - 0.25)))
    return samples


def preset_settings(name: str, correction: str = "off", **changes) -> StepSettings:
    """What a preset comes to, as a run would have it."""
    preset = PRESETS[name]
    uses_gae = preset.advantage == "gae"
    return replace(
        StepSettings(
            advantage=group_normalised if uses_gae else ADVANTAGES[preset.advantage],
            gae=GaeSettings() if uses_gae else None,
            policy_loss=POLICY_LOSSES[preset.policy],
            loss=LossSettings(preset.clip_low, preset.clip_high),
            correction=CorrectionSettings(correction, *IMPORTANCE[correction]),
            aggregate=preset.aggregate,
            aggregate_tokens=20,
        ),
        **changes,
    )


def reference_model(seed: int = 1):
    model = tiny_model("llama", seed).requires_grad_(False)
    attention.use_packed_attention(model)
    return model
