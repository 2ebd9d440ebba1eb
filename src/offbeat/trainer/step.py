"""One training step: a batch of samples in, updated weights and the step's metrics out.

The batch is split by whole groups, in order, into `updates_per_step` parts; each part is one optimizer update, whose
denominators are fixed before its first micro-batch. With one update and no value head, the log-probs at the start of
the step are those of the forward pass that computes the loss. Otherwise an additional forward pass computes them.

A sample is not trained on if its log-probs differ too much from those of the version that it names
(`offbeat.trainer.audit`). A sample with advantage 0 skips the backward pass, unless a KL term, a value head or a user's
loss gives it a gradient. It still counts in metrics and denominators. NaN or infinity raises `NotFinite` before the
update that it would affect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from offbeat.errors import OffbeatError
from offbeat.trainer.advantages import Advantage, Credit, GaeSettings, credit, group_normalised
from offbeat.trainer.audit import SegmentFinding, audit, found_segments, witness
from offbeat.trainer.losses import (
    MAX_LOG_RATIO,
    Correction,
    CorrectionSettings,
    Divergence,
    LossSettings,
    PolicyLoss,
    Tokens,
    clean,
    clip,
    correct,
    k3,
)
from offbeat.trainer.microbatch_size import MicrobatchSize
from offbeat.trainer.not_finite import NotFinite
from offbeat.trainer.packing import Microbatch, Sample, infer, passes, to_device
from offbeat.trainer.policy import Forward, LossFunction, Policy
from offbeat.trainer.rounds import Arrays, Turn, agreed


@dataclass(frozen=True)
class StepSettings:
    updates_per_step: int = 1
    tokens_per_microbatch: int = 16384
    advantage: Advantage = group_normalised
    recalls_siblings: bool = False
    """Whether baselines include the rewards of answers to the same prompt that are not in the batch (siblings)."""
    gae: GaeSettings | None = None
    """Settings for advantages from a value head; None: use `advantage`."""
    policy_loss: PolicyLoss = clip
    is_own: bool = False
    """Whether `policy_loss` is a user's own function, which may give a sample with advantage 0 a gradient."""
    loss: LossSettings = field(default_factory=LossSettings)
    correction: CorrectionSettings = field(default_factory=CorrectionSettings)
    aggregate: str = "sequence_mean"
    aggregate_tokens: int = 1
    kl_coef: float = 0.0
    divergence: Divergence = k3
    max_sample_gap: float | None = None
    """Largest mean absolute difference between the log-probs of engine and trainer over a sample's audited tokens. A
    sample above it is not trained on. None: no audit."""
    audit_share: float = 0.0
    """Share of older tokens to audit: the trainer recomputes their log-probs with the version that sampled them."""


def train_step(
    policy: Policy,
    samples: Sequence[Sample],
    settings: StepSettings,
    lr: float,
    reference: PreTrainedModel | None = None,
    weights_of: Callable[[int], Path | None] = lambda number: None,
    size: MicrobatchSize | None = None,
) -> StepMetrics:
    """Trains the policy on a batch and returns the step's metrics. `reference` is the frozen initial model for a KL
    term; None: no KL term. `weights_of` is called in audits with the number of an older version. It returns this
    version's weights file, or None if the file was not kept. `size` bounds micro-batches; None:
    `settings.tokens_per_microbatch` does."""
    policy.use_threads()
    size = size or MicrobatchSize(settings.tokens_per_microbatch)
    parts = parts_of(samples, settings.updates_per_step)
    step = StepInProgress(policy, samples, settings, reference, size)
    if settings.max_sample_gap is not None:
        step.witnessed = size.fitting(
            lambda: witness(policy, samples, settings.audit_share, weights_of, size.tokens), policy.make_room
        )
    size.fitting(lambda: step.begin(parts), policy.make_room)
    norms: list[float] = []
    try:
        for part in parts:
            before = deepcopy(step.sums)

            def forget(before: StepAccumulator = before) -> bool:
                policy.drop_gradients()
                step.sums, step.pending = deepcopy(before), []
                return policy.make_room()

            size.fitting(partial(step.accumulate, part), forget)
            norms.append(policy.update(lr))
    except NotFinite as error:
        error.num_updates = len(norms)
        policy.drop_gradients()
        raise
    return step.sums.metrics(norms, step.credit.signal_share, has_values=settings.gae is not None)


