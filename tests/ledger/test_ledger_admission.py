from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from ledger_run import answer, eval_groups, full_step, handed, new_groups, version

from offbeat.ledger.errors import Refused
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import Cursor, DrawCursor, derive_seed
from offbeat.rules.groups import AdmissionState


def test_the_cursor_counts_what_was_drawn_from_each_source(ledger: Ledger):
    assert ledger.cursor() == Cursor(0, {})
    ledger.admit(new_groups(ledger, 3, source="sums"))
    ledger.admit(new_groups(ledger, 2, source="words"))
    assert ledger.cursor() == Cursor(5, {"sums": 3, "words": 2}, DrawCursor("words", 1, 0))


def test_a_source_may_skip_problems_but_never_repeat_one(ledger: Ledger):
    (group,) = new_groups(ledger, 1)
    ledger.admit([replace(group, source_ordinal=4)])
    assert ledger.cursor().drawn == {"sums": 5}
    with pytest.raises(Refused, match=r"prompt 4 of source 'sums' was drawn already; the next .* is 5"):
        ledger.admit([replace(group, ordinal=1, source_ordinal=4)])


def test_ordinals_are_drawn_without_a_gap_and_only_once(ledger: Ledger):
    groups = new_groups(ledger, 2)
    with pytest.raises(Refused, match="the next ordinal is 0"):
        ledger.admit(groups[1:])
    ledger.admit(groups)
    with pytest.raises(Refused, match="the next ordinal is 2"):
        ledger.admit(groups)


def test_a_refused_call_changes_nothing(ledger: Ledger):
    good, bad = new_groups(ledger, 2)
    with pytest.raises(Refused):
        ledger.admit([good, replace(bad, ordinal=7)])
    assert ledger.cursor().next_ordinal == 0
    assert ledger.lease("w", 10, 0) == []


def test_a_task_gets_prompt_sampling_and_a_seed_of_its_own(ledger: Ledger):
    (group,) = new_groups(ledger, 1, size=3)
    (group_id,) = ledger.admit([group])
    tasks = ledger.lease("w", 10, 0)
    assert [task.group for task in tasks] == [group_id] * 3
    assert [task.seed for task in tasks] == [derive_seed(group.seed, member) for member in range(3)]
    assert len({task.seed for task in tasks}) == 3
    assert all(0 <= task.seed < 2**63 for task in tasks)
    assert all(np.array_equal(task.prompt, group.prompt_tokens) for task in tasks)
    assert all(task.sampling == group.sampling and task.require_version == 0 for task in tasks)


def test_seeds_are_the_same_on_every_machine():
    assert derive_seed(1000, 0) == 8432364623925564982
    assert derive_seed(1000, "retry", 1) != derive_seed(1000, 1)


def test_groups_may_not_require_a_version_that_is_not_there(ledger: Ledger):
    with pytest.raises(Refused, match="version 9, which was never published"):
        ledger.admit(new_groups(ledger, 1, require_version=9))


def test_an_evaluation_needs_a_version_and_admits_each_prompt_once(ledger: Ledger):
    with pytest.raises(Refused, match="must name the version to evaluate"):
        ledger.admit(eval_groups(1, require_version=None))
    ledger.admit(eval_groups(2))
    with pytest.raises(Refused, match="group 0 of step 0 was admitted already"):
        ledger.admit(eval_groups(1))
    assert ledger.cursor() == Cursor(0, {})


def test_a_problem_comes_back_as_it_was(ledger: Ledger):
    (group,) = new_groups(ledger, 1, size=1)
    problem = {"prompt": [{"role": "user", "content": "Wie groß? 数"}], "answer": None, "info": {"n": 2**70, "x": 0.1}}
    ledger.admit([replace(group, problem=problem)])
    (task,) = ledger.lease("w", 1, 0)
    ledger.submit([handed(answer(task, [0]))])
    assert ledger.unscored(1)[0].problem == problem


def test_a_problem_that_cannot_be_stored_is_refused_by_name(ledger: Ledger):
    (group,) = new_groups(ledger, 1)
    with pytest.raises(Refused, match="the problem of prompt 0 of source 'sums' cannot be stored as JSON"):
        ledger.admit([replace(group, problem={"info": object()})])


def test_standing_counts_what_the_next_step_may_train(ledger: Ledger):
    assert ledger.admission_state() == AdmissionState(step=0, num_alive=0)
    ledger.admit(new_groups(ledger, 2))
    ledger.admit(eval_groups(3))
    assert ledger.admission_state() == AdmissionState(step=0, num_alive=2)


def test_standing_leaves_out_groups_that_wait_for_a_later_step(ledger: Ledger):
    for step in range(3):
        full_step(ledger, step)
    ledger.reconcile(0, None)
    ledger.publish(version(ledger.next_version_number(), 0, 0))
    assert ledger.admission_state() == AdmissionState(step=0, num_alive=2)
    ledger.commit(0, version(ledger.next_version_number(), 1, 4))
    assert ledger.admission_state() == AdmissionState(step=1, num_alive=2)
