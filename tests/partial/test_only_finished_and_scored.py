"""Bug class 12: an answer that was cut, or has no reward, reaches the trainer."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_run import answer, new_groups, quick_folder, send, version

from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import LedgerTerms, Outcome, Scored
from offbeat.trajectory import End, Reward, Task

NUM_GROUPS = 3


def rounds(folder: Path, **options) -> Ledger:
    terms = LedgerTerms(max_staleness=2, groups_per_step=NUM_GROUPS, in_rounds=True, **options)
    ledger = Ledger(folder / "l.sqlite", terms)
    ledger.publish(version(0, 0))
    ledger.admit(new_groups(ledger, NUM_GROUPS, size=2, require_version=None))
    return ledger


def claim(ledger: Ledger, count: int = NUM_GROUPS):
    ledger.terms = replace(ledger.terms, groups_per_step=count)
    return ledger.claim(0, in_order=False)


def test_a_beginning_is_not_delivered_nor_scored_and_nor_is_an_answer_without_a_reward(tmp_path):
    with rounds(tmp_path, min_group=2) as ledger:
        cut, *others = ledger.lease("w", 100, 0)
        for task in others:
            send(ledger, answer(task, [0]), fence=task.fence)
        unscored = ledger.unscored(100)
        ledger.score([Scored(one.task, [Reward(1.0)]) for one in unscored[1:]])
        assert send(ledger, answer(cut, [0], end=None), fence=cut.fence) is Outcome.PARTIAL
        assert claim(ledger) is None
        assert ledger.score([Scored(cut.id, [Reward(1.0)])]).num_tasks == 0, "a beginning was given a reward"
        assert cut.id not in {one.task for one in ledger.unscored(100)}
        (cut,) = ledger.lease("w", 100, 0)
        assert send(ledger, answer(cut, [0]), fence=cut.fence) is Outcome.STORED
        assert claim(ledger) is None, "two answers have no reward"
        ledger.score([Scored(cut.id, [Reward(0.0)])])
        assert claim(ledger) is None, "an answer has no reward"
        ledger.score([Scored(unscored[0].task, [Reward(0.5)])])
        batch = claim(ledger)
        assert batch is not None
        assert [member.reward for group in batch.groups for member in group.members].count(0.5) == 1
        assert ledger.verify().violations == ()


moves = st.tuples(st.sampled_from(["cut", "end", "score", "fail reward", "fail", "give back"]), st.integers(0, 5))


@settings(max_examples=60)
@given(moves=st.lists(moves, max_size=40))
def test_whatever_was_cut_scored_and_failed_a_batch_has_only_finished_answers_with_rewards(moves):
    with quick_folder() as folder, rounds(folder, min_group=1, max_attempts=100) as ledger:
        held: dict[int, Task] = {}
        rewarded: dict[int, float] = {}
        for move, number in moves:
            held |= {task.id: task for task in ledger.lease("w", 100, 0)}
            tasks = sorted(held)
            waiting = [one.task for one in ledger.unscored(100)]
            if move in ("score", "fail reward"):
                if waiting:
                    task = waiting[number % len(waiting)]
                    rewarded |= {task: float(task)} if move == "score" else {}
                    result = {"rewards": [Reward(float(task))]} if move == "score" else {"error": "it raised"}
                    assert ledger.score([Scored(task, **result)]).num_tasks == 1
            elif tasks:
                task = held.pop(tasks[number % len(tasks)])
                if move == "fail":
                    ledger.fail("w", task.id, task.fence, "engine")
                elif move == "give back":
                    ledger.release("w")
                    held.clear()
                elif task.prefix is None or task.prefix.num_tokens < task.sampling.max_new_tokens - 1:
                    send(ledger, answer(task, [0], end=None if move == "cut" else End.STOP), fence=task.fence)
            batch = claim(ledger, 1)
            if batch is not None:
                assert ledger.verify().violations == ()
                members = [member for group in batch.groups for member in group.members]
                assert members
                for member in members:
                    assert member.trajectory.end is not None
                    assert math.isfinite(member.reward)
                    assert member.reward == rewarded[member.task]
                return
