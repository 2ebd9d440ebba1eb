"""The event model: simulates rounds of generation to predict the effect of over-provision factors.

A round is the generation from one version until the batch of its step is complete. It begins with `factor` ×
groups_per_step groups: the survivors (unfinished groups) of earlier rounds, filled up with new groups. When the batch
is complete, everything stops and the step is trained; unfinished groups survive into the next round. A round is
computed from the order in which answers end, not token by token. All factors are simulated at once in numpy arrays,
which takes little longer than simulating one. The simulation of one factor is called a lane.

Guarantees: the same seed gives the same predictions (`Outlook`). All factors of one call see the same answers in the
same order, so that their differences are not luck. Batches are chosen as by `offbeat.rules.groups.select` with
`in_order=False`. A token counts as generated in its round. It counts as delivered when its group enters a batch, with
the number of rounds since then as its age. No token is discarded.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from offbeat.rules.length_model import LengthDistribution, draw, score
from offbeat.rules.padding_split import is_long_row
from offbeat.rules.step_time import StepTime


@dataclass(frozen=True)
class Flow:
    """Totals of one simulated round. Each array has an entry per lane (the simulation of one over-provision factor).
    `num_steps` counts decode steps."""

    num_steps: np.ndarray
    num_rows: np.ndarray
    """Number of rows (running answers), summed over the decode steps: the number of tokens generated."""
    num_context_tokens: np.ndarray
    """Tokens of context read from the KV cache, summed over the decode steps."""
    num_prefilled_tokens: np.ndarray
    num_prefilled_again: np.ndarray
    """Prefilled tokens of answers that were begun in an earlier round; included in `num_prefilled_tokens`."""
    peak_context_tokens: np.ndarray
    """Largest total length in tokens, at any decode step, of all running answers with their prompts."""
    delivered_by_age: np.ndarray
    """Number of the batch's tokens, by lane and by the number of rounds since the tokens were generated."""


@dataclass(frozen=True, slots=True)
class BurstRules:
    """Settings that are the same for all rounds and lanes. Fields without a description are as in
    `EventModelConfig`."""

    num_wanted: int
    """Number of groups in a batch; if the gate is "release", every answer counts as a group of one."""
    max_staleness: int
    prompt_tokens: float
    slots: int | None
    resumes: bool
    pads: bool


