"""A trainer does not start with a model whose samples depend on their neighbours."""

import pytest
import torch
from learning_models import tiny_model

from benchmarks.architectures import tiny
from offbeat.errors import UserError
from offbeat.model.lora import Lora, attach
from offbeat.trainer.policy import AdamSettings, Policy

LOOK = r"LlamaForCausalLM \(llama\): in a micro-batch with others, a sample's log-probs differ by"


class SeesNeighbours(torch.nn.Module):
    """Mixes tokens in a way that only a row of some length shows: the few of the probe are not enough."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, states):
        out = self.inner(states)
        return out + states.roll(7, dims=1) if states.shape[1] > 8 else out


def test_what_the_probe_has_missed_is_refused_in_one_line():
    model = tiny_model("llama")
    model.model.layers[0].mlp = SeesNeighbours(model.model.layers[0].mlp)
    with pytest.raises(UserError, match=LOOK) as told:
        Policy(model, AdamSettings())
    assert "\n" not in str(told.value)
    assert "docs/models.md" in str(told.value)


def test_a_model_that_looks_ahead_is_refused():
    with pytest.raises(UserError, match=r"BertLMHeadModel \(bert\)"):
        Policy(tiny.tiny_model("bert", is_decoder=False), AdamSettings())


def test_a_model_whose_code_fails_is_refused_in_one_line():
    class Fails(torch.nn.Module):
        def forward(self, states):
            raise TypeError("not today\nnor tomorrow")

    model = tiny_model("llama")
    model.model.layers[0].mlp = Fails()
    with pytest.raises(UserError, match=r"a forward and backward pass fails: TypeError: not today nor tomorrow"):
        Policy(model, AdamSettings())


def test_a_model_that_has_no_way_back_is_refused_in_one_line():
    class OneWay(torch.autograd.Function):
        @staticmethod
        def forward(ctx, states):
            return states.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise AssertionError("put the model into training mode first")

    class Wrapped(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, states):
            return OneWay.apply(self.inner(states))

    model = tiny_model("llama")
    model.model.layers[1].mlp = Wrapped(model.model.layers[1].mlp)
    with pytest.raises(
        UserError, match=r"a forward and backward pass fails: AssertionError: put the model into training"
    ):
        Policy(model, AdamSettings())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_rounding_is_no_reason_to_refuse(kind, dtype):
    Policy(tiny_model(kind).to(dtype), AdamSettings())


def test_a_model_that_scales_its_embedded_tokens_in_place_is_taken():
    Policy(tiny.tiny_model("ctrl"), AdamSettings())


def test_adapters_are_checked_with_the_model_that_they_are_in():
    model = tiny_model("llama")
    attach(model, Lora(rank=4, alpha=8.0))
    Policy(model, AdamSettings())
    broken = tiny_model("llama")
    attach(broken, Lora(rank=4, alpha=8.0))
    broken.model.layers[0].mlp = SeesNeighbours(broken.model.layers[0].mlp)
    with pytest.raises(UserError, match=LOOK):
        Policy(broken, AdamSettings())


def test_weights_that_are_not_finite_are_left_for_the_first_step_to_name():
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    Policy(model, AdamSettings())


def test_the_check_draws_no_random_numbers():
    model = tiny_model("llama")
    before = torch.get_rng_state()
    Policy(model, AdamSettings())
    assert torch.equal(torch.get_rng_state(), before)
