"""Bug class 2: tokens, log-probs, masks and versions of an answer drift apart as it is cut and carried on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fake_coordinator import a_task
from hypothesis import given, settings
from hypothesis import strategies as st
from partial_scenes import assert_logprobs_are_the_versions_own, carry_on, handed_on, new_stepper

from offbeat.engines.embedded.weights import stage
from offbeat.engines.protocol import Finish, Generation
from offbeat.ledger.records import Batch, BatchGroup, Member
from offbeat.trainer.packing import samples_of
from offbeat.trajectory import Segment, SegmentError, Trajectory
from offbeat.worker.worker import append, begin

BUDGET = 24


def good_segment(trajectory: Trajectory, count: int = 2) -> Segment:
    version = int(trajectory.versions[-1]) if trajectory.num_tokens else 0
    tokens, logprobs = np.arange(count), np.full(count, -1.0)
    return Segment(trajectory.num_tokens, tokens, logprobs=logprobs, version=version, kv_version=version)


SPOILT = {
    "a log-prob too few": lambda good: replace(good, logprobs=good.logprobs[:-1]),
    "no log-probs": lambda good: replace(good, logprobs=None),
    "a gap": lambda good: replace(good, start=good.start + 1),
    "an overlap": lambda good: replace(good, start=good.start - 1),
    "no version": lambda good: replace(good, version=None),
    "an older version": lambda good: replace(good, version=good.version - 1, kv_version=good.version - 1),
    "keys and values of the future": lambda good: replace(good, kv_version=good.version + 1),
    "an array too short": lambda good: replace(good, arrays={"entropy": np.zeros(1)}),
    "a log-prob that is no number": lambda good: replace(good, logprobs=np.full(2, np.nan)),
    "no token": lambda good: replace(good, tokens=good.tokens[:0], logprobs=good.logprobs[:0]),
    "more than the budget": lambda good: replace(good, tokens=np.ones(99), logprobs=np.full(99, -1.0)),
}


def assert_aligned(trajectory: Trajectory) -> None:
    count = trajectory.num_tokens
    arrays = trajectory.tokens, trajectory.logprobs, trajectory.sampled_mask, trajectory.versions
    assert [len(array) for array in arrays] == [count] * 4
    ends = [0, *(segment.end for segment in trajectory.segments)]
    assert [segment.start for segment in trajectory.segments] == ends[:-1]
    assert ends[-1] == count
    assert sum(len(s.logprobs) for s in trajectory.segments) == count
    member = Member(0, 0, trajectory, (), 0.0, np.where(trajectory.sampled_mask, 0, -1))
    (sample,) = samples_of(Batch(0, 0, (BatchGroup(0, 0, "sums", (member,)),)))  # which looks at its lengths itself
    assert sample.num_tokens == count


def assert_refused(trajectory: Trajectory, name: str) -> None:
    before, tokens = trajectory.encode(), trajectory.tokens
    bad = SPOILT[name](good_segment(trajectory))
    for finish in (Finish.ABORT, Finish.LENGTH):
        with pytest.raises(SegmentError):
            append(trajectory, Generation("r", (bad,), finish))
    assert trajectory.encode() == before
    assert trajectory.tokens is tokens


@pytest.fixture(scope="module")
def stepper():
    return new_stepper()


events = st.one_of(st.integers(0, 6), st.sampled_from(["load", *SPOILT]))


@pytest.mark.full
@settings(max_examples=60)
@given(events=st.lists(events, max_size=12), seed=st.integers(0, 1000))
def test_whatever_is_appended_cut_and_carried_on_all_arrays_stay_aligned(stepper, versions, events, seed):
    """A number is a worker that takes so many steps and hands back; the others happen to what was handed back."""
    task, handed_out = replace(a_task(0, BUDGET), seed=seed), []
    stepper.load(0, stage(stepper.model, versions[0]))
    for event in events:
        running = begin(task)
        if event == "load":
            number = min(stepper.version + 1, 3)
            stepper.load(number, stage(stepper.model, versions[number]))
        elif event in SPOILT:
            if 0 < running.trajectory.num_tokens <= BUDGET - 2:  # what comes first may be of any version
                assert_refused(running.trajectory, event)
        elif carry_on(stepper, running, event):
            assert_aligned(running.trajectory)
            break
        assert_aligned(running.trajectory)
        task = handed_on(task, running)
        handed_out.append((task, task.prefix.encode() if task.prefix else None))
    for given_out, bytes_then in handed_out:
        assert (given_out.prefix.encode() if given_out.prefix else None) == bytes_then, (
            "another's beginning was changed"
        )
    if task.prefix is not None:
        assert_logprobs_are_the_versions_own(task.prefix)
