"""What calls and answers look like as bytes: msgpack; `coding` compresses it and gives it a digest.

What we send is our own records as they are, so that a field added to one of them crosses the wire by itself. What a
worker sends is checked against a schema, field by field and with bounds, before it becomes anything: a call has a limit
of bytes, and whatever in it can be long has one of its own. `trajectory` then builds through `Trajectory.append`, which
refuses what does not fit. Nothing received is ever executed or unpickled.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from offbeat.ledger.records import ComparedSegment, Outcome
from offbeat.ledger.workers import Role
from offbeat.reward.pool import RewardResult
from offbeat.serve.http.coding import Malformed
from offbeat.trajectory import ARRAY_NAME, MAX_ARRAY_BYTES, MAX_ARRAYS, End, Origin, Reward, Segment, Trajectory
from offbeat.weights.manifest import Digest
from offbeat.weights.version import Version

T = TypeVar("T")

MSGPACK = "application/msgpack"
OCTETS = "application/octet-stream"
MAX_SEGMENTS = 2048
"""Each is looked at in the light of those before it; a trajectory that crosses thousands of versions is not one."""
MAX_TIMINGS = 256
"""In one call; an engine's step times are known by far fewer."""
MAX_HELD = 100_000
"""Tasks that one worker can name in one call."""
MAX_COMPARED = 1_000_000
"""Segments of one batch that a trainer tells of."""
MAX_SAMPLES = 4096
"""Rewards in one call; a coordinator hands out no more samples than that."""
MAX_PROMPT_BYTES = 4 * 2**20
"""A million tokens."""
MAX_SEGMENT_BYTES = 16 * 1024
"""Of a segment without its tokens, log-probs and arrays: names, numbers and shapes."""
DTYPE = re.compile(r"[<|][biuf][1248]|<f2")

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e6)]
Name = Annotated[str, Meta(max_length=256)]
FileName = Annotated[str, Meta(max_length=200, pattern=r"\A[^./\\\x00-\x1f\x7f][^/\\\x00-\x1f\x7f]*\Z")]
"""What becomes part of a path on the machine that is told it: one name, no way out of the folder, nothing hidden."""
Rate = Annotated[float, Meta(gt=0.0, le=1e15)]


