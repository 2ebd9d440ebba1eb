"""Rewards as a separate stage: samples wait in one bounded queue, and judges pull from it at their own pace.

A sample is a finished trajectory without a reward. Judges compute rewards: the processes of the local pool, and remote
workers with the reward role. A slow judge delays only the trainer, never an engine: samples that do not fit into the
queue wait in the ledger. A reward is acknowledged once it is stored. Samples that a judge held when the coordinator
died are still unscored in the ledger, and are judged again.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import UNSET, UnsetType

from offbeat.client.protocol import RewardLease
from offbeat.coordinator.busy_times import BusyTimes
from offbeat.errors import RunStopped, UserError
from offbeat.ledger.errors import Fenced, Forbidden, Refused, Unknown
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import Purpose, Scored, Scores, Unscored
from offbeat.rewards.pool import EpisodeView, FailureWatch, RewardInput, RewardPool, RewardResult, RewardSpec, Shaping
from offbeat.rewards.verifiers import LOADERS
from offbeat.trajectory import EpisodeRecord, Reward, Trajectory, reward_problem, total_problem, turns_of
from offbeat.waiting import BackgroundTasks, Notifier


@dataclass(frozen=True)
class RewardBatch:
    """Samples leased together to a judge, which computes their rewards with the function `reward`; `ticket` is the id
    of this lease."""

    ticket: str
    judge: str
    reward: str
    samples: tuple[Unscored, ...]
    deadline_s: float | None
    """Time on the monotonic clock at which the samples go back to the queue; None for the local pool, which enforces
    its own timeouts."""


class PendingRewards:
    """Samples that wait for a reward, and samples that judges hold. No I/O; the clock is injected.

    A judge leases a batch of samples under a ticket (id). A batch that is not answered in time, or whose judge leaves,
    goes back to the front of the queue, and its ticket expires. Guarantees: an added sample either waits, is leased
    under exactly one ticket, or was answered; it is answered once. At most `max_samples` are waiting or leased, if
    callers of `add` respect `room`. Tickets that another coordinator process issued are rejected.
    """

    def __init__(self, max_samples: int, sample_s: float, slack_s: float, clock: Callable[[], float]):
        """A judge has `sample_s` seconds for each sample that it holds, plus `slack_s`, to answer a new batch."""
        self.max_samples, self.sample_s, self.slack_s, self._clock = max_samples, sample_s, slack_s, clock
        self._waiting: dict[str, deque[Unscored]] = {}
        self._out: dict[int, RewardBatch] = {}
        self._by_judge = Counter[str]()
        self._by_reward = Counter[str]()
        self._num_issued = 0
        self._name = secrets.token_hex(8)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def room(self) -> int:
        """Number of samples that may be added now."""
        return self.max_samples - self.num_waiting - self._by_judge.total()

    @property
    def rewards(self) -> list[str]:
        """Names of the reward functions for which samples wait."""
        return [reward for reward, samples in self._waiting.items() if samples]

    @property
    def held(self) -> dict[str, int]:
        """Number of leased samples by judge."""
        return dict(self._by_judge)

    def held_of(self, judge: str, reward: str) -> int:
        return sum(len(p.samples) for p in self._out.values() if (p.judge, p.reward) == (judge, reward))

    def add(self, samples: Sequence[Unscored]) -> None:
        for sample in samples:
            self._waiting.setdefault(sample.reward, deque()).append(sample)

    def lease(self, judge: str, capacity: int, rewards: Collection[str], *, timed: bool = True) -> RewardBatch | None:
        """Leases up to `capacity` waiting samples to `judge`, all for one reward function: the one of `rewards`
        with the fewest leased samples. Returns None if no sample waits for any of `rewards`. If not `timed`, the batch
        has no deadline."""
        ready = [reward for reward in self.rewards if reward in rewards]
        if not ready or capacity < 1:
            return None
        reward = min(ready, key=lambda reward: (self._by_reward[reward], self._waiting[reward][0].seq))
        queue = self._waiting[reward]
        samples = tuple(queue.popleft() for _ in range(min(capacity, len(queue))))
        self._num_issued += 1
        self._by_judge[judge] += len(samples)
        self._by_reward[reward] += len(samples)
        # Time for all samples of this judge: one with a single process judges the new ones last.
        ttl_s = self._by_judge[judge] * self.sample_s + self.slack_s
        deadline_s = self._clock() + ttl_s if timed else None
        batch = RewardBatch(f"{self._name}-{self._num_issued}", judge, reward, samples, deadline_s)
        self._out[self._num_issued] = batch
        return batch

    def find(self, judge: str, ticket: str) -> RewardBatch:
        """Returns the batch that `judge` holds under `ticket`; raises if it holds none under this ticket."""
        number = self._number(ticket)
        batch = self._out.get(number)
        if batch is None:
            raise Fenced(
                f"reward ticket {ticket} is no longer valid: its samples were already answered, or went back to the "
                "queue"
            )
        if batch.judge != judge:
            raise Forbidden(f"reward ticket {ticket} was issued to another judge, not to {judge}")
        return batch

    def answer(self, judge: str, ticket: str) -> RewardBatch:
        """Ends a ticket whose samples have been answered; returns its batch."""
        self.find(judge, ticket)
        return self._end(self._number(ticket))

    def leave(self, judge: str) -> int:
        """Requeues the samples that `judge` holds; returns their number."""
        return self._take_back([number for number, batch in self._out.items() if batch.judge == judge])

    def expire(self) -> int:
        """Requeues the samples of overdue batches; returns their number."""
        now_s = self._clock()
        due = [n for n, batch in self._out.items() if batch.deadline_s is not None and batch.deadline_s <= now_s]
        return self._take_back(due)

    def next_deadline_s(self) -> float | None:
        """Returns the earliest deadline of all leased batches, as a time on the clock; None if no batch has one."""
        return min((p.deadline_s for p in self._out.values() if p.deadline_s is not None), default=None)

    def _number(self, ticket: str) -> int:
        name, _, digits = ticket.partition("-")
        known = name == self._name and digits.isascii() and digits.isdecimal() and len(digits) < 20
        if not known or not 1 <= int(digits) <= self._num_issued:
            raise Unknown(
                f"reward ticket {ticket[:64]!r} was never issued, or was issued before the coordinator restarted"
            )
        return int(digits)

    def _end(self, number: int) -> RewardBatch:
        batch = self._out.pop(number)
        self._by_judge[batch.judge] -= len(batch.samples)
        if not self._by_judge[batch.judge]:
            del self._by_judge[batch.judge]  # otherwise the map would grow with every judge that ever joined
        self._by_reward[batch.reward] -= len(batch.samples)
        return batch

    def _take_back(self, numbers: Sequence[int]) -> int:
        """Puts batches, given by ticket number, back at the front of the queue in their old order; returns their number
        of samples."""
        num_samples = 0
        for number in sorted(numbers, reverse=True):
            batch = self._end(number)
            self._waiting[batch.reward].extendleft(reversed(batch.samples))
            num_samples += len(batch.samples)
        return num_samples


class Scorer:
    """Turns trajectories into inputs of reward functions, and their results into scores for the ledger.

    A reward function may return several named parts, which are stored with their weights. A reward that failed is
    stored as a failure with its reason, never as a zero. If too large a share of the latest rewards failed, the run
    stops instead of training on the others.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[np.ndarray]], list[str]],
        watch: FailureWatch,
        log_path: Path,
        shaping: Shaping | None = None,
        untried: Collection[str] = (),
    ):
        """`decode` turns the token ids of answers into texts. `watch` counts successes and failures. `log_path` is the
        log file that errors name. `untried` are the names of reward parts that have a weight in the configuration, if
        no trial has checked that they occur; `take_unseen` returns those that no reward contains."""
        self.decode, self.watch, self.log_path, self.shaping = decode, watch, log_path, shaping or Shaping()
        self.num_failed = 0
        self._unseen, self._has_seen_some = set(untried), False

    def inputs(self, samples: Sequence[Unscored]) -> list[RewardInput]:
        return inputs_of(samples, self.decode)

    def scored(self, samples: Sequence[Unscored], results: Sequence[RewardResult]) -> list[Scored]:
        """Returns, for each sample, its rewards or the reason why they failed. Counts successes and failures for
        `stop_if_failing`."""
        scored = []
        for sample, result in zip(samples, results, strict=True):
            rewards = self._shaped(sample, result.rewards) if result.error is None else ()
            error = result.error
            if problem := total_problem(rewards):  # valid parts may still have an invalid weighted sum
                error = f"value: {problem}"
            if error is None:
                self.watch.record(failed=False)
                scored.append(Scored(sample.task, rewards))
            else:
                self.failed(error)
                scored.append(Scored(sample.task, error=error))
        return scored

    def _shaped(self, sample: Unscored, rewards: Sequence[Reward]) -> Sequence[Reward]:
        self._has_seen_some = True
        self._unseen -= {reward.name for reward in rewards}
        if sample.purpose is Purpose.TRAIN:
            return self.shaping.for_training(rewards, sample.num_sampled)
        return self.shaping.weighted(rewards)

    def take_unseen(self) -> list[str]:
        """Returns the names of the reward parts that have a configured weight, but that no reward has contained yet.
        Later calls do not return these names again. Empty before the first reward."""
        if not self._has_seen_some:
            return []
        unseen, self._unseen = sorted(self._unseen), set()
        return unseen

    def failed(self, reason: str) -> None:
        """Counts a sample whose reward failed, with the `reason`."""
        self.num_failed += 1
        self.watch.record(failed=True, reason=reason)

    def stop_if_failing(self) -> None:
        """Raises `RunStopped` if too many of the latest rewards failed."""
        if reason := self.watch.verdict():
            raise RunStopped(f"{reason}; correct the cause (see {self.log_path}), then resume the run")


