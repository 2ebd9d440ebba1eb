"""Who is set aside for failing what it is given, and for how long."""

from __future__ import annotations

from offbeat.rules.quarantine import ASIDE_S, FAILURE_WINDOW, MAX_FAILED, Fitness


def failing(fitness: Fitness, worker: str, tasks) -> list[str | None]:
    return [fitness.failed(worker, task, "CUDA error") for task in tasks]


def test_a_worker_that_fails_one_task_after_the_other_is_set_aside_with_the_reason():
    fitness = Fitness(lambda: 0.0)
    *before, last = failing(fitness, "broken", range(MAX_FAILED + 1))
    assert before == [None] * MAX_FAILED
    assert last == "8 of the latest 8 tasks of broken failed, the last one with: CUDA error"
    assert fitness.aside() == {"broken": last}
    assert (fitness.aside_s("broken"), fitness.aside_s("other")) == (ASIDE_S, 0.0)


def test_others_failures_are_no_workers_own():
    fitness = Fitness(lambda: 0.0)
    for worker in range(100):
        assert failing(fitness, f"w{worker}", range(MAX_FAILED)) == [None] * MAX_FAILED


def test_a_task_that_nobody_can_do_sets_nobody_aside():
    assert failing(Fitness(lambda: 0.0), "w", [7] * 1000) == [None] * 1000


def test_a_worker_that_mostly_succeeds_goes_on():
    fitness = Fitness(lambda: 0.0)
    for task in range(1000):
        assert fitness.failed("w", task, "now and then") is None
        for _ in range(2):
            fitness.succeeded("w")


def test_a_worker_that_fails_every_other_task_is_set_aside():
    fitness = Fitness(lambda: 0.0)
    for task in range(FAILURE_WINDOW):
        fitness.succeeded("w")
        if fitness.failed("w", task, "often"):
            return
    raise AssertionError("half of its tasks failed, and it goes on")


def test_after_a_while_it_may_try_again_with_a_clean_record():
    now = [0.0]
    fitness = Fitness(lambda: now[0])
    failing(fitness, "w", range(MAX_FAILED + 1))
    now[0] = ASIDE_S
    assert fitness.aside_s("w") == 0
    assert fitness.aside() == {}
    assert failing(fitness, "w", range(MAX_FAILED)) == [None] * MAX_FAILED
    assert fitness.failed("w", 99, "again") is not None


def test_who_leaves_or_begins_anew_is_forgotten():
    fitness = Fitness(lambda: 0.0)
    failing(fitness, "w", range(MAX_FAILED + 1))
    fitness.forget("w")
    assert (fitness.aside_s("w"), fitness.has_failed("w")) == (0.0, False)


def test_a_worker_may_be_set_aside_at_once_for_another_reason():
    now = [0.0]
    fitness = Fitness(lambda: now[0])
    failing(fitness, "w", range(MAX_FAILED))
    fitness.set_aside("w", "it hoards")
    assert (fitness.aside_s("w"), fitness.aside()) == (ASIDE_S, {"w": "it hoards"})
    now[0] = ASIDE_S
    assert fitness.aside() == {}
    assert fitness.failed("w", 99, "its first since") is None, "it begins with a clean record"
