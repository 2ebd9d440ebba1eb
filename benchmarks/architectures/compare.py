"""Compares a tiny model in the trainer and in the embedded engine with transformers' own code on the same weights.

Samples and requests are uneven on purpose: prompts of one token, answers longer than any window, groups that share a
prompt, a request that is cut and continued. An answer of the engine is compared by its log-probs, with those of the
model's own forward pass over the sampled tokens.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from benchmarks.architectures.tiny import CONTEXT_TOKENS, VOCAB_SIZE
from offbeat.engines.embedded.stepper import Stepper
from offbeat.engines.protocol import Generation, Request
from offbeat.errors import OffbeatError
from offbeat.trainer.packing import Sample, pack
from offbeat.trainer.policy import AdamSettings, Policy
from offbeat.trajectory import Sampling

MAX_GAP = 1e-4
"""Largest accepted difference of log-probs, and of gradients relative to the largest gradient."""
GROUPS = ((1, (9, 14)), (5, (3, 12, 1)), (17, (8,)))
"""Prompt length, and the lengths of its answers."""
REQUESTS = ((44, 12), (1, 14), (1, 13), (2, 12), (12, 8), (7, 3))
"""Prompt length, and how many tokens are sampled."""
NUM_SLOTS, NUM_EXACT_SLOTS = 4, 16
CUT_AFTER_STEPS = 10
"""Number of steps after which requests are cut; rows with prompts of one token are then longer than the window."""

MakeModel = Callable[[], PreTrainedModel]


@dataclass(frozen=True)
class Verdict:
    """Verdict on one part of Offbeat with one model."""

    status: str
    """One of agrees, refused, disagrees and fails."""
    way: str = ""
    """Way in which the part ran the model."""
    gap: float | None = None
    """The largest difference from the model's own code."""
    why: str = ""
    """Text of the refusal or of the error."""


@dataclass(frozen=True)
class Result:
    """Result of one architecture."""

    name: str
    kind: str
    """Name of its class in transformers."""
    error: str | None
    """Reason that no tiny model could be made; None if one was made."""
    trainer: Verdict | None = None
    engine: Verdict | None = None

    @property
    def statuses(self) -> set[str]:
        return {verdict.status for verdict in (self.trainer, self.engine) if verdict is not None}


def judge(try_it: Callable[[], Verdict]) -> Verdict:
    """Runs a comparison and returns its verdict. An `OffbeatError` of one line is a refusal; other errors are
    failures."""
    try:
        return try_it()
    except OffbeatError as error:
        text = str(error)
        return Verdict("refused" if "\n" not in text else "fails", why=text)
    except Exception:  # noqa: BLE001 - whatever it is, it is what the benchmark looks for
        return Verdict("fails", why=traceback.format_exc())


def trainer(make: MakeModel) -> Verdict:
    """Compares log-probs and gradients of samples trained together with those of each sample alone."""
    samples, own = _samples(), make()
    own.set_attn_implementation("eager")
    policy = Policy(make(), AdamSettings(), gradient_checkpointing=_has_layers(own))
    batch = pack(samples, range(len(samples)), policy.device)
    found = policy.forward_backward(batch, lambda it: it.logprobs.sin().sum())
    wanted = torch.cat([_own_logprobs(own, sample.prompt, sample.response) for sample in samples])
    wanted.sin().sum().backward()
    gap = _gap(found, wanted.detach())
    gradients = dict(own.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in gradients.values() if p.grad is not None)
    for name, parameter in policy.model.named_parameters():
        mine, theirs = parameter.grad, gradients[name].grad
        if mine is not None or theirs is not None:
            zero = torch.zeros_like(parameter)
            gap = max(gap, _gap(zero if mine is None else mine, zero if theirs is None else theirs) / largest)
    return _verdict(gap, "packed" if policy.usage.packs else "rows")


def _has_layers(model: PreTrainedModel) -> bool:
    """Whether there are any to compute again: with them, whatever is on in training alone would show."""
    return any(isinstance(module, GradientCheckpointingLayer) for module in model.modules())


def engine(make: MakeModel) -> Verdict:
    """Compares log-probs of sampled tokens with those of a forward pass over them; with slots, in both engine modes."""
    gap, own = 0.0, make()
    own.set_attn_implementation("eager")
    for exact in (False, True):
        with torch.inference_mode():
            model, num_slots = make(), NUM_EXACT_SLOTS if exact else NUM_SLOTS
            stepper = Stepper(model, num_slots, CONTEXT_TOKENS, exact, "tiny", "tiny", version=0)
            answers = _answers(stepper)
        with torch.no_grad():
            for prompt, response, logprobs in answers:
                gap = max(gap, _gap(torch.as_tensor(logprobs), _own_logprobs(own, prompt, response)))
        if not stepper.usage.has_slots:
            return _verdict(gap, "anew")
    return _verdict(gap, "slots")


def _verdict(gap: float, way: str) -> Verdict:
    return Verdict("agrees" if gap <= MAX_GAP else "disagrees", way, gap)


def _gap(one: torch.Tensor, other: torch.Tensor) -> float:
    difference = (one - other).abs().max()
    return float("inf") if difference.isnan() else float(difference)


def _own_logprobs(model: PreTrainedModel, prompt: np.ndarray, response: np.ndarray) -> torch.Tensor:
    tokens = torch.as_tensor(np.concatenate([prompt, response]).astype(np.int64))
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits, -1).gather(1, tokens[len(prompt) :, None])[:, 0]


def _samples() -> list[Sample]:
    random, samples = np.random.default_rng(0), []
    for group, (prompt_tokens, lengths) in enumerate(GROUPS):
        prompt = _tokens(random, prompt_tokens)
        for length in lengths:
            nothing = np.zeros(length, np.float32)
            samples.append(Sample(group, prompt, _tokens(random, length), nothing, np.ones(length, bool), 0.0))
    return samples


def _tokens(random: np.random.Generator, count: int) -> np.ndarray:
    """Returns random tokens without the first ids, which are those of special tokens."""
    return random.integers(3, VOCAB_SIZE, count)


def _answers(stepper: Stepper) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Returns prompt, answer and log-probs of every request; all requests are cut once and continued."""
    random = np.random.default_rng(1)
    prompts = {str(i): _tokens(random, length) for i, (length, _) in enumerate(REQUESTS)}
    wanted = {str(i): length for i, (_, length) in enumerate(REQUESTS)}
    parts: dict[str, list[Any]] = {name: [] for name in prompts}

    def ask(name: str) -> None:
        known = [segment.tokens for segment in parts[name]]
        done = sum(map(len, known))
        sampling = Sampling(max_new_tokens=wanted[name] - done)
        stepper.submit(Request(name, np.concatenate([prompts[name], *known]), int(name), sampling, position=done))

    def take(generations: list[Generation]) -> None:
        for generation in generations:
            parts[generation.id].extend(generation.segments)

    for name in prompts:
        ask(name)
    for _ in range(CUT_AFTER_STEPS):
        take(stepper.step())
    take(cut := stepper.abort(None))
    for generation in cut:
        ask(generation.id)
    while not stepper.is_idle:
        take(stepper.step())
    return [
        (prompts[name], np.concatenate([s.tokens for s in some]), np.concatenate([s.logprobs for s in some]))
        for name, some in parts.items()
    ]