def inputs_of(samples: Sequence[Unscored], decode: Callable[[Sequence[np.ndarray]], list[str]]) -> list[RewardInput]:
    """Returns samples as reward functions get them."""
    texts = decode([sample.response_tokens for sample in samples])
    inputs = []
    for sample, text in zip(samples, texts, strict=True):
        view: EpisodeView | UnsetType = UNSET
        if sample.trajectory is not None:
            view = view_of(sample.trajectory, sample.stop_token_ids, decode)
        inputs.append(
            RewardInput(
                prompt=sample.problem["prompt"],
                response=view.final if not isinstance(view, UnsetType) and sample.reward in LOADERS else text,
                answer=sample.problem["answer"],
                info=sample.problem["info"],
                tokens=sample.response_tokens.tolist(),
                episode=view,
            )
        )
    return inputs


def view_of(
    trajectory: Trajectory, stop_token_ids: Collection[int], decode: Callable[[Sequence[np.ndarray]], list[str]]
) -> EpisodeView:
    """Returns an episode as reward functions see it."""
    record = trajectory.episode or EpisodeRecord()
    with_calls = {call.turn for call in record.calls}
    spans: list[tuple[str, int, int]] = []
    at = 0
    for number, (first, last) in enumerate(turns_of(trajectory, stop_token_ids)):
        if first > at:
            spans.append(("tool" if number - 1 in with_calls else "user", at, first))
        spans.append(("assistant", first, last))
        at = last
    if trajectory.num_tokens > at:
        spans.append(("user", at, trajectory.num_tokens))
    texts = decode([trajectory.tokens[first:last] for _, first, last in spans])
    messages = [{"role": role, "content": text} for (role, _, _), text in zip(spans, texts, strict=True)]
    own = [message["content"] for message in messages if message["role"] == "assistant"]
    claims = [(claim.position, claim.value, claim.name) for claim in record.claims]
    return EpisodeView(own[-1] if own else "", messages, len(own), record.state, claims)


