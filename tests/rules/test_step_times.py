from offbeat.rules.step_times import StepTimes


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_batch_that_was_there_before_the_trainer_wanted_it_cost_no_waiting():
    clock = Clock()
    times = StepTimes(clock)
    times.claimed(0)
    clock.now_s = 1.0
    times.claimed(1)  # ahead, while step 0 is trained
    clock.now_s = 4.0
    assert times.committed(0) is None  # nobody knows when it began
    clock.now_s = 6.0
    assert times.committed(1) == (0.0, 2.0)


def test_a_batch_that_came_late_is_waited_for():
    clock = Clock()
    times = StepTimes(clock)
    times.committed(0)
    clock.now_s = 3.0
    times.claimed(1)
    times.claimed(1)  # asked for again
    clock.now_s = 4.0
    assert times.committed(1) == (3.0, 4.0)


def test_the_split_tells_generation_from_rewards():
    clock = Clock()
    times = StepTimes(clock)
    assert times.split() == {}
    times.leased()
    clock.now_s = 2.0
    times.submitted()
    clock.now_s = 2.5
    times.claimed(0)
    assert times.split() == {"time_generate_s": 2.0, "time_reward_s": 0.5}


def test_answers_to_tasks_handed_out_before_the_last_claim_were_generated_since_then():
    """Otherwise the last answer came before the first task, and generation took less than no time."""
    clock = Clock()
    times = StepTimes(clock)
    times.leased()
    clock.now_s = 1.0
    times.claimed(0)
    clock.now_s = 3.0
    times.submitted()
    times.leased()
    clock.now_s = 4.0
    times.claimed(1)
    assert times.split() == {"time_generate_s": 2.0, "time_reward_s": 1.0}
