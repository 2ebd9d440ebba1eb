"""Which samples are off: by the mean gap over their own fresh tokens, and by nothing else."""

import math

import numpy as np
import pytest

from offbeat.learn.audit import believable
from offbeat.learn.samples import Sample


def sample(gaps, staleness=None, mask=None) -> Sample:
    """A sample whose engine's log-probs are this far from the trainer's, which are all -1."""
    count = len(gaps)
    return Sample(
        group=0,
        prompt=np.array([1]),
        response=np.arange(count),
        logprobs=np.array([-1 - gap for gap in gaps], np.float32),
        mask=np.ones(count, bool) if mask is None else np.array(mask, bool),
        reward=0.0,
        staleness=np.zeros(count, np.int64) if staleness is None else np.array(staleness),
    )


def off(*samples: Sample, max_gap: float = 1.0) -> list[bool]:
    start = np.full(sum(s.num_tokens for s in samples), -1.0, np.float32)
    wrong, believed = believable(samples, start, max_gap)
    owner = np.repeat(np.arange(len(samples)), [s.num_tokens for s in samples])
    assert believed.tolist() == [not wrong[i] for i in owner]
    return wrong.tolist()


@pytest.mark.parametrize(
    "judged, is_off",
    [
        (sample([3.0, 0.5]), True),
        (sample([-3.0, -0.5]), True),  # likelier or less likely
        (sample([1.5, 0.25]), False),  # the mean counts
        (sample([1.0, 1.0]), False),  # the limit itself is allowed
        (sample([9.0, 0.5], staleness=[1, 0]), False),  # older weights say other things
        (sample([9.0, 9.0], staleness=[1, 2]), False),
        (sample([9.0, 0.5], mask=[False, True]), False),
        (sample([0.0, 9.0, 9.0], staleness=[2, 0, 0]), True),  # an old token does not water it down
        (sample([]), False),
    ],
)
def test_a_sample_is_off_by_the_mean_over_its_fresh_trained_tokens(judged, is_off):
    assert off(judged) == [is_off]
    assert off(sample([0.1]), judged, sample([5.0])) == [False, is_off, True]


def test_nan_is_nobodys_lie():
    """It is for the step to refuse: a comparison with it would acquit or condemn by accident."""
    wrong, believed = believable([sample([0.0, 0.0])], np.array([-1.0, math.nan], np.float32), 1.0)
    assert not wrong.any()
    assert believed.all()


def test_a_token_that_the_trainer_holds_impossible_condemns_its_sample():
    """A worker can send it, and must not be able to stop a run with it."""
    wrong, _ = believable([sample([0.0, 0.0])], np.array([-1.0, -math.inf], np.float32), 1.0)
    assert wrong.all()
