"""Answers arithmetic problems with given weights on the embedded engine, at temperature 1, and scores the answers.

The same weights, problems and seeds give the same answers, as far as the machine's arithmetic is deterministic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from offbeat.data.prompts import Problem
from offbeat.engines.embedded import EmbeddedEngine
from offbeat.engines.protocol import Request
from offbeat.ledger.records import derive_seed
from offbeat.model.loading import load_model, load_tokenizer, stop_token_ids
from offbeat.rewards.verifiers import number
from offbeat.trajectory import Sampling
from offbeat.weights.publish import Publisher
from offbeat.weights.version import WeightFolder

NUM_SLOTS = 256


@dataclass(frozen=True)
class Answer:
    prompt: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    reward: float


class Scorer:
    """Samples and scores answers of one model; close `engine` at the end."""

    def __init__(self, model: str, folder: Path, max_new_tokens: int, max_context_tokens: int):
        """`folder` is where versions are written, one at a time."""
        self.folder, self.tokenizer = folder, load_tokenizer(model)
        on_cpu = load_model(model, torch.float32, torch.device("cpu"))
        self.engine = EmbeddedEngine(on_cpu, num_slots=NUM_SLOTS, max_context_tokens=max_context_tokens, version=0)
        self.publisher, self.version = Publisher(folder), 0
        stops = stop_token_ids(model, self.tokenizer)
        self.sampling = Sampling(max_new_tokens=max_new_tokens, stop_token_ids=stops)

    async def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Loads weights into the engine as a new version."""
        self.version += 1
        await self.engine.load(self.publisher.write(self.version, self.version, None, tensors))
        WeightFolder(self.folder).keep([self.version])

    async def judge(self, problems: Sequence[Problem]) -> float:
        """Returns the mean reward on these problems, with the same random numbers each time."""
        answers = await self.answer([(problem, derive_seed(0, i)) for i, problem in enumerate(problems)])
        return float(np.mean([answer.reward for answer in answers]))

    async def answer(self, asked: Iterable[tuple[Problem, int]]) -> list[Answer]:
        """Returns an answer for each problem and seed."""
        pairs = list(asked)
        prompts = [np.asarray(self.tokenizer(str(problem.prompt))["input_ids"], np.int32) for problem, _ in pairs]
        requests = [
            Request(id=str(i), tokens=prompt, seed=seed, sampling=self.sampling)
            for i, (prompt, (_, seed)) in enumerate(zip(prompts, pairs, strict=True))
        ]
        generations = await asyncio.gather(*(self.engine.generate(request) for request in requests))
        segments = [generation.segments[0] for generation in generations]
        texts = self.tokenizer.batch_decode([s.tokens.tolist() for s in segments], skip_special_tokens=True)
        rewards = [number(text, problem.answer) for text, (problem, _) in zip(texts, pairs, strict=True)]
        logprobs = [np.asarray(segment.logprobs) for segment in segments]
        return list(map(Answer, prompts, [s.tokens for s in segments], logprobs, rewards))
