"""Builds the parts of a run from its configuration: the one place that translates keys into objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from offbeat.config.models import Config
from offbeat.errors import UserError
from offbeat.learn import attention
from offbeat.learn.policy import AdamSettings, Policy
from offbeat.learn.schedule import learning_rate
from offbeat.learn.step import StepSettings
from offbeat.learn.trainer import TrainerSettings
from offbeat.ledger.ledger import Ledger
from offbeat.model.devices import pick_device, pick_dtype
from offbeat.model.loading import context_window, load_model, load_tokenizer, resolve, stop_token_ids
from offbeat.reward.failures import MIN_COUNT, FailureWatch
from offbeat.reward.pool import RewardPool
from offbeat.rollout.engines.embedded import EmbeddedEngine
from offbeat.serve.coordinator import Coordinator, CoordinatorSettings
from offbeat.serve.issuing import EvalPlan, Issuer
from offbeat.serve.scoring import Scorer
from offbeat.tasks.mixture import Mixture
from offbeat.tasks.prompts import Renderer
from offbeat.trajectory import Sampling


@dataclass(frozen=True)
class Tokens:
    """The model's language: its tokenizer, its window and what ends an answer."""

    tokenizer: PreTrainedTokenizerBase
    window_tokens: int
    stop_token_ids: tuple[int, ...]

    def decode(self, responses: Sequence[np.ndarray]) -> list[str]:
        return self.tokenizer.batch_decode([r.tolist() for r in responses], skip_special_tokens=True)


def load_tokens(config: Config) -> Tokens:
    from transformers import AutoConfig

    path = config.model.path
    folder = resolve(path)
    tokenizer = load_tokenizer(config.model.tokenizer or path, config.model.chat_template)
    try:
        window = context_window(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"model.path = {path!r}: transformers cannot read its config.json: {' '.join(str(error).split())}"
        ) from error
    rollout = config.rollout
    if rollout.max_prompt_tokens + rollout.max_new_tokens > window:
        raise UserError(
            f"rollout.max_prompt_tokens + rollout.max_new_tokens = {rollout.max_prompt_tokens} + "
            f"{rollout.max_new_tokens}: {path} has a window of {window} tokens; lower one of them"
        )
    return Tokens(tokenizer, window, stop_token_ids(path, tokenizer))


def train_sampling(config: Config, tokens: Tokens) -> Sampling:
    return Sampling(
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        stop_token_ids=tokens.stop_token_ids,
    )


def eval_plan(config: Config, tokens: Tokens) -> EvalPlan:
    return EvalPlan(
        every=config.eval.every,
        num_prompts=config.eval.prompts,
        num_samples=config.eval.samples,
        sampling=Sampling(
            max_new_tokens=config.rollout.max_new_tokens,
            temperature=config.eval.temperature,
            top_p=config.eval.top_p,
            top_k=config.eval.top_k,
            stop_token_ids=tokens.stop_token_ids,
        ),
    )


def make_engine(config: Config, name: str, version: int | None = None) -> EmbeddedEngine:
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
        ),
        learning_rate=rate,
        checkpoint_every=config.checkpoint.every,
        claim_within_s=config.rollout.deadline_s,
        max_logprob_gap=loss.max_logprob_gap,
        stop_logprob_gap=loss.stop_logprob_gap,
    )


def make_renderer(config: Config, tokens: Tokens) -> Renderer:
    return Renderer(
        tokens.tokenizer,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        max_new_tokens=config.rollout.max_new_tokens,
        window_tokens=tokens.window_tokens,
    )


def make_issuer(config: Config, mixture: Mixture, tokens: Tokens) -> Issuer:
    plan = eval_plan(config, tokens)
    if plan.every and not mixture.held_out(plan.num_prompts):
        plan = replace(plan, every=0)
    return Issuer(
        mixture,
        make_renderer(config, tokens),
        seed=config.run.seed,
        group_size=config.batch.group_size,
        sampling=train_sampling(config, tokens),
        eval_plan=plan,
    )


def make_coordinator(config: Config, ledger: Ledger, issuer: Issuer, pool: RewardPool, tokens: Tokens) -> Coordinator:
    samples_per_step = config.batch.groups_per_step * config.batch.group_size
    watch = FailureWatch(config.reward.max_failure_share, window=max(samples_per_step, MIN_COUNT))
    return Coordinator(
        ledger,
        issuer,
        Scorer(pool, tokens.decode, watch),
        CoordinatorSettings(
            groups_per_step=config.batch.groups_per_step,
            num_steps=config.run.steps,
            max_staleness=config.schedule.max_staleness,
        ),
    )


def set_threads(config: Config) -> None:
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)


def open_ledger(config: Config, path: Path) -> Ledger:
    return Ledger(path, min_group=config.batch.min_group, max_attempts=config.rollout.max_attempts)
