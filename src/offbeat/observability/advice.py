"""Finds signs in a run's metrics that the run does not learn, and advises once on each sign what to change.

Takes rows and returns advice, without I/O or a clock. A sign that has lasted long enough is a finding. Most findings
need several steps in a row, so that chance alone rarely causes one. A run that has nearly solved its task may show the
same signs, but gets no advice.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from offbeat.config.summary import count

Row = Mapping[str, Any]

FIRST_STEPS, MIN_ANSWERS = 3, 24
"""Numbers of steps and answers after which a run gets advice if its reward never varied. If one answer in ten is right,
the first 24 answers are all wrong in 8 % of runs."""
STEPS, FEW_STEPS, MANY_STEPS = 5, 3, 10
"""Numbers of consecutive bad steps after which a run gets advice. `FEW_STEPS` is for figures that hardly vary by
chance. `MANY_STEPS` is for figures that may look bad for a while in a healthy run, such as the entropy. `STEPS` is for
all others."""
LOW_SIGNAL = 0.05
"""If a smaller share of a step's samples has an advantage other than 0, the step teaches next to nothing."""
SOLVED = 0.1
"""A task counts as solved if the mean reward is this close to the best reward so far. The unit is the distance between
the best and the worst reward."""
MOST_CUT, MANY_CUT = 0.8, 0.5
"""Shares of answers cut at the length limit. A run gets advice if more than `MOST_CUT` are cut for `FEW_STEPS` steps in
a row, or more than `MANY_CUT` for `MANY_STEPS` steps in a row. A healthy run was above 0.5 for four steps and reached
0.73, while its model tried out longer answers."""
COLLAPSED, MIN_ENTROPY = 0.05, 0.02
"""Limits for the entropy: the first relative to the entropy in the first steps, the second absolute. If the entropy is
below both, answers hardly vary any more. The entropy of a healthy run fell to 0.05, 0.04 times its first value."""
HIGH_REWARD, LOW_REWARD, FALLEN_ANSWERS = 0.4, 0.1, 64
"""Limits for the advice that the reward has fallen. A run gets it under two conditions. First, the mean reward of
`FALLEN_ANSWERS` consecutive answers was once at least `HIGH_REWARD` above the worst reward. Second, the mean reward of
each of the latest steps, with at least `FALLEN_ANSWERS` answers in all, is at most `LOW_REWARD` above the worst reward.
`HIGH_REWARD` and `LOW_REWARD` are shares of the distance between the run's worst and best reward. So many answers
seldom differ that much by chance."""
MANY_FAILED = 0.2
"""If a larger share of the answers failed, the advice on a reward that never varies blames the failures: often, the
reward function returns None for a wrong answer."""
MANY_MASKED = 0.5
"""If a larger share of a step's tokens is not trained, or is rejected by loss.correction, most work is wasted."""
FEW_ROWS, FEW_HELD_OUT = 20, 10
"""Numbers of training rows and of held-out problems below which a run gets advice."""
NO_WORKER_S = 180.0
"""Seconds without a worker after which a run gets advice; starting a vLLM server with a large model takes two
minutes."""


class Advice(NamedTuple):
    about: str
    """Name of the finding; a run gets advice on each finding once."""
    text: str


def right_answer_earns(
    task: str, answer: str | None, place: str | None, value: float, empty: float | None
) -> Advice | None:
    """Returns advice if the right answer earned 0 in the trial of a reward. `answer` is the right answer to a problem
    of `task`, found at `place`, and `value` its reward. `empty` is the reward of an empty response (None: unknown). If
    `empty` is less than 0, there is no advice, because 0 may be the best reward."""
    if not answer or value != 0 or (empty is not None and empty < 0):
        return None
    shown = answer if len(answer) <= 40 else f"{answer[:40]}..."
    text = (
        f"the right answer {shown!r} of a problem of task {task}{f' ({place})' if place else ''} earned 0 in a trial: "
        "check task.reward (answers are passed as text, so compare text, or convert both the response and the answer); "
        "ignore this if the reward wants more than the bare answer"
    )
    return Advice(f"trial {task}", text)


def wrong_answer_fails(task: str, why: str) -> Advice | None:
    """Returns advice if, in the trial of the reward of `task`, the reward failed for an empty response, though not for
    the right answer. `why` is the error for the empty response; "" if there was none."""
    if not why:
        return None
    return Advice(
        f"failure {task}",
        f"the reward of task {task} failed for an empty response: {why}; answers whose reward fails are not trained "
        "on, so return 0.0 for a wrong one",
    )


def few_rows(task: str, num_rows: int) -> Advice | None:
    """Returns advice if `task` has too few rows to train on."""
    if num_rows >= FEW_ROWS:
        return None
    text = (
        f"task {task} has only {count(num_rows, 'row')} to train on, which a model learns by heart: add rows to "
        "task.path, or watch the held-out reward and keep run.steps low"
    )
    return Advice(f"few rows {task}", text)


