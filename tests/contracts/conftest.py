"""The engines that must keep the contract, each with two versions of a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from served_engine import MAX_CONTEXT_TOKENS, Served, tiny_llama
from transformers import LlamaForCausalLM

from offbeat.rollout.engine import Engine, Version
from offbeat.rollout.engines.embedded import EmbeddedEngine


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[Version, Version], tuple[LlamaForCausalLM, ...]]:
    folder = tmp_path_factory.mktemp("versions")
    models = tiny_llama(seed=1), tiny_llama(seed=2)

    def publish(number: int) -> Version:
        path: Path = folder / str(number)
        models[number].save_pretrained(path)
        return Version(number, step=number, parent=number - 1 if number else None, digest=str(number), path=path)

    return (publish(0), publish(1)), models


@pytest.fixture(params=["embedded", "embedded exact"])
def served(request: pytest.FixtureRequest, published) -> Served:
    versions, models = published
    torch.set_num_threads(1)

    def open_embedded() -> Engine:
        model = LlamaForCausalLM.from_pretrained(versions[0].path, dtype=torch.float32)
        return EmbeddedEngine(
            model, num_slots=16, max_context_tokens=MAX_CONTEXT_TOKENS, exact="exact" in request.param, version=0
        )

    return Served(open_embedded, versions, models, logprob_tolerance=1e-4)
