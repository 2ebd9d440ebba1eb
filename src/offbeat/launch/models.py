"""Builds the parts of a run that hold a model: the policy that learns, and the engine that generates."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from offbeat.config.models import Config
from offbeat.learn import attention
from offbeat.learn.policy import AdamSettings, Policy
from offbeat.learn.schedule import learning_rate
from offbeat.learn.step import StepSettings
from offbeat.learn.trainer import TrainerSettings
from offbeat.model.devices import pick_device, pick_dtype
from offbeat.model.loading import load_model
from offbeat.rollout.engines.embedded import EmbeddedEngine


def make_embedded(config: Config, name: str, version: int | None = None) -> EmbeddedEngine:
    """An engine with a model of its own; it serves nothing until it is given a version, unless it holds one."""
    device = pick_device(config.model.device)
    model = load_model(config.model.path, pick_dtype(config.model.dtype, device), device)
    context = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    return EmbeddedEngine(
        model,
        num_slots=config.rollout.slots,
        max_context_tokens=context,
        exact=config.run.exact,
        worker=name,
        version=version,
    )


def make_policy(config: Config) -> tuple[Policy, PreTrainedModel | None]:
    """The policy, and the frozen starting model where the loss wants a reference."""
    device = pick_device(config.model.device)
    dtype = pick_dtype(config.model.dtype, device)
    optimizer = config.optimizer
    policy = Policy(
        load_model(config.model.path, dtype, device),
        AdamSettings(
            beta1=optimizer.beta1,
            beta2=optimizer.beta2,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            max_grad_norm=optimizer.max_grad_norm,
        ),
        temperature=config.rollout.temperature,
        gradient_checkpointing=config.model.gradient_checkpointing,
    )
    reference = None
    if config.loss.kl_coef > 0:
        reference = load_model(config.model.path, dtype, device).requires_grad_(False)
        attention.use(reference)
    return policy, reference


def trainer_settings(config: Config) -> TrainerSettings:
    optimizer, loss = config.optimizer, config.loss
    is_overlap = config.schedule.mode == "overlap"

    def rate(step: int) -> float:
        return learning_rate(step, optimizer.lr, optimizer.schedule, optimizer.warmup_steps, config.run.steps)

    return TrainerSettings(
        num_steps=config.run.steps,
        step=StepSettings(
            updates_per_step=config.batch.updates_per_step,
            tokens_per_microbatch=config.batch.tokens_per_microbatch,
            clip_low=loss.clip_low,
            clip_high=loss.clip_high,
            kl_coef=loss.kl_coef,
            max_importance=loss.max_importance if is_overlap else None,
            # A paced engine's tokens come from no weights at all.
            max_sample_gap=None if config.rollout.engine == "paced" else loss.max_sample_gap,
        ),
        learning_rate=rate,
        checkpoint_every=config.checkpoint.every,
        claim_within_s=config.rollout.deadline_s,
        max_logprob_gap=loss.max_logprob_gap,
        stop_logprob_gap=loss.stop_logprob_gap,
        claim_ahead=is_overlap,
    )


def set_threads(config: Config) -> None:
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
