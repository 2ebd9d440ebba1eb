"""The data that all components exchange: sampling parameters, tasks, segments, trajectories and rewards.

A trajectory is a prompt and its ordered segments. Tokens are added only by `Trajectory.append`, which keeps these
invariants or raises `SegmentError` and changes nothing:

- each segment starts where the previous one ended, and no segment is empty;
- a `sampled` segment has one finite float32 log-prob <= 0 (but for rounding) per token, a version and a `kv_version` <=
  version; a `given` segment has none of these and is never trained on;
- every other array of a segment has a name and one row of numbers per token; the number of arrays and the size of their
  rows are limited;
- a segment's version may be lower than that of the sampled segment before it, but by at most `max_version_drop`;
- the response has at most `max_new_tokens` tokens, and no segment follows the end.

On the wire and on disk, trajectories are msgpack; `encode` and `decode` lose nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, Self

import msgspec
import numpy as np

from offbeat.errors import OffbeatError

LOGPROB_TOLERANCE = 1e-4
"""Largest log-prob accepted; above 0, because float32 softmax can round the probability 1 to slightly more."""
MAX_ARRAYS = 8
"""Largest number of named arrays in a segment."""
MAX_ARRAY_BYTES = 4096
"""Largest number of bytes per token in all arrays together. For comparison: the indices of 8 experts in each of 94
layers take 1,504 bytes; the 20 likeliest tokens with their log-probs take 160."""
ARRAY_NAME = "[a-z][a-z0-9_]{0,31}"
ARRAY_KINDS = "biuf"
"""numpy kinds that arrays may have: booleans, integers and floats, of at most 8 bytes each."""
MAX_REWARD = 1e6
"""Largest absolute reward; a reward of 1e200 would silently set the advantages of its group to 0."""


class SegmentError(OffbeatError, ValueError):
    """A segment does not fit its trajectory."""


class Origin(StrEnum):
    """Origin of a segment's tokens."""

    SAMPLED = "sampled"
    """Sampled by one worker from one version."""
    GIVEN = "given"
    """Written by an environment, tool or template: no log-probs, never trained on."""


class End(StrEnum):
    """Why a trajectory ended. An unfinished trajectory, called partial, has no end."""

    STOP = "stop"
    """By a stop token; in an episode with tools, by a turn without a call."""
    LENGTH = "length"
    """At `max_new_tokens`; in an episode, also in a turn that reached its own limit. The turn was not acted on."""
    ENVIRONMENT = "environment"
    """The environment said that the episode is over."""
    TURNS = "turns"
    """At the limit of turns."""
    TIME = "time"
    """At the time limit of the episode."""
    CALLS = "calls"
    """After too many bad calls in a row."""
    OVERFLOW = "overflow"
    """There was no room for the environment's reply."""


ANSWER_ENDS = (End.STOP, End.LENGTH)
"""Ends of a trajectory that is one answer. All others are for episodes."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters. `top_p`, `top_k` and `min_p` are for evaluation only; training refuses them."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()


class Claim(msgspec.Struct, frozen=True):
    """A value that an environment says was earned at a token position of the response; -1 is the last token. It was
    made on a worker, so it is stored as a claim and judged like an answer."""

    value: float
    name: str = "environment"
    position: int = -1


class ToolCall(msgspec.Struct, frozen=True):
    """A call that a turn made: number of the turn, name of the tool, milliseconds, and `status`: that of
    `environments.protocol.CallStatus`, "cut" at its time limit, or "raised"."""

    turn: int
    tool: str
    status: str
    ms: float = 0.0


class EpisodeRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a worker notes about an episode beside its tokens."""

    num_turns: int = 0
    """Number of turns that were handed to the environment."""
    wait_ms: float = 0.0
    """Time for which the episode waited for its environment."""
    claims: tuple[Claim, ...] = ()
    calls: tuple[ToolCall, ...] = ()
    num_bad: int = 0
    """Number of mistakes that the model has been told of since its last turn without one."""
    state: dict[str, Any] = {}
    """Facts about the end, as the environment gave them."""


MAX_RECORD_BYTES = 256 * 1024
"""Largest encoded size of an `EpisodeRecord`."""


@dataclass(frozen=True)
class EpisodeStart:
    """How the environment of a task begins: the name of the task's source, the problem, and the seed that all members
    of the group share."""

    source: str
    problem: Mapping[str, Any]
    seed: int


