import numpy as np
import pytest
import torch
from learning_models import KINDS, tiny_model
from learning_samples import make_samples

from offbeat.trainer import output_head
from offbeat.trainer.output_head import OutputHead
from offbeat.trainer.packing import pack
from offbeat.trainer.policy import AdamSettings, Policy

CPU = torch.device("cpu")
SHAPES = [(5, [3, 9, 1]), (2, [30, 4]), (7, [6])]


def passed(kind: str, temperature: float, *, has_value_head: bool = False) -> tuple[torch.Tensor, Policy]:
    """Log-probs of a micro-batch, and the policy with its gradients."""
    samples = make_samples(np.random.default_rng(0), SHAPES)
    policy = Policy(tiny_model(kind), AdamSettings(), temperature, has_value_head=has_value_head)
    batch = pack(samples, range(len(samples)), CPU)
    got = []

    def loss(found):
        got.append(found.logprobs.detach())
        return found.logprobs.sin().sum() + (0 if found.values is None else found.values.sum())

    policy.forward_backward(batch, loss)
    return got[0], policy


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunks_give_the_log_probs_and_gradients_of_all_logits_at_once(kind, temperature, monkeypatch):
    wanted, whole = passed(kind, temperature)
    monkeypatch.setattr(output_head, "CHUNK_BYTES", 4 * 3 * whole.model.config.get_text_config().vocab_size)
    found, chunked = passed(kind, temperature)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    for name, mine, theirs in zip(chunked.names, chunked.parameters, whole.parameters, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_is_computed_in_chunks(kind):
    """A model whose logits cannot be had from its output layer alone would take all the memory in silence."""
    assert OutputHead.of(tiny_model(kind), torch.arange(1, 6)[None]) is not None


def test_a_value_head_reads_the_same_states_beside_chunks(monkeypatch):
    wanted, whole = passed("llama", 1.0, has_value_head=True)
    monkeypatch.setattr(output_head, "CHUNK_BYTES", 500)
    found, chunked = passed("llama", 1.0, has_value_head=True)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(chunked.head.linear.weight.grad, whole.head.linear.weight.grad)


def test_a_layer_that_changes_logits_in_an_unknown_way_is_left_to_the_model():
    model = tiny_model("llama")
    plain = model.forward

    def forward(*args, **options):
        found = plain(*args, **options)
        found.logits = found.logits * 3
        return found

    model.forward = forward
    assert OutputHead.of(model, torch.arange(1, 6)[None]) is None


def test_soft_caps_and_scales_of_logits_are_kept(monkeypatch):
    from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM

    shape = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    capped = Gemma2Config(**shape, final_logit_softcapping=0.5)
    scaled = CohereConfig(**shape, logit_scale=3.0)
    for make, config in ((Gemma2ForCausalLM, capped), (CohereForCausalLM, scaled)):
        found = []
        for chunk_bytes in (2**29, 500):
            monkeypatch.setattr(output_head, "CHUNK_BYTES", chunk_bytes)
            torch.manual_seed(0)
            policy = Policy(make(config).eval(), AdamSettings(), 0.9)
            samples = make_samples(np.random.default_rng(0), SHAPES)
            policy.forward_backward(pack(samples, range(len(samples)), CPU), lambda one: one.logprobs.square().sum())
            assert chunk_bytes == 2**29 or list(policy._outputs.values()) != [None]
            found.append([parameter.grad for parameter in policy.parameters])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
