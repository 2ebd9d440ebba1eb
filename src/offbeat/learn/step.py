"""One training step: a batch of samples in, updated weights and the step's figures out.

The batch is cut into `updates_per_step` parts by whole groups, in order; each part is one optimizer update.
Denominators are fixed per update before its first micro-batch. With one update the policy at the start of the step is
the policy itself, so its log-probs come for free; with several they are computed once before the first update, as are
a value head's guesses.

Samples are audited on the way: where the log-probs that came with tokens are far from those of the very weights that
they are said to come from, nothing of the sample is learnt from (`offbeat.learn.audit`).

A sample without an advantage has no gradient (unless a KL term or a value head gives it one), so it is not sent
backward: late in a run that is most of them. It is still measured, and still counts in every denominator.

Numbers that are not finite raise `NotFinite` before the update that they would have been part of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from offbeat.learn.advantages import Advantage, group_normalised
from offbeat.learn.aggregation import Totals, token_weights
from offbeat.learn.audit import audit, witness
from offbeat.learn.corrections import CorrectionSettings, correct
from offbeat.learn.credit import Credit, GaeSettings, credit
from offbeat.learn.divergence import Divergence, k3
from offbeat.learn.figures import StepFigures, Sums
from offbeat.learn.finite import NotFinite
from offbeat.learn.losses import LossSettings, PolicyLoss, clip
from offbeat.learn.packing import Microbatch, pack, plan
from offbeat.learn.policy import Forward, Policy
from offbeat.learn.samples import Sample
from offbeat.learn.tokens import Tokens, clean


@dataclass(frozen=True)
class StepSettings:
    updates_per_step: int = 1
    tokens_per_microbatch: int = 16384
    advantage: Advantage = group_normalised
    recalls_siblings: bool = False
    """Whether answers are also judged against siblings that are not in the batch."""
    gae: GaeSettings | None = None
    """Advantages from a value head, instead of `advantage`."""
    policy_loss: PolicyLoss = clip
    is_own: bool = False
    """The loss is the user's: a sample without an advantage may have a gradient all the same."""
    loss: LossSettings = field(default_factory=LossSettings)
    correction: CorrectionSettings = field(default_factory=CorrectionSettings)
    aggregate: str = "sequence_mean"
    aggregate_tokens: int = 1
    kl_coef: float = 0.0
    divergence: Divergence = k3
    max_sample_gap: float | None = None
    """Samples whose compared tokens' log-probs are off by more than this on average are left out; None: no audit."""
    audit_share: float = 0.0
    """The share of older tokens that are compared with the weights of their own version."""


def train_step(
    policy: Policy,
    samples: Sequence[Sample],
    settings: StepSettings,
    lr: float,
    reference: PreTrainedModel | None = None,
    weights_of: Callable[[int], Path | None] = lambda number: None,
) -> StepFigures:
    """Trains on a batch; `reference` is the frozen starting model where a KL term is wanted, `weights_of` finds the
    file of an older version, for audits."""
    policy.use_threads()
    parts = parts_of(samples, settings.updates_per_step)
    step = StepUnderWay(policy, samples, settings, reference)
    if settings.max_sample_gap is not None:
        step.witnessed = witness(policy, samples, settings.audit_share, weights_of, settings.tokens_per_microbatch)
    step.begin(parts)
    norms: list[float] = []
    try:
        for part in parts:
            step.gather(part)
            norms.append(policy.update(lr))
    except NotFinite as error:
        error.num_updates = len(norms)
        policy.optimizer.zero_grad(set_to_none=True)
        raise
    return step.sums.figures(norms, step.credit.signal_share, has_values=settings.gae is not None)


