"""Repeats a step that met NaN or infinity, from the file that its run saved. The run itself is not changed.

Batch and configuration are in the file; the weights are beside it or still in the run's folder. Master weights, moments
and a value head come from the checkpoint of that step. Without this checkpoint they are initialised anew; the step's
second and later optimizer updates may then differ from the run's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbeat.config import Config, from_dict
from offbeat.errors import UserError
from offbeat.launch import model_parts
from offbeat.model.devices import dtype_name
from offbeat.model.loading import load_tokenizer
from offbeat.trainer import not_finite
from offbeat.trainer.checkpoint import Checkpoints
from offbeat.trainer.not_finite import FailedStepDump, NotFinite
from offbeat.trainer.packing import Sample, pack, samples_of
from offbeat.trainer.policy import Policy
from offbeat.trainer.step import StepInProgress, StepMetrics, StepSettings, parts_of, train_step
from offbeat.weights.version import WeightFolder, weights_file


@dataclass(frozen=True)
class SampleFigures:
    """Loss and gradient norm that one sample alone contributes to an optimizer update; NaN if not finite."""

    sample: int
    loss: float
    grad_norm: float
    max_log_ratio: float
    """Largest difference between the trainer's and the engine's log-prob of a trained token."""


@dataclass
class Repeated:
    """Outcome of a repeated training step: where NaN or infinity appeared, if it did, and figures of each sample."""

    samples: list[SampleFigures]
    """First the samples whose gradient norm is not finite, then the others by norm, largest first."""
    module: str | None = None
    """First module whose output was not finite; None: there was none."""
    had_finite_input: bool = True
    """Whether the input of `module` was finite."""
    gradient: str | None = None
    """First parameter, from the loss backwards, whose gradient was not finite; None: there was none."""
    problem: NotFinite | None = None
    """Error of the repeated step; None: all was finite."""
    metrics: StepMetrics | None = None
    """Metrics of the repeated step; None: it failed."""


@dataclass(frozen=True)
class StepReplay:
    dump: FailedStepDump
    repeated: Repeated
    has_optimizer: bool
    """Whether the optimizer's state came from the checkpoint of the step; otherwise it was initialised anew."""
    sample: int
    """Index of the sample at fault or, if unknown, of the sample with the largest gradient."""
    prompt: str
    answer: str


def replay(file: Path, device: str | None = None, model: str | None = None) -> StepReplay:
    """Repeats the step saved in `file`; `device` and `model` replace the run's model.device and model.path."""
    dump = not_finite.read(file)
    tensors = _weights(file, dump)
    here = {"model.device": device, "model.path": model, "model.dtype": dtype_name(next(iter(tensors.values())).dtype)}
    config = from_dict(dump.config, {key: value for key, value in here.items() if value is not None})
    model_parts.prepare_torch(config)
    policy, reference = model_parts.make_policy(config)
    if policy.published.keys() != tensors.keys():
        raise UserError(f"model.path = {config.model.path!r}: is not the model of {file}; name another with --model")
    load_published(policy, tensors)
    has_optimizer = _load_optimizer(config, policy, file, dump)
    repeated = repeat(policy, samples_of(dump.batch), model_parts.step_settings(config), dump.lr, reference)
    at_fault = (repeated.problem or dump).sample
    sample = repeated.samples[0].sample if at_fault is None else at_fault
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.path, config.model.chat_template)
    trajectory = dump.members[sample].trajectory
    texts = tokenizer.batch_decode([trajectory.prompt.tolist(), trajectory.tokens.tolist()])
    return StepReplay(dump, repeated, has_optimizer, sample, *texts)


def _weights(file: Path, dump: FailedStepDump) -> Mapping[str, Tensor]:
    published = WeightFolder(file.absolute().parent.parent / "weights").path(dump.version)
    for folder in (not_finite.weights_of(file), published):
        if weights_file(folder).is_file():
            try:
                return load_file(weights_file(folder))
            except (OSError, SafetensorError) as error:
                raise UserError(
                    f"{weights_file(folder)}: cannot be read: {' '.join(str(error).split())}; restore this file"
                ) from error
    places = f"neither in {not_finite.weights_of(file)} nor in {published}"
    raise UserError(f"{file}: the weights of version {dump.version} are {places}; restore one of these folders")


