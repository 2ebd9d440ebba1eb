"""Builds a run's parts from its configuration: here all but those that hold a model, so that the coordinator needs no
torch. `offbeat.launch.models` has the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from offbeat.config.changes import fixed_keys
from offbeat.config.learning import recipe
from offbeat.config.models import Config
from offbeat.control.rounds import Setting
from offbeat.errors import UserError
from offbeat.launch.sources import make_shaping
from offbeat.ledger.ledger import Ledger
from offbeat.model.loading import context_window, load_tokenizer, resolve, stop_token_ids, switching_lengths
from offbeat.reward.failures import MIN_COUNT, FailureWatch
from offbeat.reward.pool import RewardPool
from offbeat.serve.clearing import Clearing
from offbeat.serve.coordinator import Coordinator, CoordinatorSettings
from offbeat.serve.hosts import is_this_machine
from offbeat.serve.issuing import EvalPlan, Issuer
from offbeat.serve.judging import Judging
from offbeat.serve.keeping import KeepSettings
from offbeat.serve.scoring import Scorer
from offbeat.tasks.mixture import Mixture
from offbeat.tasks.prompts import Renderer
from offbeat.trajectory import Sampling
from offbeat.weights.pieces import PieceStore, open_store


@dataclass(frozen=True)
class Tokens:
    """The model's language: its tokenizer, its window and what ends an answer."""

    tokenizer: PreTrainedTokenizerBase
    window_tokens: int
    stop_token_ids: tuple[int, ...]
    vocab_size: int
    """Of the model, which may be larger than the tokenizer's."""

    def decode(self, responses: Sequence[np.ndarray]) -> list[str]:
        return self.tokenizer.batch_decode([r.tolist() for r in responses], skip_special_tokens=True)


def load_tokens(config: Config) -> Tokens:
    from transformers import AutoConfig

    path = config.model.path
    folder = resolve(path)
    tokenizer = load_tokenizer(config.model.tokenizer or path, config.model.chat_template)
    try:
        model = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"model.path = {path!r}: transformers cannot read its config.json: {' '.join(str(error).split())}"
        ) from error
    window, vocab_size = context_window(model), int(model.get_text_config().vocab_size)
    rollout = config.rollout
    beyond = ", from which on it codes positions by the longest row beside (longrope)" * (
        window in switching_lengths(model.get_text_config())
    )
    if rollout.max_prompt_tokens + rollout.max_new_tokens > window:
        raise UserError(
            f"rollout.max_prompt_tokens + rollout.max_new_tokens = {rollout.max_prompt_tokens} + "
            f"{rollout.max_new_tokens}: {path} has a window of {window} tokens{beyond}; lower one of them"
        )
    return Tokens(tokenizer, window, stop_token_ids(path, tokenizer), vocab_size)


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
        group_size=config.batch.members,
        num_siblings=config.batch.siblings,
        sampling=train_sampling(config, tokens),
        eval_plan=plan,
    )


def make_coordinator(
    config: Config, ledger: Ledger, issuer: Issuer, pool: RewardPool, tokens: Tokens, clearing: Clearing
) -> Coordinator:
    samples_per_step = config.batch.groups_per_step * config.batch.group_size
    watch = FailureWatch(config.reward.max_failure_share, window=max(samples_per_step, MIN_COUNT))
    untried = () if pool.num_processes else config.reward.weights
    scorer = Scorer(tokens.decode, watch, pool.log_path, make_shaping(config), untried)
    return Coordinator(
        ledger,
        issuer,
        Judging(scorer, pool, issuer.mixture.rewards, config.reward.timeout_s),
        CoordinatorSettings(
            num_steps=config.run.steps,
            overlap=config.schedule.mode == "overlap",
            over_provision=config.schedule.factor,
            rounds=_rounds(config) if config.schedule.stops else None,
            max_new_tokens=config.rollout.max_new_tokens,
            lease_ttl_s=config.rollout.lease_s,
            vocab_size=tokens.vocab_size,
            keep=KeepSettings(config.ledger.keep_bodies, config.ledger.backup),
        ),
        clearing,
    )


def _rounds(config: Config) -> Setting:
    return Setting(
        groups_per_step=config.batch.claims_per_step,
        group_size=config.batch.members,
        bound=config.schedule.bound,
        resumes=config.rollout.kv == "stale",
        pads=config.rollout.engine == "embedded",
    )


def publishes_pieces(config: Config, *, is_away: bool) -> bool:
    """Whether a trainer, on the coordinator's machine or away, cuts versions into pieces for workers elsewhere."""
    if config.weights.deltas != "auto":
        return config.weights.deltas == "always"
    serve = config.serve
    return is_away or config.weights.store is not None or serve.behind_proxy or not is_this_machine(serve.host)


def open_pieces(config: Config, folder: Path) -> PieceStore:
    """Where the run's pieces lie: a place that all machines reach, or the coordinator's `folder` of weights."""
    return open_store(config.weights.store or folder)


def open_ledger(config: Config, path: Path) -> Ledger:
    """The run's ledger; a new one records what is fixed for the life of the run."""
    batch = config.batch
    ledger = Ledger(
        path,
        min_group=batch.min_group,
        max_no_signal=batch.max_redraws * batch.groups_per_step if recipe(config).drop_no_signal else 0,
        max_attempts=config.rollout.max_attempts,
        max_staleness=config.schedule.bound,
        max_kv_lag=config.rollout.kv_lag if config.rollout.kv == "stale" else 0,
        groups_per_step=batch.claims_per_step,
        stops=config.schedule.stops,
    )
    ledger.begin_with(fixed_keys(config))
    return ledger
