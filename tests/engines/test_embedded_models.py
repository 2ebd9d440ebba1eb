"""The embedded engine against each architecture's own code."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from tiny_models import CONTEXT_TOKENS, ask, tiny_model, tokens

from offbeat.engines.embedded import EmbeddedEngine
from offbeat.engines.embedded.stepper import Stepper
from offbeat.engines.embedded.weights import Staged
from offbeat.engines.protocol import Generation, Request
from offbeat.errors import UserError

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
    "gemma2, capped scores": ("gemma2", {"head_dim": 8, "sliding_window": 8, "attn_logit_softcapping": 2.0}),
    "bloom, an attention that cannot be replaced": ("bloom", {"n_layer": 2, "n_head": 4}),
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


@pytest.mark.parametrize("window", [3, 8])
def test_a_short_row_beside_a_long_one_keeps_to_its_window(window):
    """On a CPU the step reads in two parts then, and the row of one token is in the part that is read less far."""
    requests = [ask(tokens(i, length), seed=i, max_new_tokens=20) for i, length in enumerate((44, 1, 1))]
    own, got = tiny_model("mistral", sliding_window=window), tiny_model("mistral", sliding_window=window)
    for request, generation in zip(requests, answers(got, requests), strict=True):
        (segment,) = generation.segments
        np.testing.assert_allclose(segment.logprobs, own_logprobs(own, request.tokens, segment.tokens), atol=1e-4)


def own_logprobs(model, prompt: np.ndarray, response: np.ndarray) -> np.ndarray:
    """By the model's own forward pass over all of it."""
    whole = torch.tensor(np.concatenate([prompt, response]))
    with torch.no_grad():
        logprobs = model(whole[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return logprobs.gather(1, whole[len(prompt) :, None]).squeeze(1).numpy()


def test_a_model_without_kv_slots_carries_on_what_was_cut_under_weights_that_changed_meanwhile():
    model, prompt = tiny_model("bloom", n_layer=1, n_head=2), tokens(0, 5)
    with torch.inference_mode():
        stepper = Stepper(model, 2, 64, False, "worker", "fingerprint", 0)
        stepper.submit(ask(prompt, max_new_tokens=8))
        for _ in range(3):
            stepper.step()
        (cut,) = stepper.abort(None)
        changed = {name: tensor * 1.1 for name, tensor in model.state_dict().items() if tensor.ndim > 1}
        stepper.load(1, Staged(None, [(model.state_dict()[name], tensor) for name, tensor in changed.items()]))
        known = cut.segments[0].tokens
        stepper.submit(ask(np.concatenate([prompt, known]), position=len(known), max_new_tokens=5))
        ended = [generation for _ in range(5) for generation in stepper.step()]
    (segment,) = ended[0].segments
    assert (segment.version, segment.kv_version, len(segment.tokens)) == (1, 1, 5)
    expected = own_logprobs(model, np.concatenate([prompt, known]), segment.tokens)
    np.testing.assert_allclose(segment.logprobs, expected, atol=1e-4)


def test_a_model_whose_steps_are_not_its_own_forward_pass_is_refused_in_one_line():
    """Its positions begin after the padding token's, and the engine numbers them from 0."""
    model = tiny_model("roberta", is_decoder=True, pad_token_id=1, max_position_embeddings=130)
    with pytest.raises(UserError, match=r"RobertaForCausalLM \(roberta\): the embedded engine's log-probs") as told:
        EmbeddedEngine(model, num_slots=2, max_context_tokens=32)
    assert "\n" not in str(told.value)
    assert 'use rollout.engine = "vllm"' in str(told.value)


def test_a_context_longer_than_the_models_positions_is_refused_with_figures():
    with pytest.raises(UserError, match=rf"{CONTEXT_TOKENS + 1}.*{CONTEXT_TOKENS}"):
        EmbeddedEngine(tiny_model(), num_slots=2, max_context_tokens=CONTEXT_TOKENS + 1)


def test_a_context_in_which_positions_would_be_coded_by_the_longest_row_is_refused():
    rope = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    model = tiny_model("phi3", original_max_position_embeddings=32, rope_scaling=rope)
    with pytest.raises(UserError, match=r"max_context_tokens = 33, but Phi3ForCausalLM \(phi3\) takes at most 32"):
        EmbeddedEngine(model, num_slots=2, max_context_tokens=33)
    answers(model, [ask(tokens(0, 20), max_new_tokens=12)], max_context_tokens=32)


def test_another_instance_of_the_model_keeps_its_own_attention():
    other = tiny_model()
    answers(tiny_model(), [ask(tokens(0, 4))])
    assert other.config._attn_implementation == "sdpa"
