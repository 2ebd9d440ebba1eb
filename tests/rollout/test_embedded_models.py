"""The embedded engine against each architecture's own code."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from tiny_models import CONTEXT_TOKENS, ask, tiny_model, tokens

from offbeat.rollout.engine import EngineError, Generation, Request
from offbeat.rollout.engines.embedded import EmbeddedEngine

torch.set_num_threads(1)

ARCHITECTURES = {
    "llama, own output embedding": ("llama", {}),
    "llama, tied, one KV head": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2, tied, biased projections": ("qwen2", {"tie_word_embeddings": True}),
    "gpt-neox, a quarter of each head rotated": ("gpt_neox", {}),
    "mistral, window shorter than the prompt": ("mistral", {"sliding_window": 8}),
    "qwen2, every other layer with a window": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "gpt2, learned positions": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT_TOKENS}),
}


def answers(model, requests: list[Request], **options) -> list[Generation]:
    async def run() -> list[Generation]:
        engine = EmbeddedEngine(model, **{"num_slots": 4, "max_context_tokens": 64, "version": 0, **options})
        try:
            return await asyncio.gather(*map(engine.generate, requests))
        finally:
            await engine.close()

    return asyncio.run(run())


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_greedy_tokens_are_those_of_generate(kind, exact):
    name, changes = ARCHITECTURES[kind]
    requests = [ask(tokens(i, 2 + 4 * i), temperature=0.0, max_new_tokens=20 + i) for i in range(6)]
    expected = []
    model = tiny_model(name, **changes)
    for request in requests:
        with torch.no_grad():
            prompt = torch.tensor(request.tokens).unsqueeze(0)
            whole = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=request.sampling.max_new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        expected.append(whole[0, len(request.tokens) :].tolist())
    got = answers(model, requests, exact=exact, num_slots=16 if exact else 4)
    assert [g.segments[0].tokens.tolist() for g in got] == expected


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt_neox"])
def test_bfloat16_logprobs_are_float32_and_near_the_models_own(kind):
    model = tiny_model(kind, dtype=torch.bfloat16)
    requests = [ask(tokens(i, 5 + i), seed=i, max_new_tokens=30) for i in range(6)]
    got = answers(tiny_model(kind, dtype=torch.bfloat16), requests)
    for request, generation in zip(requests, got, strict=True):
        (segment,) = generation.segments
        whole = torch.tensor(np.concatenate([request.tokens, segment.tokens])).unsqueeze(0)
        with torch.no_grad():
            logprobs = model(whole).logits[0].float().log_softmax(-1)
        first = len(request.tokens) - 1
        expected = logprobs[first:-1].gather(1, whole[0, first + 1 :, None]).squeeze(1).numpy()
        assert segment.logprobs.dtype == np.float32
        assert np.abs(segment.logprobs - expected).mean() < 0.02


def test_a_model_whose_attention_cannot_be_replaced_is_refused():
    with pytest.raises(EngineError, match="BloomForCausalLM does not let its attention be replaced"):
        EmbeddedEngine(tiny_model("bloom", n_layer=1, n_head=2), num_slots=2, max_context_tokens=32)


def test_a_model_that_caps_its_attention_scores_is_refused():
    with pytest.raises(EngineError, match="Gemma2Attention needs softcap"):
        EmbeddedEngine(tiny_model("gemma2", head_dim=8), num_slots=2, max_context_tokens=32)


def test_a_model_with_layers_other_than_attention_is_refused():
    model = tiny_model("llama")
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(EngineError, match="linear_attention"):
        EmbeddedEngine(model, num_slots=2, max_context_tokens=32)


def test_a_context_longer_than_the_models_positions_is_refused_with_figures():
    with pytest.raises(EngineError, match=rf"{CONTEXT_TOKENS + 1}.*{CONTEXT_TOKENS}"):
        EmbeddedEngine(tiny_model(), num_slots=2, max_context_tokens=CONTEXT_TOKENS + 1)


def test_another_instance_of_the_model_keeps_its_own_attention():
    other = tiny_model()
    answers(tiny_model(), [ask(tokens(0, 4))])
    assert other.config._attn_implementation == "sdpa"
