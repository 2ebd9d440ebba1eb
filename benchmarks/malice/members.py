"""Adversaries with a token that lie about everything but their tokens, or take without giving."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import aiohttp
import numpy as np

from benchmarks.malice.adversary import ANSWER_WITHIN_S, Line, Member, last_changed, noise, whatever, with_segments
from benchmarks.malice.model import VOCAB_SIZE
from benchmarks.malice.strangers import false_size, zstd_bomb
from offbeat.client import wire
from offbeat.client.http_client import RemoteJudge, RemoteTrainer
from offbeat.client.protocol import Heartbeat
from offbeat.trajectory import End, Origin, Task, Trajectory
from offbeat.weights.version import Version

ARRAY_BYTES = 16 * 1024 * 1024
NUM_HOARDED = 16
NUM_PATIENT = 64
FLOOD = 300
NUM_OTHERS = 10_000


class Liar(Member):
    """Changes a true answer before it hands it in; a subclass says how, perhaps in several ways."""

    async def use(self, task: Task) -> None:
        for lie in self.lies(await self.answer(task)):
            await self.submit(lie, task.fence)

    def lies(self, true: Trajectory) -> list[Trajectory]:
        raise NotImplementedError

    async def submit(self, trajectory: Trajectory, fence: int) -> None:
        """Submits something and ignores the answer."""
        await whatever(self.client.submit(trajectory, fence))


class HugeArrays(Liar):
    """Adds 16 MB of further arrays to an answer: the coordinator's memory, and then its disk."""

    pause_s, max_attempts = 4.0, 12

    def lies(self, true: Trajectory) -> list[Trajectory]:
        num_tokens = len(true.segments[-1].tokens)
        return [last_changed(true, arrays={"more": np.zeros((num_tokens, ARRAY_BYTES // num_tokens), np.int8)})]


class ManyArrays(Liar):
    """Adds thousands of small arrays, and some of many dimensions, to an answer: what is spent on each."""

    pause_s, max_attempts = 2.0, 30

    def lies(self, true: Trajectory) -> list[Trajectory]:
        num_tokens = len(true.segments[-1].tokens)
        many = {f"array-{number}": np.zeros(num_tokens, np.int8) for number in range(5000)}
        deep = np.zeros((num_tokens, *([1] * 30)), np.int8)
        return [last_changed(true, arrays=many), last_changed(true, arrays={"deep": deep})]


class BadNumbers(Liar):
    """Claims log-probs that are not numbers, infinite or positive: one of them would spoil the weights."""

    def lies(self, true: Trajectory) -> list[Trajectory]:
        logprobs = true.segments[-1].logprobs
        assert logprobs is not None
        return [
            last_changed(true, logprobs=np.full_like(logprobs, bad)) for bad in (math.nan, math.inf, -math.inf, 1.0)
        ]


class WrongShapes(Liar):
    """Hands in log-probs of another length, tokens that are no whole numbers, and segments that overlap: the checks."""

    def lies(self, true: Trajectory) -> list[Trajectory]:
        last = true.segments[-1]
        assert last.logprobs is not None
        return [
            last_changed(true, logprobs=last.logprobs[:-1]),
            last_changed(true, logprobs=np.zeros((len(last.tokens), 2), np.float32)),
            last_changed(true, arrays={"odd": np.zeros(len(last.tokens), np.complex64)}),
            last_changed(true, start=last.start + 1),
            with_segments(true, (*true.segments, last)),
        ]


class OutsideVocabulary(Liar):
    """Hands in tokens that the model does not have: they would index past its embeddings."""

    def lies(self, true: Trajectory) -> list[Trajectory]:
        tokens = true.segments[-1].tokens
        return [last_changed(true, tokens=np.full_like(tokens, token)) for token in (VOCAB_SIZE, 2**31 - 1, -1)]


class GivenTokens(Liar):
    """Says of half of its tokens that they were given, where no environment gives any: tokens beyond the audit."""

    def lies(self, true: Trajectory) -> list[Trajectory]:
        *before, last = true.segments
        half = len(last.tokens) // 2
        assert last.logprobs is not None
        given = replace(
            last, tokens=last.tokens[:half], origin=Origin.GIVEN, logprobs=None, version=None, kv_version=None
        )
        sampled = replace(last, start=last.start + half, tokens=last.tokens[half:], logprobs=last.logprobs[half:])
        return [with_segments(true, (*before, given, sampled))]


class StopWithoutStop(Liar):
    """Ends answers early and says that the model stopped there: short answers that it never gave."""

    def lies(self, true: Trajectory) -> list[Trajectory]:
        return [_cut(true, End.STOP)]


class LengthTooEarly(Liar):
    """Ends answers early and says that their length was used up: work that was never done."""

    def lies(self, true: Trajectory) -> list[Trajectory]:
        return [_cut(true, End.LENGTH)]


def _cut(true: Trajectory, end: End) -> Trajectory:
    """Returns the trajectory without the last two thirds of its last segment."""
    *before, last = true.segments
    third = max(1, len(last.tokens) // 3)
    assert last.logprobs is not None
    cut = replace(last, tokens=last.tokens[:third], logprobs=last.logprobs[:third])
    return with_segments(true, (*before, cut), end=end)


class AnotherTask(Liar):
    """Hands in the answer to one prompt as that to another, or a longer one than was asked for: the reward."""

    def lies(self, true: Trajectory) -> list[Trajectory]:
        others = [task for task, _ in self.scene.seen[-50:] if task != true.task] or [true.task + 1]
        prompt = noise(self.scene.rng, len(true.prompt), VOCAB_SIZE - 2)
        return [
            replace(true, task=self.scene.rng.choice(others)),
            replace(true, prompt=prompt),
            replace(true, max_new_tokens=10 * true.max_new_tokens),
            replace(true, index=7),
        ]


class AnotherFence(Liar):
    """Hands in answers under fences that are not its own, for its task and for those of others: their work."""

    async def use(self, task: Task) -> None:
        true = await self.answer(task)
        for fence in (task.fence + 1, task.fence - 1, 2**63 - 1):
            await self.submit(true, fence)
        for other, fence in self.scene.seen[-3:]:
            await self.submit(replace(true, task=other), fence)


class TwoAnswers(Liar):
    """Hands in one true answer and then others under the same fence: which of them is kept."""

    async def use(self, task: Task) -> None:
        true = await self.answer(task)
        await self.submit(true, task.fence)
        for lie in (_cut(true, End.LENGTH), last_changed(true, engine="another")):
            await self.submit(lie, task.fence)


class EnormousStrings(Liar):
    """Fills every text that it may send, in answers, failures and heartbeats: logs, metrics and the ledger."""

    def lies(self, true: Trajectory) -> list[Trajectory]:
        return [last_changed(true, engine="e" * 1_000_000), last_changed(true, worker="w" * 100_000)]

    async def use(self, task: Task) -> None:
        await super().use(task)
        await self.told("/v1/fail", wire.FailCall(task=task.id, fence=task.fence, reason="r\n" * 1_000_000))
        await self.told("/v1/heartbeat", wire.HeartbeatCall(held=[], life="l" * 100_000, figures={"f" * 10_000: 1.0}))


class FalseDigest(Line):
    """A connection on which answers never are what their digest says."""

    async def _request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None, within_s: float
    ) -> aiohttp.ClientResponse:
        if wire.CONTENT_DIGEST in headers and "/trajectories/" in path:
            headers = {**headers, wire.CONTENT_DIGEST: wire.content_digest(b"something else")}
        return await super()._request(method, path, headers, body, within_s)


class WrongDigest(Liar):
    """Sends answers that are not what their digest says: bytes that changed on the way."""

    line = FalseDigest

    def lies(self, true: Trajectory) -> list[Trajectory]:
        return [true]


class Hoarder(Member):
    """Takes 16 tasks, keeps them alive with heartbeats and never answers: the groups that wait for them."""

    groundwork = ("/v1/join",)
    pause_s = 1.0

    async def prepare(self) -> None:
        await super().prepare()
        self.held: dict[int, int] = {}

    async def strike(self) -> None:
        if len(self.held) < NUM_HOARDED:
            self.held |= {task.id: task.fence for task in await self.lease(NUM_HOARDED - len(self.held))}
        answer = await self.client.heartbeat(list(self.held.items()))
        for task in answer.lost:
            self.held.pop(task, None)


class FailsAll(Member):
    """Takes tasks and says of each that it failed: the attempts that a task has, and the run's limit of failures."""

    async def strike(self) -> None:
        for task in await self.lease(2):
            await self.client.fail(task.id, task.fence, "the engine is on fire")


class Deserter(Member):
    """Takes tasks and is never heard of again under that life: the losses that a task may have."""

    pause_s = 2.0

    async def strike(self) -> None:
        await self.lease(2)
        call = wire.HeartbeatCall(held=[], life=f"life-{self.tally.num_attempts}", figures={})
        await self.connection.call("/v1/heartbeat", call, Heartbeat)


class ComesAndGoes(Member):
    """Joins, leaves and comes back, a thousand times where it may: what is kept of those who left."""

    groundwork = ()
    pause_s, num_tokens = 0.05, 20

    async def strike(self) -> None:
        if self.tally.num_attempts % 10 == 0 and len(self.tokens) > 1:
            await self.connection.close()
            self.connection, self.client = await self._join(self.tokens.pop())
        await self.client.lease(1, self.scene.version, 0.0)
        await self.client.leave()


class OthersLeases(Member):
    """Sends heartbeats for the leases of others, gives them back and fails them: work under way elsewhere."""

    async def strike(self) -> None:
        highest = max((task for task, _ in self.scene.seen), default=100)
        others = [(task, fence) for task in range(max(1, highest - NUM_OTHERS // 4), highest + 8) for fence in (1, 2)]
        await self.client.heartbeat(others[-NUM_OTHERS:])
        await self.client.give_back(others[-64:])
        for task, fence in others[-4:]:
            await self.told("/v1/fail", wire.FailCall(task=task, fence=fence, reason="not mine"))


class LiesAboutFigures(Member):
    """Tells figures that are huge, not numbers, or without end."""

    async def strike(self) -> None:
        for value in (math.nan, math.inf, 1e308):
            figures = {f'figure"}}\n{number}': value for number in range(64)}
            await self.told("/v1/heartbeat", wire.HeartbeatCall(held=[], life="a", figures=figures))


class Greedy(Member):
    """Says that it has room for 100,000 tasks and gives back what it gets: how much is drawn, and who waits for it."""

    groundwork = ("/v1/join",)
    pause_s = 2.0

    async def strike(self) -> None:
        await self.client.give_back([(task.id, task.fence) for task in await self.lease(100_000)])


class FalsePeer(Member):
    """Registers the addresses of others, of the coordinator and of nobody as its own: whom others fetch from."""

    async def strike(self) -> None:
        theirs = (self.scene.host, self.scene.port)
        for host, port in (theirs, ("169.254.169.254", 80), ("127.0.0.1", 1), ("a:b@c", 65535), ("x" * 1000, -1)):
            call = wire.SourcesCall(site="", host=host, port=port, root_bytes_per_s=1e15)
            await self.told("/v1/sources", call)
            site = f"site-{self.tally.num_attempts}"
            await self.told("/v1/sources", wire.SourcesCall(site=site, host=host, port=port))


class PlaysJudge(Member):
    """Asks for answers to judge and hands in rewards, with the token of a worker: the rewards."""

    async def strike(self) -> None:
        judge = RemoteJudge(self.connection)
        await whatever(judge.lease_rewards(10, 0.0), judge.submit_rewards("ticket", []))


class PlaysTrainer(Member):
    """Claims, commits, publishes and resumes with the token of a worker: the batches and the weights."""

    async def strike(self) -> None:
        trainer = RemoteTrainer(self.connection, shares_disk=True)
        version = Version(10**6, 10**6, 1, "0" * 64, Path("/etc"))
        await whatever(
            trainer.claim(0, 0.0),
            trainer.commit(0, version),
            trainer.publish(version),
            trainer.reconcile(0, None),
            trainer.checkpointed(10**6),
            trainer.next_version(),
            trainer.report({"step": 0, "reward": math.nan}),
        )


class LongRanges(Member):
    """Asks for parts of weights by numbers of 5,000 digits, and for files beside them: the reader of weights."""

    async def strike(self) -> None:
        number = self.scene.version
        for path, header in (
            (f"/v1/weights/{number}/model.safetensors", "bytes=" + "9" * 5000 + "-"),
            (f"/v1/weights/{number}/model.safetensors", "bytes=-" + "9" * 5000),
            (f"/v1/weights/{number}/model.safetensors", "bytes=0-0," * 500 + "0-0"),
            (f"/v1/weights/{number}/..%2f..%2fledger.sqlite", "bytes=0-100"),
            ("/v1/pieces/..%2f..%2fledger.sqlite", "bytes=0-100"),
            (f"/v1/weights/{'9' * 5000}", ""),
        ):
            await whatever(self.opened("GET", path, {"Range": header}))


class BodyBomb(Member):
    """Hands in a compressed answer that becomes half a gigabyte: memory, with a token this time."""

    pause_s = 2.0

    async def use(self, task: Task) -> None:
        for body in (zstd_bomb(), false_size()):
            headers = {
                "Content-Type": wire.MSGPACK,
                "Content-Encoding": wire.ZSTD,
                wire.CONTENT_DIGEST: wire.content_digest(body),
            }
            path = f"/v1/trajectories/{task.id}/{task.fence}"
            await whatever(self.opened("PUT", path, headers, body))


class Impatient(Member):
    """Makes 300 calls at once, again and again: the share of the coordinator that one worker may have."""

    pause_s = 3.0

    async def strike(self) -> None:
        call = wire.NewerCall(have_version=self.scene.version - 1, wait_s=0.0)
        calls = (self.connection.call("/v1/newer", call, wire.Newer) for _ in range(FLOOD))
        async with asyncio.timeout(ANSWER_WITHIN_S):
            await asyncio.gather(*calls, return_exceptions=True)


class PatientCrowd(Member):
    """Waits for new weights with 64 calls at a time: what a waiting call costs, and the moment when all are woken."""

    pause_s = 0.5

    async def strike(self) -> None:
        waiting = (self.client.newer(self.scene.version, ANSWER_WITHIN_S) for _ in range(NUM_PATIENT))
        await asyncio.gather(*waiting, return_exceptions=True)


MEMBERS: tuple[type[Member], ...] = (
    HugeArrays,
    ManyArrays,
    BadNumbers,
    WrongShapes,
    OutsideVocabulary,
    GivenTokens,
    StopWithoutStop,
    LengthTooEarly,
    AnotherTask,
    AnotherFence,
    TwoAnswers,
    EnormousStrings,
    WrongDigest,
    Hoarder,
    FailsAll,
    Deserter,
    ComesAndGoes,
    OthersLeases,
    LiesAboutFigures,
    Greedy,
    FalsePeer,
    PlaysJudge,
    PlaysTrainer,
    LongRanges,
    BodyBomb,
    Impatient,
    PatientCrowd,
)
