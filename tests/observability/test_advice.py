"""What is said of a run that does not learn, and that a run that does is left in peace."""

import json
from pathlib import Path

import pytest

from offbeat.observability.advice import Adviser, Keys, few_held_out, few_rows, right_answer_earns, wrong_answer_fails

KEYS = Keys(max_new_tokens=64, group_size=8, max_staleness=2, lr=0.5)
LEARNING = json.loads(
    '{"reward": 0.4, "reward_min": 0.0, "reward_max": 1.0, "samples": 8, "tokens": 80, "num_trained_tokens": 80,'
    ' "signal_share": 0.8, "cut_share": 0.1, "entropy": 0.5, "kept_share": 1.0, "dropped_no_signal": 0}'
)
NOTHING = {"reward": 0.0, "reward_max": 0.0, "signal_share": 0.0}
REAL_RUN = Path(__file__).parents[2] / "benchmarks" / "results" / "smollm2-h200" / "metrics.jsonl"


def adviser(said=()) -> Adviser:
    return Adviser(KEYS, "runs/x", said)


def told(*rows: dict, by: Adviser | None = None) -> list[tuple[int, str]]:
    """The steps at which something was said, and what about."""
    by = by or adviser()
    return [(n, advice.about) for n, row in enumerate(rows, 1) for advice in by.step({**LEARNING, **row})]


def learning(num_steps: int, **figures) -> list[dict]:
    """Steps of a run whose reward rises to nearly 1."""
    return [{"reward": min(0.4 + 0.03 * n, 0.98), **figures} for n in range(num_steps)]


def test_a_run_that_learns_and_solves_its_task_gets_no_advice():
    solved = [{"reward": 0.99, "signal_share": 0.0, "entropy": 0.001}] * 50
    assert told(*learning(20), *solved) == []


def test_a_run_that_learnt_for_real_gets_no_advice():
    """Most of its answers were cut for a while, and its entropy fell to a twentieth."""
    watching = adviser()
    steps = [row for line in REAL_RUN.read_text().splitlines() if "reward" in (row := json.loads(line))]
    assert len(steps) > 100
    assert [advice for row in steps for advice in watching.step(row)] == []


def test_a_reward_that_is_always_0_is_told_after_three_steps_and_once():
    assert told(*[NOTHING] * 40) == [(3, "constant reward")]


def test_a_reward_that_is_always_the_same_is_told_with_its_value():
    watching, same = adviser(), {"reward": 0.5, "reward_min": 0.5, "reward_max": 0.5, "signal_share": 0.0}
    told(same, same, by=watching)
    (advice,) = watching.step({**LEARNING, **same})
    assert "all 24 answers so far earned 0.5" in advice.text
    assert "task.reward" in advice.text


def test_failures_are_told_beside_the_answers_that_were_scored():
    """Many failures are the likelier cause, as of a reward that gives None for a wrong answer."""
    same = {"reward": 1.0, "reward_min": 1.0, "reward_max": 1.0, "signal_share": 0.0}
    for failures, remedy in (
        (1, "or choose harder problems"),
        (20, "if task.reward gives None for a wrong answer, let it give"),
    ):
        watching, rows = adviser(), [{**LEARNING, **same, "failures": failures}] * 3
        (advice,) = [advice for row in rows for advice in watching.step(row)]
        assert advice.text.startswith(f"all 24 answers so far that were scored earned 1 and {3 * failures} failed, so ")
        assert remedy in advice.text
        assert ("--failed" in advice.text) == (failures == 20)


def test_a_reward_that_has_fallen_is_blamed_on_the_learning_rate_and_on_nothing_else():
    """Nothing else is advised, though most answers are now cut and none teaches anything."""
    watching, spoilt = adviser(), {"reward": 0.0, "signal_share": 0.0, "cut_share": 1.0, "samples": 64}
    rows = [{"reward": 0.84, "samples": 64}, *[spoilt] * 30]
    found = [advice for row in rows for advice in watching.step({**LEARNING, **row})]
    assert [advice.about for advice in found] == ["fallen reward"]
    assert found[0].text.startswith("the reward has fallen from 0.84 to 0: optimizer.lr = 0.5 is probably too large")
    assert "start a new run with optimizer.lr = 0.05" in found[0].text


def test_a_low_reward_of_few_answers_has_not_fallen():
    assert told({"reward": 0.5}, *[{"reward": 0.0}] * 3, *[{"reward": 0.4}, {"reward": 0.1}] * 20) == []


def test_a_few_wrong_answers_are_no_finding():
    assert told(*[{**NOTHING, "samples": 2}] * 4) == []


def test_one_right_answer_makes_the_reward_vary():
    assert told(NOTHING, {}, *[NOTHING] * 3) == []