def load_published(policy: Policy, tensors: Mapping[str, Tensor]) -> None:
    """Copies the tensors of a version into the policy's model and its float32 master weights."""
    with torch.no_grad():
        for name, tensor in policy.published.items():
            tensor.copy_(tensors[name])
        for parameter, master in zip(policy.parameters, policy.masters, strict=True):
            if master is not parameter:
                master.copy_(parameter)


def _load_optimizer(config: Config, policy: Policy, file: Path, dump: FailedStepDump) -> bool:
    folder, step = file.absolute().parent.parent / "checkpoints", dump.batch.step
    if not (folder / f"{step:08d}").is_dir():
        return False
    state = torch.get_rng_state()
    manifest, tensors = Checkpoints(folder, adapter=model_parts.make_adapter(config, policy.model)).load(step)
    torch.set_rng_state(state)
    if manifest.version != dump.version:  # the run resumed from an earlier step and reached this one again
        return False
    policy.load_state(tensors)
    return True


def repeat(
    policy: Policy,
    samples: Sequence[Sample],
    settings: StepSettings,
    lr: float,
    reference: PreTrainedModel | None = None,
) -> Repeated:
    """Repeats a step. First computes the loss and gradient of each sample alone. Then trains the policy on all samples,
    and records the first module output and the first gradient that are not finite."""
    policy.use_threads()
    figures = list(_one_by_one(policy, samples, settings, reference))
    done = Repeated(sorted(figures, key=lambda f: -f.grad_norm if math.isfinite(f.grad_norm) else -math.inf))
    with _watched(policy, reference, done):
        try:
            done.metrics = train_step(policy, samples, settings, lr, reference)
        except NotFinite as problem:
            done.problem = problem
            return done
    wrong = [name for name, one in zip(policy.names, policy.parameters, strict=True) if not _is_finite(one)]
    done.problem = NotFinite(f"the updated {wrong[0]}") if wrong else None
    return done


def _one_by_one(
    policy: Policy, samples: Sequence[Sample], settings: StepSettings, reference: PreTrainedModel | None
) -> Iterator[SampleFigures]:
    parts, step = parts_of(samples, settings.updates_per_step), StepInProgress(policy, samples, settings, reference)
    has_advantages = True
    try:
        step.begin(parts)
    except NotFinite:
        has_advantages = False
    part_of = {i: part for part in parts for i in part}
    for i, part in part_of.items():
        before, loss, norm = step.sums.loss, math.nan, math.nan
        try:
            if has_advantages:
                step.accumulate(part, only=[i])
                gradients = [master.grad for master in policy.masters if master.grad is not None]
                loss, norm = step.sums.loss - before, float(nn.utils.get_total_norm(gradients)) if gradients else 0.0
        except NotFinite:
            pass  # the whole step will report it
        policy.optimizer.zero_grad(set_to_none=True)
        logprobs = policy.logprobs(pack([samples[i]], [0], policy.device)).cpu().numpy()
        apart = np.abs(logprobs - samples[i].logprobs)[samples[i].mask]
        yield SampleFigures(i, loss, norm, float(apart.max()) if len(apart) else 0.0)


@contextmanager
def _watched(policy: Policy, reference: PreTrainedModel | None, done: Repeated) -> Iterator[None]:
    """Records in `done` the first module output and the first gradient that are not finite."""
    modules = {name or "the model": module for name, module in policy.model.named_modules()}
    if policy.head is not None:
        modules["value_head"] = policy.head.linear
    if isinstance(reference, nn.Module):
        modules |= {f"the reference's {name or 'model'}": module for name, module in reference.named_modules()}

    def output_hook(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if done.module is None and not _is_finite(output):
                done.module, done.had_finite_input = name, _is_finite((args, kwargs))

        return hook

    def gradient_hook(name: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            if done.gradient is None and not _is_finite(gradient):
                done.gradient = name

        return hook

    with ExitStack() as hooks:
        for name, module in modules.items():
            hooks.callback(module.register_forward_hook(output_hook(name), with_kwargs=True).remove)
        for name, parameter in zip(policy.names, policy.parameters, strict=True):
            hooks.callback(parameter.register_hook(gradient_hook(name)).remove)
        yield


def _is_finite(value: Any) -> bool:
    """Returns whether all tensors in a nested value are finite; anything else counts as finite."""
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(value.detach().isfinite().all())
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    return all(map(_is_finite, inner))
