"""Builds the parts of a run that hold a model: the policy that learns, and the engine that generates."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from transformers import PreTrainedModel

from offbeat.config import resolved, secrets
from offbeat.config.learning import recipe
from offbeat.config.models import Config
from offbeat.control.chain import Anchoring
from offbeat.launch import wiring
from offbeat.learn import attention, own
from offbeat.learn.advantages import group_normalised
from offbeat.learn.corrections import CorrectionSettings
from offbeat.learn.credit import GaeSettings
from offbeat.learn.divergence import DIVERGENCES
from offbeat.learn.losses import POLICY_LOSSES, LossSettings
from offbeat.learn.policy import AdamSettings, Policy
from offbeat.learn.schedule import learning_rate
from offbeat.learn.step import StepSettings
from offbeat.learn.trainer import TrainerSettings
from offbeat.model.devices import be_deterministic, pick_device, pick_dtype
from offbeat.model.loading import load_model
from offbeat.model.lora import Bare, Lora, base_tensors, describe, load_adapted
from offbeat.rollout.engines.embedded import EmbeddedEngine
from offbeat.weights.adapter import Adapter
from offbeat.weights.away import AwayPublisher
from offbeat.weights.digest import weights_digest
from offbeat.weights.publish import Publisher
from offbeat.weights.signing import SigningKey

NUM_THREADS = torch.get_num_threads()
"""Before any run of this process has changed it."""


def make_embedded(config: Config, name: str, version: int | None = None) -> EmbeddedEngine:
    """An engine with a model of its own; it serves nothing until it is given a version, unless it holds one."""
    lora = _lora(config) if version is None else None  # the model as it is was merged, or never had an adapter
    model = _load(config, lora)
    context = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    return EmbeddedEngine(
        model,
        num_slots=config.rollout.slots,
        max_context_tokens=context,
        exact=config.run.exact,
        worker=name,
        version=version,
        base=None if lora is None else weights_digest(base_tensors(model)),
    )


def _load(config: Config, lora: Lora | None) -> PreTrainedModel:
    """The model, with adapters where they are wanted."""
    device = pick_device(config.model.device)
    dtype = pick_dtype(config.model.dtype, device)
    if lora is None:
        return load_model(config.model.path, dtype, device)
    return load_adapted(config.model.path, dtype, device, lora, config.run.seed)


def _lora(config: Config) -> Lora | None:
    rank, alpha = config.model.lora_rank, config.model.lora_alpha
    return Lora(rank, alpha or 2.0 * rank, tuple(config.model.lora_targets)) if rank else None


def make_adapter(config: Config, policy: Policy) -> Adapter | None:
    """What a policy's versions have in common, where they are adapters."""
    if (lora := _lora(config)) is None:
        return None
    base = weights_digest(base_tensors(policy.model))
    return Adapter(base, describe(policy.model, lora), lambda: base_tensors(policy.model))


def make_policy(config: Config) -> tuple[Policy, PreTrainedModel | None]:
    """The policy, and the frozen starting model where the loss wants a reference."""
    optimizer = config.optimizer
    policy = Policy(
        _load(config, _lora(config)),
        AdamSettings(
            beta1=optimizer.beta1,
            beta2=optimizer.beta2,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            max_grad_norm=optimizer.max_grad_norm,
        ),
        temperature=config.rollout.temperature,
        gradient_checkpointing=config.model.gradient_checkpointing,
        has_value_head=recipe(config).advantage == "gae",
    )
    if config.loss.kl_coef == 0:
        return policy, None
    if config.model.lora_rank:
        return policy, cast(PreTrainedModel, Bare(policy.model))  # it is called, and asked nothing else
    reference = _load(config, None).requires_grad_(False)
    attention.use(reference)
    return policy, reference


def make_publisher(config: Config, folder: Path, key: Path, adapter: Adapter | None, *, is_away: bool) -> Publisher:
    """Writes whole files for engines on this disk, and pieces for those elsewhere where there can be any."""
    if not wiring.publishes_pieces(config, is_away=is_away):
        return Publisher(folder, adapter=adapter)
    anchoring, store = Anchoring(config.weights.anchor_every), wiring.open_pieces(config, folder)
    signing = SigningKey.load_or_create(key)
    if is_away:
        return AwayPublisher(folder, store, signing, anchoring, adapter, clears_store=config.weights.store is None)
    return Publisher(folder, store, signing, anchoring, adapter)


def trainer_settings(config: Config) -> TrainerSettings:
    optimizer, loss = config.optimizer, config.loss

    def rate(step: int) -> float:
        return learning_rate(step, optimizer.lr, optimizer.schedule, optimizer.warmup_steps, config.run.steps)

    return TrainerSettings(
        num_steps=config.run.steps,
        step=step_settings(config),
        learning_rate=rate,
        checkpoint_every=config.checkpoint.every,
        claim_within_s=config.rollout.deadline_s,
        max_logprob_gap=loss.max_logprob_gap,
        stop_logprob_gap=loss.stop_logprob_gap,
        num_witnesses=config.schedule.bound + 1 if config.schedule.bound and loss.audit_share else 0,
        claim_ahead=config.schedule.mode == "overlap",
        config=secrets.shown_value(resolved(config)),
    )


def step_settings(config: Config) -> StepSettings:
    loss, chosen = config.loss, recipe(config)
    uses_gae = chosen.advantage == "gae"
    return StepSettings(
        updates_per_step=config.batch.updates_per_step,
        tokens_per_microbatch=config.batch.tokens_per_microbatch,
        advantage=own.load_advantage(chosen.advantage) if not uses_gae else group_normalised,
        recalls_siblings=config.batch.gate == "release",
        gae=GaeSettings(loss.gamma, loss.gae_lambda, loss.value_coef, loss.value_clip) if uses_gae else None,
        policy_loss=own.load_loss(loss.name) if loss.is_own else POLICY_LOSSES[chosen.policy],
        is_own=loss.is_own,
        loss=LossSettings(chosen.clip_low, chosen.clip_high, loss.dual_clip, loss.ratio_max),
        correction=CorrectionSettings(chosen.correction, chosen.min_importance, chosen.max_importance),
        aggregate=chosen.aggregate,
        aggregate_tokens=chosen.aggregate_tokens,
        kl_coef=loss.kl_coef,
        divergence=DIVERGENCES[loss.kl],
        # A paced engine's tokens come from no weights at all.
        max_sample_gap=None if config.rollout.engine == "paced" else loss.max_sample_gap,
        audit_share=loss.audit_share,
    )


def prepare_torch(config: Config) -> None:
    """Settles how torch computes: `run.threads`, or as many as torch chose, for the calling thread, which begins with
    whatever was set last in any other; and with `run.exact`, for the whole process, that equal work gives equal bits.
    To be called before a model is loaded."""
    torch.set_num_threads(config.run.threads or NUM_THREADS)
    if config.run.exact:
        be_deterministic(pick_device(config.model.device))