def few_held_out(num_problems: int, wanted: int) -> Advice | None:
    """Returns advice if so few problems are held out that their mean reward is mostly chance. Returns None if there are
    as many as the user `wanted` (`eval.prompts`), or if no problem is held out."""
    if not 0 < num_problems < min(FEW_HELD_OUT, wanted):
        return None
    text = (
        f"only {count(num_problems, 'problem')} held out, so the held-out reward is mostly chance (each problem moves "
        f"it by up to {1 / num_problems:.2f}): add rows to task.path, or raise task.held_out"
    )
    return Advice("few held-out", text)


@dataclass(frozen=True)
class Keys:
    """Values of the configuration keys that appear in advice."""

    max_new_tokens: int
    group_size: int
    max_staleness: int
    lr: float


class Adviser:
    """Watches a run's rows of metrics and returns new advice. `said` are the names of the findings on which the run
    got advice before, such as before a resume."""

    def __init__(self, keys: Keys, run: str, said: Iterable[str] = ()):
        self.keys, self.run, self._said = keys, run, set(said)
        self._streaks: Counter[str] = Counter()
        self._latest: deque[Row] = deque(maxlen=MANY_STEPS)
        self._first_entropies: list[float] = []
        self._num_steps = self._num_answers = self._num_failed = 0
        self._best, self._worst, self._peak = -math.inf, math.inf, -math.inf

    def step(self, row: Row) -> list[Advice]:
        """Returns new advice on the row of the next step. Figures that the row lacks, as in a run of an older Offbeat,
        are not judged."""
        row = {key: value for key, value in row.items() if isinstance(value, (int, float)) and math.isfinite(value)}
        if "reward" not in row:
            return []
        self._latest.append(row)
        self._num_steps += 1
        self._num_answers += row.get("samples", 0)
        self._num_failed += row.get("failures", 0)
        self._best = max(self._best, row.get("reward_max", row["reward"]))
        self._worst = min(self._worst, row.get("reward_min", row["reward"]))
        if len(self._first_entropies) < FIRST_STEPS:
            self._first_entropies.append(row.get("entropy", 0.0))
        return self._new(self._findings(row))

    def evaluation(self, figures: Row) -> list[Advice]:
        failed, scored = figures.get("eval_failed", 0), figures.get("eval_samples", 0)
        if not failed:
            return []
        text = (
            f"{failed} of {failed + scored} held-out answers of step {figures['step']} failed; the held-out reward is "
            f"the mean of the others only. See {self.run}/logs/rewards.log; raise reward.timeout_s if they took too "
            "long"
        )
        return self._new([Advice("failed evaluation", text)])

    def no_worker(self, seconds: float) -> list[Advice]:
        """Returns advice if no worker has asked for work for `seconds`, and that is at least `NO_WORKER_S`."""
        if seconds < NO_WORKER_S:
            return []
        text = (
            f"no worker has asked for work for {seconds:.0f} s: start one with offbeat worker --join, or see in "
            f"{self.run}/logs why earlier workers stopped"
        )
        return self._new([Advice("no worker", text)])

    def _new(self, found: Iterable[Advice]) -> list[Advice]:
        fresh = [advice for advice in found if advice.about not in self._said]
        self._said.update(advice.about for advice in fresh)
        return fresh

    def _findings(self, row: Row) -> Iterator[Advice]:
        if self._has_fallen(row):  # then all other signs have the same cause
            yield self._fallen(row)
            return
        n = self._num_steps
        if self._best == self._worst and n >= FIRST_STEPS and self._num_answers >= MIN_ANSWERS:
            yield self._constant_reward()
        elif self._lasts("signal", self._signal(row) < LOW_SIGNAL, STEPS) and (not self._is_solved() or n <= STEPS):
            yield self._no_signal()
        cut = row.get("cut_share", 0.0)
        if self._lasts("most cut", cut > MOST_CUT, FEW_STEPS) or self._lasts("many cut", cut > MANY_CUT, MANY_STEPS):
            yield Advice(
                "cut",
                f"{cut:.0%} of the answers are cut at rollout.max_new_tokens = "
                f"{self.keys.max_new_tokens}: raise it, or ask for shorter answers in the prompt",
            )
        if self._lasts("entropy", self._has_collapsed(row), MANY_STEPS):
            yield Advice(
                "entropy",
                f"answers hardly vary any more (entropy {row['entropy']:.2g}, {self._first_entropy():.2g} at first), "
                "and the task is not solved: lower optimizer.lr, or set loss.clip_high = 0.28",
            )
        trained = row.get("num_trained_tokens", math.inf) / max(row.get("tokens", 0), 1)
        if self._lasts("masked", trained < 1 - MANY_MASKED, FEW_STEPS):
            yield Advice(
                "masked",
                f"only {trained:.0%} of the step's tokens were trained; the others are older than "
                f"schedule.max_staleness = {self.keys.max_staleness} steps, or failed an audit: lower "
                "schedule.over_provision, raise schedule.max_staleness, or see offbeat worker list",
            )
        if self._lasts("rejected", row.get("kept_share", 1.0) < 1 - MANY_MASKED, FEW_STEPS):
            yield Advice(
                "rejected",
                f"loss.correction rejects {1 - row['kept_share']:.0%} of the tokens: the weights have changed too much "
                "since these tokens were sampled. Lower optimizer.lr or schedule.max_staleness",
            )
        if self._lasts("idle", row.get("idle_workers", 0) > 0, STEPS):
            yield Advice(
                "idle workers",
                f"{row['idle_workers']} of {row['workers']} workers got no work in the last {STEPS} steps: a step has "
                f"only {row['samples']} answers. Raise batch.groups_per_step, or lower rollout.slots to share the "
                "answers",
            )

    def _lasts(self, name: str, is_so: bool, num_steps: int) -> bool:
        """Records whether the sign called `name` is present in this step (`is_so`). Returns whether this sign was
        present in each of the last `num_steps` steps."""
        self._streaks[name] = self._streaks[name] + 1 if is_so else 0
        return self._streaks[name] >= num_steps

    def _has_fallen(self, row: Row) -> bool:
        """Whether the mean reward was high earlier in the run, and has been near the lowest reward of any answer for
        the last `FEW_STEPS` steps."""
        if (recent := self._recent_reward()) is not None:
            self._peak = max(self._peak, recent)
        span = self._best - self._worst
        if not self._lasts("fallen", row["reward"] <= self._worst + LOW_REWARD * span, FEW_STEPS):
            return False
        low = list(self._latest)[-self._streaks["fallen"] :]
        has_enough = sum(row.get("samples", 0) for row in low) >= FALLEN_ANSWERS
        return has_enough and self._peak >= self._worst + HIGH_REWARD * span > self._worst

    def _recent_reward(self) -> float | None:
        """Returns the mean reward of the latest steps, of as many as have `FALLEN_ANSWERS` answers together; None if
        the latest `MANY_STEPS` steps have fewer."""
        num_answers, earned = 0, 0.0
        for row in reversed(self._latest):
            num_answers += row.get("samples", 0)
            earned += row["reward"] * row.get("samples", 0)
            if num_answers >= FALLEN_ANSWERS:
                return earned / num_answers
        return None

    def _fallen(self, row: Row) -> Advice:
        return Advice(
            "fallen reward",
            f"the reward has fallen from {self._peak:.3g} to {row['reward']:.3g}: optimizer.lr = {self.keys.lr:g} is "
            "probably too large. A resume would go on with spoilt weights: start a new run with optimizer.lr = "
            f"{self.keys.lr / 10:g}",
        )

    def _signal(self, row: Row) -> float:
        """Returns the share of samples whose advantage is not 0, among all samples with a reward, including samples of
        groups that were dropped without a signal."""
        num_samples, num_dropped = max(row.get("samples", 0), 1), row.get("dropped_no_signal", 0) * self.keys.group_size
        return row.get("signal_share", 1.0) * num_samples / (num_samples + num_dropped)

    def _is_solved(self) -> bool:
        """Whether nearly every answer earns the best reward seen so far."""
        mean = sum(row["reward"] for row in self._latest) / len(self._latest)
        return self._best - mean <= SOLVED * (self._best - self._worst)

    def _first_entropy(self) -> float:
        return sum(self._first_entropies) / len(self._first_entropies)

    def _has_collapsed(self, row: Row) -> bool:
        limit = min(COLLAPSED * self._first_entropy(), MIN_ENTROPY)
        return row.get("entropy", math.inf) < limit and not self._is_solved()

    def _constant_reward(self) -> Advice:
        failed, scored = self._num_failed, f"all {self._num_answers} answers so far"
        if failed:
            scored = f"{scored} that were scored earned {self._best:g} and {failed} failed"
        else:
            scored = f"{scored} earned {self._best:g}"
        look = f"look at some with offbeat show {self.run}"
        if failed > MANY_FAILED * (failed + self._num_answers):
            text = (
                f"{scored}, so there is nothing to learn: offbeat show {self.run} --failed shows the reasons; answers "
                "that fail are not trained on, so if task.reward gives None for a wrong answer, let it give a number"
            )
        elif self._best == 0:
            text = (
                f"{scored}, so there is nothing to learn: {look}; check "
                "task.reward, show the wanted form of an answer in the prompt, or choose easier problems"
            )
        else:
            text = (
                f"{scored}, so there is nothing to learn: {look}; "
                "check that task.reward tells right from wrong, or choose harder problems"
            )
        return Advice("constant reward", text)

    def _no_signal(self) -> Advice:
        rows = list(self._latest)[-STEPS:]
        share = sum(self._signal(row) for row in rows) / STEPS
        mean = sum(row["reward"] for row in rows) / STEPS
        how_many = f"only {share:.0%}" if share >= 0.005 else "none"
        way = "easier" if mean - self._worst < self._best - mean else "harder"
        return Advice(
            "no signal",
            f"{how_many} of the answers of the last {STEPS} steps teach anything, because the rewards within a group "
            f"are equal (mean {mean:.3g}): choose {way} problems, or raise batch.group_size = {self.keys.group_size}",
        )
