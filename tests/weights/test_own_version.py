"""From training to a token and back: log-probs are those of the version that the token is stamped with.

A real policy is trained a few steps on what a real engine generated; every version reaches the engine in pieces, by a
store and a receiver. Afterwards plain transformers computes each token's log-prob anew, with the tensors that were
published: near what the engine said under the token's own version, and far from it under one that training has moved
away from.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offbeat.data.arithmetic import Arithmetic
from offbeat.engines.embedded import EmbeddedEngine
from offbeat.engines.protocol import Generation, Request
from offbeat.model.loading import load_model, load_state, load_tokenizer, state_tensors, stop_token_ids
from offbeat.rewards.verifiers import number as reward_of
from offbeat.trainer.packing import Sample
from offbeat.trainer.policy import AdamSettings, Policy
from offbeat.trainer.step import StepSettings, train_step
from offbeat.trajectory import Sampling
from offbeat.weights.download import StoreSources
from offbeat.weights.manifest import Anchoring
from offbeat.weights.piece_store import FolderStore
from offbeat.weights.publish import Publisher
from offbeat.weights.receive import ReceiveFigures, Receiver
from offbeat.weights.signing import SigningKey
from offbeat.weights.version import Version

MODEL = "offbeat-tiny"
CPU = torch.device("cpu")
NUM_STEPS, NUM_PROMPTS, GROUP_SIZE = 6, 6, 6
LR = 1e-3
"""Ten times the demo's, so that a few steps lead far away."""
NEAR = {torch.float32: 1e-4, torch.bfloat16: 0.04}
"""How far log-probs of one and the same version may be apart, on average: two ways to add up the same products."""
FAR = 0.15
"""How far apart those of the first version and the last one are at least."""
WITHIN_S = 240

tokenizer = load_tokenizer(MODEL)
problems = Arithmetic(seed=0, level=2).held_out(NUM_PROMPTS)
prompts = [np.array(tokenizer(str(problem.prompt))["input_ids"]) for problem in problems]


class Trainer:
    """Trains, and publishes each version as what changed."""

    def __init__(self, folder: Path, dtype: torch.dtype):
        self.policy = Policy(load_model(MODEL, dtype, CPU), AdamSettings())
        self.key, self.store = SigningKey.generate(), FolderStore(folder / "store")
        anchoring = Anchoring(every=4, max_share=10.0)
        self.publisher = Publisher(folder / "published", self.store, self.key, anchoring)
        self.versions: list[Version] = []
        self.tensors: list[dict[str, Tensor]] = []
        """Of each version, as they were handed over to be published."""

    def publish(self) -> Version:
        number, tensors = len(self.versions), state_tensors(self.policy.model)
        self.tensors.append({name: tensor.clone() for name, tensor in tensors.items()})
        self.versions.append(self.publisher.write(number, number, number - 1 if number else None, tensors))
        return self.versions[-1]

    def train(self, answers: Sequence[tuple[int, Generation]]) -> None:
        train_step(self.policy, [sample_of(*answer) for answer in answers], StepSettings(), lr=LR)


class Worker:
    """An engine that knows no weights but those that its receiver brings."""

    def __init__(self, folder: Path, trainer: Trainer, dtype: torch.dtype):
        self.fetched = Counter[str]()
        sources, trusted = StoreSources(trainer.store), [trainer.key.public]
        self.receiver = Receiver(folder, sources, trusted, num_kept=NUM_STEPS + 1, report=self._note)
        model = load_model(MODEL, dtype, CPU)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        self.engine = EmbeddedEngine(model, num_slots=4, max_context_tokens=160)

    def _note(self, figures: ReceiveFigures) -> None:
        self.fetched += figures.num_bytes

    async def take(self, version: Version) -> None:
        await self.engine.load(await self.receiver.fetch(version))

    async def answer(self, group: int, member: int, max_new_tokens: int = 24, *, stops: bool = True) -> Generation:
        sampling = Sampling(max_new_tokens=max_new_tokens, stop_token_ids=STOPS if stops else ())
        name = f"{group}.{member}.{self.engine.version}"
        return await self.engine.generate(Request(name, prompts[group], 1000 * group + member, sampling))


STOPS = stop_token_ids(MODEL, tokenizer)


@dataclass
class School:
    """What came of it."""

    dtype: torch.dtype
    trainer: Trainer
    answers: list[list[tuple[int, Generation]]] = field(default_factory=list)
    """By version: each with the group that it answers."""
    in_flight: list[tuple[int, Generation]] = field(default_factory=list)
    """Under way while the first version was replaced by the last one."""
    late: list[tuple[int, Generation]] = field(default_factory=list)
    """Of a worker that joined at the end."""
    fetched: dict[str, Counter[str]] = field(default_factory=dict)

    @property
    def last(self) -> int:
        return len(self.trainer.versions) - 1


def sample_of(group: int, generation: Generation) -> Sample:
    (segment,) = generation.segments
    assert segment.logprobs is not None
    text = tokenizer.decode(segment.tokens, skip_special_tokens=True)
    return Sample(
        group=group,
        prompt=prompts[group],
        response=segment.tokens,
        logprobs=segment.logprobs,
        mask=np.ones(len(segment.tokens), bool),
        reward=reward_of(text, problems[group].answer),
    )