BUCKET_ENDS = (0, 1, 2, 4, 8)
"""Largest staleness, in steps, of each bucket but the last. Metrics divide tokens into buckets by staleness."""
BUCKET_NAMES = ("0", "1", "2", "3-4", "5-8", "9+")


@dataclass(frozen=True)
class StalenessMetrics:
    """Metrics of one staleness bucket: the trained tokens whose staleness lies within a range of steps."""

    num_tokens: int
    ess: float
    """Effective sample size under the importance ratios ρ (see `losses`), divided by the number of tokens."""
    behaviour_kl: float
    """KL estimate (k3) between the policy at the start of the step and the policy that sampled the tokens."""
    clip_share: float
    kept_share: float


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of a step; per-token means and shares are over the tokens trained on."""

    loss: float
    grad_norm: float
    clip_share: float
    kept_share: float
    """Share of tokens that the off-policy correction did not reject."""
    kl: float
    ess: float
    logprob_gap: float
    """Mean absolute difference between the log-probs of engine and trainer, over tokens sampled from the weights at the
    start of the step; NaN if there are no such tokens."""
    clamped_share: float
    """Share of tokens whose log r or log ρ (see `losses`) was clamped to plus or minus `MAX_LOG_RATIO`."""
    entropy: float
    """Entropy estimate: minus the mean of the log-probs that engines reported."""
    num_trained_tokens: int
    num_row_tokens: int
    num_microbatches: int
    signal_share: float
    """Share of samples with an advantage other than 0 at any token."""
    value_loss: float | None = None
    left_out: tuple[int, ...] = ()
    """Indices of the samples that were not trained on, because they failed the audit."""
    compared: tuple[SegmentFinding, ...] = ()
    """Results of the audit, one for each segment with a compared token."""
    by_staleness: dict[str, StalenessMetrics] = field(default_factory=dict)
    rank_s: tuple[float, ...] = ()
    """Seconds of each rank's forward passes within layers, without waits for other ranks; empty for one rank."""

    def row(self) -> dict[str, float]:
        """Returns the metrics by name as one flat row of numbers, without `value_loss` if there is no value head."""
        row = {**asdict(self), "left_out": len(self.left_out)}
        row["compared_tokens"] = sum(segment.num_tokens for segment in self.compared)
        row["off_tokens"] = sum(segment.num_off for segment in self.compared)
        del row["by_staleness"], row["compared"], row["rank_s"]
        if self.value_loss is None:
            del row["value_loss"]
        row |= {f"rank_s/{rank}": seconds for rank, seconds in enumerate(self.rank_s)}
        for name, bucket in self.by_staleness.items():
            row |= {f"{metric}/staleness_{name}": value for metric, value in asdict(bucket).items()}
        return row


