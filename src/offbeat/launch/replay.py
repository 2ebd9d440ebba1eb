"""Repeats the step that a run broke on, from the file that it kept, without touching the run.

What is repeated is the step as it was: the batch and the configuration are in the file, the weights lie beside it or
still in the run's folder, in the dtype that was published. Masters, moments and a value head come from the checkpoint
of that very step where there is one; without it they are fresh, so that an update after the step's first may differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from offbeat.config import Config, from_dict
from offbeat.errors import UserError
from offbeat.launch import models
from offbeat.learn import broken
from offbeat.learn.broken import Broken
from offbeat.learn.checkpoint import Checkpoints
from offbeat.learn.policy import Policy
from offbeat.learn.replay import Repeated, load_published, repeat
from offbeat.learn.trainer import samples_of
from offbeat.model.devices import dtype_name
from offbeat.model.loading import load_tokenizer
from offbeat.model.lora import published_tensors
from offbeat.weights.folder import WeightFolder, weights_file


@dataclass(frozen=True)
class Replay:
    """A step that was repeated, and what it was repeated from."""

    broken: Broken
    repeated: Repeated
    has_optimizer: bool
    """Whether the optimizer's state was found, too."""
    texts: tuple[str, str]
    """Prompt and answer of the sample at fault, or of the worst."""
    sample: int


def replay(file: Path, device: str | None = None, model: str | None = None) -> Replay:
    found = broken.read(file)
    tensors = _weights(file, found)
    here = {"model.device": device, "model.path": model, "model.dtype": dtype_name(next(iter(tensors.values())).dtype)}
    config = from_dict(found.config, {key: value for key, value in here.items() if value is not None})
    models.prepare_torch(config)
    policy, reference = models.make_policy(config)
    own = published_tensors(policy.model)
    if own.keys() != tensors.keys():
        raise UserError(f"model.path = {config.model.path!r}: is not the model of {file}; name that with --model")
    load_published(policy, own, tensors)
    has_optimizer = _load_optimizer(config, policy, file, found)
    repeated = repeat(policy, samples_of(found.batch), models.step_settings(config), found.lr, reference)
    sample = _at_fault(found, repeated)
    return Replay(found, repeated, has_optimizer, _texts(config, found, sample), sample)


def _weights(file: Path, found: Broken) -> Mapping[str, Tensor]:
    """Those kept beside the file, or those that its run still has."""
    published = WeightFolder(file.absolute().parent.parent / "weights").path(found.version)
    for folder in (broken.weights_of(file), published):
        if weights_file(folder).is_file():
            try:
                return load_file(weights_file(folder))
            except (OSError, SafetensorError) as error:
                raise UserError(f"{weights_file(folder)}: is damaged: {' '.join(str(error).split())}") from error
    raise UserError(
        f"{file}: the weights of version {found.version} are neither in {broken.weights_of(file)} nor in {published}"
    )


def _load_optimizer(config: Config, policy: Policy, file: Path, found: Broken) -> bool:
    folder, step = file.absolute().parent.parent / "checkpoints", found.batch.step
    if not (folder / f"{step:08d}").is_dir():
        return False
    state = torch.get_rng_state()
    manifest, tensors = Checkpoints(folder, adapter=models.make_adapter(config, policy)).load(step)
    torch.set_rng_state(state)
    if manifest.version != found.version:  # the run went back and came to this step again
        return False
    policy.load_state(tensors)
    return True


def _at_fault(found: Broken, repeated: Repeated) -> int:
    if repeated.problem is not None and repeated.problem.sample is not None:
        return repeated.problem.sample
    if repeated.problem is None and found.sample is not None:
        return found.sample
    return repeated.samples[0].sample


def _texts(config: Config, found: Broken, sample: int) -> tuple[str, str]:
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.path, config.model.chat_template)
    trajectory = found.members[sample].trajectory
    prompt, answer = tokenizer.batch_decode([trajectory.prompt.tolist(), trajectory.tokens.tolist()])
    return prompt, answer
