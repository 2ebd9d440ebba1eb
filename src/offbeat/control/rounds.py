"""What rounds of generation would give at an over-provision factor: the event model.

Duty: predict, before anything is tried. A round begins with a burst: `factor` times groups_per_step groups are alive,
survivors of earlier rounds first and fresh ones beside them. All of them decode until the batch of the step is there;
then everything stops, the step is trained, and what is unfinished survives into the next round. Between two answers
that end nothing changes but the contexts, so rounds are computed from the order of their ends, not token by token.

Guarantees: the same seed gives the same outlooks, and all factors of one call see the same answers in the same order,
so that their differences are theirs and not luck. Whom a batch waits for is what `select` says, out of order. Nothing
is thrown away: what is generated is delivered in the long run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from offbeat.control.burst import Bursts, Flow, Terms
from offbeat.control.law import Law, score
from offbeat.control.siblings import draw
from offbeat.control.step_time import StepTime

NUM_ROUNDS = 24
"""Played a factor, in a few milliseconds; whoever decides averages over versions besides."""
SETTLING = 3
"""One round in so many is left out at the begin, while survivors gather."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What does not change from round to round."""

    groups_per_step: int
    group_size: int
    bound: int
    """S: a group begun S steps ago is waited for."""
    prompt_tokens: float = 0
    slots: int | None = None
    """Rows that can run at once; None: all."""
    max_context_tokens: float | None = None
    """Keys and values that there is room for, in tokens in flight; None: enough."""
    gate: Literal["strict", "release"] = "strict"
    """A round ends with groups_per_step whole groups, or with as many samples as those have."""
    resumes: bool = False
    """Whether a trajectory goes on from kept keys and values; otherwise its whole prefix is prefilled again."""
    pads: bool = False
    """Whether a step reads rows times the longest context."""
    update_s: float = 0.0
    """From the end of a round to the begin of the next."""


@dataclass(frozen=True, slots=True)
class Survivor:
    """A group that is carried over into the coming round."""

    age: int
    """Steps since it was begun; 1: in the round before."""
    num_tokens: tuple[int, ...]
    """Of each member so far."""
    ended: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is predicted of a factor, on average over rounds."""

    factor: float
    tokens_per_s: float
    """Generated, all of which are delivered in the long run."""
    step_s: float
    """A round and the update after it."""
    off_policy_share: float
    """Of the delivered tokens."""
    staleness_p50: int
    staleness_p95: int
    staleness_max: int
    reprefill_share: float
    """Of the time."""
    mean_rows: float
    max_context_tokens: float
    """In flight at most, in any round."""


@dataclass(frozen=True)
class _Answers:
    """Who comes when: the survivors at the begin, then fresh groups in the order in which they are begun."""

    have: np.ndarray
    left: np.ndarray
    ages: np.ndarray
    fresh: np.ndarray


def outlooks(
    setting: Setting,
    step_time: StepTime,
    law: Law,
    factors: Sequence[float],
    *,
    seed: int,
    num_rounds: int = NUM_ROUNDS,
    survivors: Sequence[Survivor] = (),
) -> list[Outlook]:
    """Of rounds in which that many times groups_per_step groups are alive at the begin, a factor each."""
    num_fresh = round((num_rounds + max(factors)) * setting.groups_per_step)
    answers = _draw_answers(setting, law, num_fresh, survivors, np.random.default_rng(seed))
    per_group = 1 if setting.gate == "strict" else setting.group_size
    terms = Terms(
        num_wanted=setting.groups_per_step * per_group,
        bound=setting.bound,
        prompt_tokens=setting.prompt_tokens,
        slots=setting.slots,
        resumes=setting.resumes,
        pads=setting.pads,
    )
    num_alive = np.array([round(factor * setting.groups_per_step) * per_group for factor in factors])
    bursts = Bursts(terms, num_alive, answers.have, answers.left, answers.ages)
    flows = [bursts.play(answers.fresh) for _ in range(num_rounds)][num_rounds // SETTLING :]
    return [_sum_up(setting, step_time, factor, flows, lane) for lane, factor in enumerate(factors)]


def _draw_answers(
    setting: Setting, law: Law, num_fresh: int, survivors: Sequence[Survivor], rng: np.random.Generator
) -> _Answers:
    group = _stratified(rng, (num_fresh, 1))
    own = _stratified(rng, (num_fresh, setting.group_size))
    fresh = law.lengths(np.sqrt(law.shared) * group + np.sqrt(1 - law.shared) * own)
    have = np.array([survivor.num_tokens for survivor in survivors], np.int64).reshape(-1, setting.group_size)
    ended = np.array([survivor.ended for survivor in survivors], bool).reshape(-1, setting.group_size)
    left = draw(law, have, ended, rng) - have
    ages = np.array([survivor.age for survivor in survivors], np.int64)
    oldest_first = np.argsort(-ages, kind="stable")
    have, left, ages = have[oldest_first], left[oldest_first], ages[oldest_first]
    if setting.gate == "strict":
        return _Answers(have, left, ages, fresh)
    ages, is_open = np.repeat(ages, setting.group_size), left.reshape(-1) > 0
    return _Answers(have.reshape(-1, 1)[is_open], left.reshape(-1, 1)[is_open], ages[is_open], fresh.reshape(-1, 1))


def _stratified(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Standard normal scores that fill their law evenly: few draws then have its mean and its tail."""
    num = shape[0] * shape[1]
    return score((rng.permutation(num) + rng.random(num)) / num).reshape(shape)


def _sum_up(setting: Setting, step_time: StepTime, factor: float, flows: Sequence[Flow], lane: int) -> Outlook:
    num_steps = float(sum(flow.num_steps[lane] for flow in flows))
    num_tokens = float(sum(flow.num_rows[lane] for flow in flows))
    num_read = float(sum(flow.num_context_tokens[lane] for flow in flows))
    num_prefilled = float(sum(flow.num_prefilled_tokens[lane] for flow in flows))
    seconds = step_time.seconds(num_steps, num_tokens, num_read, num_prefilled) + setting.update_s * len(flows)
    by_age = np.sum([flow.delivered_by_age[lane] for flow in flows], axis=0)
    shares = by_age.cumsum() / by_age.sum()
    return Outlook(
        factor=factor,
        tokens_per_s=num_tokens / seconds,
        step_s=seconds / len(flows),
        off_policy_share=1 - float(shares[0]),
        staleness_p50=int(np.searchsorted(shares, 0.5)),
        staleness_p95=int(np.searchsorted(shares, 0.95)),
        staleness_max=int(np.flatnonzero(by_age).max()),
        reprefill_share=step_time.prefill_s * float(sum(flow.num_prefilled_again[lane] for flow in flows)) / seconds,
        mean_rows=num_tokens / num_steps,
        max_context_tokens=float(max(flow.peak_context_tokens[lane] for flow in flows)),
    )