class StepInProgress:
    """A training step while it runs; holds data that its micro-batches share, such as advantages and metric sums."""

    def __init__(
        self,
        policy: Policy,
        samples: Sequence[Sample],
        settings: StepSettings,
        reference: PreTrainedModel | None,
        size: MicrobatchSize | None = None,
    ):
        self.policy, self.samples, self.settings, self.reference = policy, samples, settings, reference
        self.size = size or MicrobatchSize(settings.tokens_per_microbatch)
        self.proximal: dict[int, np.ndarray] = {}
        """Log-probs at the start of the step, by sample index. Empty with one update and no value head, because the
        forward pass for the loss then gives them."""
        self.values: dict[int, np.ndarray] = {}
        self.witnessed: dict[int, np.ndarray] = {}
        """Log-probs of older tokens under the weights of their own version, by sample index; NaN: not computed."""
        self.credit = Credit((), None, 0.0)
        self.sums = StepAccumulator()
        self.pending: list[tuple[int, Microbatch, dict[str, Tensor]]] = []
        """Micro-batches of the current update that this rank ran, each with its place among those of all ranks, and
        with named sums and checks that are still on the device."""
        self._next_place = 0
        self._problem: Exception | None = None
        self.places: dict[tuple[int, ...], tuple[tuple[int, int], ...]] = {}
        """Place of each audited segment (see `Findings.places`), for each micro-batch. Keys are the indices of the
        micro-batch's samples."""

    def begin(self, parts: Sequence[Sequence[int]]) -> None:
        """Computes the advantages. With several updates or a value head, first computes the log-probs and values at the
        start of the step. `parts` holds the sample indices of each update."""
        settings = self.settings
        if len(parts) > 1 or settings.gae is not None:
            self._record_start(parts)
        values = [self.values.get(i) for i in range(len(self.samples))]
        self.credit = credit(
            self.samples, settings.advantage, settings.gae, values, recalls_siblings=settings.recalls_siblings
        )

    def _record_start(self, parts: Sequence[Sequence[int]]) -> None:
        """Computes and stores the log-probs of all samples before the step's first update; with a value head, also the
        values."""
        for part in parts:
            found = infer(self.policy, self.samples, part, self.size.tokens, self.policy.infer)
            self.proximal.update({i: one.logprobs for i, one in found.items()})
            self.values.update({i: one.values for i, one in found.items() if one.values is not None})
        for i, values in self.values.items():
            wrong = np.flatnonzero(~np.isfinite(values) & self.samples[i].mask)
            if len(wrong):  # a single one would make all advantages NaN
                raise NotFinite("the value head's estimate", i, int(wrong[0]))

    def accumulate(self, part: Sequence[int], only: Sequence[int] | None = None) -> None:
        """Accumulates the gradient of one update from the samples with the indices `part`. With `only`, a subset of
        `part`, only these samples contribute, while the denominators stay those of the whole part."""
        settings, masks = self.settings, [self.samples[i].mask for i in part]
        counted = [self.samples[i].counted for i in part]
        totals = Totals.of(counted)
        weighed = token_weights(masks, totals, settings.aggregate, settings.aggregate_tokens, counted)
        weights = dict(zip(part, weighed, strict=True))
        learns_all = settings.kl_coef > 0 or settings.gae is not None or settings.is_own
        chosen = part if only is None else only
        learning = [i for i in chosen if learns_all or self.credit.advantages[i].any()]
        silent = sorted(set(chosen) - set(learning))
        for turn, batch in self._passes(learning):
            self._learn(turn, batch, weights, totals)
        for turn, batch in self._passes(silent):
            self._measure(turn, batch)
        self._settle()

    def _passes(self, chosen: Sequence[int]) -> Iterator[tuple[Turn, Microbatch]]:
        """Yields this rank's micro-batches; places continue those of earlier passes that are still pending."""
        first, last = self._next_place, self._next_place
        for turn, batch in passes(self.policy, self.samples, chosen, self.size.tokens):
            last = first + turn.place - self.policy.ranks.rank + turn.num_real
            yield replace(turn, place=first + turn.place), batch
        self._next_place = last

    def _learn(self, turn: Turn, batch: Microbatch, weights: dict[int, np.ndarray], totals: Totals) -> None:
        settings = self.settings
        weight = self._flat([weights[i] for i in batch.samples])
        reference = self.policy.logprobs(batch, self.reference) if self.reference is not None else None

        def loss(found: Forward) -> Tensor:
            tokens = self._tokens(turn, batch, found.logprobs, reference)
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
            parts = {"loss": total.detach(), "kl": kl_sum, "value_loss": value.detach()}
            parts["wrong_cost"] = _first_true(~costs.detach().isfinite())
            self._note(batch, tokens, correction, token.clipped, parts)
            return total

        self.policy.forward_backward(batch, partial(self._guarded, turn, loss), turn.num_real)

    def _guarded(self, turn: Turn, loss: LossFunction, found: Forward) -> Tensor:
        """Returns the loss; 0 if this rank only runs along in this round. On several ranks, an error is kept until all
        ranks have finished their passes (`_settle`), because the others would wait for this one within a pass."""
        if turn.index is not None:
            try:
                return loss(found)
            except Exception as error:
                if self.policy.ranks.size == 1:
                    raise
                self._problem = self._problem or error
        nothing = found.logprobs.sum() * 0
        return nothing if found.values is None else nothing + found.values.sum() * 0

    def _measure(self, turn: Turn, batch: Microbatch) -> None:
        """Adds samples without a gradient (their advantage is 0) to the step's metrics; makes no backward pass."""
        start = self._start(batch)
        logprobs = self.policy.logprobs(batch) if start is None else start
        if turn.index is not None:
            tokens = self._tokens(turn, batch, logprobs, None)
            self._note(batch, tokens, correct(tokens, self.settings.correction), None, {})

    def _tokens(self, turn: Turn, batch: Microbatch, logprobs: Tensor, reference: Tensor | None) -> Tokens:
        """Audits a micro-batch and returns its tokens for the loss. Samples that fail the audit are masked, and so are
        tokens with NaN or infinity. Appends to `pending` the audit's results and the index of the first token with NaN
        or infinity."""
        chosen = [self.samples[i] for i in batch.samples]
        start = self._start(batch)
        proximal = logprobs.detach() if start is None else start
        mask = to_device(np.concatenate([sample.mask for sample in chosen]), logprobs.device)
        lengths = [sample.num_tokens for sample in chosen]
        sequence = self._whole([np.repeat(np.arange(len(chosen)), lengths)])
        noted: dict[str, Tensor] = {}
        if self.settings.max_sample_gap is not None:
            witnessed = [self.witnessed.get(i) for i in batch.samples]
            findings = audit(chosen, proximal, self.settings.max_sample_gap, witnessed)
            mask = mask & ~findings.is_off[sequence]
            noted = {"is_off": findings.is_off, "counts": findings.counts}
            self.places[batch.samples] = findings.places
        tokens, wrong = clean(
            Tokens(
                logprobs=logprobs,
                proximal=proximal,
                behaviour=self._flat([sample.logprobs for sample in chosen]),
                advantages=self._flat([self.credit.advantages[i] for i in batch.samples]),
                mask=mask,
                sequence=sequence,
                num_sequences=len(chosen),
                staleness=self._whole([sample.ages for sample in chosen]),
                reference=reference,
            )
        )
        first = noted["wrong_token"] = _first_true(wrong)
        if len(wrong):
            given = [logprobs.detach(), proximal, *([] if reference is None else [reference])]
            noted["finite"] = torch.stack([values.index_select(0, first.clamp(min=0)).isfinite() for values in given])
        self.pending.append((turn.place, batch, noted))
        return tokens

    def _note(
        self,
        batch: Microbatch,
        tokens: Tokens,
        correction: Correction,
        clipped: Tensor | None,
        parts: dict[str, Tensor],
    ) -> None:
        """Adds a micro-batch's sums for the metrics, and `parts` of the loss, to its entry in `pending`. The numbers
        stay on the device until `_settle` reads them."""
        _, _, noted = self.pending[-1]
        noted |= parts
        noted["buckets"], noted["whole"] = sums_of(tokens, correction, clipped, self._fresh(batch))

    def _settle(self) -> None:
        """Adds the tensors in `pending`, read from the device all at once, and those of all other ranks to the step's
        sums, in the order of places. Raises `NotFinite`, on every rank, for the first micro-batch with NaN or
        infinity."""
        if self._problem is not None or self.policy.ranks.size > 1:
            self._agree()
        for _, found in self.policy.ranks.merge(self._read_pending()):
            samples = found["samples"].tolist()
            if found["wrong_token"][0] >= 0:
                self._refuse(samples, int(found["wrong_token"][0]), found["finite"].ravel().astype(bool).tolist())
            loss, wrong_cost = float(found.get("loss", 0.0)), found.get("wrong_cost")
            if not math.isfinite(loss):  # perhaps only the sum or another term is not finite
                place = () if wrong_cost is None or wrong_cost[0] < 0 else self._locate(samples, int(wrong_cost[0]))
                raise NotFinite("the loss", *place)
            self.sums.add(int(found["num_tokens"]), found)
            if "is_off" in found:
                is_off = found["is_off"].astype(bool)
                self.sums.left_out += [i for i, off in zip(samples, is_off, strict=True) if off]
                places = [(int(i), int(start)) for i, start in found["places"]]
                segments = found_segments(places, found["counts"].tolist())
                self.sums.compared += [one._replace(sample=samples[one.sample]) for one in segments]

    def _read_pending(self) -> list[tuple[int, Arrays]]:
        pending, self.pending = self.pending, []
        if not pending:
            return []
        flat = [values.double().reshape(-1) for _, _, noted in pending for values in noted.values()]
        read = iter(np.split(torch.cat(flat).cpu().numpy(), np.cumsum([len(values) for values in flat])[:-1]))
        items: list[tuple[int, Arrays]] = []
        for place, batch, noted in pending:
            found = {name: next(read).reshape(values.shape) for name, values in noted.items()}
            found |= {"samples": np.array(batch.samples), "num_tokens": np.array(batch.num_tokens)}
            if "is_off" in found:
                found["places"] = np.array(self.places[batch.samples], np.int64).reshape(-1, 2)
            items.append((place, found))
        return items

    def _agree(self) -> None:
        """Raises on every rank if any of them met an error in this update's passes; the rank that did raises that."""
        problem, self._problem = self._problem, None
        problems = self.policy.ranks.agree("" if problem is None else f"{type(problem).__name__}: {problem}")
        if problem is not None or problems:
            raise agreed(problem or OffbeatError("; ".join(problems)))

    def _refuse(self, samples: Sequence[int], first: int, finite: Sequence[bool]) -> None:
        """Raises `NotFinite` for the target with index `first` of a micro-batch with these `samples`. `finite` says
        which of the target's log-probs are finite: the trainer's, that at the start of the step and, with a KL term,
        the reference's."""
        sample, token = self._locate(samples, first)
        if not finite[0]:
            what = "the trainer's log-prob"
        elif not finite[1]:
            what = "the trainer's log-prob at the start of the step"
        elif not np.isfinite(self.samples[sample].logprobs[token]):
            what = "the engine's log-prob"
        elif not all(finite[2:]):
            what = "the reference's log-prob"
        else:
            what = "the advantage"
        raise NotFinite(what, sample, token)

    def _locate(self, samples: Sequence[int], target: int) -> tuple[int, int]:
        """Returns the place of a micro-batch's target with index `target`: the sample's index in the batch, and the
        token's index in the sample's response. `samples` holds the indices of the micro-batch's samples."""
        ends = np.cumsum([self.samples[i].num_tokens for i in samples])
        which = int(np.searchsorted(ends, target, side="right"))
        return samples[which], target - int(ends[which] - self.samples[samples[which]].num_tokens)

    def _value_loss(self, batch: Microbatch, found: Forward, tokens: Tokens, totals: Totals) -> Tensor:
        """Returns PPO's value loss of a micro-batch. For each trained token, this is half the larger of the squared
        errors with and without clipping. The sum is divided by the number of tokens in the update."""
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
        return to_device(np.concatenate([self.samples[i].is_fresh for i in batch.samples]), self.policy.device)

    def _start(self, batch: Microbatch) -> Tensor | None:
        return self._flat([self.proximal[i] for i in batch.samples]) if self.proximal else None

    def _flat(self, parts: Sequence[np.ndarray]) -> Tensor:
        return to_device(np.concatenate(parts).astype(np.float32), self.policy.device)

    def _whole(self, parts: Sequence[np.ndarray]) -> Tensor:
        return to_device(np.concatenate(parts).astype(np.int64), self.policy.device)


