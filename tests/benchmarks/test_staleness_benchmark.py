"""Trials of the staleness benchmark: data is as old as the plan says, and really of older weights."""

from __future__ import annotations

import pytest

from benchmarks.staleness import trial
from benchmarks.staleness.trial import Plan, Size, run_trial

SIZE = Size(steps=4, judge_every=4, prompts=10, seeds=1, lr=1e-3, groups=2, group_size=4)


@pytest.mark.parametrize("held_back, ages", [(0, [0, 0, 0, 0]), (2, [0, 1, 2, 2])])
def test_every_batch_was_sampled_so_many_steps_before_it_is_trained(monkeypatch, held_back, ages):
    told, worth = [], []

    def watched(policy, samples, settings, lr):
        told.append({int(age) for sample in samples for age in sample.staleness})
        figures = train_step(policy, samples, settings, lr)
        worth.append(figures.ess)
        return figures

    train_step = trial.train_step
    monkeypatch.setattr(trial, "train_step", watched)
    run_trial(Plan(held_back, "off", seed=1), SIZE)
    assert told == [{age} for age in ages]
    assert [ess < 0.9999 for ess in worth] == [age > 0 for age in ages], "as old as it is said to be"