def test_groups_without_a_difference_are_told_with_the_way_to_go():
    hard, easy = {"reward": 0.01, "signal_share": 0.02}, {"reward": 0.99, "signal_share": 0.02}
    for row, way in ((hard, "easier"), (easy, "harder")):
        watching = adviser()
        assert told(*[row] * 4, by=watching) == []
        (advice,) = watching.step({**LEARNING, **row})
        assert advice.about == "no signal"
        assert f"choose {way} problems" in advice.text
        assert "batch.group_size = 8" in advice.text


def test_groups_that_were_dropped_for_want_of_a_difference_count():
    assert told(*[{"signal_share": 1.0, "dropped_no_signal": 40}] * 5) == [(5, "no signal")]


def test_one_good_step_between_bad_ones_starts_the_count_anew():
    bad = {"signal_share": 0.0}
    assert told(*[bad] * 4, {}, *[bad] * 4) == []


def test_answers_that_are_cut_name_the_key_and_its_value():
    watching = adviser()
    assert told({"cut_share": 0.9}, {"cut_share": 1.0}, by=watching) == []
    (advice,) = watching.step({**LEARNING, "cut_share": 0.875})
    assert advice.text.startswith("88% of the answers are cut at rollout.max_new_tokens = 64")
    assert told(*[{"cut_share": 0.6}] * 10) == [(10, "cut")]


def test_an_entropy_that_collapses_before_the_task_is_solved_is_told():
    assert told(*[{}] * 3, *[{"entropy": 0.001}] * 10) == [(13, "entropy")]


@pytest.mark.parametrize(
    "figures, step, about, key",
    [
        ({"num_trained_tokens": 20}, 3, "masked", "schedule.max_staleness = 2"),
        ({"kept_share": 0.3}, 3, "rejected", "optimizer.lr"),
        ({"workers": 4, "idle_workers": 2}, 5, "idle workers", "batch.groups_per_step"),
    ],
)
def test_work_that_is_wasted_is_told_with_the_key_to_change(figures, step, about, key):
    watching = adviser()
    assert told(*[figures] * (step - 1), by=watching) == []
    (advice,) = watching.step({**LEARNING, **figures})
    assert advice.about == about
    assert key in advice.text


def test_a_resumed_run_is_told_nothing_again():
    assert told(*[NOTHING] * 5, by=adviser(said=["constant reward"])) == []


def test_a_right_answer_that_earns_nothing_is_told_before_the_first_step():
    advice = right_answer_earns("sums", "4" * 50, "sums.jsonl:1", 0.0, 0.0)
    assert advice is not None
    assert f"the right answer {'4' * 40 + '...'!r} of a problem of task sums (sums.jsonl:1) earned 0" in advice.text
    assert right_answer_earns("sums", "42", None, 0.1, None) is None
    assert right_answer_earns("sums", None, None, 0.0, 0.0) is None


def test_a_right_answer_may_earn_nothing_where_wrong_ones_earn_less():
    assert right_answer_earns("sums", "42", None, 0.0, -1.0) is None


def test_few_rows_and_few_held_out_problems_are_told_and_enough_are_not():
    rows, held_out = few_rows("sums", 1), few_held_out(1, 64)
    assert rows is not None
    assert rows.text.startswith("task sums has only 1 row to train on")
    assert held_out is not None
    assert held_out.text.startswith("only 1 problem held out")
    assert few_rows("sums", 20) is None
    assert few_held_out(10, 64) is None
    assert few_held_out(4, 4) is None, "as many as eval.prompts asks for"
    assert few_held_out(0, 64) is None, "none were to be held out"


def test_answers_left_out_of_an_evaluation_are_told():
    assert adviser().evaluation({"step": 10, "eval_samples": 60, "eval_failed": 0}) == []
    (advice,) = adviser().evaluation({"step": 10, "eval_samples": 23, "eval_failed": 37})
    assert advice.text.startswith("37 of 60 held-out answers of step 10 failed")


def test_a_run_without_workers_is_told_in_the_end():
    watching = adviser()
    assert watching.no_worker(60.0) == []
    assert [advice.about for advice in watching.no_worker(200.0)] == ["no worker"]
    assert watching.no_worker(400.0) == []


def test_rows_of_another_version_may_lack_figures():
    watching = adviser()
    for row in [{"step": 1}, {"reward": 0.1}, {"reward": None}, {"reward": float("nan"), "samples": 3}] * 9:
        assert [advice.about for advice in watching.step(row)] == []


def test_a_reward_that_fails_for_wrong_answers_is_named_before_it_stops_the_run():
    advice = wrong_answer_fails("sums", "the reward returned None")
    assert advice is not None
    assert advice.text.startswith("the reward of task sums failed for an empty response: the reward returned None; ")
    assert wrong_answer_fails("sums", "") is None
