import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.relay.max_flow import least_seconds, max_flow
from offbeat.weights.relay_tree import ROOT


def test_the_flow_to_a_receiver_is_that_through_the_narrowest_cut():
    links = {("s", "a"): 3.0, ("s", "b"): 2.0, ("a", "b"): 1.0, ("a", "t"): 2.0, ("b", "t"): 3.0}
    assert max_flow(links, "s", "t") == pytest.approx(5.0)
    assert max_flow(links, "t", "s") == 0.0


def test_flow_finds_its_way_back_out_of_a_path_that_was_a_mistake():
    links = {("s", "a"): 1.0, ("s", "b"): 1.0, ("a", "b"): 1.0, ("a", "t"): 1.0, ("b", "t"): 1.0}
    assert max_flow(links, "s", "t") == pytest.approx(2.0)


def test_nothing_beats_one_copy_over_a_shared_slow_link():
    receivers = [f"w{number}" for number in range(6)]
    links = {(ROOT, "gate"): 1e6, **{("gate", name): 1e9 for name in receivers}}
    links |= {(one, other): 3e6 for one in receivers for other in receivers if one != other}
    assert least_seconds(40e6, links, receivers) == pytest.approx(40.0)


def test_the_hardest_to_reach_sets_the_pace():
    links = {(ROOT, "near"): 10.0, ("near", "far"): 2.0, (ROOT, "far"): 1.0}
    assert least_seconds(30.0, links, ["near", "far"]) == pytest.approx(10.0)


@given(st.dictionaries(st.tuples(st.sampled_from("abcde"), st.sampled_from("abcde")), st.integers(0, 9), max_size=12))
def test_the_flow_equals_the_least_cut(links):
    others, cuts = "bcd", []
    for chosen in range(2 ** len(others)):
        side = {"a", *(name for bit, name in enumerate(others) if chosen >> bit & 1)}
        cuts.append(sum(rate for (tail, head), rate in links.items() if tail in side and head not in side))
    assert max_flow(links, "a", "e") == min(cuts)
