"""The wire format: msgpack, optionally compressed with zstd, with a digest.

Answers are encoded records. Calls are checked field by field against a schema: each call and each field that can be
long has a size limit. Received data is never executed or unpickled.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
import numpy as np
import zstandard
from blake3 import blake3
from msgspec import Meta

from offbeat.ledger.records import ComparedSegment, Outcome
from offbeat.ledger.workers import Role
from offbeat.rewards.pool import RewardResult
from offbeat.trajectory import (
    ARRAY_NAME,
    MAX_ARRAY_BYTES,
    MAX_ARRAYS,
    MAX_RECORD_BYTES,
    End,
    EpisodeRecord,
    Origin,
    Reward,
    Segment,
    Trajectory,
    array_from_wire,
    array_to_wire,
    record_problem,
)
from offbeat.weights.manifest import Digest
from offbeat.weights.version import Version

ZSTD = "zstd"
CONTENT_DIGEST = "Content-Digest"
"""Header with the digest of the body as sent."""
DAMAGED = "Damaged"
"""`kind` of an error answer to a call whose body was damaged in transit; the caller sends it again."""
GENERATION = "Offbeat-Generation"
"""Header with the generation of the calling trainer: the number that it got from `reconcile`."""


DIGEST = re.compile(r"(?:^|,)\s*blake3=:([A-Za-z0-9+/]{43}=):")


class Malformed(ValueError):
    """The bytes do not match their schema or encoding."""


def digest_header(digest: bytes) -> str:
    return f"blake3=:{base64.b64encode(digest).decode()}:"


def content_digest(data: bytes) -> str:
    return digest_header(blake3(data).digest())


def read_digest(headers: Mapping[str, str], name: str) -> bytes | None:
    """Returns the blake3 digest in header `name`; None if it is missing or unreadable."""
    found = DIGEST.search(headers.get(name) or "")
    return None if found is None else base64.b64decode(found.group(1))


def compress(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(data)


def decompressed_size(data: bytes) -> int:
    """Returns the decompressed size that a zstd frame declares; raises `Malformed` if it declares none."""
    try:
        size = zstandard.get_frame_parameters(data).content_size
    except zstandard.ZstdError as error:
        raise Malformed(f"the body is not compressed with zstd: {error}") from error
    if size in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR):
        raise Malformed("the zstd frame of the body does not declare its size")
    return size


def decompress(data: bytes, limit_bytes: int) -> bytes | None:
    """Returns the decompressed bytes; None, without decompressing, if they would exceed `limit_bytes`."""
    if (size := decompressed_size(data)) > limit_bytes:
        return None
    try:
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=max(size, 1), allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Malformed(f"the zstd frame of the body is damaged: {error}") from error


T = TypeVar("T")

MSGPACK = "application/msgpack"
OCTETS = "application/octet-stream"
MAX_SEGMENTS = 2048
"""Largest number of segments (runs of tokens of one origin) in a trajectory, because checking them takes time."""
MAX_HELD = 100_000
"""Largest number of tasks that one call can name."""
MAX_COMPARED = 1_000_000
"""Largest number of compared segments that one commit can report."""
MAX_SAMPLES = 4096
"""Largest number of samples' results in one call; a coordinator never leases more samples than this."""
MAX_PROMPT_BYTES = 4 * 2**20
"""Largest size of a prompt in bytes: room for a million tokens of 4 bytes."""
MAX_SEGMENT_BYTES = 16 * 1024
"""Largest size in bytes of a segment without its tokens, log-probs and arrays."""
DTYPE = re.compile(r"[<|][biuf][1248]|<f2")

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e6)]
Name = Annotated[str, Meta(max_length=256)]
FileName = Annotated[str, Meta(max_length=200, pattern=r"\A[^./\\\x00-\x1f\x7f][^/\\\x00-\x1f\x7f]*\Z")]
"""File name that the receiver uses in a path: a single component that cannot leave the folder and is not hidden."""
Rate = Annotated[float, Meta(gt=0.0, le=1e15)]


