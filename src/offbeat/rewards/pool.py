"""Scores samples (answers) in killable processes: a reward that hangs, raises or crashes affects only its own sample.

- Every sample has a wall-clock deadline. A sample that misses it gets the error `timeout`; its process is killed, and
  unanswered samples in the same message are judged again by another process.
- Several calls run at once. Samples are handed out in small messages. If there are enough processes, each reward leaves
  one process free for every other reward. So a slow reward does not delay a quick one.
- `close` leaves no process behind, and neither does a pool that is itself killed (see `guard`).
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import cloudpickle
import msgspec

from offbeat.errors import OffbeatError, UserError
from offbeat.rewards.process import ProcessOutcome, RewardLog, RewardProcess
from offbeat.rewards.wire import RewardAnswer, Setup
from offbeat.spelling import suggest
from offbeat.trajectory import Reward, reward_problem

OneReward = str | Callable[..., Any]
"""Name of a built-in reward, `module:function`, `file.py:function`, or a function."""
RewardSpec = OneReward | Mapping[str, OneReward]
"""A reward, or a mapping of names to rewards whose values are added up. Each reward of a mapping gives a part with its
name."""
START_S = 120.0
"""Time limit for the start of a process; a user's module may import a lot."""
MAX_PIECE = 64
"""Largest number of samples in one message to a process; an async function judges all of them concurrently."""
MAX_LOSSES = 3
"""A sample fails after this many processes died or hung with it, even if another sample may have been the cause."""


@dataclass(frozen=True)
class EpisodeView:
    """An episode as reward functions see it, each field as an argument of its name."""

    final: str
    """The model's last turn, without calls."""
    messages: Sequence[Mapping[str, str]]
    """The turns, with role `assistant`, and what came back, with role `tool` or `user`."""
    turns: int
    """Number of turns of the model."""
    state: Mapping[str, Any]
    """Facts about the end, as the environment gave them."""
    claims: Sequence[tuple[int, float, str]]
    """What the environment says was earned: (position, value, name)."""


@dataclass(frozen=True)
class RewardInput:
    """A sample to judge. A reward function receives the fields that its parameters name."""

    response: str
    answer: str | None = None
    prompt: str | Sequence[Mapping[str, Any]] = ""
    info: Mapping[str, Any] = field(default_factory=dict)
    tokens: Sequence[int] = ()
    """Token ids of the response."""
    episode: EpisodeView | msgspec.UnsetType = msgspec.UNSET
    """Unset: one answer, without tools or an environment."""


@dataclass(frozen=True)
class RewardResult:
    """A reward or an error: exactly one of `value` and `error` is None."""

    value: float | None = None
    """Sum of `rewards`, unweighted."""
    error: str | None = None
    """Message that begins with the kind of error: `timeout`, `raised`, `value`, `crash` or `start`."""
    rewards: tuple[Reward, ...] = ()


WRONG_VALUE = "value: "


def is_wrong_value(error: str) -> bool:
    """Whether `error` says that the function returned something other than a reward. The log has no traceback for
    it."""
    return error.startswith(WRONG_VALUE)


def without_kind(error: str) -> str:
    """Returns an error for people: without the prefix `value`, which only serves to count failures by kind."""
    return error.removeprefix(WRONG_VALUE)


NOT_APPLICABLE = RewardResult(error="value: the reward returned None: no reward applies to this answer")
WHOLE = "reward"
"""Name of the only part of a reward if the function returns one number."""
TRIAL = RewardInput(prompt="1+1=", response="2", answer="2")
"""Sample on which `check` tries a reward by default."""


@dataclass(eq=False)
class _Call:
    """A call of `score` in progress; `num_open` counts its samples that have no result yet."""

    done: asyncio.Future[None]
    results: list[RewardResult | None]
    num_open: int


@dataclass(eq=False)
class _Job:
    """One sample of a call of `score`, at `index` of the call's batch."""

    call: _Call
    index: int
    sample: RewardInput
    num_losses: int = 0
    alone: bool = False
    """Whether the sample must be judged alone, because a process died or hung while it had this sample."""