class StepUnderWay:
    """What the micro-batches of a step share."""

    def __init__(
        self,
        policy: Policy,
        samples: Sequence[Sample],
        settings: StepSettings,
        reference: PreTrainedModel | None,
    ):
        self.policy, self.samples, self.settings, self.reference = policy, samples, settings, reference
        self.proximal: dict[int, np.ndarray] = {}
        """Log-probs at the step's start, by sample, where they were computed before it."""
        self.values: dict[int, np.ndarray] = {}
        self.witnessed: dict[int, np.ndarray] = {}
        """Log-probs of older tokens by their own weights, by sample; NaN where a token was not looked at."""
        self.credit = Credit((), None, 0.0)
        self.sums = Sums()

    def begin(self, parts: Sequence[Sequence[int]]) -> None:
        """Takes down what is needed of the policy as it is now, and finds the advantages."""
        settings = self.settings
        if len(parts) > 1 or settings.gae is not None:
            self.look(parts)
        values = [self.values.get(i) for i in range(len(self.samples))]
        self.credit = credit(
            self.samples, settings.advantage, settings.gae, values, recalls_siblings=settings.recalls_siblings
        )

    def look(self, parts: Sequence[Sequence[int]]) -> None:
        """Computes what every sample's log-probs and values are under the policy as it is now."""
        for part in parts:
            for batch in self._microbatches(part):
                found = self.policy.look(batch)
                ends = np.cumsum([self.samples[i].num_tokens for i in batch.samples])[:-1]
                self.proximal.update(zip(batch.samples, np.split(found.logprobs.cpu().numpy(), ends), strict=True))
                if found.values is not None:
                    self.values.update(zip(batch.samples, np.split(found.values.cpu().numpy(), ends), strict=True))
        for i, values in self.values.items():
            wrong = np.flatnonzero(~np.isfinite(values) & self.samples[i].mask)
            if len(wrong):  # one of them would spoil the advantages of all
                raise NotFinite("the value head's guess", i, int(wrong[0]))

    def gather(self, part: Sequence[int], only: Sequence[int] | None = None) -> None:
        """Adds up the gradient of one update, or what some of its samples are of it."""
        settings, masks = self.settings, [self.samples[i].mask for i in part]
        counted = [self.samples[i].counted for i in part]
        totals = Totals.of(counted)
        weighed = token_weights(masks, totals, settings.aggregate, settings.aggregate_tokens, counted)
        weights = dict(zip(part, weighed, strict=True))
        learns_all = settings.kl_coef > 0 or settings.gae is not None or settings.is_own
        chosen = part if only is None else only
        learning = [i for i in chosen if learns_all or self.credit.advantages[i].any()]
        silent = sorted(set(chosen) - set(learning))
        for batch in self._microbatches(learning):
            self._learn(batch, weights, totals)
        for batch in self._microbatches(silent):
            self._measure(batch)

    def _learn(self, batch: Microbatch, weights: dict[int, np.ndarray], totals: Totals) -> None:
        settings, sums = self.settings, self.sums
        weight = self._flat([weights[i] for i in batch.samples])
        reference = self.policy.logprobs(batch, self.reference) if self.reference is not None else None

        def loss(found: Forward) -> Tensor:
            tokens = self._tokens(batch, found.logprobs, reference)
            token = settings.policy_loss(tokens, settings.loss)
            correction = correct(tokens, settings.correction)
            costs = token.loss * correction.weight * weight * tokens.mask
            total = costs.sum()
            kl_sum = value = total.new_zeros(())
            if reference is not None:
                assert tokens.reference is not None
                kl = settings.divergence(tokens.logprobs, tokens.reference)
                total = total + settings.kl_coef * (kl * weight * tokens.mask).sum()
                kl_sum = (kl.detach() * tokens.mask).sum()
            if settings.gae is not None:
                value = self._value_loss(batch, found, tokens, totals)
                total = total + settings.gae.value_coef * value
            sums.add(tokens, correction, token.clipped, self._fresh(batch))
            told = torch.stack([total.detach(), kl_sum, value.detach()]).tolist()
            if not np.isfinite(told[0]):
                wrong = (~costs.detach().isfinite()).nonzero()  # none: their sum, or another term, is at fault
                raise NotFinite("the loss", *(self._place(batch, int(wrong[0])) if len(wrong) else ()))
            sums.loss, sums.kl, sums.value_loss = sums.loss + told[0], sums.kl + told[1], sums.value_loss + told[2]
            return total

        self.policy.forward_backward(batch, loss)
        self._count(batch)

    def _measure(self, batch: Microbatch) -> None:
        """Says what can be said of samples that have no gradient."""
        start = self._start(batch)
        tokens = self._tokens(batch, self.policy.logprobs(batch) if start is None else start, None)
        self.sums.add(tokens, correct(tokens, self.settings.correction), None, self._fresh(batch))
        self._count(batch)

    def _tokens(self, batch: Microbatch, logprobs: Tensor, reference: Tensor | None) -> Tokens:
        """A micro-batch as losses see it: audited, and refused where a number is not finite."""
        chosen = [self.samples[i] for i in batch.samples]
        start = self._start(batch)
        proximal = logprobs.detach() if start is None else start
        mask = np.concatenate([sample.mask for sample in chosen])
        lengths = [sample.num_tokens for sample in chosen]
        if self.settings.max_sample_gap is not None:
            witnessed = [self.witnessed.get(i) for i in batch.samples]
            findings = audit(chosen, proximal.cpu().numpy(), self.settings.max_sample_gap, witnessed)
            self.sums.audited += [i for i, is_off in zip(batch.samples, findings.is_off, strict=True) if is_off]
            self.sums.compared += [found._replace(sample=batch.samples[found.sample]) for found in findings.segments]
            mask &= np.repeat(~findings.is_off, lengths)
        tokens, wrong_tokens = clean(
            Tokens(
                logprobs=logprobs,
                proximal=proximal,
                behaviour=self._flat([sample.logprobs for sample in chosen]),
                advantages=self._flat([self.credit.advantages[i] for i in batch.samples]),
                mask=torch.as_tensor(mask, device=logprobs.device),
                sequence=self._whole([np.repeat(np.arange(len(chosen)), lengths)]),
                num_sequences=len(chosen),
                staleness=self._whole([sample.ages for sample in chosen]),
                reference=reference,
            )
        )
        if bool(wrong_tokens.any()):
            self._refuse(batch, wrong_tokens.cpu().numpy(), logprobs, proximal, reference)
        return tokens

    def _refuse(
        self, batch: Microbatch, wrong: np.ndarray, logprobs: Tensor, proximal: Tensor, reference: Tensor | None
    ) -> None:
        first = int(np.flatnonzero(wrong)[0])
        sample, token = self._place(batch, first)
        if not bool(logprobs[first].isfinite()):
            what = "the trainer's log-prob"
        elif not bool(proximal[first].isfinite()):
            what = "the trainer's log-prob at the start of the step"
        elif not np.isfinite(self.samples[sample].logprobs[token]):
            what = "the engine's log-prob"
        elif reference is not None and not bool(reference[first].isfinite()):
            what = "the reference's log-prob"
        else:
            what = "the advantage"
        raise NotFinite(what, sample, token)

    def _place(self, batch: Microbatch, target: int) -> tuple[int, int]:
        """The sample, and which of its tokens, that a micro-batch's target is."""
        ends = np.cumsum([self.samples[i].num_tokens for i in batch.samples])
        sample = batch.samples[int(np.searchsorted(ends, target, side="right"))]
        return sample, target - int(ends[batch.samples.index(sample)] - self.samples[sample].num_tokens)

    def _value_loss(self, batch: Microbatch, found: Forward, tokens: Tokens, totals: Totals) -> Tensor:
        """PPO's: the larger of the squared errors with and without the clip, over all trained tokens of the update."""
        assert self.settings.gae is not None
        assert self.credit.returns is not None
        assert found.values is not None
        values = torch.where(tokens.mask, found.values, 0.0)
        before = self._flat([self.values[i] for i in batch.samples])
        wanted = self._flat([self.credit.returns[i] for i in batch.samples])
        reach = self.settings.gae.value_clip
        clipped = before + (values - before).clamp(-reach, reach)
        errors = torch.maximum((values - wanted).square(), (clipped - wanted).square()) / 2
        return torch.where(tokens.mask, errors, 0.0).sum() / max(totals.num_tokens, 1)

    def _fresh(self, batch: Microbatch) -> Tensor:
        is_fresh = np.concatenate([self.samples[i].is_fresh for i in batch.samples])
        return torch.as_tensor(is_fresh, device=self.policy.device)

    def _start(self, batch: Microbatch) -> Tensor | None:
        return self._flat([self.proximal[i] for i in batch.samples]) if self.proximal else None

    def _count(self, batch: Microbatch) -> None:
        self.sums.row_tokens += batch.num_tokens
        self.sums.microbatches += 1

    def _microbatches(self, chosen: Sequence[int]) -> Iterator[Microbatch]:
        some, room = [self.samples[i] for i in chosen], self.settings.tokens_per_microbatch
        for local in plan(some, room, shares_prompts=self.policy.usage.packs):
            yield pack(self.samples, [chosen[i] for i in local], self.policy.device)

    def _flat(self, parts: Sequence[np.ndarray]) -> Tensor:
        return torch.as_tensor(np.concatenate(parts).astype(np.float32), device=self.policy.device)

    def _whole(self, parts: Sequence[np.ndarray]) -> Tensor:
        return torch.as_tensor(np.concatenate(parts).astype(np.int64), device=self.policy.device)


def parts_of(samples: Sequence[Sample], count: int) -> list[list[int]]:
    """Cuts a batch by whole groups, in the order in which they appear, into `count` parts as even as can be."""
    groups = [sample.group for sample in samples]
    ids = list(dict.fromkeys(groups))
    part_of = {group: i * count // len(ids) for i, group in enumerate(ids)}
    parts: list[list[int]] = [[] for _ in range(count)]
    for i, group in enumerate(groups):
        parts[part_of[group]].append(i)
    return [part for part in parts if part]
