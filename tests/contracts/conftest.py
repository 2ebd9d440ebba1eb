"""The engines that must keep the contract, each with two versions of a tiny model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from served_engine import MAX_CONTEXT_TOKENS, VOCAB_SIZE, Served, forward_logprobs, tiny_llama
from transformers import LlamaForCausalLM

from offbeat.rollout.engine import Engine, Request, Version
from offbeat.rollout.engines.embedded import EmbeddedEngine
from offbeat.rollout.engines.paced import FixedLength, PacedEngine, PacedSettings, noise


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Version, LlamaForCausalLM]]:
    """Two versions that disagree, and a flat one."""
    folder = tmp_path_factory.mktemp("versions")
    models = [tiny_llama(seed=1), tiny_llama(seed=2), tiny_llama(seed=1)]
    torch.nn.init.zeros_(models[2].lm_head.weight)
    versions = []
    for number, model in enumerate(models):
        path = folder / str(number)
        model.save_pretrained(path)
        versions.append(Version(number, step=number, parent=None, digest=str(number), path=path))
    return list(zip(versions, models, strict=True))


@pytest.fixture(params=["embedded", "embedded exact", "paced"])
def served(request: pytest.FixtureRequest, published: list[tuple[Version, LlamaForCausalLM]]) -> Served:
    if request.param == "paced":
        return served_paced(published)
    (first, first_model), (second, second_model), (flat, _) = published
    exact = request.param == "embedded exact"
    models = (first_model, second_model)
    torch.set_num_threads(1)

    def open_embedded() -> Engine:
        model = LlamaForCausalLM.from_pretrained(first.path, dtype=torch.float32)
        return EmbeddedEngine(model, num_slots=16, max_context_tokens=MAX_CONTEXT_TOKENS, exact=exact)

    def logprobs(version: int, request: Request, response: np.ndarray) -> np.ndarray:
        return forward_logprobs(models[version], request, response)

    return Served(open_embedded, (first, second), logprobs, flat, logprob_tolerance=1e-4, models=models)


def served_paced(published: list[tuple[Version, LlamaForCausalLM]]) -> Served:
    (first, _), (second, _), (flat, _) = published
    settings = PacedSettings(
        num_slots=16,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        vocab_size=VOCAB_SIZE,
        base_s=0.0005,
        lengths=FixedLength(20),
    )

    def logprobs(version: int, request: Request, response: np.ndarray) -> np.ndarray:
        return noise.logprobs(request.seed, request.position, len(response), version)

    return Served(lambda: PacedEngine(settings), (first, second), logprobs, flat, logprob_tolerance=0.0)
