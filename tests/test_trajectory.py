import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.trajectory import End, Origin, Segment, SegmentError, Trajectory


def sampled(start, count=2, version=1, kv_version=None, logprob=-0.5, **fields):
    return Segment(
        start=start,
        tokens=np.arange(count),
        logprobs=np.full(count, logprob),
        version=version,
        kv_version=version if kv_version is None else kv_version,
        **fields,
    )


def given_tokens(start, count=2):
    return Segment(start=start, tokens=np.arange(count), origin=Origin.GIVEN)


def trajectory(**fields):
    return Trajectory(**{"task": 1, "prompt": np.array([5, 6]), "max_new_tokens": 10, **fields})


def test_segments_of_both_origins_tile_the_response():
    whole = trajectory(max_version_drop=1)
    whole.append(sampled(0, 3, version=4))
    whole.append(given_tokens(3, 2))
    whole.append(sampled(5, 2, version=3), End.STOP)
    assert whole.tokens.tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert whole.sampled_mask.tolist() == [True] * 3 + [False] * 2 + [True] * 2
    assert whole.versions.tolist() == [4, 4, 4, -1, -1, 3, 3]
    assert whole.logprobs.tolist() == [-0.5] * 3 + [0.0] * 2 + [-0.5] * 2
    assert not whole.is_partial


def test_a_response_may_have_just_as_many_tokens_as_it_may():
    whole = trajectory(max_new_tokens=10)
    whole.append(sampled(0, 10), End.LENGTH)
    assert (whole.num_tokens, whole.end) == (10, End.LENGTH)


BAD = {
    "a gap": (sampled(3), "must start at 2"),
    "an overlap": (sampled(1), "must start at 2"),
    "no tokens": (sampled(2, 0), "at least one token"),
    "too many tokens": (sampled(2, 9), "past max_new_tokens = 10"),
    "a negative token": (Segment(2, np.array([-1]), logprobs=np.array([-1.0]), version=1, kv_version=1), "negative"),
    "a missing log-prob": (Segment(2, np.arange(2), logprobs=np.array([-1.0]), version=1, kv_version=1), "1 log-probs"),
    "no log-probs": (Segment(2, np.arange(2), version=1, kv_version=1), "no log-probs for 2 tokens"),
    "NaN": (sampled(2, logprob=float("nan")), "not finite"),
    "a positive log-prob": (sampled(2, logprob=0.1), "is positive"),
    "no version": (Segment(2, np.arange(1), logprobs=np.array([-1.0])), "need a version"),
    "KV newer than its version": (sampled(2, kv_version=2), "newer than version"),
    "a version that dropped": (sampled(2, version=0), "may be lower by at most 0"),
    "a given segment with log-probs": (
        Segment(2, np.arange(1), origin=Origin.GIVEN, logprobs=np.array([-1.0])),
        "no log-probs",
    ),
    "a given segment with a version": (Segment(2, np.arange(1), origin=Origin.GIVEN, version=1), "version or"),
    "a given segment with a KV version": (Segment(2, np.arange(1), origin=Origin.GIVEN, kv_version=1), "or kv_version"),
    "an array of another length": (sampled(2, arrays={"routing": np.zeros(3)}), "array 'routing' has 3 rows"),
    "an array without rows": (sampled(2, arrays={"routing": np.array(1.0)}), "has no rows for 2 tokens"),
    "an array of objects": (sampled(2, arrays={"x": np.array([None, None])}), "must hold little-endian numbers"),
    "an array of texts": (sampled(2, arrays={"x": np.array(["a", "b"])}), "must hold little-endian numbers"),
    "an array of complex numbers": (sampled(2, arrays={"x": np.zeros(2, np.complex64)}), "must hold little-endian"),
    "an array the wrong way round": (sampled(2, arrays={"x": np.zeros(2, ">f4")}), "must hold little-endian"),
    "an array with large rows": (
        sampled(2, arrays={"x": np.zeros((2, 513))}),
        "8208 bytes for 2 tokens; the limit is 4096",
    ),
    "too many arrays": (sampled(2, arrays={f"a{i}": np.zeros(2) for i in range(9)}), "9 arrays; the limit is 8"),
    "an array with a name like a path": (sampled(2, arrays={"../x": np.zeros(2)}), "array name '../x': must be"),
    "an array with a long name": (sampled(2, arrays={"x" * 33: np.zeros(2)}), "must be up to 32"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_segment_is_refused_and_changes_nothing(name):
    segment, message = BAD[name]
    whole = trajectory()
    whole.append(sampled(0))
    before = whole.encode()
    with pytest.raises(SegmentError, match=message):
        whole.append(segment)
    assert whole.encode() == before


def test_nothing_follows_an_end():
    whole = trajectory()
    whole.append(sampled(0), End.LENGTH)
    with pytest.raises(SegmentError, match='already ended: its end is "length"'):
        whole.append(sampled(2))
    with pytest.raises(SegmentError, match="already ended"):
        whole.finish(End.STOP)


def test_arrays_have_room_for_routing_and_for_likely_tokens():
    whole, arrays = trajectory(), {f"a{i}": np.zeros(2, np.bool_) for i in range(5)}
    arrays["routing"] = np.zeros((2, 94, 8), np.int16)
    arrays["top_logprobs"], arrays["top_tokens"] = np.zeros((2, 20), np.float32), np.zeros((2, 20), np.int32)
    whole.append(sampled(0, arrays=arrays))
    assert Trajectory.decode(whole.encode()) == whole


@st.composite
def trajectories(draw):
    whole = Trajectory(
        task=draw(st.integers(0, 2**40)),
        prompt=np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5))),
        max_new_tokens=40,
        max_version_drop=2,
    )
    version = 10
    for _ in range(draw(st.integers(0, 6))):
        tokens = np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5)))
        if draw(st.booleans()):
            whole.append(Segment(whole.num_tokens, tokens, origin=Origin.GIVEN))
            continue
        version = max(0, version + draw(st.integers(-2, 3)))
        floats = st.floats(-50, 0, width=32)
        whole.append(
            Segment(
                start=whole.num_tokens,
                tokens=tokens,
                logprobs=np.array(draw(st.lists(floats, min_size=len(tokens), max_size=len(tokens))), np.float32),
                version=version,
                kv_version=draw(st.integers(0, version)),
                worker=draw(st.text(max_size=5)),
                engine="embedded float32",
                arrays={"routing": np.arange(2 * len(tokens), dtype=np.int16).reshape(-1, 2)}
                if draw(st.booleans())
                else {},
            )
        )
    if whole.segments and draw(st.booleans()):
        whole.finish(draw(st.sampled_from(list(End))))
    return whole


@given(trajectories())
def test_bytes_bring_back_the_very_same_trajectory(whole):
    again = Trajectory.decode(whole.encode())
    assert again == whole
    assert again.encode() == whole.encode()
    for mine, theirs in zip(again.segments, whole.segments, strict=True):
        assert mine == theirs
        assert mine.tokens.dtype == np.int32
        for name in theirs.arrays:
            assert mine.arrays[name].dtype == theirs.arrays[name].dtype


@given(trajectories())
def test_every_array_has_one_entry_per_token(whole):
    lengths = {len(whole.tokens), len(whole.logprobs), len(whole.sampled_mask), len(whole.versions), whole.num_tokens}
    assert len(lengths) == 1
    assert (whole.versions[whole.sampled_mask] >= 0).all()
    assert (whole.logprobs[~whole.sampled_mask] == 0).all()
