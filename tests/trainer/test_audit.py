"""Which samples are off, by the mean gap over the tokens compared; and what is found of each segment."""

import math

import numpy as np
import pytest
import torch

from offbeat.trainer.audit import SegmentFinding, audit, choose
from offbeat.trainer.packing import Sample


def sample(gaps, staleness=None, mask=None, **more) -> Sample:
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
        **{name: np.array(values) for name, values in more.items()},
    )


def found(*samples: Sample, max_gap: float = 1.0, witnessed=()):
    now = np.full(sum(s.num_tokens for s in samples), -1.0, np.float32)
    return audit(samples, torch.from_numpy(now), max_gap, witnessed)


def off(*samples: Sample) -> list[bool]:
    return found(*samples).is_off.tolist()


@pytest.mark.parametrize(
    "judged, is_off",
    [
        (sample([3.0, 0.5]), True),
        (sample([-3.0, -0.5]), True),  # likelier or less likely
        (sample([1.5, 0.25]), False),  # the mean counts
        (sample([2.0, 0.0]), False),  # the limit itself is allowed
        (sample([9.0, 0.5], staleness=[1, 0]), False),  # older weights say other things
        (sample([9.0, 9.0], staleness=[1, 2]), False),
        (sample([9.0, 0.5], mask=[False, True]), False),
        (sample([0.0, 9.0, 9.0], staleness=[2, 0, 0]), True),  # an old token does not water it down
        (sample([9.0, 9.0], old_kv=[True, True]), False),  # as older keys and values do
        (sample([0.0, 9.0], old_kv=[True, False]), True),
        (sample([]), False),
    ],
)
def test_a_sample_is_off_by_the_mean_over_its_fresh_trained_tokens(judged, is_off):
    assert off(judged) == [is_off]
    assert off(sample([0.1]), judged, sample([5.0])) == [False, is_off, True]


def test_nan_is_nobodys_lie():
    """It is for the step to refuse: a comparison with it would acquit or condemn by accident."""
    findings = audit([sample([0.0, 0.0])], torch.tensor([-1.0, math.nan]), 1.0)
    assert not findings.is_off.any()
    assert findings.segments == ((0, 0, 1, 0),)


def test_a_token_that_the_trainer_holds_impossible_condemns_its_sample():
    """A worker can send it, and must not be able to stop a run with it."""
    findings = audit([sample([0.0, 0.0])], torch.tensor([-1.0, -math.inf]), 1.0)
    assert findings.is_off.all()
    assert findings.segments == ((0, 0, 2, 1),)


def test_each_segment_counts_the_tokens_that_were_compared_and_those_that_are_off():
    """Neither older tokens nor those with older keys and values count as looked at."""
    first = sample(
        [0.0, 0.6, 9.0, 0.4, 9.0], staleness=[0, 0, 1, 0, 0], segment=[0, 0, 2, 3, 4], old_kv=[0, 0, 0, 0, 1]
    )
    first = Sample(**{**vars(first), "old_kv": first.old_kv.astype(bool)})
    second = sample([-0.6, -0.5], segment=[0, 0])
    assert found(first, second).segments == (
        SegmentFinding(0, 0, 2, 1),
        SegmentFinding(0, 3, 1, 0),
        SegmentFinding(1, 0, 2, 1),
    )


def test_older_tokens_that_were_looked_at_are_compared_with_their_own_weights():
    """Weights of their own version say -3 of all but the last, which was not looked at."""
    own = np.array([-3.0, -3.0, math.nan], np.float32)
    honest = sample([2.0, 2.0, 9.0], staleness=[1, 1, 1])
    assert found(honest, witnessed=[own]).segments == ((0, 0, 2, 0),)
    forged = sample([0.0, 0.0, 0.0], staleness=[1, 1, 1])
    findings = found(sample([0.0]), forged, witnessed=[None, own])
    assert findings.is_off.tolist() == [False, True]
    assert findings.segments == ((0, 0, 1, 0), (1, 0, 2, 2))


def stale_batch(seed: int, versions: int, num_samples: int = 200) -> list[Sample]:
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(num_samples):
        age = int(rng.integers(1, versions + 1))
        samples.append(sample(rng.normal(size=10), staleness=[age] * 10, version=[100 - age] * 10))
    return samples


@pytest.mark.parametrize("versions", [1, 4])
def test_a_share_of_the_older_tokens_is_looked_at_whatever_their_versions_are(versions: int):
    at_hand = dict.fromkeys(range(100))
    seen, num_loads = np.zeros(200), 0
    for seed in range(20):
        samples = stale_batch(seed, versions)
        chosen = list(choose(samples, 0.3, at_hand))
        num_loads += len(chosen)
        for number, indices in chosen:
            assert all((samples[i].version == number).all() for i in indices)
            seen[indices] += 1
    assert seen.sum() / (200 * 20) == pytest.approx(0.3, abs=0.015)
    assert num_loads <= 2 * 20, "few versions, because each has to be loaded"
    assert seen.max() < 16, "nobody is looked at for his place in the batch"


def test_the_same_batch_is_looked_at_in_the_same_way_and_another_in_another():
    one, same, other = (list(choose(stale_batch(seed, 2), 0.3, {98: 0, 99: 0})) for seed in (1, 1, 2))
    assert one == same != other


def test_nothing_is_looked_at_that_is_not_at_hand_fresh_or_of_older_keys_and_values():
    assert list(choose(stale_batch(0, 3), 0.3, {})) == []
    assert {number for number, _ in choose(stale_batch(0, 3), 0.9, {98: 0})} == {98}
    fresh = sample([0.0], version=[100])
    kept = sample([0.0], staleness=[1], version=[99], old_kv=[True])
    assert list(choose([fresh, kept, sample([0.0], staleness=[1])], 1.0, {99: 0, 100: 0})) == []
    assert list(choose(stale_batch(0, 1), 0.0, {99: 0})) == []


def test_all_older_tokens_of_whoever_is_not_proven_are_looked_at_and_a_share_of_the_others():
    samples = stale_batch(0, 3)
    new = [Sample(**{**vars(one), "is_proven": i % 4 > 0}) for i, one in enumerate(samples)]
    chosen = {i for _, indices in choose(new, 0.3, dict.fromkeys(range(100))) for i in indices}
    assert chosen >= set(range(0, 200, 4))
    assert len(chosen) - 50 == pytest.approx(0.3 * 200, abs=3), "of the batch, beside the newcomers"


def test_a_forged_beginning_condemns_a_sample_whose_mean_it_hardly_moves():
    """Four tokens off by a little, in 100 that are not."""
    begun = sample([0.8] * 4 + [0.0] * 100, segment=[0] * 4 + [4] * 100)
    assert off(begun) == [True]
    assert off(sample([0.8] * 4 + [0.0] * 100)) == [False], "4 of 104 are no more than another engine may be off"
