"""When a version is published whole, and which versions lead to another."""

from offbeat.weights.manifest import Anchoring


def test_every_nth_version_is_an_anchor():
    anchoring = Anchoring(every=3)
    assert [anchoring.is_full(num_deltas, 0, 100) for num_deltas in range(3)] == [False, False, True]


def test_where_every_version_is_an_anchor_none_is_a_delta():
    assert Anchoring(every=1).is_full(0, 0, 100)


def test_a_chain_that_outgrew_half_a_copy_is_ended():
    anchoring = Anchoring(every=100, max_share=0.5)
    assert not anchoring.is_full(3, 50, 100)
    assert anchoring.is_full(3, 51, 100)
