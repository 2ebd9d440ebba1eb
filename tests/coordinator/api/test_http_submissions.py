"""Trajectories over the wire: what is stored, and what honest mistakes and lies are answered with."""

import msgspec
import numpy as np
import pytest
from http_run import answer

from offbeat.client import wire
from offbeat.ledger.records import Outcome
from offbeat.trajectory import End, Segment, Trajectory


def as_dict(trajectory: Trajectory) -> dict:
    return msgspec.msgpack.decode(trajectory.encode())


def forged(trajectory: Trajectory, **changes) -> bytes:
    """The trajectory's bytes with fields changed behind the checks' back; `segment` changes its first segment."""
    body = as_dict(trajectory)
    body["segments"][0].update(changes.pop("segment", {}))
    body.update(changes)
    return msgspec.msgpack.encode(body)


def floats(*values: float) -> bytes:
    return np.array(values, np.float32).tobytes()


def ints(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def stored_tasks(run) -> set[int]:
    return {task for (task,) in run.ledger.execute("SELECT task FROM trajectories")}


def test_a_stored_trajectory_is_201_and_on_disk(run, worker, task):
    response = run.submit(answer(task), task.fence, worker)
    assert response.status == 201
    assert response.record(wire.Submitted).outcome is Outcome.STORED
    assert task.id in stored_tasks(run)


def test_the_same_again_is_200_and_changes_nothing(run, worker, task):
    trajectory = answer(task)
    assert run.submit(trajectory, task.fence, worker).status == 201
    stored = run.ledger.execute("SELECT seq, digest FROM trajectories ORDER BY seq").fetchall()
    for _ in range(3):
        response = run.submit(trajectory, task.fence, worker)
        assert (response.status, response.record(wire.Submitted).outcome) == (200, Outcome.REPEATED)
    assert run.ledger.execute("SELECT seq, digest FROM trajectories ORDER BY seq").fetchall() == stored
    assert run.ledger.verify().violations == ()


def test_another_trajectory_for_the_same_lease_is_a_conflict(run, worker, task):
    assert run.submit(answer(task), task.fence, worker).status == 201
    response = run.submit(answer(task, tokens=(9,)), task.fence, worker)
    assert (response.status, "a different trajectory" in response.error) == (409, True)
    assert run.ledger.verify().violations == ()


def test_a_partial_is_kept_and_its_lease_is_over_then(run, worker, task):
    partial = task.new_trajectory()
    partial.append(Segment(0, np.array([5, 6]), logprobs=np.array([-0.1, -0.2]), version=0, kv_version=0))
    response = run.submit(partial, task.fence, worker)
    assert (response.status, response.record(wire.Submitted).outcome) == (201, Outcome.PARTIAL)
    next_worker = run.secret("next")
    again = {leased.id: leased for leased in run.lease(next_worker, capacity=1000)}[task.id]
    assert (again.fence, again.prefix) == (task.fence + 1, partial)
    assert run.submit(answer(task), task.fence, worker).status == 409
    whole = again.new_trajectory()
    stop = np.array(task.sampling.stop_token_ids[:1])
    whole.append(Segment(2, stop, logprobs=np.array([-0.3]), version=0, kv_version=0), End.STOP)
    assert run.submit(whole, again.fence, next_worker).status == 201
    assert run.post("/v1/leave", wire.Nothing(), next_worker).status == 204
    assert run.ledger.verify().violations == ()


def test_a_fence_that_is_over_is_410(run, worker, task):
    assert run.post("/v1/leave", wire.Nothing(), worker).status == 204
    next_worker = run.secret("next")
    again = {leased.id: leased for leased in run.lease(next_worker, capacity=1000)}[task.id]
    assert again.fence == task.fence + 1
    assert run.post("/v1/leave", wire.Nothing(), next_worker).status == 204
    before = run.content()
    response = run.submit(answer(task), task.fence, worker)
    assert (response.status, "is over" in response.error) == (410, True)
    assert run.content() == before


def test_a_fence_that_was_never_given_is_403(run, worker, task, unchanged):
    assert run.submit(answer(task), task.fence + 1, worker).status == 403


def test_someone_elses_lease_is_403(run, task, unchanged):
    response = run.submit(answer(task), task.fence, run.secret("thief"))
    assert (response.status, "not by thief" in response.error) == (403, True)


def test_a_captured_submission_replayed_by_another_worker_is_403(run, worker, task):
    trajectory = answer(task)
    assert run.submit(trajectory, task.fence, worker).status == 201
    assert run.submit(trajectory, task.fence, run.secret("replayer")).status == 403


def test_a_task_that_was_never_issued_is_404(run, worker, task, unchanged):
    body = forged(answer(task), task=10**9)
    assert run.put(10**9, 1, body, worker).status == 404


@pytest.mark.parametrize("number", [2**63, 2**64 + 5, 10**30, "9" * 5000, "-1", "+1", "1.0", "%D9%A1", "0x1"])
def test_numbers_beyond_any_task_are_404(run, worker, task, number, unchanged):
    assert run.put(task.id, number, answer(task).encode(), worker).status == 404
    assert run.put(number, task.fence, answer(task).encode(), worker).status == 404


def test_the_path_and_the_body_must_name_the_same_task(run, worker, unchanged_pair):
    first, second = unchanged_pair
    response = run.put(first.id, first.fence, answer(second).encode(), worker)
    assert (response.status, "the URL names task" in response.error) == (400, True)


@pytest.fixture
def unchanged_pair(run, worker):
    pair = run.lease(worker, capacity=2)
    before = run.content()
    yield pair
    assert run.content() == before


FORGERIES = {
    "an edited prompt": lambda t: forged(answer(t), prompt=ints(1, 2, 3)),
    "no prompt": lambda t: forged(answer(t), prompt=b""),
    "another length": lambda t: forged(answer(t), max_new_tokens=t.sampling.max_new_tokens + 1),
    "a second trajectory": lambda t: forged(answer(t), index=1),
    "many tokens": lambda t: forged(
        answer(t),
        max_new_tokens=10**5,
        segment={"tokens": ints(*[5] * 10**5), "logprobs": floats(*[-0.1] * 10**5)},
    ),
    "many tokens within the issued length": lambda t: forged(
        answer(t), segment={"tokens": ints(*[5] * 10**5), "logprobs": floats(*[-0.1] * 10**5)}
    ),
    "no tokens": lambda t: forged(answer(t), segment={"tokens": b"", "logprobs": b""}),
    "no segments": lambda t: forged(answer(t), segments=[]),
    "a negative token": lambda t: forged(answer(t), segment={"tokens": ints(5, -6, 7)}),
    "NaN": lambda t: forged(answer(t), segment={"logprobs": floats(-0.1, float("nan"), -0.1)}),
    "minus infinity": lambda t: forged(answer(t), segment={"logprobs": floats(-0.1, float("-inf"), -0.1)}),
    "a positive log-prob": lambda t: forged(answer(t), segment={"logprobs": floats(-0.1, 0.5, -0.1)}),
    "missing log-probs": lambda t: forged(answer(t), segment={"logprobs": None}),
    "too few log-probs": lambda t: forged(answer(t), segment={"logprobs": floats(-0.1)}),
    "a version of the future": lambda t: forged(answer(t), segment={"version": 7, "kv_version": 7}),
    "no version": lambda t: forged(answer(t), segment={"version": None, "kv_version": None}),
    "KV newer than its version": lambda t: forged(answer(t), segment={"kv_version": 1}),
    "a gap": lambda t: two_segments(t, 4),
    "an overlap": lambda t: two_segments(t, 2),
    "only given tokens": lambda t: forged(
        answer(t), segment={"origin": "given", "logprobs": None, "version": None, "kv_version": None}
    ),
    "a word of somebody else's": lambda t: given_between(t),
    "a stop without a stop token": lambda t: forged(answer(t), segment={"tokens": ints(5, 6, 7)}),
    "a length before the limit": lambda t: forged(answer(t), end="length"),
    "an array of another length": lambda t: forged(
        answer(t), segment={"arrays": {"x": {"dtype": "<f4", "shape": [1], "data": floats(1.0)}}}
    ),
    "an array with large rows": lambda t: forged(answer(t), segment={"arrays": {"x": rows_of(4097)}}),
    "arrays with large rows together": lambda t: forged(
        answer(t), segment={"arrays": {name: rows_of(1366) for name in "abc"}}
    ),
}
"""Well formed, and inadmissible."""


def rows_of(num_bytes: int) -> dict:
    return {"dtype": "|u1", "shape": [3, num_bytes], "data": bytes(3 * num_bytes)}


def two_segments(task, start: int) -> bytes:
    body = as_dict(answer(task))
    body["segments"].append({**body["segments"][0], "start": start})
    return msgspec.msgpack.encode(body)


def given_between(task) -> bytes:
    body = as_dict(answer(task))
    (last,) = body["segments"]
    given = {"start": 0, "origin": "given", "logprobs": None, "version": None, "kv_version": None}
    body["segments"] = [{**last, **given}, {**last, "start": 3}]
    return msgspec.msgpack.encode(body)


@pytest.mark.parametrize("name", FORGERIES)
def test_what_is_well_formed_and_inadmissible_is_422(run, worker, task, name, unchanged):
    response = run.put(task.id, task.fence, FORGERIES[name](task), worker)
    assert response.status == 422, response.body
    assert response.error


def test_a_forgery_does_not_spoil_the_lease(run, worker, task):
    assert run.put(task.id, task.fence, FORGERIES["NaN"](task), worker).status == 422
    assert run.submit(answer(task), task.fence, worker).status == 201


MALFORMED = {
    "nothing": lambda t: b"",
    "no msgpack": lambda t: b"\xc1",
    "JSON": lambda t: b'{"task": 1}',
    "a list": lambda t: msgspec.msgpack.encode([1, 2]),
    "half of it": lambda t: answer(t).encode()[:-5],
    "more than it": lambda t: answer(t).encode() + b"\x00",
    "a field missing": lambda t: msgspec.msgpack.encode({k: v for k, v in as_dict(answer(t)).items() if k != "end"}),
    "a field too many": lambda t: forged(answer(t), reward=1.0),
    "its own reward": lambda t: forged(answer(t), segment={"reward": 1.0}),
    "a task that is text": lambda t: forged(answer(t), task="1"),
    "a version that is no whole number": lambda t: forged(answer(t), segment={"version": 0.0}),
    "a negative version": lambda t: forged(answer(t), segment={"version": -1}),
    "a number beyond the ledger": lambda t: forged(answer(t), segment={"version": 2**63}),
    "an unknown end": lambda t: forged(answer(t), end="reward"),
    "an unknown origin": lambda t: forged(answer(t), segment={"origin": "stolen"}),
    "tokens of three bytes": lambda t: forged(answer(t), segment={"tokens": b"abc"}),
    "an array of objects": lambda t: forged(
        answer(t), segment={"arrays": {"x": {"dtype": "|O", "shape": [3], "data": b"12345678" * 3}}}
    ),
    "an array without a shape": lambda t: forged(
        answer(t), segment={"arrays": {"x": {"dtype": "<f4", "shape": [], "data": floats(1.0)}}}
    ),
    "an array larger than its bytes": lambda t: forged(
        answer(t), segment={"arrays": {"x": {"dtype": "<f4", "shape": [3, 2**40], "data": floats(1.0, 2.0, 3.0)}}}
    ),
    "nine arrays": lambda t: forged(answer(t), segment={"arrays": {f"a{i}": rows_of(1) for i in range(9)}}),
    "an array named like a path": lambda t: forged(answer(t), segment={"arrays": {"../x": rows_of(1)}}),
    "an array with a name without end": lambda t: forged(answer(t), segment={"arrays": {"x" * 33: rows_of(1)}}),
    "an engine without end": lambda t: forged(answer(t), segment={"engine": "x" * 1025}),
    "segments without end": lambda t: msgspec.msgpack.encode(
        {**as_dict(answer(t)), "segments": as_dict(answer(t))["segments"] * (wire.MAX_SEGMENTS + 1)}
    ),
    "nesting without end": lambda t: b"\x91" * 100_000,
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_malformed_is_400(run, worker, task, name, unchanged):
    response = run.put(task.id, task.fence, MALFORMED[name](task), worker)
    assert response.status == 400, response.body
    assert response.error


def test_six_answers_of_three_tokens_stay_as_small_as_they_are(run, worker):
    """What a few bytes decompress to is refused before there is room for it, and nothing of it reaches the disk."""
    tasks = run.lease(worker, capacity=6)
    huge = {"dtype": "|u1", "shape": [3, 2**23], "data": bytes(3 * 2**23)}
    sizes = sum(file.stat().st_size for file in run.folder.iterdir() if file.is_file())
    for task in tasks:
        body = wire.compress(forged(answer(task), segment={"arrays": {"x": huge}}))
        assert len(body) < 10_000
        response = run.put(task.id, task.fence, body, worker, **{"Content-Encoding": "zstd"})
        assert (response.status, "after decompression" in response.error) == (413, True)
    assert run.server.state.bodies.held_bytes == 0
    assert sum(file.stat().st_size for file in run.folder.iterdir() if file.is_file()) < sizes + 10**6
    assert (
        run.submit(answer(tasks[0], arrays={"routing": np.zeros((3, 8, 94), np.int16)}), tasks[0].fence, worker).status
        == 201
    )


def test_a_digest_must_be_there_and_true(run, worker, task, unchanged):
    other = wire.content_digest(b"something else")
    for wrong in (None, other, "blake3=:AAAA:", "sha-256=:AAAA:", "nonsense"):
        assert run.submit(answer(task), task.fence, worker, **{wire.CONTENT_DIGEST: wrong}).status == 400


def test_a_token_that_the_model_does_not_have_is_refused_where_its_size_is_known(run, worker, task, unchanged):
    settings = run.coordinator.settings
    if settings.vocab_size is None:
        pytest.skip("this coordinator was not told the model's vocabulary")
    assert run.submit(answer(task, tokens=(settings.vocab_size,)), task.fence, worker).status == 422


def test_an_honest_end_by_length_is_stored(run, worker, task):
    trajectory = task.new_trajectory()
    count = task.sampling.max_new_tokens
    segment = Segment(0, np.full(count, 5), logprobs=np.full(count, -0.1), version=0, kv_version=0)
    trajectory.append(segment, End.LENGTH)
    assert run.submit(trajectory, task.fence, worker).status == 201
