"""Repeats a step to see where numbers stop being finite.

First each sample alone, for what it adds to the step: its loss, how far the trainer's log-probs are from the engine's,
and its gradient. Then the step itself, exactly as it is trained, with every module and every gradient watched. The
policy is not that of a run: it is changed by the step, and thrown away.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbeat.learn.figures import StepFigures
from offbeat.learn.finite import NotFinite
from offbeat.learn.packing import pack
from offbeat.learn.policy import Policy
from offbeat.learn.samples import Sample
from offbeat.learn.step import StepSettings, StepUnderWay, parts_of, train_step


@dataclass(frozen=True)
class SampleFigures:
    """What one sample adds to its update."""

    sample: int
    advantage: float
    """Of its first trained token."""
    loss: float
    max_log_ratio: float
    """The largest distance between the trainer's log-prob of a trained token and the engine's."""
    grad_norm: float
    problem: NotFinite | None = None

    @property
    def badness(self) -> tuple[bool, float]:
        """Whatever is not finite comes first, then the longest gradient."""
        is_broken = self.problem is not None or not math.isfinite(self.max_log_ratio + self.loss + self.grad_norm)
        return is_broken, self.grad_norm if math.isfinite(self.grad_norm) else math.inf


@dataclass
class Firsts:
    """What was not finite first."""

    module: str | None = None
    """The first module to finish a forward pass with such an output."""
    had_finite_input: bool = True
    gradient: str | None = None
    """The first parameter to get such a gradient: the nearest to the loss."""


@dataclass(frozen=True)
class Repeated:
    """A step that was repeated."""

    samples: list[SampleFigures]
    """The worst first."""
    firsts: Firsts = field(default_factory=Firsts)
    problem: NotFinite | None = None
    figures: StepFigures | None = None
    """Where the step went through."""


def load_published(policy: Policy, own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Gives a policy the weights of a version: `own` are the policy's tensors that versions are made of."""
    assert own.keys() == tensors.keys(), f"weights of another model: {sorted(own.keys() ^ tensors.keys())[:3]}"
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
        for parameter, master in zip(policy.parameters, policy.masters, strict=True):
            if master is not parameter:
                master.copy_(parameter)


def repeat(
    policy: Policy,
    samples: Sequence[Sample],
    settings: StepSettings,
    lr: float,
    reference: PreTrainedModel | None = None,
) -> Repeated:
    """Trains the policy on a batch once more, and tells what it saw."""
    policy.use_threads()
    worst = sorted(_one_by_one(policy, samples, settings, reference), key=lambda s: s.badness, reverse=True)
    with _watching(policy, reference) as firsts:
        try:
            figures = train_step(policy, samples, settings, lr, reference)
        except NotFinite as problem:
            return Repeated(worst, firsts, problem)
    for name, parameter in zip(policy.names, policy.parameters, strict=True):
        if not _is_finite(parameter):
            return Repeated(worst, firsts, NotFinite(f"the updated {name}"), figures)
    return Repeated(worst, firsts, None, figures)


def _one_by_one(
    policy: Policy, samples: Sequence[Sample], settings: StepSettings, reference: PreTrainedModel | None
) -> Iterator[SampleFigures]:
    parts = parts_of(samples, settings.updates_per_step)
    step = StepUnderWay(policy, samples, settings, reference)
    try:
        step.begin(parts)
    except NotFinite as error:  # without advantages nothing can be said of a sample's gradient
        for i, sample in enumerate(samples):
            yield SampleFigures(i, math.nan, math.nan, _max_log_ratio(policy, sample), math.nan, error)
        return
    for part in parts:
        for i in part:
            yield _alone(step, part, i)


def _alone(step: StepUnderWay, part: Sequence[int], i: int) -> SampleFigures:
    """What a sample adds to the update of its part; leaves no gradient behind."""
    policy, sample, before = step.policy, step.samples[i], step.sums.loss
    problem = None
    try:
        step.gather(part, only=[i])
    except NotFinite as error:
        problem = error
    norm = _norm(master.grad for master in policy.masters)
    policy.optimizer.zero_grad(set_to_none=True)
    trained = step.credit.advantages[i][sample.mask]
    return SampleFigures(
        sample=i,
        advantage=float(trained[0]) if len(trained) else 0.0,
        loss=math.nan if problem is not None else step.sums.loss - before,
        max_log_ratio=_max_log_ratio(policy, sample),
        grad_norm=math.nan if problem is not None else norm,
        problem=problem,
    )


def _max_log_ratio(policy: Policy, sample: Sample) -> float:
    if not sample.mask.any():
        return 0.0
    found = policy.logprobs(pack([sample], [0], policy.device)).cpu().numpy()
    return float(np.abs(found - sample.logprobs)[sample.mask].max())


def _norm(gradients: Iterable[Tensor | None]) -> float:
    found = [gradient for gradient in gradients if gradient is not None]
    return float(torch.nn.utils.get_total_norm(found)) if found else 0.0


@contextmanager
def _watching(policy: Policy, reference: PreTrainedModel | None) -> Iterator[Firsts]:
    firsts = Firsts()
    modules = {name or "the model": module for name, module in policy.model.named_modules()}
    if policy.head is not None:
        modules["value_head"] = policy.head.linear
    if isinstance(reference, nn.Module):
        modules |= {f"the reference's {name or 'model'}": module for name, module in reference.named_modules()}

    def see_output(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if firsts.module is None and not _is_finite(output):
                firsts.module, firsts.had_finite_input = name, _is_finite((args, kwargs))

        return hook

    def see_gradient(name: str) -> Any:
        def hook(gradient: Tensor) -> None:
            if firsts.gradient is None and not _is_finite(gradient):
                firsts.gradient = name

        return hook

    with ExitStack() as hooks:
        for name, module in modules.items():
            hooks.callback(module.register_forward_hook(see_output(name), with_kwargs=True).remove)
        for name, parameter in zip(policy.names, policy.parameters, strict=True):
            hooks.callback(parameter.register_hook(see_gradient(name)).remove)
        yield firsts


def _is_finite(value: Any) -> bool:
    """Whether all numbers are, in tensors and what modules hand around; what is no tensor counts as finite."""
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(value.detach().isfinite().all())
    if isinstance(value, Mapping):
        return all(_is_finite(inner) for inner in value.values())
    if isinstance(value, (tuple, list)):
        return all(_is_finite(inner) for inner in value)
    return True
