"""The engines that must keep the contract, each with two versions of a tiny model.

Those that are servers of their own take part where one is named: OFFBEAT_VLLM_PYTHON is the interpreter of an
environment that has vLLM, which is then started here, once (`make test-engines` makes one); OFFBEAT_VLLM_URL and
OFFBEAT_SGLANG_URL name servers that run already with a tiny Llama of the shape in `served_engine`.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator

import numpy as np
import pytest
import torch
from engine_servers import DIALECTS, NUM_SLOTS, SERVERS, dialect_of, started
from served_engine import MAX_CONTEXT_TOKENS, VOCAB_SIZE, Served, forward_logprobs, tiny_llama
from transformers import LlamaForCausalLM

from offbeat.engines.embedded import EmbeddedEngine
from offbeat.engines.protocol import Engine, Request, Version
from offbeat.engines.server_engine import ServerEngine
from offbeat.testing.paced import FixedLength, PacedEngine, PacedSettings, noise


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


OWN = ("embedded", "embedded exact", "paced")
ON_GPU = ("embedded gpu", "embedded gpu exact") if torch.cuda.is_available() else ()
FOUND = [name for name in DIALECTS if any(os.environ.get(variable) for variable in SERVERS[name.split()[0]])]


@pytest.fixture(params=[*OWN, *ON_GPU, *FOUND])
def served(request: pytest.FixtureRequest, published: list[tuple[Version, LlamaForCausalLM]]) -> Served:
    if request.param == "paced":
        return served_paced(published)
    if request.param in DIALECTS:
        return served_by(request.param, request.getfixturevalue(f"{request.param.split()[0]}_url"), published)
    exact, device = request.param.endswith("exact"), "cuda" if "gpu" in request.param else "cpu"
    torch.set_num_threads(1)

    async def open_embedded() -> Engine:
        model = LlamaForCausalLM.from_pretrained(published[0][0].path, dtype=torch.float32).to(device)
        return EmbeddedEngine(model, num_slots=NUM_SLOTS, max_context_tokens=MAX_CONTEXT_TOKENS, exact=exact)

    return served_model(open_embedded, published, 1e-4)


def served_model(
    opening: Callable[[], Awaitable[Engine]], published: list[tuple[Version, LlamaForCausalLM]], tolerance: float
) -> Served:
    """An engine with a model: its own forward pass is the truth."""
    (first, first_model), (second, second_model), (flat, _) = published
    models = (first_model, second_model)

    def logprobs(version: int, request: Request, response: np.ndarray) -> np.ndarray:
        return forward_logprobs(models[version], request, response)

    return Served(opening, (first, second), logprobs, flat, logprob_tolerance=tolerance, models=models)


def served_by(name: str, url: str, published: list[tuple[Version, LlamaForCausalLM]]) -> Served:
    async def attach() -> Engine:
        return await ServerEngine.attach(dialect_of(name, url), worker=name, num_slots=NUM_SLOTS)

    return served_model(attach, published, 2e-2)


@pytest.fixture(scope="session")
def vllm_url(published: list[tuple[Version, LlamaForCausalLM]]) -> Iterator[str]:
    """A real vLLM server, started once for all tests."""
    yield from started("vllm", published[0][0].path)


@pytest.fixture(scope="session")
def direct_url(published: list[tuple[Version, LlamaForCausalLM]]) -> Iterator[str]:
    """vLLM in a process of ours, started once for all tests."""
    yield from started("direct", published[0][0].path)


@pytest.fixture(scope="session")
def sglang_url(published: list[tuple[Version, LlamaForCausalLM]]) -> Iterator[str]:
    yield from started("sglang", published[0][0].path)


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

    async def open_paced() -> Engine:
        return PacedEngine(settings)

    return Served(open_paced, (first, second), logprobs, flat, logprob_tolerance=0.0)
