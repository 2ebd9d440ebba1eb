"""A recorded decode step is the model, under any weights and at any size, or it is not used."""

from __future__ import annotations

import pytest
import torch
from transformers import GPTNeoXConfig, LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from offbeat.engines.embedded import decode_forward
from offbeat.engines.embedded.decode_forward import DecodeForward, RecordedStep
from offbeat.engines.embedded.stepper import Stepper

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 3,
}


def new_stepper(config: type, exact: bool = False, **more: object) -> Stepper:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**SHAPE, **more)).eval()
    with torch.inference_mode():
        return recorded(Stepper(model, 16, 64, exact, "worker", "fingerprint", 0))


def recorded(stepper: Stepper) -> Stepper:
    stepper.record()
    return stepper


def both(stepper: Stepper) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the recording and the model itself say, at every size."""
    with torch.inference_mode():
        direct = DecodeForward(stepper.model)
        return [(stepper._forward(*some), direct(*some)) for some in stepper._decode_inputs()]


@pytest.mark.parametrize("config", [LlamaConfig, Qwen2Config, GPTNeoXConfig])
@pytest.mark.parametrize("tied", [True, False])
def test_a_recording_follows_weights_that_change_under_it(config, tied):
    stepper = new_stepper(config, tie_word_embeddings=tied)
    assert isinstance(stepper._forward, RecordedStep)
    before = both(stepper)
    with torch.no_grad():
        for parameter in stepper.model.parameters():
            parameter.mul_(1.5).add_(0.01)
    after = both(stepper)
    for replayed, direct in before + after:
        assert torch.equal(replayed, direct)
    assert not torch.equal(before[0][0], after[0][0])


def test_a_model_that_looks_at_sizes_in_python_is_called_itself():
    assert isinstance(new_stepper(MistralConfig, sliding_window=8)._forward, DecodeForward)


def test_exact_steps_call_the_model_itself():
    assert isinstance(new_stepper(LlamaConfig, exact=True)._forward, DecodeForward)


def test_a_model_that_branches_on_values_is_called_itself():
    class Branching(torch.nn.Linear):
        def forward(self, states):
            return super().forward(states) * (1.0 if states.mean() > 0 else 1)  # the same, but it had to look

    def branching(config: LlamaConfig) -> PreTrainedModel:
        model = AutoModelForCausalLM.from_config(config)
        model.lm_head = Branching(config.hidden_size, config.vocab_size)
        return model.eval()

    with torch.inference_mode():
        stepper = recorded(Stepper(branching(LlamaConfig(**SHAPE)), 16, 64, False, "worker", "fingerprint", 0))
    assert isinstance(stepper._forward, DecodeForward)


def test_a_recording_that_gives_other_logits_than_the_model_is_not_used():
    class Changing(DecodeForward):
        """Adds 1 to the logits of every call but the first, which is recorded."""

        calls = 0

        def __call__(self, *values: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().__call__(*values) + float(self.calls > 1)

    with torch.inference_mode():
        stepper = new_stepper(LlamaConfig)
        for forward, is_recorded in ((DecodeForward(stepper.model), True), (Changing(stepper.model), False)):
            found = decode_forward.recorded(forward, stepper._decode_inputs())
            assert (found is not forward) == is_recorded
