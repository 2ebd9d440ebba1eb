"""Records to bytes and back: nothing is lost, whatever they hold."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from offbeat.client import wire
from offbeat.client.protocol import Heartbeat, LeaseResponse
from offbeat.ledger.records import Batch, BatchGroup, Member, Reconciled
from offbeat.trajectory import (
    ARRAY_NAME,
    MAX_ARRAY_BYTES,
    MAX_ARRAYS,
    End,
    Origin,
    Reward,
    Sampling,
    Segment,
    SegmentError,
    Task,
    Trajectory,
)
from offbeat.weights.version import Version

COUNTS = st.integers(0, 2**63 - 1)
NAMES = st.text(max_size=20)
ARRAY_NAMES = st.from_regex(ARRAY_NAME, fullmatch=True)
TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5)


@st.composite
def arrays(draw, num_rows: int) -> np.ndarray:
    dtype = draw(st.sampled_from(["<f4", "<f2", "<f8", "<i8", "|u1", "|b1", "<i2"]))
    shape = (num_rows, *draw(st.sampled_from([(), (1,), (2, 3), (0,)])))
    data = draw(st.binary(min_size=64 * 8 * num_rows, max_size=64 * 8 * num_rows))
    count = int(np.prod(shape))
    if dtype == "|b1":
        return (np.frombuffer(data, "|u1")[:count] % 2 == 0).reshape(shape)
    return np.frombuffer(data, dtype)[:count].reshape(shape)


@st.composite
def trajectories(draw) -> Trajectory:
    made = Trajectory(
        task=draw(COUNTS),
        prompt=np.array(draw(TOKENS)),
        max_new_tokens=1000,
        index=draw(st.integers(0, 3)),
        max_version_drop=draw(st.integers(0, 3)),
    )
    version = draw(st.integers(0, 2**60))
    for _ in range(draw(st.integers(0, 4))):
        tokens = np.array(draw(TOKENS))
        named: dict[str, Any] = {"worker": draw(NAMES), "engine": draw(NAMES)}
        further = draw(st.dictionaries(ARRAY_NAMES, arrays(len(tokens)), max_size=2))
        if draw(st.booleans()):
            made.append(Segment(made.num_tokens, tokens, Origin.GIVEN, arrays=further, **named))
            continue
        version += draw(st.integers(0, 2))
        logprobs = np.array(
            draw(st.lists(st.floats(-1000.0, 0.0, width=32), min_size=len(tokens), max_size=len(tokens)))
        )
        kv_version = draw(st.integers(0, version))
        named |= {"version": version, "kv_version": kv_version}
        made.append(Segment(made.num_tokens, tokens, logprobs=logprobs, arrays=further, **named))
    if draw(st.booleans()):
        made.finish(draw(st.sampled_from(End)))
    return made


VERSIONS = st.builds(
    Version, COUNTS, COUNTS, st.none() | COUNTS, NAMES, st.sampled_from([Path("/runs/x/weights/1"), Path("w")])
)
TASKS = st.builds(
    Task,
    id=COUNTS,
    group=COUNTS,
    prompt=TOKENS.map(lambda ids: np.array(ids, np.int32)),
    seed=COUNTS,
    sampling=st.builds(Sampling, max_new_tokens=st.integers(1, 10**6), stop_token_ids=TOKENS.map(tuple)),
    require_version=st.none() | COUNTS,
    prefix=st.none() | trajectories(),
    fence=COUNTS,
)


def same(a: object, b: object) -> bool:
    """Equality that looks into arrays, down to type, shape and bits."""
    if isinstance(a, np.ndarray):
        assert isinstance(b, np.ndarray)
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if hasattr(a, "__dataclass_fields__"):
        return type(a) is type(b) and all(same(getattr(a, f), getattr(b, f)) for f in a.__dataclass_fields__)
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


def crossed(record):
    return wire.decode(wire.encode(record), type(record))


@given(trajectories())
def test_a_submitted_trajectory_arrives_whole(made):
    arrived = wire.trajectory(made.encode())
    assert same(arrived, made)
    assert arrived.encode() == made.encode()  # so that its digest in the ledger is that of what was sent


@given(st.builds(LeaseResponse, st.lists(TASKS, max_size=3).map(tuple), st.none() | VERSIONS, st.floats(0, 1e6)))
def test_a_lease_arrives_whole(lease):
    assert same(crossed(lease), lease)


@given(trajectories(), st.integers(0, 5))
def test_a_batch_arrives_whole(made, size):
    mask = np.arange(made.num_tokens) % 2 == 0
    members = tuple(Member(i, i, made, (Reward(0.5), Reward(-1.0, "length", 3)), -0.5, mask) for i in range(size))
    released = BatchGroup(4, 9, "sums", members[:1], prompt=3, earlier=(0.5, -1.25))
    batch = Batch(3, 2, (BatchGroup(1, 7, "sums", members), BatchGroup(2, 8, "sums", ()), released))
    assert same(crossed(batch), batch)


@given(VERSIONS)
def test_a_version_arrives_whole(version):
    assert crossed(version) == version
    assert crossed(wire.Newer(version)) == wire.Newer(version)


@pytest.mark.parametrize(
    "record",
    [
        Reconciled(3, 7, True, (4, 5), (3, 4), 2, 2),
        Reconciled(0, None, False),
        Heartbeat((1, 2)),
        Heartbeat(),
        LeaseResponse(),
    ],
)
def test_small_records_arrive_whole(record):
    assert same(crossed(record), record)


@pytest.mark.parametrize("num_segments", [1, 7])
def test_the_largest_trajectory_is_within_its_limit_and_the_limit_near_it(num_segments):
    """Every name and number as long as it may be."""
    count, most = num_segments * 50, 2**63 - 1
    made = Trajectory(most, np.full(wire.MAX_PROMPT_BYTES // 4, 2**31 - 1), count, most, most)
    rows = MAX_ARRAY_BYTES // MAX_ARRAYS // 8
    for _ in range(num_segments):
        named = {f"{i}".rjust(32, "a"): np.zeros((50, 1, 1, 1, 1, 1, 1, rows), np.float64) for i in range(MAX_ARRAYS)}
        made.append(
            Segment(
                made.num_tokens,
                np.full(50, 2**31 - 1),
                logprobs=np.zeros(50),
                version=most,
                kv_version=most,
                worker="\U0001f984" * 256,
                engine="\U0001f984" * 1024,
                arrays=named,
            )
        )
    body = made.encode()
    assert wire.trajectory(body) == made
    assert wire.MAX_PROMPT_BYTES < len(body) <= wire.max_trajectory_bytes(count)


def calls(kind: type = wire.WireCall) -> Iterator[type[wire.WireCall]]:
    for call in kind.__subclasses__():
        yield call
        yield from calls(call)


def unbounded(found: inspect.Type, where: str) -> Iterator[str]:
    """Places in a schema that hold as much as a sender likes."""
    if getattr(found, "max_length", 0) is None:
        yield where
    for part in (getattr(found, name, None) for name in ("item_type", "key_type", "value_type")):
        if part is not None:
            yield from unbounded(part, f"{where}[]")
    parts = getattr(found, "types", None) or getattr(found, "item_types", None) or ()
    for part in parts:
        yield from unbounded(part, where)
    for field in getattr(found, "fields", ()):
        yield from unbounded(field.type, f"{where}.{field.name}")
    if isinstance(found, inspect.AnyType):
        yield f"{where}: anything"


@pytest.mark.parametrize("kind", list(calls()), ids=lambda kind: kind.__name__)
def test_whatever_can_be_long_in_a_call_has_a_bound(kind):
    open_places = list(unbounded(inspect.type_info(kind), kind.__name__))
    if kind.max_bytes > 64 * 1024:
        allowed = {"ReportCall.row[]: anything", "CommitCall.version.digest", "CommitCall.version.manifest"}
        assert set(open_places) <= allowed  # of trainers; and bounded by the whole call
        assert kind.max_bytes <= (2**20 if kind is wire.ReportCall else 16 * 2**20)


def test_whatever_can_be_long_in_a_trajectory_has_a_bound():
    """Tokens, log-probs and arrays are bounded by the whole body, and then by each other."""
    open_places = {place.split(".", 1)[1] for place in unbounded(inspect.type_info(wire._TrajectoryBody), "it")}
    open_places = {place for place in open_places if not place.startswith("episode")}  # `record_problem` bounds them
    assert open_places == {"segments[].tokens", "segments[].logprobs", "segments[].arrays[].data"}


def test_a_row_of_figures_may_hold_numpys_numbers():
    row = {"step": np.int64(3), "reward": np.float32(0.5), "split": {"generate": 1.5}, "note": None}
    arrived = crossed(wire.ReportCall(row=row)).row
    assert arrived == {"step": 3, "reward": 0.5, "split": {"generate": 1.5}, "note": None}


@given(st.binary(max_size=200))
def test_bytes_of_anyone_become_a_trajectory_or_malformed(data):
    with pytest.raises(wire.Malformed):
        wire.trajectory(data)


@given(trajectories(), st.data())
def test_a_trajectory_with_a_byte_changed_is_refused_or_another_whole_one(made, data):
    body = bytearray(made.encode())
    place = data.draw(st.integers(0, len(body) - 1))
    body[place] ^= data.draw(st.integers(1, 255))
    try:
        arrived = wire.trajectory(bytes(body))
    except (wire.Malformed, SegmentError):
        return
    assert same(wire.trajectory(arrived.encode()), arrived)


@given(st.binary(max_size=3000), st.integers(0, 3000))
def test_what_was_compressed_comes_back_if_it_is_within_the_limit(data, limit):
    expected = data if len(data) <= limit else None
    assert wire.decompress(wire.compress(data), limit) == expected


@given(st.binary(max_size=300))
def test_bytes_of_anyone_decompress_or_are_malformed(data):
    try:
        found = wire.decompress(data, 1000)
    except wire.Malformed:
        return
    assert found is None or len(found) <= 1000


def test_a_digest_is_read_from_among_others():
    ours = wire.content_digest(b"x")
    digest = wire.read_digest({"Content-Digest": f"sha-256=:AAAA:, {ours}"}, "Content-Digest")
    assert wire.digest_header(digest) == ours
    assert wire.read_digest({}, "Content-Digest") is None
