"""The engines that must keep the contract, each with two versions of a tiny model."""

from __future__ import annotations

import pytest
import torch
from served_engine import MAX_CONTEXT_TOKENS, Served, tiny_llama
from transformers import LlamaForCausalLM

from offbeat.rollout.engine import Engine, Version
from offbeat.rollout.engines.embedded import EmbeddedEngine


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


@pytest.fixture(params=["embedded", "embedded exact"])
def served(request: pytest.FixtureRequest, published: list[tuple[Version, LlamaForCausalLM]]) -> Served:
    (first, first_model), (second, second_model), (flat, _) = published
    exact = request.param == "embedded exact"
    torch.set_num_threads(1)

    def open_embedded() -> Engine:
        model = LlamaForCausalLM.from_pretrained(first.path, dtype=torch.float32)
        return EmbeddedEngine(model, num_slots=16, max_context_tokens=MAX_CONTEXT_TOKENS, exact=exact)

    return Served(open_embedded, (first, second), (first_model, second_model), flat, logprob_tolerance=1e-4)
