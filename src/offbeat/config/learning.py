"""How a policy learns: `[optimizer]` and `[loss]`, and what each algorithm's name stands for.

A name such as `dapo` is a preset: a policy loss, an advantage, a way to add up, and their numbers. Each key that is
given replaces the preset's; `recipe` says what holds in the end, and everything downstream reads that alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from offbeat.config.section import Section, free

if TYPE_CHECKING:
    from offbeat.config.models import Config

Aggregate = Literal["token_mean", "sequence_mean", "constant"]
Correction = Literal["off", "decoupled", "tis", "icepop", "sequence_tis", "sequence_mask"]
Divergence = Literal["k1", "k2", "k3"]

ADVANTAGES = ("group", "mean", "leave_one_out", "siblings", "batch", "gae")
"""What `loss.advantage` may name besides a function of the user's own."""
BEYOND_SIBLINGS = ("batch", "gae")
"""Those that do not compare answers to one prompt."""
RELEASED = {"group": "siblings", "mean": "leave_one_out"}
"""What stands in for a preset's advantage where answers are trained without some of their siblings: a baseline without
the answer itself counts the same with one known sibling as with all."""


@dataclass(frozen=True)
class Preset:
    """What the name of an algorithm stands for."""

    policy: str
    """`clip`, `sequence_clip`, `cispo` or `reinforce`."""
    advantage: str
    aggregate: Aggregate
    clip_low: float = 0.2
    clip_high: float = 0.2
    drop_no_signal: bool = False


PRESETS = {
    "grpo": Preset("clip", "group", "sequence_mean"),
    "dr_grpo": Preset("clip", "mean", "constant"),
    "dapo": Preset("clip", "group", "token_mean", clip_high=0.28, drop_no_signal=True),
    "gspo": Preset("sequence_clip", "group", "sequence_mean", clip_low=3e-4, clip_high=4e-4),
    "cispo": Preset("cispo", "group", "token_mean"),
    "rloo": Preset("clip", "leave_one_out", "constant"),
    "reinforce": Preset("reinforce", "batch", "token_mean"),
    "reinforce++": Preset("clip", "batch", "token_mean"),
    "ppo": Preset("clip", "gae", "token_mean"),
}
OWN = Preset("own", "group", "token_mean")
"""Of a loss of the user's own."""

IMPORTANCE = {
    "off": (0.0, 1.0),
    "decoupled": (0.0, float("inf")),
    "tis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "sequence_tis": (0.0, 2.0),
    "sequence_mask": (0.5, 2.0),
}
"""For each correction, the least and the most that a token or sequence of older weights may count."""
HAVE_LEAST = ("icepop", "sequence_mask")
HAVE_MOST = ("tis", "icepop", "sequence_tis", "sequence_mask")
"""Corrections with a limit that a key may change."""


class OptimizerConfig(Section):
    lr: float = free(1e-6, gt=0)
    """Learning rate, at its highest."""
    schedule: Literal["constant", "linear", "cosine"] = free("constant")
    """How it falls towards run.steps."""
    warmup_steps: int = free(0, ge=0)
    """Steps in which it rises from 0."""
    beta1: float = free(0.9, ge=0, lt=1)
    """Of AdamW: how slowly the mean of gradients forgets."""
    beta2: float = free(0.999, ge=0, lt=1)
    """The same for their squares."""
    eps: float = free(1e-8, gt=0)
    """Added to the root of that mean, so that nothing is divided by 0."""
    weight_decay: float = free(0.0, ge=0)
    """The share of every weight, times lr, that an update takes away."""
    max_grad_norm: float = free(1.0, gt=0)
    """Longer gradients are shortened to this."""