@dataclass(frozen=True, eq=False)
class Segment:
    """Consecutive response tokens of one origin; the first has position `start` in the response. `version` sampled the
    tokens; `kv_version` is the oldest version whose keys and values they attended to."""

    start: int
    tokens: np.ndarray
    origin: Origin = Origin.SAMPLED
    logprobs: np.ndarray | None = None
    version: int | None = None
    kv_version: int | None = None
    worker: str = ""
    engine: str = ""
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", np.asarray(self.tokens, dtype=np.int32))
        if self.logprobs is not None:
            object.__setattr__(self, "logprobs", np.asarray(self.logprobs, dtype=np.float32))

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Segment) and _segment_to_wire(self) == _segment_to_wire(other)


@dataclass(eq=False)
class Trajectory:
    """One answer to one task. `index` is its number among the task's trajectories; currently a task has only one."""

    task: int
    prompt: np.ndarray
    max_new_tokens: int
    index: int = 0
    max_version_drop: int = 0
    segments: tuple[Segment, ...] = ()
    end: End | None = None
    episode: EpisodeRecord | None = None
    """None: one answer to a prompt, without tools or an environment."""

    def __post_init__(self) -> None:
        self.prompt = np.asarray(self.prompt, dtype=np.int32)

    def append(self, segment: Segment, end: End | None = None) -> None:
        """Adds a segment. With the last segment, `end` must say why the trajectory ends."""
        self._check(segment)
        self.segments = (*self.segments, segment)
        self.end = end
        self.__dict__.pop("tokens", None)

    def finish(self, end: End) -> None:
        """Ends the trajectory without further tokens, for example if it already has `max_new_tokens`."""
        if self.end is not None:
            raise SegmentError(f'the trajectory of task {self.task} has already ended: its end is "{self.end.value}"')
        self.end = end

    def _check(self, segment: Segment) -> None:
        def refuse(why: str) -> SegmentError:
            return SegmentError(f"task {self.task}, segment at position {segment.start}: {why}")

        count = len(segment.tokens)
        if self.end is not None:
            raise refuse(f'the trajectory has already ended: its end is "{self.end.value}"')
        if segment.tokens.ndim != 1 or count == 0:
            raise refuse(
                f"its tokens have shape {segment.tokens.shape}; they must have one dimension and at least one token"
            )
        if segment.start != self.num_tokens:
            raise refuse(f"it must start at {self.num_tokens}, where the previous segment ended")
        if segment.end > self.max_new_tokens:
            raise refuse(f"it ends at {segment.end}, past max_new_tokens = {self.max_new_tokens}")
        if int(segment.tokens.min()) < 0:
            raise refuse(f"token {int(segment.tokens.min())} is negative")
        if segment.arrays and (problem := _arrays_problem(segment.arrays, count)):
            raise refuse(problem)
        problem = self._sampled_problem(segment) if segment.origin is Origin.SAMPLED else _given_problem(segment)
        if problem:
            raise refuse(problem)

    def _sampled_problem(self, segment: Segment) -> str | None:
        logprobs, version, kv_version = segment.logprobs, segment.version, segment.kv_version
        if logprobs is None or logprobs.shape != segment.tokens.shape:
            have = "no" if logprobs is None else str(len(logprobs))
            return f"it has {have} log-probs for {len(segment.tokens)} tokens; each sampled token needs one"
        if not np.isfinite(logprobs).all():
            return "one of its log-probs is not finite"
        if float(logprobs.max()) > LOGPROB_TOLERANCE:
            return f"log-prob {float(logprobs.max()):.4g} is positive; log-probs must be at most 0"
        if version is None or kv_version is None:
            return f"sampled tokens need a version and a kv_version, but these are {version} and {kv_version}"
        if kv_version > version:
            return f"kv_version {kv_version} is newer than version {version}"
        before = next((s.version for s in reversed(self.segments) if s.version is not None), version)
        if before - version > self.max_version_drop:
            return (
                f"its version is {version}, but the sampled segment before it has version {before}; it may be lower by "
                f"at most {self.max_version_drop} (max_version_drop)"
            )
        return None

    @property
    def num_tokens(self) -> int:
        return self.segments[-1].end if self.segments else 0

    @property
    def is_partial(self) -> bool:
        return self.end is None

    @cached_property
    def tokens(self) -> np.ndarray:
        """Token ids of the response."""
        return _concatenate([s.tokens for s in self.segments], np.int32)

    @property
    def logprobs(self) -> np.ndarray:
        """Log-prob of each response token under the version that sampled it; 0 for given tokens."""
        zeros = [s.logprobs if s.logprobs is not None else np.zeros(len(s.tokens), np.float32) for s in self.segments]
        return _concatenate(zeros, np.float32)

    @property
    def sampled_mask(self) -> np.ndarray:
        """True for each sampled response token; only these may be trained on."""
        return _concatenate([np.full(len(s.tokens), s.origin is Origin.SAMPLED) for s in self.segments], np.bool_)

    @property
    def versions(self) -> np.ndarray:
        """Version that sampled each response token; -1 for given tokens."""
        runs = [np.full(len(s.tokens), -1 if s.version is None else s.version) for s in self.segments]
        return _concatenate(runs, np.int64)

    def encode(self) -> bytes:
        fields = {
            "task": self.task,
            "index": self.index,
            "prompt": self.prompt.tobytes(),
            "max_new_tokens": self.max_new_tokens,
            "max_version_drop": self.max_version_drop,
            "end": self.end,
            "segments": [_segment_to_wire(s) for s in self.segments],
        }
        if self.episode is not None:  # left out of an answer's bytes, which are those of earlier releases
            fields["episode"] = self.episode
        return _ENCODER.encode(fields)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decodes a trajectory from untrusted bytes: its segments are checked by `append`."""
        found = cls.restore(data)
        segments, end = found.segments, found.end
        found.segments, found.end = (), None
        for segment in segments:
            found.append(segment)
        if end is not None:
            found.finish(end)
        return found

    @classmethod
    def restore(cls, data: bytes) -> Self:
        """Decodes a trajectory from trusted bytes without checks, several times as fast as `decode`."""
        wire = _DECODER.decode(data)
        found = object.__new__(cls)  # skips checks and conversions, as for segments
        found.__dict__.update(
            task=wire.task,
            prompt=np.frombuffer(wire.prompt, _INT32),
            max_new_tokens=wire.max_new_tokens,
            index=wire.index,
            max_version_drop=wire.max_version_drop,
            segments=tuple([_segment_from_wire(segment) for segment in wire.segments]),
            end=wire.end,
            episode=wire.episode,
        )
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trajectory) and self.encode() == other.encode()


def _given_problem(segment: Segment) -> str | None:
    if segment.logprobs is not None or segment.version is not None or segment.kv_version is not None:
        return "given tokens must have no log-probs, version or kv_version"
    return None


def _arrays_problem(arrays: Mapping[str, np.ndarray], count: int) -> str | None:
    """Returns why a segment of `count` tokens cannot have these arrays; None if it can."""
    if len(arrays) > MAX_ARRAYS:
        return f"it has {len(arrays)} arrays; the limit is {MAX_ARRAYS}"
    for name, array in arrays.items():
        if re.fullmatch(ARRAY_NAME, name) is None:
            return f"array name {name[:40]!r}: must be up to 32 lower-case letters, digits and '_', a letter first"
        if array.dtype.kind not in ARRAY_KINDS or array.itemsize > 8 or array.dtype.str.startswith(">"):
            return (
                f"array {name!r} has dtype {array.dtype.str[:20]}; it must hold little-endian numbers of up to 8 bytes"
            )
        if array.ndim == 0 or len(array) != count:
            return (
                f"array {name!r} has {len(array) if array.ndim else 'no'} rows for {count} tokens; each token needs one"
            )
    num_bytes = sum(array.nbytes for array in arrays.values())
    if num_bytes > MAX_ARRAY_BYTES * count:
        return f"its arrays take {num_bytes} bytes for {count} tokens; the limit is {MAX_ARRAY_BYTES} bytes per token"
    return None


def _concatenate(parts: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)


def _segment_to_wire(segment: Segment) -> dict[str, Any]:
    logprobs, arrays = segment.logprobs, segment.arrays
    return {
        "start": segment.start,
        "origin": segment.origin,
        "tokens": segment.tokens.tobytes(),
        "logprobs": None if logprobs is None else logprobs.tobytes(),
        "version": segment.version,
        "kv_version": segment.kv_version,
        "worker": segment.worker,
        "engine": segment.engine,
        "arrays": {name: array_to_wire(array) for name, array in arrays.items()} if arrays else {},
    }


def array_to_wire(array: np.ndarray) -> dict[str, Any]:
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": array.tobytes()}


def array_from_wire(dtype: str, shape: Sequence[int], data: Any) -> np.ndarray:
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape)


class _ArrayWire(msgspec.Struct):
    dtype: str
    shape: list[int]
    data: bytes


class _SegmentWire(msgspec.Struct):
    """A segment as it is encoded in msgpack, with arrays as raw bytes."""

    start: int
    origin: Origin
    tokens: bytes
    logprobs: bytes | None
    version: int | None
    kv_version: int | None
    worker: str
    engine: str
    arrays: dict[str, _ArrayWire]


class _TrajectoryWire(msgspec.Struct):
    task: int
    index: int
    prompt: bytes
    max_new_tokens: int
    max_version_drop: int
    end: End | None
    segments: list[_SegmentWire]
    episode: EpisodeRecord | None = None


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_TrajectoryWire)
_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)


def _segment_from_wire(wire: _SegmentWire) -> Segment:
    logprobs, arrays = wire.logprobs, wire.arrays
    segment = object.__new__(Segment)  # skips __post_init__: the arrays have the right types
    segment.__dict__.update(
        start=wire.start,
        tokens=np.frombuffer(wire.tokens, _INT32),
        origin=wire.origin,
        logprobs=None if logprobs is None else np.frombuffer(logprobs, _FLOAT32),
        version=wire.version,
        kv_version=wire.kv_version,
        worker=wire.worker,
        engine=wire.engine,
        arrays={name: array_from_wire(array.dtype, array.shape, array.data) for name, array in arrays.items()}
        if arrays
        else {},
    )
    return segment


@dataclass(frozen=True)
class Task:
    """A prompt that needs one trajectory. `prefix` is an unfinished trajectory to continue; None: start from the
    prompt. Only the version `require_version` may generate tokens for this task; None: any version."""

    id: int
    group: int
    prompt: np.ndarray
    seed: int
    sampling: Sampling
    require_version: int | None = None
    prefix: Trajectory | None = None
    fence: int = 0
    """Number of leases of the task so far; a submission must name the fence of its lease."""
    episode: EpisodeStart | msgspec.UnsetType = msgspec.UNSET
    """Unset: the task wants one answer, without tools or an environment. Then nothing of it crosses the wire."""

    def new_trajectory(self, max_version_drop: int = 0) -> Trajectory:
        return self.prefix or Trajectory(
            task=self.id,
            prompt=self.prompt,
            max_new_tokens=self.sampling.max_new_tokens,
            max_version_drop=max_version_drop,
            episode=None if self.episode is msgspec.UNSET else EpisodeRecord(),
        )


class Reward(msgspec.Struct, frozen=True):
    """A value that an answer earned at a token position of the response; -1 is the last token. `weight` scales the
    value."""

    value: float
    name: str = "reward"
    position: int = -1
    weight: float = 1.0


def record_problem(record: EpisodeRecord, num_tokens: int) -> str | None:
    """Returns why the record of an episode with `num_tokens` response tokens cannot be stored; None if it can."""
    if (size := len(msgspec.msgpack.encode(record))) > MAX_RECORD_BYTES:
        return f"its notes take {size} bytes; allowed {MAX_RECORD_BYTES}"
    for claim in record.claims:
        if not abs(claim.value) <= MAX_REWARD:
            return f"its claim {claim.name[:40]!r} is {_too_large(claim.value)}"
        if not -1 <= claim.position < num_tokens:
            return f"its claim {claim.name[:40]!r} is at position {claim.position} of {num_tokens} tokens"
    if min(record.num_turns, record.num_bad) < 0 or not 0 <= record.wait_ms < float("inf"):
        return f"its notes count {record.num_turns} turns and {record.wait_ms} ms"
    return None


def turns_of(trajectory: Trajectory, stop_token_ids: Collection[int]) -> list[tuple[int, int]]:
    """Returns the first and the last position, plus one, of each turn of the model: sampled tokens up to a stop token.
    The last turn may be unfinished."""
    turns: list[tuple[int, int]] = []
    first: int | None = None
    for segment in trajectory.segments:
        if segment.origin is Origin.GIVEN:
            continue
        for position in range(segment.start, segment.end):
            first = position if first is None else first
            if int(segment.tokens[position - segment.start]) in stop_token_ids:
                turns.append((first, position + 1))
                first = None
    if first is not None:
        turns.append((first, trajectory.num_tokens))
    return turns


def total(rewards: Sequence[Reward]) -> float:
    """Returns the weighted sum of rewards."""
    return float(sum(reward.weight * reward.value for reward in rewards))


def reward_problem(rewards: Sequence[Reward]) -> str | None:
    """Returns why rewards cannot be trained on (one is not finite or is too large); None if they can."""
    for reward in rewards:
        if not abs(reward.value) <= MAX_REWARD:
            return f"{reward.name!r} is {_too_large(reward.value)}"
    return None


def total_problem(rewards: Sequence[Reward]) -> str | None:
    """Returns why rewards cannot be trained on, like `reward_problem`, but also checks their weighted sum."""
    earned = total(rewards)
    return reward_problem(rewards) or (
        None if abs(earned) <= MAX_REWARD else f"the weighted sum is {_too_large(earned)}"
    )


def _too_large(value: float) -> str:
    return f"{float(value)!r}; it must be -{MAX_REWARD:g} to {MAX_REWARD:g}"
