"""How many groups are in flight: a number, as far ahead as the trainer needs, or what rounds show to be fastest."""

from __future__ import annotations

from offbeat.rules.over_provision import FIRST_PATIENCE, NUM_TRIED, Decision, InRounds, Overlapped, Provisioning


def test_a_number_stays_as_it_was_configured():
    made = Provisioning(2.5)
    for _ in range(5):
        made.trained(still_s=9.0, step_s=10.0)
        made.began(8)
        assert made.factor() == made.figures()["over_provision"] == 2.5


def test_where_work_overlaps_more_is_in_flight_from_the_next_version_on_when_the_trainer_stood_still():
    made = Overlapped(max_staleness=3)
    assert made.factor() == 2.0
    made.trained(still_s=5.0, step_s=10.0)
    assert made.factor() == 2.0
    made.began(8)
    assert made.factor() == 3.0


class Run:
    """Rounds of 10 seconds, as a coordinator reports them; `num_tokens` by factor says how long their answers are."""

    def __init__(self, max_staleness: int = 2):
        self.now_s, self.decisions = 0.0, list[Decision]()
        self.made = InRounds(max_staleness, self.decisions.append, lambda: self.now_s)
        self.made.began(8)

    def play(self, num_tokens: int, num_slots: int = 8, *, is_partial: bool = False, with_evaluation: bool = False):
        self.made.handed_out(requires_version=with_evaluation)
        if not is_partial:
            self.made.ended(num_tokens)
        self.now_s += 10.0
        self.made.began(num_slots)


def test_in_rounds_the_speed_of_whole_answers_is_measured():
    run = Run()
    assert run.made.figures() == {"over_provision": 3.0}
    run.play(200)
    assert run.made.figures() == {"over_provision": 3.0, "generated_tokens_per_second": 20.0}
    run.play(500, is_partial=True)
    assert run.made.figures()["generated_tokens_per_second"] == 0.0, "its tokens count when it has ended"


def test_in_rounds_a_factor_of_one_is_tried_and_kept_where_it_is_as_fast():
    run = Run()
    for _ in range(100):
        run.play(200)
    assert run.made.factor() == run.decisions[-1].factor == 1.0
    assert run.decisions[-1].reason == "20 tokens/s with factor 1, 20 with 3"


def test_a_round_with_an_evaluation_is_not_measured():
    run, num_rounds = Run(), 3 + FIRST_PATIENCE
    for _ in range(num_rounds - 1):
        run.play(200)
    run.play(10**5, with_evaluation=True)
    assert run.made.factor() == 3.0
    run.play(200)
    assert run.made.factor() == 1.0


def test_rounds_with_more_engines_are_not_compared_with_earlier_ones():
    run = Run()
    while run.made.factor() == 3.0:
        run.play(200)
    for _ in range(3 + NUM_TRIED):
        run.play(2000, num_slots=80)
    assert run.made.factor() == 1.0
    assert len(run.decisions) == 1, "the trial is not decided, since the engines are others"
