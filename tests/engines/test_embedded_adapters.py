"""Adapters in the embedded engine: log-probs are those of base and adapter, and nothing is served on a wrong base."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import CONTEXT_TOKENS, ask, tiny_model, tokens
from transformers import PreTrainedModel

from offbeat.engines.embedded.decode_forward import RecordedStep
from offbeat.engines.embedded.stepper import Stepper
from offbeat.engines.embedded.weights import stage, swap
from offbeat.engines.protocol import EngineError, Generation, Version
from offbeat.model.loading import state_tensors
from offbeat.model.lora import Lora, adapter_tensors, attach, base_tensors, describe
from offbeat.weights.publish import Publisher
from offbeat.weights.version import Adapter, weights_digest

peft = pytest.importorskip("peft")
torch.set_num_threads(1)
LORA = Lora(rank=4, alpha=8.0)
NUM_BEFORE, NUM_NEW = 15, 40


def adapted(seed: int = 0) -> PreTrainedModel:
    model = tiny_model(seed=seed)
    attach(model, LORA, seed=1)
    return model


class Published:
    """Adapters on one base, in a folder."""

    def __init__(self, folder: Path):
        self.model = adapted()
        self.base = weights_digest(base_tensors(self.model))
        adapter = Adapter(self.base, describe(self.model, LORA), lambda: {})
        self.publisher = Publisher(folder / "weights", adapter=adapter)

    def write(self, number: int) -> Version:
        """A version whose adapter does something, and something else than every other's."""
        random = torch.Generator().manual_seed(number)
        for name, tensor in adapter_tensors(self.model).items():
            if ".lora_B." in name:
                tensor.copy_(torch.randn(tensor.shape, generator=random) * 0.3)
        return self.publisher.write(number, number, number - 1 if number else None, adapter_tensors(self.model))


@pytest.fixture
def published(tmp_path: Path) -> Published:
    return Published(tmp_path)


def new_stepper(model: PreTrainedModel, exact: bool, version: int | None = 0) -> Stepper:
    with torch.inference_mode():
        stepper = Stepper(model, 16, CONTEXT_TOKENS, exact, "w", "print", version)
        stepper.record()
        return stepper


def finish(stepper: Stepper) -> list[Generation]:
    ended: list[Generation] = []
    with torch.inference_mode():
        while not stepper.is_idle:
            ended += stepper.step()
    return ended


@torch.no_grad()
def logprobs_of(version: Version, prompt: np.ndarray, response: np.ndarray) -> np.ndarray:
    """By transformers and peft alone."""
    model = peft.PeftModel.from_pretrained(tiny_model(), version.path).eval()
    whole = torch.from_numpy(np.concatenate([prompt, response]))[None]
    found = model(whole).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
    return found.gather(1, torch.from_numpy(response)[:, None])[:, 0].numpy()


@pytest.mark.parametrize("exact", [False, True])
def test_a_load_in_flight_splits_a_request_and_each_part_is_its_own_adapters(published, exact):
    first, second = published.write(0), published.write(1)
    model, request = adapted(), ask(tokens(3, 9), seed=5, max_new_tokens=NUM_NEW)
    swap(stage(model, first, published.base))
    stepper = new_stepper(model, exact)
    assert exact or isinstance(stepper._forward, RecordedStep), "adapters cost the engine its recording"
    stepper.submit(request)
    with torch.inference_mode():
        for _ in range(NUM_BEFORE):
            assert stepper.step() == []
        stepper.load(1, stage(model, second, published.base))
    (generation,) = finish(stepper)
    before, after = generation.segments
    assert [(part.version, part.kv_version, part.end) for part in (before, after)] == [(0, 0, 15), (1, 1, 40)]
    response = np.concatenate([before.tokens, after.tokens]).astype(np.int64)
    under = [logprobs_of(version, request.tokens, response) for version in (first, second)]
    assert np.abs(before.logprobs - under[0][:NUM_BEFORE]).max() < 1e-4
    assert np.abs(after.logprobs - under[1][NUM_BEFORE:]).max() < 1e-4
    assert np.abs(under[0] - under[1]).mean() > 0.1, "the two adapters are nearly the same: nothing is shown"


def test_an_adapter_on_another_base_is_refused_and_changes_nothing(published):
    version, model = published.write(0), adapted(seed=7)
    own, before = weights_digest(base_tensors(model)), weights_digest(state_tensors(model))
    with pytest.raises(
        EngineError,
        match=rf"version 0: its adapter needs base weights with digest {published.base[:12]}.* digest {own[:12]}",
    ):
        stage(model, version, own)
    assert weights_digest(state_tensors(model)) == before


def test_a_base_that_came_with_an_adapter_takes_the_place_of_the_models_own(published, tmp_path):
    tiny_model().save_pretrained(tmp_path / "base")
    version, model = replace(published.write(0), base=tmp_path / "base"), adapted(seed=7)
    staged = stage(model, version, weights_digest(base_tensors(model)))
    swap(staged)
    assert staged.base == published.base == weights_digest(base_tensors(model))
    request = ask(tokens(3, 9), max_new_tokens=12)
    stepper = new_stepper(model, exact=False)
    stepper.submit(request)
    (generation,) = finish(stepper)
    (part,) = generation.segments
    expected = logprobs_of(version, request.tokens, part.tokens.astype(np.int64))
    assert np.abs(part.logprobs - expected).max() < 1e-4


def test_whole_models_and_adapters_are_not_taken_for_one_another(published, tmp_path):
    tiny_model().save_pretrained(tmp_path / "whole")
    whole = Version(3, step=0, parent=None, digest="", path=tmp_path / "whole")
    with pytest.raises(EngineError, match="version 3: is not an adapter, but the model was loaded with one"):
        stage(adapted(), whole, published.base)
    with pytest.raises(EngineError, match="version 0: is an adapter, but the model was loaded without one"):
        stage(tiny_model(), published.write(0))


def test_an_adapter_of_another_rank_is_refused(published):
    model = tiny_model()
    attach(model, Lora(rank=2, alpha=4.0))
    with pytest.raises(
        EngineError, match=r"version 0: .*lora_A.* has shape \(4, 64\), but in this worker's model \(2, 64\)"
    ):
        stage(model, published.write(0), published.base)


def test_an_adapter_that_is_to_be_multiplied_by_something_else_is_refused(published):
    model = tiny_model()
    attach(model, Lora(rank=4, alpha=4.0))
    with pytest.raises(EngineError, match=r"version 0: its adapter has the scale 2, but the model's has 1"):
        stage(model, published.write(0), published.base)