class Call(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a caller sends."""

    max_bytes: ClassVar[int] = 64 * 1024
    """As sent, and once decompressed."""


class Join(Call):
    """Comes with a token, which proves that the caller was invited, in place of a secret."""

    max_bytes: ClassVar[int] = 16 * 1024
    name: Name
    secret_hash: Annotated[bytes, Meta(min_length=32, max_length=32)]
    """Of the secret that the caller has drawn and that is to be its own; see `ledger.workers.secret_hash`."""
    capabilities: Annotated[dict[Name, Any], Meta(max_length=64)] = {}


class LeaseCall(Call):
    capacity: Annotated[int, Meta(ge=1, le=100_000)]
    have_version: Count | None
    wait_s: Seconds


class HeartbeatCall(Call):
    max_bytes: ClassVar[int] = 4 * 2**20
    held: Annotated[list[tuple[Count, Count]], Meta(max_length=MAX_HELD)]
    life: Name = ""
    figures: Annotated[dict[Name, float], Meta(max_length=64)] = {}
    """What it has done so far, in sums."""


class FailCall(Call):
    task: Count
    fence: Count
    reason: Annotated[str, Meta(max_length=10_000)]


class GiveBackCall(Call):
    max_bytes: ClassVar[int] = 4 * 2**20
    leases: Annotated[list[tuple[Count, Count]], Meta(max_length=MAX_HELD)]


class RoundOverCall(Call):
    number: Count
    wait_s: Seconds


class TimingsCall(Call):
    timings: Annotated[list[tuple[Count, Count, Count, Count, Seconds]], Meta(max_length=MAX_TIMINGS)]
    """The fields of `offbeat.control.step_time.Timing`, in their order."""


class NewerCall(Call):
    have_version: Count | None
    wait_s: Seconds


class LeaseRewardsCall(Call):
    capacity: Annotated[int, Meta(ge=0, le=100_000)]
    wait_s: Seconds


class RewardBody(Call):
    value: float
    name: Name
    position: Annotated[int, Meta(ge=-1, le=2**31)]


class ResultBody(Call):
    """A reward's parts, or why there are none."""

    rewards: Annotated[list[RewardBody], Meta(max_length=1000)] = []
    error: Annotated[str, Meta(max_length=10_000)] | None = None


class SubmitRewardsCall(Call):
    max_bytes: ClassVar[int] = 16 * 2**20
    ticket: Annotated[str, Meta(max_length=64)]
    results: Annotated[list[ResultBody], Meta(max_length=MAX_SAMPLES)]


class ReconcileCall(Call):
    step: Count
    version: Count | None
    host: Name = ""
    home: Name = ""
    from_scratch: bool = False


class PublishCall(Call):
    version: Version


class ClaimCall(Call):
    step: Count
    wait_s: Seconds


class CommitCall(Call):
    max_bytes: ClassVar[int] = 16 * 2**20
    step: Count
    version: Version
    audited: Annotated[list[Count], Meta(max_length=MAX_HELD)] = []
    compared: Annotated[list[ComparedSegment], Meta(max_length=MAX_COMPARED)] = []


class CheckpointedCall(Call):
    step: Count


class ReportCall(Call):
    max_bytes: ClassVar[int] = 2**20
    row: Annotated[dict[Name, Any], Meta(max_length=10_000)]


class IntroduceCall(Call):
    key: Digest
    """Public, of whoever signs this trainer's manifests."""


class MissingCall(Call):
    max_bytes: ClassVar[int] = 8 * 2**20
    pieces: Annotated[list[Digest], Meta(max_length=100_000)]


class SourcesCall(Call):
    site: Name
    host: Annotated[str, Meta(max_length=64)] = ""
    """An address of its own; "": the one that it calls from."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Where it serves pieces; 0: nowhere."""
    up_bytes_per_s: Rate | None = None
    root_bytes_per_s: Rate | None = None


class Nothing(Call):
    """The call's name says it all."""


class Welcome(msgspec.Struct, frozen=True):
    """The answer to a token: who the worker is from now on, and what it takes part in."""

    worker: FileName
    role: Role
    run: FileName
    config: dict[str, Any]


class RunInfo(msgspec.Struct, frozen=True):
    run: FileName
    config: dict[str, Any]


class Submitted(msgspec.Struct, frozen=True):
    outcome: Outcome


class Newer(msgspec.Struct, frozen=True):
    version: Version | None


class RoundOver(msgspec.Struct, frozen=True):
    is_over: bool


class NextVersion(msgspec.Struct, frozen=True):
    number: int


class Signers(msgspec.Struct, frozen=True):
    keys: list[str]


class Peer(msgspec.Struct, frozen=True):
    host: Annotated[str, Meta(max_length=45, pattern=r"\A[0-9a-fA-F.:]+\Z")]
    """An IP address."""
    port: Annotated[int, Meta(ge=1, le=65535)]
    key: str
    """What to show there."""

    def __repr__(self) -> str:  # it is logged sooner or later
        return f"Peer(host={self.host!r}, port={self.port})"


class SourceList(msgspec.Struct, frozen=True):
    peers: list[Peer]
    guests: list[str]
    """The hashes of the keys that may be honoured."""


class Missing(msgspec.Struct, frozen=True):
    pieces: list[str]


class WeightFile(msgspec.Struct, frozen=True):
    name: FileName
    num_bytes: int
    blake3: str


class WeightFiles(msgspec.Struct, frozen=True):
    files: list[WeightFile]


class _SegmentBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    start: Count
    origin: Origin
    tokens: memoryview
    logprobs: memoryview | None
    version: Count | None
    kv_version: Count | None
    worker: Name
    engine: Annotated[str, Meta(max_length=1024)]
    arrays: Annotated[dict[_ArrayName, _ArrayBody], Meta(max_length=MAX_ARRAYS)]


_ArrayName = Annotated[str, Meta(pattern=f"^{ARRAY_NAME}$", max_length=32)]


class _ArrayBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: Annotated[str, Meta(max_length=8)]
    shape: Annotated[list[Count], Meta(min_length=1, max_length=8)]
    data: memoryview


class _TrajectoryBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`Trajectory.encode`, as a schema. What is long stays where it came in: nothing is copied before it is checked."""

    task: Count
    index: Count
    prompt: Annotated[memoryview, Meta(max_length=MAX_PROMPT_BYTES)]
    max_new_tokens: Count
    max_version_drop: Count
    end: End | None
    segments: Annotated[list[_SegmentBody], Meta(max_length=MAX_SEGMENTS)]


def max_trajectory_bytes(max_new_tokens: int) -> int:
    """The most that a trajectory of so many tokens takes."""
    per_token = 2 * 4 + MAX_ARRAY_BYTES
    num_segments = min(max_new_tokens, MAX_SEGMENTS)
    return MAX_PROMPT_BYTES + max_new_tokens * per_token + (num_segments + 1) * MAX_SEGMENT_BYTES


def trajectory(data: bytes) -> Trajectory:
    """A trajectory from bytes that anyone may have sent: `Malformed`, or `SegmentError` where it contradicts itself."""
    body = decode(data, _TrajectoryBody)
    made = Trajectory(
        task=body.task,
        index=body.index,
        prompt=_vector(body.prompt, np.int32),
        max_new_tokens=body.max_new_tokens,
        max_version_drop=body.max_version_drop,
    )
    for segment in body.segments:
        made.append(_segment(segment))
    if body.end is not None:
        made.finish(body.end)
    return made


def reward_result(body: ResultBody) -> RewardResult:
    """What a judge said; whether that is a reward is for the coordinator to find out."""
    if body.error is not None:
        return RewardResult(error=body.error)
    rewards = tuple(Reward(part.value, part.name, part.position) for part in body.rewards)
    return RewardResult(sum(reward.value for reward in rewards), rewards=rewards)


def result_body(result: RewardResult, max_reason: int) -> ResultBody:
    if result.error is not None:
        return ResultBody(error=result.error[:max_reason])
    return ResultBody(rewards=[RewardBody(value=r.value, name=r.name, position=r.position) for r in result.rewards])


def _segment(body: _SegmentBody) -> Segment:
    return Segment(
        start=body.start,
        origin=body.origin,
        tokens=_vector(body.tokens, np.int32),
        logprobs=None if body.logprobs is None else _vector(body.logprobs, np.float32),
        version=body.version,
        kv_version=body.kv_version,
        worker=body.worker,
        engine=body.engine,
        arrays={name: _array(msgspec.structs.asdict(array)) for name, array in body.arrays.items()},
    )


def _vector(data: memoryview, dtype: type) -> np.ndarray:
    try:
        return np.frombuffer(data, dtype)
    except ValueError as error:
        raise Malformed(f"{len(data)} bytes are not a row of {np.dtype(dtype)}") from error


def _array(wire: Any) -> np.ndarray:
    try:
        dtype, shape, data = str(wire["dtype"]), wire["shape"], wire["data"]
        if DTYPE.fullmatch(dtype) is None:
            raise Malformed(f"an array of {dtype!r}; allowed are little-endian numbers and truth values")
        return np.frombuffer(data, np.dtype(dtype)).reshape(shape)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise Malformed(f"an array that is none: {error}") from error


# --- bytes ---


def _to_wire(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "shape": list(value.shape), "data": value.tobytes()}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} does not cross the wire")


def _from_wire(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        return _array(value)
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"{kind.__name__} does not cross the wire")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_wire)
_DECODERS: dict[type, msgspec.msgpack.Decoder[Any]] = {}


def encode(value: Any) -> bytes:
    return _ENCODER.encode(value)


def decode(data: bytes, kind: type[T]) -> T:
    """The bytes as a record, or `Malformed` with what is wrong and where."""
    decoder = _DECODERS.get(kind)
    if decoder is None:
        decoder = _DECODERS[kind] = msgspec.msgpack.Decoder(kind, dec_hook=_from_wire)
    try:
        found: T = decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"not a {kind.__name__.strip('_')}: {error}") from error
    return found