def admissible(sample: Unscored, result: RewardResult) -> RewardResult:
    """Returns `result` if it is valid, else a failed result: a remote judge may send anything."""
    if result.error is not None:
        return result
    num_tokens = len(sample.response_tokens)
    if problem := reward_problem(result.rewards):
        return RewardResult(error=f"value: the reward {problem}")
    for reward in result.rewards:
        if not -1 <= reward.position < num_tokens:
            place = f"at position {reward.position}, outside its answer of {num_tokens} tokens"
            return RewardResult(error=f"value: the reward {reward.name!r} is {place}")
    return result if result.rewards else RewardResult(error="value: the judge sent no reward")


MAX_SAMPLES = 4096
"""Largest number of samples waiting or leased, all with their tokens in memory."""
LARGE, SMALL = 64, 8
"""Samples per batch of the local pool: normally `LARGE`, to save messages; `SMALL` while remote judges are present, so
that samples are left for them."""
LOCAL = ""
"""Judge name of the local pool; no worker can have this name."""
RESTART_S = 2.0
"""Seconds that replacing a hung reward process may take, added to reward.timeout_s for each sample that a judge
holds."""
SLACK_S = 20.0
"""Extra seconds per batch, for the network and for a judge that must first import the reward function."""
SILENT_S = 30.0
"""A remote judge that makes no call for this time loses its samples, even before their deadline."""
PRESENT_S = 60.0
"""A judge without samples that makes no call for this time counts as gone."""
MAX_SLEEP_S = 1.0