class Bursts:
    """Simulates rounds of generation in lanes, one per over-provision factor. Each round first fills every lane up to
    its `num_alive` groups. Groups begun before the first round are described by `have` (tokens of each answer so far),
    `left` (tokens that each answer still needs) and `ages` (rounds since each group began)."""

    def __init__(self, terms: BurstRules, num_alive: np.ndarray, have: np.ndarray, left: np.ndarray, ages: np.ndarray):
        self.terms, self._num_alive = terms, num_alive
        shape = (len(num_alive), max(int(num_alive.max()), len(have)), have.shape[1])
        self._have, self._left = np.zeros(shape), np.zeros(shape)
        self._by_age = np.zeros((*shape[:2], terms.max_staleness + 1))
        self._begun, self._is_alive = np.zeros(shape[:2]), np.zeros(shape[:2], bool)
        """Two values for each place (room for one group) of a lane. The first is the round in which its group got its
        first token, negative for groups begun before the simulation. The second is whether the place is taken."""
        num, ages = len(have), np.minimum(ages, terms.max_staleness)
        self._have[:, :num], self._left[:, :num] = have, left
        self._by_age[:, np.arange(num), ages] = have.sum(axis=1)  # all counted as old as the first token
        self._begun[:, :num], self._is_alive[:, :num] = -ages, True
        self._round, self._num_fresh = 0, np.zeros(len(num_alive), np.int64)

    def play(self, fresh: np.ndarray) -> Flow:
        """Simulates a round in every lane and returns its totals. `fresh` holds the answer lengths of all new groups,
        in the order in which every lane takes them. It must be the same array in every round."""
        self._admit(fresh)
        terms = self.terms
        starts = self._starts()
        ready_at = np.where(self._is_alive, (starts + self._left).max(axis=2), np.inf)
        last = self._last_step(ready_at)
        made = np.clip(last[:, None, None] - starts, 0, self._left)
        begins = made > 0
        before = terms.prompt_tokens + self._have
        goes_on = begins & (self._have > 0)
        again = np.zeros(len(last)) if terms.resumes else (before * goes_on).sum(axis=(1, 2))
        first = terms.prompt_tokens * (begins & ~goes_on).sum(axis=(1, 2))
        read, peak = _context(before, starts, made, terms.pads)
        self._by_age[:, :, 0] += made.sum(axis=2)
        self._have, self._left = self._have + made, self._left - made
        delivered = self._take(ready_at <= last[:, None])
        return Flow(last, made.sum(axis=(1, 2)), read, first + again, again, peak, delivered)

    def _admit(self, fresh: np.ndarray) -> None:
        """Adds new groups to every lane until it has its number of groups; `fresh` is as for `play`."""
        is_free = ~self._is_alive
        wanted = np.maximum(self._num_alive - self._is_alive.sum(axis=1), 0)
        place = is_free.cumsum(axis=1)
        lanes, places = np.nonzero(is_free & (place <= wanted[:, None]))
        which = self._num_fresh[lanes] + place[lanes, places] - 1
        self._have[lanes, places], self._left[lanes, places] = 0.0, fresh[which]
        self._by_age[lanes, places], self._is_alive[lanes, places] = 0.0, True
        # The fraction breaks ties between groups begun in the same round, by their order.
        self._begun[lanes, places] = self._round + which / (len(fresh) + 1)
        self._num_fresh += wanted

    def _starts(self) -> np.ndarray:
        """Returns how many decode steps each answer waits for a slot of the engine; 0 if a slot is free at once. Groups
        begun longest ago get slots first."""
        starts, slots = np.zeros(self._left.shape), self.terms.slots
        if slots is None:
            return starts
        for lane in np.flatnonzero((self._left > 0).sum(axis=(1, 2)) > slots):
            order = np.argsort(self._begun[lane], kind="stable")
            left = self._left[lane, order].ravel()
            waiting, flat = np.flatnonzero(left > 0), np.zeros(len(left))
            busy_until = left[waiting[:slots]].tolist()
            heapq.heapify(busy_until)
            for member in waiting[slots:].tolist():
                flat[member] = busy_until[0]
                heapq.heapreplace(busy_until, busy_until[0] + left[member])
            starts[lane, order] = flat.reshape(-1, self._left.shape[2])
        return starts

    def _last_step(self, ready_at: np.ndarray) -> np.ndarray:
        """Returns the decode step after which each lane's batch is complete. `ready_at` holds the decode step at which
        each group is finished. The batch needs enough finished groups. Among these must be the old groups that would
        exceed `max_staleness` in later batches."""
        wanted, max_staleness = self.terms.num_wanted, self.terms.max_staleness
        last = np.partition(ready_at, wanted - 1, axis=1)[:, wanted - 1]
        begun = np.floor(self._begun)
        for more_steps in range(max_staleness):
            is_due = self._is_alive & (begun <= self._round - max_staleness + more_steps)
            num_due = np.minimum(is_due.sum(axis=1) - more_steps * wanted, wanted)
            lanes = np.flatnonzero(num_due > 0)
            if len(lanes):
                due = np.sort(np.where(is_due, ready_at, np.inf)[lanes], axis=1)
                last[lanes] = np.maximum(last[lanes], due[np.arange(len(lanes)), num_due[lanes] - 1])
        return last

    def _take(self, is_ready: np.ndarray) -> np.ndarray:
        """Removes each lane's batch, which are the groups begun longest ago among those in the mask `is_ready`. Makes
        all other tokens one round older. Returns the number of tokens in each batch by age."""
        wanted = self.terms.num_wanted
        order = np.where(is_ready, self._begun, np.inf)
        is_taken = order <= np.partition(order, wanted - 1, axis=1)[:, wanted - 1, None]
        delivered = (self._by_age * is_taken[:, :, None]).sum(axis=1)
        self._is_alive &= ~is_taken
        self._left[is_taken] = 0.0
        self._round += 1
        is_waiting = self._is_alive & ~self._by_age.any(axis=2)
        self._begun[is_waiting] += 1  # a group without a token does not age
        oldest = self._by_age[:, :, -1] + (self._by_age[:, :, -2] if self.terms.max_staleness else 0.0)
        self._by_age[:, :, 1:] = self._by_age[:, :, :-1].copy()
        self._by_age[:, :, -1], self._by_age[:, :, 0] = oldest, 0.0
        return delivered


