"""Headroom where it costs nothing, and plans without shapes that bring nothing."""

from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plan_instances import drawn, golden

from offbeat.planner.problem import Offer
from offbeat.planner.solve.check import check
from offbeat.planner.solve.search import fastest, tidied
from offbeat.planner.solve.view import ColumnCounts, view_of


def with_headroom(problem, share):
    return replace(problem, demand=replace(problem.demand, headroom=share))


def test_headroom_fills_cards_that_are_paid_for_and_no_more():
    tight = fastest(golden(bound=20))
    assert tight.solution.replicas == {"on B": 10}  # 3 nodes of 4 cards
    roomy = fastest(with_headroom(golden(bound=20), 0.2))
    assert roomy.solution.replicas == {"on B": 12}  # 120,000 tokens and a fifth more, at 400 * (34 - 2) each
    assert (roomy.solution.tau_s, roomy.price_per_h) == (tight.solution.tau_s, tight.price_per_h)
    half = fastest(with_headroom(golden(bound=20), 0.5))  # 15 would be wanted; half of it fits
    assert half.solution.replicas == {"on B": 12}


def test_headroom_has_long_answers_ready_earlier_where_that_costs_nothing():
    problem = golden(bound=20, tail_tokens=60_000.0)
    on_a, on_b = problem.rollout
    slower = replace(on_b, name="slower on B", token_s=0.0108)  # its tail takes 648 s of 663, the other's 600
    lighter = replace(slower, concurrency=8)
    problem = replace(problem, rollout=(on_a, on_b, lighter))
    assert set(fastest(problem).solution.replicas) == {"slower on B"}  # less in flight
    assert set(fastest(with_headroom(problem, 0.1)).solution.replicas) == {"on B"}


def test_less_headroom_than_any_share_that_is_tried_is_kept_too():
    problem = golden(bound=20)
    on_a, on_b = problem.rollout
    slim = replace(on_b, name="slim on B", tokens_per_s=380.0, concurrency=8)
    problem = replace(
        problem, offers={"A": problem.offers["A"], "B": Offer("B", 5, 2, 4.0)}, rollout=(on_a, on_b, slim)
    )
    assert fastest(problem).solution.replicas == {"slim on B": 10}
    assert fastest(with_headroom(problem, 0.5)).solution.replicas == {"on B": 10}  # 6.7 % more than is asked for


def test_a_shape_that_brings_next_to_nothing_is_left_out():
    problem = golden(bound=20)
    on_a, on_b = problem.rollout
    on_c = replace(on_b, name="on C", offer="C", tokens_per_s=1.0, concurrency=1)
    offers = {**problem.offers, "C": Offer("C", 1, 4, 2.0)}
    view = view_of(replace(problem, offers=offers, rollout=(on_a, on_b, on_c)))
    gang = next(s for s, gang in enumerate(view.gangs) if gang.name == "A x 2")

    def counts(**replicas: int) -> ColumnCounts:
        return ColumnCounts(gang, tuple(replicas.get(shapes[0].offer, 0) for shapes in view.columns))

    assert tidied(view, 34.0, counts(B=12, C=1)) == counts(B=12)
    assert tidied(view, 34.0, counts(B=12)) == counts(B=12)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.05, 0.3]))
def test_headroom_costs_neither_speed_nor_money(seed, share):
    problem, wanted = drawn(seed), with_headroom(drawn(seed), share)
    tight, roomy = fastest(problem), fastest(wanted)
    assume(tight.solution is not None)
    assert roomy.solution.tau_s == tight.solution.tau_s
    assert roomy.price_per_h == tight.price_per_h
    assert not check(wanted, roomy.solution, roomy.certificate)