class RewardQueue:
    """Gives judges unscored samples from the ledger and stores the rewards; used only on the coordinator's event
    loop."""

    def __init__(
        self,
        scorer: Scorer,
        pool: RewardPool,
        rewards: Mapping[str, RewardSpec],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.scorer, self.pool, self.timeout_s, self._clock = scorer, pool, timeout_s, clock
        self.pending = PendingRewards(MAX_SAMPLES, timeout_s + RESTART_S, SLACK_S, clock)
        self._specs = {name: spec for name, spec in rewards.items() if isinstance(spec, str)}
        self._stay_here = sorted(rewards.keys() - self._specs.keys())
        if self._stay_here and not pool.num_processes:
            raise UserError(f"reward.processes = 0: it must be at least 1, because {_cannot_leave(self._stay_here)}")
        self._feed_now, self._store_now = asyncio.Event(), asyncio.Event()
        self._waiting = Notifier()
        self.busy = BusyTimes("reward")
        self._heard: dict[str, float] = {}
        """Time of each remote judge's last call."""
        self._answers: list[tuple[list[Scored], asyncio.Future[None]]] = []
        self._last_seq = 0
        self._is_full = False
        """Whether the ledger may hold unscored samples for which the queue had no room."""
        self._is_over, self._interrupted = False, ""

    def start(
        self,
        ledger: Ledger,
        call: Callable[..., Awaitable[Any]],
        background: BackgroundTasks,
        stored: Notifier,
        on_dropped: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts to compute rewards for the ledger's unscored trajectories. `call` runs a function on the ledger's
        thread. Notifies `stored` after each commit of rewards, and calls `on_dropped` if groups were dropped, so that
        other groups can be drawn."""
        self._background, self._stored, self._on_dropped = background, stored, on_dropped
        background.spawn(self._feed(ledger, call))
        background.spawn(self._store(ledger, call))
        background.spawn(self._expire())

    def arrived(self) -> None:
        """Wakes the queue, because a trajectory was stored in the ledger."""
        self._feed_now.set()

    def end(self, interrupted: str = "") -> None:
        """Ends the run for judges: the answer to every waiting or later `lease` call says that the run is over.
        `interrupted` says how the run ended before its last step; "": it has finished."""
        self._is_over, self._interrupted = True, interrupted
        self._waiting.notify()

    # --- remote judges ---

    async def lease(self, judge: str, capacity: int, wait_s: float) -> RewardLease:
        """Leases up to `capacity` samples, all for one reward function, to `judge` as soon as any wait. Returns an
        empty lease after `wait_s` seconds, or at once if `capacity` is 0."""
        if self._stay_here and not self._specs:
            raise Refused(f"{_cannot_leave(self._stay_here)}; put it in a file and name it as file.py:function")
        self._heard[judge] = self._clock()

        async def check() -> RewardLease | None:
            if self._is_over:
                return RewardLease(is_over=True, interrupted=self._interrupted)
            batch = self.pending.lease(judge, capacity, self._specs)
            if batch is not None:
                self.busy.got_work(_track(judge))
                inputs = tuple(self.scorer.inputs(batch.samples))
                return RewardLease(batch.ticket, self._specs[batch.reward], inputs, self.timeout_s, SILENT_S)
            return None if capacity else RewardLease(ttl_s=SILENT_S)

        return await self._waiting.first(check, time.monotonic() + wait_s) or RewardLease(ttl_s=SILENT_S)

    async def submit(self, judge: str, ticket: str, results: Sequence[RewardResult]) -> None:
        """Stores a judge's results for the samples of `ticket` and returns once they are on disk. If a result is
        invalid, it is stored as failed, and `Refused` is raised."""
        self._heard[judge] = self._clock()
        samples = self.pending.find(judge, ticket).samples
        if len(results) != len(samples):
            raise Refused(f"reward ticket {ticket} has {len(samples)} samples, but {len(results)} results were sent")
        found = [admissible(sample, result) for sample, result in zip(samples, results, strict=True)]
        await self._answer(judge, ticket, found)
        for index, (sent, accepted) in enumerate(zip(results, found, strict=True)):
            if accepted is not sent:
                raise Refused(f"reward ticket {ticket}: result {index} is stored as failed: {accepted.error}")

    def leave(self, judge: str) -> None:
        """Requeues the samples that a judge holds."""
        self._heard.pop(judge, None)
        if self.pending.leave(judge):
            self._hand_out()
        self.busy.left(_track(judge))

    def forget_silent(self) -> None:
        """Forgets judges that hold no samples and made no call for `PRESENT_S` seconds."""
        here = self.present()
        for judge in self._heard.keys() - here:
            self.busy.left(_track(judge))
        self._heard = {judge: heard_s for judge, heard_s in self._heard.items() if judge in here}

    def present(self, within_s: float = PRESENT_S) -> list[str]:
        """Returns the remote judges that hold samples or made a call within the last `within_s` seconds."""
        since_s = self._clock() - within_s
        heard = {judge for judge, heard_s in self._heard.items() if heard_s >= since_s}
        return sorted((heard | self.pending.held.keys()) - {LOCAL})

    def settle_busy_times(self) -> None:
        self.busy.settle([_track(judge) for judge in self.pending.held])

    def describe_waits(self) -> str:
        """Returns how many samples each judge holds, or how to start a judge if there is none, as text for errors."""
        if not self.pool.num_processes and not self.present():
            return "no judge is present and reward.processes = 0: start offbeat worker --role reward --join URL"
        out = [f"{count} with {judge or 'local processes'}" for judge, count in sorted(self.pending.held.items())]
        return f"samples being judged: {', '.join(out) or 'none'}"

    # --- the queue ---

    async def _feed(self, ledger: Ledger, call: Callable[..., Awaitable[Any]]) -> None:
        """Fills the queue from the ledger whenever new samples may have arrived and the queue has room."""
        while True:
            self._feed_now.clear()
            self._is_full = True
            while (room := self.pending.room) > 0:
                found: list[Unscored] = await call(ledger.unscored, room, after=self._last_seq)
                if found:
                    self._last_seq = found[-1].seq
                    self.pending.add(found)
                    self._hand_out()
                if len(found) < room:
                    self._is_full = False
                    break
            await self._feed_now.wait()

    def _hand_out(self) -> None:
        """Gives waiting samples to the local pool, up to a limit per reward function, and wakes remote judges."""
        num = self.pool.num_processes
        size, most = (SMALL, SMALL * num) if self.present() else (LARGE, LARGE * (num + 1))
        for reward in self.pending.rewards if num else ():
            # The limit is per reward: within the pool, a slow reward does not delay a quick one.
            while self.pending.held_of(LOCAL, reward) < most:
                batch = self.pending.lease(LOCAL, size, (reward,), timed=False)
                if batch is None:
                    break
                self.busy.got_work(_track(LOCAL))
                self._background.spawn(self._judge_here(batch))
        self._waiting.notify()

    async def _judge_here(self, batch: RewardBatch) -> None:
        results = await self.pool.score(batch.reward, self.scorer.inputs(batch.samples))
        found = [admissible(sample, result) for sample, result in zip(batch.samples, results, strict=True)]
        await self._answer(LOCAL, batch.ticket, found)

    async def _answer(self, judge: str, ticket: str, results: Sequence[RewardResult]) -> None:
        batch = self.pending.answer(judge, ticket)
        self.busy.answered(_track(judge), len(batch.samples))
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answers.append((self.scorer.scored(batch.samples, results), stored))
        self._store_now.set()
        self._hand_out()
        if self._is_full:
            self._feed_now.set()
        await asyncio.shield(stored)

    async def _store(self, ledger: Ledger, call: Callable[..., Awaitable[Any]]) -> None:
        """Stores answers in the ledger; answers that arrive during a commit share the next one."""
        while True:
            await self._store_now.wait()
            self._store_now.clear()
            answers, self._answers = self._answers, []
            results = [scored for batch, _ in answers for scored in batch]
            try:
                stored: Scores = await call(ledger.score, results)
            except Exception as error:
                for _, is_stored in answers:
                    is_stored.set_exception(error)
                    is_stored.exception()  # marks the exception as retrieved: the judge may have gone
                raise
            for _, is_stored in answers:
                is_stored.set_result(None)
            self._stored.notify()
            if stored.num_dropped:
                self._on_dropped()

    async def _expire(self) -> None:
        """Requeues samples of overdue batches and of judges that have been silent for `SILENT_S`."""
        while True:
            next_s = self.pending.next_deadline_s()
            left_s = MAX_SLEEP_S if next_s is None else min(max(next_s - self._clock(), 0.0), MAX_SLEEP_S)
            await asyncio.sleep(left_s)
            if self.pending.expire() + sum(self.pending.leave(judge) for judge in self._silent()):
                self._hand_out()

    def _silent(self) -> list[str]:
        since_s = self._clock() - SILENT_S
        return [judge for judge in self.pending.held if judge != LOCAL and self._heard[judge] < since_s]


def _track(judge: str) -> str:
    """Returns the name of a judge's track in the run's trace."""
    return f"judge {judge}" if judge else "rewards"


def _cannot_leave(rewards: Sequence[str]) -> str:
    return f"reward {', '.join(rewards)} is a Python object, which only the coordinator's own processes can call"
