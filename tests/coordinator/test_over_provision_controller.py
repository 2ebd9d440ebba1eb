"""The controller around a run: what it is fed, when it chooses, and what it says of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from offbeat.coordinator.admission import OverProvisionController
from offbeat.ledger.records import Surviving
from offbeat.rules.event_model import EventModelConfig
from offbeat.rules.step_time import StepTime, Timing
from offbeat.trajectory import End, Sampling, Segment, Task, Trajectory

MAX_NEW_TOKENS, GROUPS, SIZE, BOUND = 480, 8, 4, 4
TIME = StepTime(2e-3, 2e-5, 0.0, 2e-5)
SETTING = EventModelConfig(GROUPS, SIZE, BOUND)


class Run:
    """Rounds as a coordinator would tell of them: all answers of a step end, in the time that a `StepTime` says."""

    def __init__(self, sigma: float, choice_s: float = 0.0, step_time: StepTime = TIME):
        self.now_s, self.choices, self.sigma = 0.0, [], sigma
        self.rng, self.num_tasks, self.step = np.random.default_rng(1), 0, 0
        self.foresight = OverProvisionController(SETTING, MAX_NEW_TOKENS, self.choices.append, self.clock)
        self.choice_s, self.is_choosing, self.step_time = choice_s, False, step_time

    def play(self, update_s: float = 0.05, with_evaluation: bool = False) -> None:
        lengths = np.exp(self.rng.normal(np.log(60), self.sigma, GROUPS * SIZE)).round().clip(1, MAX_NEW_TOKENS - 1)
        tasks = [a_task(self.num_tasks + i, (self.num_tasks + i) // SIZE) for i in range(len(lengths))]
        self.num_tasks += len(tasks)
        self.foresight.handed_out(tasks)
        if with_evaluation:
            self.foresight.handed_out([a_task(-1, -1, require_version=1)])
        for task, length in zip(tasks, lengths, strict=True):
            self.foresight.submitted(an_answer(task, int(length)))
        for steps in np.array_split(np.arange(lengths.max()), 8):
            rows = [int((lengths > step).sum()) for step in steps]
            context = int(sum((np.minimum(lengths, step) * (lengths > step)).sum() for step in steps))
            seconds = self.step_time.seconds(len(steps), sum(rows), context)
            self.now_s += seconds
            self.foresight.timed("w", [Timing(len(steps), sum(rows), context, 0, seconds)])
        self.foresight.claimed()
        self.now_s += update_s
        self.step += 1
        self.is_choosing = True
        self.foresight.began(self.step, 256, [])
        self.is_choosing = False

    def clock(self) -> float:
        """Choosing takes time."""
        self.now_s += self.choice_s * self.is_choosing
        return self.now_s


def a_task(number: int, group: int, require_version: int | None = None) -> Task:
    sampling = Sampling(max_new_tokens=MAX_NEW_TOKENS)
    return Task(number, group, np.arange(5, dtype=np.int32), 0, sampling, require_version, fence=1)


def an_answer(task: Task, num_tokens: int, end: End | None = End.STOP) -> Trajectory:
    trajectory = task.new_trajectory()
    logprobs = np.full(num_tokens, -1.0)
    trajectory.append(Segment(0, np.zeros(num_tokens), logprobs=logprobs, version=1, kv_version=1, worker="w"), end)
    return trajectory


def test_with_a_long_tail_it_goes_up_once_enough_was_seen_and_says_why():
    run = Run(sigma=1.0)
    assert run.foresight.factor() == 1.0
    for _ in range(8):
        run.play()
    assert 1.5 <= run.foresight.factor() <= BOUND + 1
    assert run.choices[-1].factor == run.foresight.factor()
    figures = run.foresight.figures()
    assert figures["over_provision"] == run.foresight.factor()
    assert figures["step_time_error"] < 0.01
    assert figures["predicted_tokens_per_second"] > figures["generated_tokens_per_second"], "rounds here run at 1"


def test_with_answers_of_one_length_on_an_engine_that_a_step_fills_it_stays_at_one():
    run = Run(sigma=0.02, step_time=StepTime(2e-5, 2e-5, 0.0, 2e-5))
    for _ in range(8):
        run.play()
    assert (run.foresight.factor(), run.choices) == (1.0, [])


def test_where_rounds_are_short_it_chooses_every_few_of_them_after_a_first_second_of_choosing(monkeypatch):
    costly, cheap = Run(sigma=1.0, choice_s=0.2), Run(sigma=1.0)
    decided = {}
    for run in (costly, cheap):
        decide, calls = run.foresight._control.decide, []
        monkeypatch.setattr(
            run.foresight._control, "decide", lambda *args, decide=decide, calls=calls: calls.append(0) or decide(*args)
        )
        for _ in range(40):
            run.play()
        decided[run] = len(calls)
    assert decided[cheap] == 40
    assert 6 < decided[costly] <= 10, "six in the first rounds, then a choice of 0.2 s every 10 s and more"


def test_a_round_in_which_something_was_evaluated_says_nothing_about_the_prediction(monkeypatch):
    run, outcomes = Run(sigma=1.0), []
    monkeypatch.setattr(run.foresight._control, "outcome", lambda tokens, seconds: outcomes.append(tokens))
    run.play()
    run.play(with_evaluation=True)
    assert len(outcomes) == 0, "the first round has no begin that was seen, the second was mixed"
    run.play()
    assert len(outcomes) == 1


def test_tokens_of_a_beginning_are_counted_in_the_round_that_sampled_them():
    run, foresight = Run(sigma=1.0), OverProvisionController(SETTING, MAX_NEW_TOKENS, clock=lambda: run.now_s)
    foresight.began(0, 8, [])
    task = a_task(1, 1)
    foresight.handed_out([task])
    begun = an_answer(task, 100, end=None)
    foresight.submitted(begun)
    run.now_s += 10.0
    foresight.began(1, 8, [Surviving(0, (100, 0, 0, 0), (False,) * 4)])
    assert foresight.figures()["generated_tokens_per_second"] == 10.0
    again = Task(1, 1, task.prompt, 0, task.sampling, prefix=begun, fence=2)
    foresight.handed_out([again])
    whole = again.new_trajectory()
    whole.append(replace(whole.segments[0], start=100), End.STOP)
    foresight.submitted(whole)
    foresight.submitted(whole)  # again, as if somebody unknown had it: not counted
    run.now_s += 10.0
    foresight.began(2, 8, [])
    assert foresight.figures()["generated_tokens_per_second"] == 10.0


@pytest.mark.parametrize("worker", ["w", "somebody else"])
def test_a_worker_that_has_left_is_not_counted(worker):
    run = Run(sigma=1.0)
    for _ in range(4):
        run.play()
    run.foresight.left(worker)
    assert ("step_time_error" in run.foresight.figures()) == (worker != "w")