class WireCall(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base class of the bodies of calls to the coordinator."""

    max_bytes: ClassVar[int] = 64 * 1024
    """Largest size in bytes, both as sent and decompressed."""


class Join(WireCall):
    """Call to join a run; it is authorised by a join token instead of a secret."""

    max_bytes: ClassVar[int] = 16 * 1024
    name: Name
    secret_hash: Annotated[bytes, Meta(min_length=32, max_length=32)]
    """Hash of the secret that the caller has chosen at random; see `ledger.workers.secret_hash`."""


class LeaseCall(WireCall):
    capacity: Annotated[int, Meta(ge=1, le=100_000)]
    have_version: Count | None
    wait_s: Seconds


class HeartbeatCall(WireCall):
    max_bytes: ClassVar[int] = 4 * 2**20
    held: Annotated[list[tuple[Count, Count]], Meta(max_length=MAX_HELD)]
    life: Name = ""
    figures: Annotated[dict[Name, float], Meta(max_length=64)] = {}
    """The worker's measurements by name, as totals since its process started."""


class FailCall(WireCall):
    task: Count
    fence: Count
    reason: Annotated[str, Meta(max_length=10_000)]


class GiveBackCall(WireCall):
    max_bytes: ClassVar[int] = 4 * 2**20
    leases: Annotated[list[tuple[Count, Count]], Meta(max_length=MAX_HELD)]


class RoundOverCall(WireCall):
    number: Count
    wait_s: Seconds


class NewerCall(WireCall):
    have_version: Count | None
    wait_s: Seconds


class LeaseRewardsCall(WireCall):
    capacity: Annotated[int, Meta(ge=0, le=100_000)]
    wait_s: Seconds


class RewardBody(WireCall):
    value: float
    name: Name
    position: Annotated[int, Meta(ge=-1, le=2**31)]


class ResultBody(WireCall):
    """Result for one sample: the parts of its reward, or the reason why the reward failed."""

    rewards: Annotated[list[RewardBody], Meta(max_length=1000)] = []
    error: Annotated[str, Meta(max_length=10_000)] | None = None


class SubmitRewardsCall(WireCall):
    max_bytes: ClassVar[int] = 16 * 2**20
    ticket: Annotated[str, Meta(max_length=64)]
    results: Annotated[list[ResultBody], Meta(max_length=MAX_SAMPLES)]


class ReconcileCall(WireCall):
    step: Count
    version: Count | None
    host: Name = ""
    home: Name = ""
    from_scratch: bool = False


class PublishCall(WireCall):
    version: Version


class ClaimCall(WireCall):
    step: Count
    wait_s: Seconds


class CommitCall(WireCall):
    max_bytes: ClassVar[int] = 16 * 2**20
    step: Count
    version: Version
    audited: Annotated[list[Count], Meta(max_length=MAX_HELD)] = []
    compared: Annotated[list[ComparedSegment], Meta(max_length=MAX_COMPARED)] = []


class CheckpointedCall(WireCall):
    step: Count


class ReportCall(WireCall):
    max_bytes: ClassVar[int] = 2**20
    row: Annotated[dict[Name, Any], Meta(max_length=10_000)]


class IntroduceCall(WireCall):
    key: Digest
    """Public key that signs this trainer's manifests."""


class MissingCall(WireCall):
    max_bytes: ClassVar[int] = 8 * 2**20
    pieces: Annotated[list[Digest], Meta(max_length=100_000)]


class SourcesCall(WireCall):
    site: Name
    host: Annotated[str, Meta(max_length=64)] = ""
    """Address at which the worker serves pieces; "": the address from which it calls."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Port at which the worker serves pieces; 0: it serves none."""
    root_bytes_per_s: Rate | None = None


class Nothing(WireCall):
    """An empty body."""


class Welcome(msgspec.Struct, frozen=True):
    """Answer to `Join`."""

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
    """Key to send when fetching from this peer."""

    def __repr__(self) -> str:  # without the key, because peers may be logged
        return f"Peer(host={self.host!r}, port={self.port})"


class SourceList(msgspec.Struct, frozen=True):
    peers: list[Peer]
    guests: list[str]
    """Hashes of the keys with which peers may fetch pieces from this worker."""


class Missing(msgspec.Struct, frozen=True):
    pieces: list[str]


class WeightFile(msgspec.Struct, frozen=True):
    name: FileName
    num_bytes: int


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
    """Schema of an encoded `Trajectory`. Long fields are memory views, so nothing is copied before it is checked."""

    task: Count
    index: Count
    prompt: Annotated[memoryview, Meta(max_length=MAX_PROMPT_BYTES)]
    max_new_tokens: Count
    max_version_drop: Count
    end: End | None
    segments: Annotated[list[_SegmentBody], Meta(max_length=MAX_SEGMENTS)]
    episode: EpisodeRecord | None = None


def max_trajectory_bytes(max_new_tokens: int) -> int:
    """Returns the size in bytes of the largest valid encoding of a trajectory with `max_new_tokens` tokens."""
    per_token = 2 * 4 + MAX_ARRAY_BYTES
    num_segments = min(max_new_tokens, MAX_SEGMENTS)
    return MAX_PROMPT_BYTES + max_new_tokens * per_token + (num_segments + 1) * MAX_SEGMENT_BYTES + MAX_RECORD_BYTES


def trajectory(data: bytes) -> Trajectory:
    """Decodes a trajectory from untrusted bytes; raises `Malformed`, or `SegmentError` for inconsistent segments."""
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
    if body.episode is not None:
        if problem := record_problem(body.episode, made.num_tokens):
            raise Malformed(problem)
        made.episode = body.episode
    return made


def reward_result(body: ResultBody) -> RewardResult:
    """Returns the reward result that a judge sent as `body`; the coordinator must still validate it."""
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
        raise Malformed(f"{len(data)} bytes do not hold a whole number of {np.dtype(dtype)} values") from error


def _array(wire: Any) -> np.ndarray:
    try:
        dtype, shape, data = str(wire["dtype"]), wire["shape"], wire["data"]
        if DTYPE.fullmatch(dtype) is None:
            raise Malformed(f"its dtype is {dtype!r}; it must be one of little-endian numbers or of booleans")
        return array_from_wire(dtype, shape, data)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise Malformed(f"an array cannot be decoded: {error}") from error


# --- bytes ---


def _to_wire(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return array_to_wire(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"a value of type {type(value).__name__} cannot be encoded; this is a bug")


def _from_wire(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        return _array(value)
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"a value of type {kind.__name__} cannot be decoded; this is a bug")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_wire)
_DECODERS: dict[type, msgspec.msgpack.Decoder[Any]] = {}


def encode(value: Any) -> bytes:
    return _ENCODER.encode(value)


def decode(data: bytes, kind: type[T]) -> T:
    """Decodes `data` as a record of type `kind`; raises `Malformed`, which says where the error is."""
    decoder = _DECODERS.get(kind)
    if decoder is None:
        decoder = _DECODERS[kind] = msgspec.msgpack.Decoder(kind, dec_hook=_from_wire)
    try:
        found: T = decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"the body cannot be decoded as {kind.__name__.strip('_')}: {error}") from error
    return found