async def all_answers(worker: Worker) -> list[tuple[int, Generation]]:
    groups = [group for group in range(NUM_PROMPTS) for _ in range(GROUP_SIZE)]
    found = await asyncio.gather(*(worker.answer(group, n) for n, group in enumerate(groups)))
    return list(zip(groups, found, strict=True))


async def replaced_in_flight(worker: Worker, old: Version, new: Version) -> list[tuple[int, Generation]]:
    """Many more answers than there are slots, of many lengths; when the first is there, others are under way."""
    await worker.take(old)
    groups = [n % NUM_PROMPTS for n in range(24)]
    running = [
        asyncio.create_task(worker.answer(group, n, 40 + 7 * (n % 9), stops=False)) for n, group in enumerate(groups)
    ]
    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    await worker.take(new)
    return list(zip(groups, await asyncio.gather(*running), strict=True))


async def go_to_school(folder: Path, dtype: torch.dtype) -> School:
    school = School(dtype, Trainer(folder, dtype))
    trainer, worker = school.trainer, Worker(folder / "worker", school.trainer, dtype)
    try:
        for step in range(NUM_STEPS + 1):
            await worker.take(trainer.publish())
            school.answers.append(await all_answers(worker))
            if step < NUM_STEPS:
                await asyncio.to_thread(trainer.train, school.answers[-1])
        school.in_flight = await replaced_in_flight(worker, trainer.versions[0], trainer.versions[-1])
    finally:
        await worker.engine.close()
    late = Worker(folder / "late", trainer, dtype)
    try:
        await late.take(trainer.versions[-1])
        school.late = await all_answers(late)
    finally:
        await late.engine.close()
    school.fetched = {"worker": worker.fetched, "late": late.fetched}
    return school


@pytest.fixture(scope="module", params=[torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.full)], ids=str)
def school(request: Any, tmp_path_factory: Any) -> School:
    torch.set_num_threads(1)
    work = go_to_school(tmp_path_factory.mktemp("school"), request.param)
    return asyncio.run(asyncio.wait_for(work, WITHIN_S))


class Judge:
    """Plain transformers, with one version's tensors."""

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype):
        self.model = load_model(MODEL, dtype, CPU)
        load_state(self.model, tensors)

    def gap(self, answers: Sequence[tuple[int, Generation]], version: int | None = None) -> float:
        """The mean distance of log-probs from those that came with the tokens; of one version's segments, or all."""
        gaps = [np.zeros(0)]
        for group, generation in answers:
            tokens = np.concatenate([segment.tokens for segment in generation.segments])
            expected = self._logprobs(prompts[group], tokens)
            gaps += [
                np.abs(expected[segment.start : segment.end] - segment.logprobs)
                for segment in generation.segments
                if version is None or segment.version == version
            ]
        return float(np.concatenate(gaps).mean())

    def _logprobs(self, prompt: np.ndarray, response: np.ndarray) -> np.ndarray:
        row = torch.as_tensor(np.concatenate([prompt, response]), dtype=torch.int64)
        with torch.inference_mode():
            logits = self.model(row[None]).logits[0, len(prompt) - 1 : -1].float()
        return torch.log_softmax(logits, -1).gather(1, row[len(prompt) :, None])[:, 0].numpy()


def versions_of(answers: Sequence[tuple[int, Generation]]) -> set[int | None]:
    return {segment.version for _, generation in answers for segment in generation.segments}


def test_log_probs_are_those_of_the_tokens_own_version(school: School):
    for number, answers in enumerate(school.answers):
        assert versions_of(answers) == {number}
        assert Judge(school.trainer.tensors[number], school.dtype).gap(answers) < NEAR[school.dtype], number


def test_log_probs_are_not_those_of_a_version_far_away(school: School):
    last = school.last
    assert Judge(school.trainer.tensors[last], school.dtype).gap(school.answers[0]) > FAR
    assert Judge(school.trainer.tensors[0], school.dtype).gap(school.answers[last]) > FAR


def test_what_a_load_in_flight_splits_has_on_each_side_the_log_probs_of_that_side(school: School):
    last = school.last
    split = [answer for answer in school.in_flight if len(answer[1].segments) == 2]
    assert split
    for _, generation in split:
        assert [segment.version for segment in generation.segments] == [0, last]
    judges = {number: Judge(school.trainer.tensors[number], school.dtype) for number in (0, last)}
    for number, other in ((0, last), (last, 0)):
        assert judges[number].gap(split, number) < NEAR[school.dtype]
        assert judges[other].gap(split, number) > FAR


def test_a_worker_that_joins_late_answers_from_the_same_weights(school: School):
    assert versions_of(school.late) == {school.last}
    assert Judge(school.trainer.tensors[-1], school.dtype).gap(school.late) < NEAR[school.dtype]


def test_all_but_the_first_version_came_as_what_changed(school: School):
    whole = sum(tensor.nbytes for tensor in school.trainer.tensors[0].values())
    follower, late = school.fetched["worker"], school.fetched["late"]
    assert 0 < follower["full"] <= whole, follower
    assert follower["delta"] > 0
    assert set(follower) == {"full", "delta"}
    assert 0 < late["full"] <= whole, late
    assert 0 < late["delta"] < follower["delta"], "it did not begin at the newest anchor"
