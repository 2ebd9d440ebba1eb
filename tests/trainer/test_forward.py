"""Forward passes of models that cannot attend over packed rows, and of layers that are computed again."""

import numpy as np
import pytest
import torch
from learning_samples import make_samples, one_by_one

from benchmarks.architectures.tiny import tiny_model
from offbeat.errors import UserError
from offbeat.trainer.packing import pack, plan
from offbeat.trainer.policy import AdamSettings, Policy

CPU = torch.device("cpu")
SHAPE = [(5, [3, 9, 1]), (1, [14, 4]), (7, [6])]


def samples():
    return make_samples(np.random.default_rng(0), SHAPE)


@pytest.mark.parametrize("name", ["lfm2", "bloom", "nemotron"])
def test_samples_in_rows_have_the_logprobs_and_gradients_that_they_have_alone(name):
    policy, plain = Policy(tiny_model(name), AdamSettings(), temperature=0.7), tiny_model(name)
    assert not policy.usage.packs
    batch = pack(samples(), range(6), CPU)
    found = policy.forward_backward(batch, lambda it: it.logprobs.sin().sum())
    wanted = torch.cat([one_by_one(plain, sample, 0.7) for sample in samples()])
    wanted.sin().sum().backward()
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(policy.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=2e-3, atol=2e-5)


def test_a_value_head_reads_rows_where_it_would_read_the_packed_row():
    def values(model, packs: bool) -> torch.Tensor:
        policy = Policy(model, AdamSettings(), has_value_head=True)
        assert policy.usage.packs == packs
        torch.manual_seed(1)
        torch.nn.init.normal_(policy.head.linear.weight)
        return policy.infer(pack(samples(), range(6), CPU)).values

    closed = tiny_model("llama")
    closed._can_set_attn_implementation = lambda: False
    torch.testing.assert_close(values(closed, False), values(tiny_model("llama"), True), rtol=1e-4, atol=1e-5)


def test_a_plan_for_rows_counts_a_groups_prompt_for_each_member():
    group = make_samples(np.random.default_rng(0), [(10, [4, 4, 4])])
    assert plan(group, 26) == [[0, 1, 2]]
    assert plan(group, 26, shares_prompts=False) == [[0, 1], [2]]


@pytest.mark.parametrize("name, options", [("mixtral", {}), ("phimoe", {}), ("opt", {"dropout": 0.5})])
def test_layers_that_are_computed_again_are_computed_without_noise(name, options):
    """A router's jitter, or dropout, is on in training mode: the gradient would be another each time."""

    def gradients(gradient_checkpointing: bool) -> list[torch.Tensor]:
        model = tiny_model(name, **options)
        policy = Policy(model, AdamSettings(), gradient_checkpointing=gradient_checkpointing)
        policy.forward_backward(pack(samples(), range(6), CPU), lambda it: it.logprobs.sum())
        return [p.grad for p in model.parameters() if p.grad is not None]

    for one, other in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_layers_that_are_computed_again_keep_less(monkeypatch):
    """As many passes through a layer as there are, and once more on the way back."""
    model, calls = tiny_model("llama"), []
    inner = model.model.layers[0].mlp.forward
    policy = Policy(model, AdamSettings(), gradient_checkpointing=True)
    monkeypatch.setattr(model.model.layers[0].mlp, "forward", lambda states: calls.append(1) or inner(states))
    policy.forward_backward(pack(samples(), range(6), CPU), lambda it: it.logprobs.sum())
    assert len(calls) == 2


def test_a_model_without_layers_to_compute_again_is_refused():
    with pytest.raises(UserError, match=r"model.gradient_checkpointing: CTRLLMHeadModel \(ctrl\)"):
        Policy(tiny_model("ctrl"), AdamSettings(), gradient_checkpointing=True)
