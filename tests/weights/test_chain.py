"""When a version is published whole, and which versions lead to another."""

from offbeat.weights.encoding import Chain
from offbeat.weights.manifest import Anchoring


def test_every_nth_version_is_an_anchor():
    anchoring = Anchoring(every=3)
    assert [Chain(100, num_deltas).is_long(anchoring) for num_deltas in range(3)] == [False, False, True]


def test_where_every_version_is_an_anchor_none_is_a_delta():
    assert Chain(100).is_long(Anchoring(every=1))


def test_a_chain_that_outgrew_half_a_copy_is_ended():
    anchoring = Anchoring(every=100, max_share=0.5)
    assert not Chain(100, 3, 50).is_long(anchoring)
    assert Chain(100, 3, 51).is_long(anchoring)
