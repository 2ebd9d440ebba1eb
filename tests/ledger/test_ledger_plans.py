"""What every trajectory of a run pays for reads no more than it needs: no table as a whole, nothing to be sorted."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_run import answer, claim, handed, new_groups, quick_folder, released_groups, version

from offbeat.ledger.database import Database
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import LedgerTerms, Scored
from offbeat.trajectory import Reward


def plans_of(ledger: Ledger, call: Callable[[], object]) -> dict[str, list[str]]:
    """How SQLite goes about each statement of a call."""
    statements: list[str] = []
    connection = ledger.connection
    connection.set_trace_callback(statements.append)
    call()
    connection.set_trace_callback(None)
    asked = [text for text in statements if re.match(r"\s*(SELECT|UPDATE|INSERT)", text)]
    assert asked
    return {text: [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {text}")] for text in asked}


@pytest.fixture
def busy(tmp_path: Path):
    with Ledger(tmp_path / "l.sqlite", LedgerTerms(max_staleness=2, groups_per_step=4)) as ledger:
        ledger.publish(version(0, 0))
        ledger.admit(new_groups(ledger, 30, size=2, require_version=None))
        yield ledger


def test_nothing_on_the_way_of_a_trajectory_scans_a_table_or_sorts_what_waits(busy: Ledger):
    tasks = busy.lease("w", 8, 0, total_slots=100)
    plans = plans_of(busy, lambda: busy.lease("w", 2, 0, total_slots=100))
    plans |= plans_of(busy, lambda: busy.submit([handed(answer(task, [0]), "w") for task in tasks]))
    waiting = busy.unscored(9)
    plans |= plans_of(busy, lambda: busy.unscored(9, after=waiting[0].seq))
    plans |= plans_of(busy, lambda: busy.score([Scored(u.task, [Reward(1.0)]) for u in waiting]))
    plans |= plans_of(busy, lambda: claim(busy, 0, 2, 2, in_order=False))
    plans |= plans_of(busy, busy.admission_state)
    for statement, plan in plans.items():
        for line in plan:
            assert "TEMP B-TREE" not in line, statement
            assert not re.fullmatch(r"SCAN (groups|tasks|trajectories|segments|rewards|partials|[gtjsrp])", line), (
                statement
            )


def test_what_a_batch_knows_of_siblings_is_told_from_indices(tmp_path: Path):
    with Ledger(tmp_path / "l.sqlite", LedgerTerms(max_staleness=2)) as ledger:
        ledger.publish(version(0, 0))
        ledger.admit(released_groups(ledger, 30, 5, require_version=None))
        ledger.submit([handed(answer(task, [0]), "w", task.fence) for task in ledger.lease("w", 30, 0)])
        ledger.score([Scored(waiting.task, [Reward(1.0)]) for waiting in ledger.unscored(30)])
        plans = plans_of(ledger, lambda: claim(ledger, 0, 7, 2, in_order=False))
    lines = [line for plan in plans.values() for line in plan]
    assert "SEARCH s USING INDEX groups_by_ordinal (purpose=? AND ordinal=?)" in lines
    assert not [
        line for line in lines if "TEMP B-TREE" in line or re.fullmatch(r"SCAN (groups|tasks|rewards|[gtrso])", line)
    ]


@pytest.mark.parametrize("is_bound", [True, False])
def test_whether_a_group_has_a_signal_is_told_from_indices(tmp_path: Path, is_bound: bool):
    with Ledger(tmp_path / "l.sqlite", LedgerTerms(max_no_signal=40)) as ledger:
        ledger.publish(version(0, 0))
        ledger.admit(new_groups(ledger, 30, size=2, require_version=0 if is_bound else None))
        ledger.submit([handed(answer(task, [0]), "w", task.fence) for task in ledger.lease("w", 60, 0)])
        results = [Scored(waiting.task, [Reward(1.0)]) for waiting in ledger.unscored(60)]
        plans = plans_of(ledger, lambda: ledger.score(results))
    lines = [line for plan in plans.values() for line in plan]
    assert "SEARCH groups USING COVERING INDEX groups_without_signal (dropped_at_step=?)" in lines
    of_step = "SEARCH groups USING COVERING INDEX groups_of_step (purpose=? AND require_step=? AND ordinal<?)"
    assert (of_step in lines) == is_bound
    assert not [
        line for line in lines if "TEMP B-TREE" in line or re.fullmatch(r"SCAN (groups|tasks|rewards|[gtr])", line)
    ]


def test_open_groups_are_read_in_order_from_their_index_alone(busy: Ledger):
    plans = plans_of(busy, lambda: busy.lease("w", 60, 0))
    assert ["SCAN groups USING COVERING INDEX groups_open"] in plans.values()


@given(count=st.integers(0, 300))
@settings(max_examples=30, deadline=None)
def test_rows_inserted_many_at_a_time_are_all_there_in_their_order(count: int):
    with quick_folder() as folder:
        db = Database(folder / "l.sqlite")
        db.insert("sources", [(f"{i:03}", i) for i in range(count)])
        assert db.execute("SELECT name, drawn FROM sources ORDER BY name").fetchall() == [
            (f"{i:03}", i) for i in range(count)
        ]
        db.close()


def test_where_only_evaluation_is_handed_out_training_groups_are_not_even_looked_at(busy: Ledger):
    plans = plans_of(busy, lambda: busy.lease("w", 60, 0, only_eval=True))
    assert ["SEARCH groups USING COVERING INDEX groups_open (<expr><?)"] in plans.values()
    assert not [line for plan in plans.values() for line in plan if "TEMP B-TREE" in line or "SCAN groups" in line]