class RewardPool:
    """Scores samples in several killable processes. All methods must be called in one event loop."""

    def __init__(self, processes: int, timeout_s: float, rewards: Mapping[str, RewardSpec], log_path: Path):
        self.num_processes, self.log_path = processes, log_path
        self._names = list(rewards)
        self._sums = {name: tuple(spec) for name, spec in rewards.items() if isinstance(spec, Mapping)}
        """Names of the parts of each reward that is a sum of several."""
        each: dict[str, OneReward] = {}
        for name, spec in rewards.items():
            if isinstance(spec, Mapping):
                each |= {_part(name, part): own for part, own in spec.items()}
            else:
                each[name] = spec
        self._setup = Setup(
            timeout_s,
            named={name: spec for name, spec in each.items() if isinstance(spec, str)},
            pickled={name: _pickle(name, spec) for name, spec in each.items() if not isinstance(spec, str)},
        )
        self._log = RewardLog(log_path)
        self._queues: dict[str, deque[_Job]] = {name: deque() for name in each}
        self._num_running = Counter[str]()
        self._calls: set[_Call] = set()
        self._ready: list[RewardProcess] = []
        self._slots: list[asyncio.Task[None]] = []
        self._news = asyncio.Event()
        self._is_closed = False

    async def load(self) -> set[str]:
        """Loads every reward in a first process, unless a process is ready. Returns the names of the rewards that need
        an answer, that is, with a function whose parameter `answer` has no default."""
        if not self._ready:
            try:
                self._ready.append(await self._start())
            except UserError:
                raise
            except OffbeatError as error:
                raise UserError(f"{error}; see {self.log_path}") from error
        loaded = self._ready[0].rewards
        parts = {name: [_part(name, part) for part in self._sums.get(name, ())] or [name] for name in self._names}
        return {name for name in self._names if any(loaded[part].needs_answer for part in parts[name])}

    async def check(self, trials: Mapping[str, RewardInput] | None = None) -> dict[str, RewardResult]:
        """Loads every reward and tries it on one sample, to find errors before training. The sample is the entry of
        `trials` under the reward's name, or else `TRIAL`. Returns the result of each reward's trial."""
        await self.load()
        results: dict[str, RewardResult] = {}
        for name in self._names:
            (result,) = await self.score(name, [(trials or {}).get(name, TRIAL)])
            if result.error is not None:
                log = "" if is_wrong_value(result.error) else f"; see {self.log_path}"
                raise UserError(f"reward {name}: its trial failed: {without_kind(result.error)}{log}")
            results[name] = result
        return results

    @property
    def parts(self) -> set[str]:
        """Names of all parts of the rewards that are sums of several. The result of a trial may lack some of them,
        because a part may not apply to the trial's sample."""
        return {part for parts in self._sums.values() for part in parts}

    def move_log(self, path: Path) -> None:
        """Moves the log to another file, and continues it there."""
        self._log.move(path)
        self.log_path = path

    async def score(self, name: str, batch: Sequence[RewardInput]) -> list[RewardResult]:
        """Judges a batch with the reward `name`; returns the results in order. Raises only if the pool is closed or
        broken, or has no such reward."""
        if parts := self._sums.get(name, ()):
            columns = await asyncio.gather(*(self._score(_part(name, part), batch) for part in parts))
            results = [_sum(parts, row) for row in zip(*columns, strict=True)]
        else:
            results = await self._score(name, batch)
        return [result if result.rewards or result.error else NOT_APPLICABLE for result in results]

    async def _score(self, name: str, batch: Sequence[RewardInput]) -> list[RewardResult]:
        """Judges a batch with one reward function. A result with neither rewards nor an error means that the function
        does not apply to the sample."""
        if self._is_closed:
            raise OffbeatError("the reward pool is closed")
        if name not in self._queues:
            raise OffbeatError(f"the reward pool has no reward {name!r}, only {', '.join(self._names)}")
        if not batch:
            return []
        call = _Call(asyncio.get_running_loop().create_future(), [None] * len(batch), len(batch))
        self._calls.add(call)
        self._queues[name].extend(_Job(call, index, sample) for index, sample in enumerate(batch))
        self._wake()
        try:
            await call.done
        finally:
            self._calls.discard(call)
        return [result for result in call.results if result is not None]

    async def close(self) -> None:
        """Ends every process; calls in progress raise."""
        self._is_closed = True
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        await asyncio.gather(*(process.kill() for process in self._ready))
        self._ready.clear()
        self._give_up(OffbeatError("the reward pool was closed"))
        await asyncio.to_thread(self._log.close)

    async def _serve(self) -> None:
        process: RewardProcess | None = None
        try:
            while True:
                while not self._waiting():
                    self._news.clear()
                    await self._news.wait()
                try:  # before taking work, which others may do while a process starts
                    process = process or (self._ready.pop() if self._ready else await self._start())
                except OffbeatError as error:
                    for job in self._next_piece()[1]:
                        self._settle(job, RewardResult(error=f"start: {error}"))
                    continue
                name, jobs = self._next_piece()
                if jobs and not await self._judge(process, name, jobs):
                    process = None
        finally:
            if process:
                await process.kill()

    async def _start(self) -> RewardProcess:
        return await RewardProcess.start(self._setup, self._log, within_s=START_S)

    async def _judge(self, process: RewardProcess, name: str, jobs: Sequence[_Job]) -> bool:
        """Has a process judge the samples `jobs` with the reward `name`; returns whether the process survived."""
        arguments = process.rewards[name].arguments
        samples = [{argument: _plain(job.sample, argument) for argument in arguments} for job in jobs]
        self._num_running[name] += 1
        try:
            outcome = await process.judge(name, samples, lambda a: self._settle(jobs[a.index], _result(a)))
        finally:
            self._num_running[name] -= 1
            self._news.set()
        if outcome.unanswered:
            self._put_back(name, jobs, outcome)
        return outcome.error is None

    def _put_back(self, name: str, jobs: Sequence[_Job], outcome: ProcessOutcome) -> None:
        """Queues unanswered samples again, in order. A sample fails instead if it is the culprit, that is, if
        it brought the process down. It also fails after `MAX_LOSSES` lost processes for which no culprit was known."""
        if outcome.error is not None:
            self._log.write(f"reward {name} {outcome.error}\n")
        again = []
        for index in outcome.unanswered:
            job = jobs[index]
            if outcome.error is not None and outcome.culprit is None:
                job.alone, job.num_losses = True, job.num_losses + 1
            if outcome.error is not None and (index == outcome.culprit or job.num_losses == MAX_LOSSES):
                self._settle(job, RewardResult(error=outcome.error))
            else:
                again.append(job)
        self._queues[name].extendleft(reversed(again))

    def _next_piece(self) -> tuple[str, list[_Job]]:
        """Takes samples for one message from the queue of the waiting reward that occupies the fewest processes.
        Returns the reward's name ("" if none is waiting), and the samples, perhaps none."""
        name = min(self._waiting(), key=lambda name: self._num_running[name], default="")
        return name, self._take(name) if name else []

    def _waiting(self) -> list[str]:
        """Returns the names of rewards that have samples waiting and may occupy one more process."""
        most = max(1, self.num_processes - len(self._queues) + 1)
        return [name for name, queue in self._queues.items() if queue and self._num_running[name] < most]

    def _take(self, name: str) -> list[_Job]:
        """Takes the samples for one message from the queue of reward `name`. A sample that must be judged alone gets a
        message of its own. Drops samples whose call has already ended."""
        queue, jobs = self._queues[name], list[_Job]()
        size = min(MAX_PIECE, -(-len(queue) // self.num_processes))
        while queue and len(jobs) < size and not (jobs and queue[0].alone):
            job = queue.popleft()
            if job.call.done.done():
                continue
            jobs.append(job)
            if job.alone:
                break
        return jobs

    def _settle(self, job: _Job, result: RewardResult) -> None:
        call = job.call
        call.results[job.index] = result
        call.num_open -= 1
        if call.num_open == 0 and not call.done.done():
            call.done.set_result(None)

    def _wake(self) -> None:
        while len(self._slots) < self.num_processes:
            slot = asyncio.get_running_loop().create_task(self._serve())
            slot.add_done_callback(self._slot_ended)
            self._slots.append(slot)
        self._news.set()

    def _slot_ended(self, slot: asyncio.Task[None]) -> None:
        """Fails all calls if an asyncio task that serves a process ended by a bug, so that no caller waits forever."""
        if not slot.cancelled() and (error := slot.exception()):
            self._is_closed = True
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        for call in self._calls:
            if not call.done.done():
                call.done.set_exception(error)


def _part(name: str, part: str) -> str:
    """Returns the name under which the pool runs a part of the reward `name`."""
    return f"{name}/{part}"


def _sum(parts: Sequence[str], results: Sequence[RewardResult]) -> RewardResult:
    """Returns the sum of one sample's results, one for each of `parts`; an error if any of them failed."""
    for part, result in zip(parts, results, strict=True):
        if result.error is not None:
            return RewardResult(error=f"{result.error} (reward {part})")
    rewards = tuple(
        msgspec.structs.replace(reward, name=part) if reward.name == WHOLE else reward
        for part, result in zip(parts, results, strict=True)
        for reward in result.rewards
    )
    return RewardResult(sum(reward.value for reward in rewards), rewards=rewards)


def _pickle(name: str, function: Callable[..., Any]) -> bytes:
    try:
        return cloudpickle.dumps(function)
    except Exception as error:
        raise UserError(
            f"reward {name}: cannot be sent to a reward process ({error}); put the function in a file and name it as "
            "file.py:function"
        ) from error


def _plain(sample: RewardInput, argument: str) -> Any:
    if argument == "tokens":
        return [int(token) for token in sample.tokens]
    if argument == "info":
        return dict(sample.info)
    if argument == "prompt" and not isinstance(sample.prompt, str):
        return [dict(message) for message in sample.prompt]
    if argument in OF_EPISODES:
        view = sample.episode
        if isinstance(view, msgspec.UnsetType):
            view = EpisodeView(sample.response, [{"role": "assistant", "content": sample.response}], 1, {}, [])
        return getattr(view, argument)
    return getattr(sample, argument)


OF_EPISODES = tuple(one.name for one in fields(EpisodeView))


def _result(answer: RewardAnswer) -> RewardResult:
    if answer.parts is None:
        return RewardResult(error=answer.error)
    rewards = tuple(Reward(value, name, position) for value, name, position in answer.parts)
    if problem := reward_problem(rewards):
        return RewardResult(error=f"value: {problem}")
    return RewardResult(sum(reward.value for reward in rewards), rewards=rewards)


WINDOW = 512
"""Number of latest rewards that `FailureWatch` counts: a few steps of a small run, to notice a broken reward soon."""
MIN_COUNT = 64
"""Number of rewards to count before `FailureWatch` may stop a run, because three failures among ten may be chance. If
the window is smaller than this, it only has to be full."""
MAX_REASON_CHARS = 300
RAISED = re.compile(r"(raised: [\w.]+).*( \([^()]*:\d+\))", re.DOTALL)
"""Matches the error of a reward function that raised an exception. The groups are the exception's type, and the file
and line at the end."""
DETAIL = re.compile(r"'[^']*'|\"[^\"]*\"|\d+(\.\d+)?")
"""Matches what may differ from answer to answer in the text of any other error: quoted text and numbers."""


class FailureWatch:
    """Decides when so many rewards fail that a run should stop. A few failures are counted and left out of training; if
    more than `max_share` of the latest rewards failed, the training signal itself is unreliable."""

    def __init__(self, max_share: float, window: int = WINDOW, min_count: int = MIN_COUNT):
        assert window >= 1, f"window = {window}: must be 1 or more"
        self.max_share, self.min_count = max_share, min(min_count, window)
        self._latest: deque[str | None] = deque(maxlen=window)
        self.num_failed = 0

    def record(self, failed: bool, reason: str | None = None) -> None:
        """Counts one reward; `reason` is its error if it failed."""
        if len(self._latest) == self._latest.maxlen:
            self.num_failed -= self._latest[0] is not None
        self._latest.append((reason or "no reason given") if failed else None)
        self.num_failed += failed

    @property
    def share(self) -> float:
        """Share of failures among the latest rewards."""
        return self.num_failed / len(self._latest) if self._latest else 0.0

    def verdict(self) -> str | None:
        """Returns why the run should stop; None while it may go on."""
        count = len(self._latest)
        if count < self.min_count or self.share <= self.max_share:
            return None
        alike: dict[str, list[str]] = {}
        for reason in self._latest:
            if reason is not None:
                alike.setdefault(_kind_of(reason), []).append(reason)
        most = max(alike.values(), key=len)
        how = "with the reason" if len(set(most)) == 1 else "with reasons such as"
        return (
            f"{self.num_failed} of the latest {count} rewards failed ({self.share:.0%}; "
            f"reward.max_failure_share = {self.max_share:g}), {len(most)} of them {how}: {most[-1][:MAX_REASON_CHARS]}"
        )


def _kind_of(reason: str) -> str:
    """Returns a text that is equal for reasons that differ only in details, such as an answer that they quote. For a
    raised error, it is the error's type, file and line; else the reason without numbers and quoted text."""
    if raised := RAISED.match(reason):
        return " ".join(raised.groups())
    return DETAIL.sub("…", reason)


OVERLONG = "overlong"
"""Name of the reward part that penalises long answers."""


@dataclass(frozen=True)
class Shaping:
    """Weights of reward parts, and the penalty for long answers. Both are applied once, before a reward is stored, and
    are stored with it."""

    weights: Mapping[str, float] = field(default_factory=dict)
    """Weights by name of the part; 1 for parts that are not named."""
    max_new_tokens: int = 0
    overlong_tokens: int = 0
    """An answer loses reward if it is longer than `max_new_tokens` minus this number; 0: no penalty."""

    def weighted(self, rewards: Sequence[Reward]) -> tuple[Reward, ...]:
        """Returns the rewards with their weights set."""
        if not self.weights:
            return tuple(rewards)
        return tuple(msgspec.structs.replace(r, weight=float(self.weights.get(r.name, 1.0))) for r in rewards)

    def for_training(self, rewards: Sequence[Reward], num_tokens: int) -> tuple[Reward, ...]:
        """Returns the rewards with their weights set, and the length penalty, if there is one, as one more part."""
        if self.overlong_tokens:
            rewards = [*rewards, Reward(penalty(num_tokens, self.max_new_tokens, self.overlong_tokens), OVERLONG)]
        return self.weighted(rewards)

    @property
    def given_names(self) -> set[str]:
        """Names in `weights` except that of the length penalty; rewards must give parts with these names."""
        return self.weights.keys() - ({OVERLONG} if self.overlong_tokens else set())

    def check_names(self, names: Collection[str]) -> None:
        """Raises `UserError` for a weight whose part no reward gives, and for a part with the length penalty's name.
        `names` are the parts that rewards gave in a trial."""
        for name in sorted(self.given_names):
            if name not in names:
                raise UserError(
                    f"reward.weights.{name} = {self.weights[name]:g}: when the rewards were tried, none gave a part of "
                    f"that name; {suggest(name, sorted(names))}"
                )
        if self.overlong_tokens and OVERLONG in names:
            raise UserError(
                f"reward.overlong_tokens = {self.overlong_tokens}: a reward gives a part named {OVERLONG!r}, "
                "which is the name of the penalty for long answers; rename that part, or set reward.overlong_tokens = 0"
            )


def penalty(num_tokens: int, max_new_tokens: int, overlong_tokens: int) -> float:
    """Returns the reward for an answer's length: 0 up to `max_new_tokens - overlong_tokens`, then falling linearly to
    -1 at `max_new_tokens`."""
    too_long = min(num_tokens - (max_new_tokens - overlong_tokens), overlong_tokens)
    return -(too_long / overlong_tokens) if too_long > 0 else 0.0