class LossConfig(Section):
    name: str = "grpo"
    """grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce, reinforce++, ppo; or a loss of your own as `module:function`
    or `file.py:function`. See docs/algorithms.md."""
    advantage: str | None = None
    """group, mean, leave_one_out, siblings, batch, gae, or your own as `module:function`; without it, that of `name`,
    or what batch.gate makes of it."""
    aggregate: Aggregate | None = None
    """How token losses add up: by token, by sequence, or divided by a constant; without it, as `name` does."""
    aggregate_tokens: int | None = Field(None, ge=1)
    """The constant of aggregate = "constant"; without it, rollout.max_new_tokens."""
    clip_low: float | None = free(None, gt=0, lt=1)
    """How far below 1 a probability ratio still counts; without it, that of `name`."""
    clip_high: float | None = free(None, gt=0)
    """How far above 1."""
    dual_clip: float | None = free(None, gt=1)
    """The most that a ratio counts against an answer that was worse than the others; without it, no limit."""
    ratio_max: float = free(5.0, ge=1)
    """The most that a token weighs in cispo: the ratio itself, not its distance from 1."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL divergence to the starting model; 0 loads no reference."""
    kl: Divergence = "k3"
    """How that divergence is estimated."""
    correction: Correction | None = free(None)
    """How tokens of older weights, or of another engine's arithmetic, are weighed; without it, tis wherever there can
    be any (sequence_tis for gspo)."""
    min_importance: float | None = free(None, ge=0, le=1)
    """icepop, sequence_mask: less likely tokens or sequences do not count; without it, 0.5."""
    max_importance: float | None = free(None, ge=1)
    """The most that a token or sequence of older weights counts; without it, 2, and 5 for icepop."""
    allow_uncorrected: bool = free(False)
    """Train on older weights' tokens with correction = "off" all the same."""
    gamma: float = free(1.0, gt=0, le=1)
    """advantage = "gae": what a reward is worth one token earlier."""
    gae_lambda: float = free(0.95, ge=0, le=1)
    """advantage = "gae": how far rewards are looked at rather than the value head's guess."""
    value_coef: float = free(0.1, gt=0)
    """advantage = "gae": weight of the value head's loss."""
    value_clip: float = free(0.2, gt=0)
    """advantage = "gae": how far a value may move within a step."""
    max_logprob_gap: float = free(0.05, gt=0)
    """Alarm when engine and trainer disagree by more than this, on average, about fresh tokens."""
    stop_logprob_gap: float | None = free(None, gt=0)
    """Stop the run at this gap."""
    max_sample_gap: float = free(1.0, gt=0)
    """An answer whose log-probs are off by more than this, on average over the tokens compared, is not learnt from."""
    audit_share: float = free(0.3, ge=0, le=1)
    """Of tokens of older weights, the share whose log-probs are compared with those of these very weights, where
    workers are processes of their own; all fresh ones are. With 0 a worker evades the audit by naming older weights."""

    @property
    def is_own(self) -> bool:
        """Whether the loss is a function of the user's own."""
        return ":" in self.name

    @property
    def preset(self) -> Preset:
        return OWN if self.is_own else PRESETS[self.name]


@dataclass(frozen=True)
class Recipe:
    """How a run learns, with every default decided."""

    policy: str
    advantage: str
    aggregate: Aggregate
    aggregate_tokens: int
    clip_low: float
    clip_high: float
    correction: Correction
    min_importance: float
    max_importance: float
    drop_no_signal: bool


def recipe(config: Config) -> Recipe:
    """What holds for a run: the keys that were given, and the preset's where none was."""
    loss, preset = config.loss, config.loss.preset
    correction = loss.correction or _correction(config)
    low, high = IMPORTANCE[correction]
    chosen = config.batch.drop_no_signal
    return Recipe(
        policy=preset.policy,
        advantage=loss.advantage or _advantage(config),
        aggregate=loss.aggregate or preset.aggregate,
        aggregate_tokens=loss.aggregate_tokens or config.rollout.max_new_tokens,
        clip_low=preset.clip_low if loss.clip_low is None else loss.clip_low,
        clip_high=preset.clip_high if loss.clip_high is None else loss.clip_high,
        correction=correction,
        min_importance=low if loss.min_importance is None else loss.min_importance,
        max_importance=high if loss.max_importance is None else loss.max_importance,
        drop_no_signal=preset.drop_no_signal if chosen is None else chosen,
    )


def _advantage(config: Config) -> str:
    """The preset's, as far as it goes with the gate."""
    preset, gate = config.loss.preset.advantage, config.batch.gate
    if gate == "batch" and preset not in BEYOND_SIBLINGS:
        return "batch"
    return RELEASED.get(preset, preset) if gate == "release" else preset


def _correction(config: Config) -> Correction:
    """On wherever data can be off-policy: older weights, or the arithmetic of another engine."""
    if config.schedule.bound == 0 and config.rollout.engine == "embedded":
        return "off"
    return "sequence_tis" if config.loss.preset.policy == "sequence_clip" else "tis"