def _context(before: np.ndarray, starts: np.ndarray, made: np.ndarray, pads: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns two numbers per lane (simulation of one factor): how many context tokens a round reads from the KV cache,
    and the largest total length of all running rows at any decode step.

    A row is one answer with its prompt. It begins at decode step `starts` with a length of `before` tokens and grows by
    one token in each of `made` decode steps. If `pads`, the engine pads rows: a decode step reads number of rows ×
    longest row. It does so separately for long and short rows, a split chosen when the round begins (`is_long_row`).
    """
    num_lanes = len(before)
    runs = made > 0
    _, peak = _padded(before, starts, made, runs)
    if not pads:
        return (made * (before + (made + 1) / 2)).sum(axis=(1, 2)), peak
    is_far = is_long_row(np.where(runs, before, 0.0).reshape(num_lanes, -1)).reshape(before.shape)
    far, near = (_padded(before, starts, made, part)[0] for part in (runs & is_far, runs & ~is_far))
    return far + near, peak


def _padded(
    before: np.ndarray, starts: np.ndarray, made: np.ndarray, some: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the two numbers of `_context` for the rows in the mask `some` only. Tokens read are counted as if each
    decode step padded these rows to the longest of them."""
    num_lanes = len(before)
    runs, made = some.reshape(num_lanes, -1), np.where(some, made, 0.0)
    ends = np.where(runs, (starts + made).reshape(num_lanes, -1), 0.0)
    order = np.argsort(ends, axis=1)
    ends, runs = np.take_along_axis(ends, order, 1), np.take_along_axis(runs, order, 1)
    at_step_0 = np.where(runs, np.take_along_axis((before - starts).reshape(num_lanes, -1), order, 1), 0.0)
    begins = np.concatenate([np.zeros((num_lanes, 1)), ends[:, :-1]], axis=1)
    rows = runs[:, ::-1].cumsum(axis=1)[:, ::-1]
    rows = rows - _num_not_begun(starts, made, begins)
    peak = (rows * ends + at_step_0[:, ::-1].cumsum(axis=1)[:, ::-1]).max(axis=1)
    longest = np.maximum.accumulate(at_step_0[:, ::-1], axis=1)[:, ::-1]
    read = (rows * (ends - begins) * (longest + (begins + ends + 1) / 2)).sum(axis=1)
    return read, peak


def _num_not_begun(starts: np.ndarray, made: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Returns how many answers of each lane begin (`starts`) after each of the decode steps `at`. Answers that get no
    token in this round (`made` = 0) do not count."""
    if not starts.any():
        return np.zeros(at.shape)
    waits = np.sort(np.where(made > 0, starts, 0.0).reshape(len(at), -1), axis=1)
    num_begun = [np.searchsorted(row, times, side="right") for row, times in zip(waits, at, strict=True)]
    return waits.shape[1] - np.stack(num_begun)


NUM_ROUNDS = 24
"""Number of rounds simulated per factor. The controller averages predictions over versions, so few are enough."""
SETTLING = 3
"""The first 1/SETTLING of the rounds are not counted, because unfinished groups still accumulate in them."""


@dataclass(frozen=True, slots=True)
class EventModelConfig:
    """Settings of a simulation, which are the same in every round."""

    groups_per_step: int
    group_size: int
    max_staleness: int
    """Largest staleness of a trained token, in steps: a batch waits for a group that was begun this many steps ago."""
    prompt_tokens: float = 0
    slots: int | None = None
    """Answers that the engine can generate at once; None: no limit."""
    max_context_tokens: float | None = None
    """Size of the KV cache in tokens; None: no limit."""
    gate: Literal["strict", "release"] = "strict"
    """strict: a round ends when groups_per_step whole groups are finished. release: it ends when as many single answers
    are finished as groups_per_step groups have."""
    resumes: bool = False
    """Whether an unfinished answer continues from its kept KV cache; if not, its tokens are prefilled again."""
    pads: bool = False
    """Whether the engine pads: a decode step then reads number of rows (running answers) × longest context."""
    update_s: float = 0.0
    """Seconds from the end of a round to the beginning of the next, in which the step is trained."""


@dataclass(frozen=True, slots=True)
class Survivor:
    """A group that is unfinished at the end of a round and continues in the next one."""

    age: int
    """Number of training steps since the group was begun; 1: it was begun in the previous round."""
    num_tokens: tuple[int, ...]
    """Number of tokens that each member has so far."""
    ended: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Outlook:
    """Prediction for one over-provision factor (groups in flight divided by groups trained), averaged over rounds."""

    factor: float
    tokens_per_s: float
    """Generated tokens per second; in the long run all of them get into a batch."""
    step_s: float
    """Seconds of a round and of the training after it."""
    off_policy_share: float
    """Share of a batch's tokens that were generated before the round that completed the batch."""
    staleness_p95: int
    staleness_max: int
    reprefill_share: float
    """Share of the time that is spent on prefilling again answers that were begun in an earlier round."""
    mean_rows: float
    max_context_tokens: float
    """Largest total length in tokens, at any decode step of any round, of all running answers with their prompts."""


@dataclass(frozen=True)
class _Answers:
    """Unfinished groups (`have`, `left` and `ages` are as in `Bursts`), and answer lengths of new groups (`fresh`)."""

    have: np.ndarray
    left: np.ndarray
    ages: np.ndarray
    fresh: np.ndarray


def outlooks(
    setting: EventModelConfig,
    step_time: StepTime,
    law: LengthDistribution,
    factors: Sequence[float],
    *,
    seed: int,
    num_rounds: int = NUM_ROUNDS,
    survivors: Sequence[Survivor] = (),
) -> list[Outlook]:
    """Returns a prediction for each factor, from simulated rounds that begin with factor × groups_per_step groups.
    `law` is the distribution of answer lengths; `survivors` are unfinished groups with which the first round begins."""
    num_fresh = round((num_rounds + max(factors)) * setting.groups_per_step)
    answers = _draw_answers(setting, law, num_fresh, survivors, np.random.default_rng(seed))
    per_group = 1 if setting.gate == "strict" else setting.group_size
    terms = BurstRules(
        num_wanted=setting.groups_per_step * per_group,
        max_staleness=setting.max_staleness,
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
    setting: EventModelConfig,
    law: LengthDistribution,
    num_fresh: int,
    survivors: Sequence[Survivor],
    rng: np.random.Generator,
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
    """Draws standard normal numbers, one from each of equally likely ranges: even a small sample has extreme values."""
    num = shape[0] * shape[1]
    return score((rng.permutation(num) + rng.random(num)) / num).reshape(shape)


def _sum_up(setting: EventModelConfig, step_time: StepTime, factor: float, flows: Sequence[Flow], lane: int) -> Outlook:
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
        staleness_p95=int(np.searchsorted(shares, 0.95)),
        staleness_max=int(np.flatnonzero(by_age).max()),
        reprefill_share=step_time.prefill_s * float(sum(flow.num_prefilled_again[lane] for flow in flows)) / seconds,
        mean_rows=num_tokens / num_steps,
        max_context_tokens=float(max(flow.peak_context_tokens[lane] for flow in flows)),
    )