def parts_of(samples: Sequence[Sample], count: int) -> list[list[int]]:
    """Splits a batch, in order, into up to `count` parts with about equally many whole groups; returns the sample
    indices of each part."""
    groups = [sample.group for sample in samples]
    ids = list(dict.fromkeys(groups))
    part_of = {group: i * count // len(ids) for i, group in enumerate(ids)}
    parts: list[list[int]] = [[] for _ in range(count)]
    for i, group in enumerate(groups):
        parts[part_of[group]].append(i)
    return [part for part in parts if part]


@dataclass(frozen=True)
class Totals:
    """Denominators of an update's loss: the numbers of its tokens (`Sample.counted`) and of its sequences."""

    num_tokens: int = 0
    num_sequences: int = 0

    @classmethod
    def of(cls, masks: Sequence[np.ndarray]) -> Self:
        return cls(sum(int(mask.sum()) for mask in masks), len(masks))


def token_weights(
    masks: Sequence[np.ndarray],
    totals: Totals,
    how: str,
    constant: int,
    counted: Sequence[np.ndarray] | None = None,
) -> list[np.ndarray]:
    """Returns the weight of each token in an update's loss; 0 where a token is not trained on.

        token_mean      1 / tokens
        sequence_mean   1 / (sequences x tokens of the sequence)
        constant        1 / (sequences x `constant`)

    `how` is the rule, and `tokens` and `sequences` are the `totals` of the whole update, before audit or correction
    reject any token. So every split into micro-batches gives the same loss and gradient. A sequence without a trained
    token adds 0 to the loss and still counts. `counted` marks the tokens that `sequence_mean` counts in each sequence;
    None: those in `masks`, which are trained on.
    """
    sequences = max(totals.num_sequences, 1)
    match how:
        case "token_mean":
            denominators = [max(totals.num_tokens, 1)] * len(masks)
        case "sequence_mean":
            denominators = [sequences * max(int(own.sum()), 1) for own in counted or masks]
        case "constant":
            denominators = [sequences * constant] * len(masks)
        case _:
            raise AssertionError(f"this is a bug: unknown aggregation {how!r}")
    return [mask.astype(np.float32) / count for mask, count in zip(masks, denominators, strict=True)]


@dataclass
class StepAccumulator:
    """Accumulates sums over the micro-batches of a step, and computes the step's metrics from them."""

    loss: float = 0.0
    value_loss: float = 0.0
    kl: float = 0.0
    gap: float = 0.0
    entropy: float = 0.0
    tokens: int = 0
    fresh_tokens: int = 0
    clamped_tokens: int = 0
    row_tokens: int = 0
    microbatches: int = 0
    left_out: list[int] = field(default_factory=list)
    compared: list[SegmentFinding] = field(default_factory=list)
    buckets: np.ndarray = field(default_factory=lambda: np.zeros((6, len(BUCKET_NAMES))))
    """One column per staleness bucket. The rows are: number of tokens, sums of ρ, ρ² and k3, number of clipped tokens,
    number of tokens kept by the correction. ρ (importance ratio) and k3 (KL estimate) are explained in `losses`."""

    def add(self, num_row_tokens: int, found: Mapping[str, np.ndarray]) -> None:
        """Adds a micro-batch; `found` has its loss terms and, as "buckets" and "whole", the results of `sums_of`."""
        self.row_tokens += num_row_tokens
        self.microbatches += 1
        for name in ("loss", "kl", "value_loss"):
            setattr(self, name, getattr(self, name) + float(found.get(name, 0.0)))
        self.buckets += found["buckets"]
        gap, behaviour, num_fresh, num_clamped = found["whole"].tolist()
        self.gap, self.entropy = self.gap + gap, self.entropy - behaviour
        self.fresh_tokens += int(num_fresh)
        self.clamped_tokens += int(num_clamped)
        self.tokens = int(self.buckets[0].sum())

    def metrics(self, norms: list[float], signal_share: float, *, has_values: bool) -> StepMetrics:
        tokens, (counts, rho, squares, kl, clipped, kept) = max(self.tokens, 1), self.buckets
        buckets = {
            name: StalenessMetrics(
                int(n), float(r * r / (n * s)) if s else 0.0, float(k / n), float(c / n), float(e / n)
            )
            for name, n, r, s, k, c, e in zip(BUCKET_NAMES, counts, rho, squares, kl, clipped, kept, strict=True)
            if n
        }
        return StepMetrics(
            loss=self.loss / len(norms),
            grad_norm=float(np.mean(norms)),
            clip_share=float(clipped.sum()) / tokens,
            kept_share=float(kept.sum()) / tokens if self.tokens else 1.0,
            kl=self.kl / tokens,
            ess=float(rho.sum() ** 2 / (tokens * squares.sum())) if squares.sum() else 1.0,
            logprob_gap=self.gap / self.fresh_tokens if self.fresh_tokens else math.nan,
            clamped_share=self.clamped_tokens / tokens,
            entropy=self.entropy / tokens,
            num_trained_tokens=self.tokens,
            num_row_tokens=self.row_tokens,
            num_microbatches=self.microbatches,
            signal_share=signal_share,
            value_loss=self.value_loss / len(norms) if has_values else None,
            left_out=tuple(sorted(self.left_out)),
            compared=tuple(sorted(self.compared)),
            by_staleness=buckets,
        )


def sums_of(tokens: Tokens, correction: Correction, clipped: Tensor | None, fresh: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a micro-batch's sums over trained tokens, on its device: first those for `StepAccumulator.buckets`, then
    four numbers. These are the sum of the log-prob gaps of fresh tokens, the sum of the engines' log-probs, the number
    of fresh tokens, and the number of tokens with a clamped log-ratio. `fresh` is True where the engine sampled with
    the weights at the start of the step; `clipped` is None if the tokens have no gradient."""
    mask = tokens.mask.to(torch.float32)
    log_importance = tokens.log_importance.detach()
    importance = log_importance.exp()
    fresh = mask * fresh
    clamped = (tokens.logprobs.detach() - tokens.proximal).abs() > MAX_LOG_RATIO
    clamped |= (tokens.proximal - tokens.behaviour).abs() > MAX_LOG_RATIO
    rows = [mask, importance, importance.square(), torch.expm1(log_importance) - log_importance]
    rows += [torch.zeros_like(mask) if clipped is None else clipped.to(torch.float32)]
    rows += [correction.kept.to(torch.float32)]
    is_in = _bucket_of(tokens.staleness) == torch.arange(len(BUCKET_NAMES), device=mask.device)[:, None]
    by_bucket = ((torch.stack(rows) * mask)[:, None] * is_in).sum(-1)  # not a product of matrices: TF32 would round it
    whole = [(log_importance.abs() * fresh).sum(), (tokens.behaviour * mask).sum(), fresh.sum(), (clamped * mask).sum()]
    return by_bucket, torch.stack(whole)


def _bucket_of(staleness: Tensor) -> Tensor:
    """Returns the index of each token's staleness bucket."""
    bucket = torch.zeros_like(staleness)
    for end in BUCKET_ENDS:
        bucket += staleness > end
    return bucket


def _first_true(flags: Tensor) -> Tensor:
    """Returns the index of the first True in `flags`, or -1 if there is none, as a tensor of one number."""
    if not len(flags):
        return torch.full((1,), -1, device=flags.device)
    first = flags.to(torch.uint8).argmax(0, keepdim=True)
    return torch.where(flags.any(), first, -1)
