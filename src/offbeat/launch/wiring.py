"""Builds, from a run's configuration, the parts that need no torch; `model_parts` builds the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from offbeat.config.changes import fixed_keys
from offbeat.config.schema import Config, resolve_loss
from offbeat.coordinator.admission import EvalPlan, Issuer
from offbeat.coordinator.coordinator import Coordinator, CoordinatorSettings
from offbeat.coordinator.maintenance import MaintenanceSettings, WeightGarbageCollector
from offbeat.coordinator.reward_queue import RewardQueue, Scorer
from offbeat.data.files import DEFAULT_ANSWER, FileSource
from offbeat.data.mixture import Functions, Mixture, RewardSpec, WeightedSource, build_mixture
from offbeat.data.prompts import Problem, Renderer, answer_text
from offbeat.environments.wire import PartInfo
from offbeat.errors import UserError
from offbeat.launch import episode_parts
from offbeat.launch.run_folder import EVENTS
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import LedgerTerms
from offbeat.model.loading import (
    context_window,
    is_hub_name,
    load_tokenizer,
    resolve,
    stop_token_ids,
    switching_lengths,
)
from offbeat.net import is_this_machine
from offbeat.observability.metric_files import read_events
from offbeat.rewards.pool import MIN_COUNT, FailureWatch, RewardInput, RewardPool, Shaping, without_kind
from offbeat.trajectory import Sampling, total
from offbeat.weights.piece_store import PieceStore, open_store

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def make_mixture(
    config: Config,
    reward: RewardSpec | None = None,
    functions: Functions | None = None,
    home: Path | None = None,
) -> Mixture:
    """Builds the mixture of the configuration's tasks; see `build_mixture` for the other parameters. Raises `UserError`
    if the run in folder `home` began with a reward from Python and `reward` is None, because config.json cannot name
    such a reward."""
    events = [] if home is None else read_events(home / EVENTS)
    began = next((event.get("value") for event in reversed(events) if event["event"] == "rewards"), None)
    return build_mixture(
        config.task, seed=config.run.seed, reward=reward, functions=functions, home=home, began_with=began
    )


def make_shaping(config: Config) -> Shaping:
    reward = config.reward
    return Shaping(reward.weights, config.rollout.max_new_tokens, reward.overlong_tokens)


async def open_pool(config: Config, mixture: Mixture, log: Path) -> RewardPool:
    """Opens the pool of processes that compute rewards, and tries each reward on one problem. With reward.processes =
    0, no reward is tried, because judges compute the rewards in their own processes."""
    pool = RewardPool(config.reward.processes, config.reward.timeout_s, mixture.rewards, log)
    try:
        await try_rewards(config, mixture, pool)
    except BaseException:
        await pool.close()
        raise
    return pool


ANSWER_COLUMNS = ("ground_truth", "solution", "target")
"""Usual names, besides `answer`, of the column with the right answer."""


@dataclass(frozen=True)
class Trial:
    """Result of trying a reward on one problem of a source."""

    source: str
    reward: str
    problem: Problem
    answer: str | None
    """Right answer to the problem, which the trial used as the response; None: unknown, so the response was empty."""
    value: float
    """Sum of the reward's parts, each times its weight."""
    empty: float | None = None
    """Reward of an empty response; None: not tried, or the trial failed."""
    why_empty_fails: str = ""
    """Why the reward of an empty response failed; "" if it did not fail, or was not tried."""


async def try_rewards(config: Config, mixture: Mixture, pool: RewardPool) -> list[Trial]:
    """Tries each reward on the first problem of each source that uses it, and returns the results, one for each source.
    With reward.processes = 0, tries none and returns an empty list."""
    if not config.reward.processes:
        return []
    needs_answer = await pool.load()
    for member in mixture.members.values():
        if member.reward in needs_answer:
            _answer_must_exist(member)
    problems = {member.name: (member.reward, member.problem(0)) for member in mixture.members.values()}
    answers = {source: _right_answer(problem) for source, (_, problem) in problems.items()}
    tried = {reward: (source, _response(problem, answers[source])) for source, (reward, problem) in problems.items()}
    checked = await pool.check({reward: sample for reward, (_, sample) in tried.items()})
    found = {source: checked[reward] for reward, (source, _) in tried.items()}
    for source, (reward, problem) in problems.items():
        if source not in found:  # another source has the same reward, and perhaps other columns
            (found[source],) = await pool.score(reward, [_response(problem, answers[source])])
            if why := found[source].error:
                raise UserError(f"reward {reward}: its trial on task {source} failed: {without_kind(why)}")
    shaping = make_shaping(config)
    shaping.check_names(pool.parts | {part.name for result in found.values() for part in result.rewards})
    trials = []
    for source, (name, problem) in problems.items():
        trial = Trial(source, name, problem, answers[source], total(shaping.weighted(found[source].rewards)))
        if trial.answer:  # otherwise the response was empty
            (empty,) = await pool.score(name, [_response(problem, None)])
            if empty.error is None:
                trial = replace(trial, empty=total(shaping.weighted(empty.rewards)))
            else:
                trial = replace(trial, why_empty_fails=without_kind(empty.error))
        trials.append(trial)
    return trials


def _answer_must_exist(member: WeightedSource) -> None:
    """Raises `UserError` if the rows of a source lack the column of the right answer, so that a reward would get None
    as every answer."""
    source = member.source
    if isinstance(source, FileSource) and (columns := source.columns_without_answer()):
        likely = next((name for name in ANSWER_COLUMNS if name in columns), None)
        remedy = f'task.answer = "{likely}"' if likely else "task.answer to the column with the right answer"
        raise UserError(
            f'task.answer = "{DEFAULT_ANSWER}": task {member.name} has no such column, only {", ".join(columns)}, so '
            f"the reward {member.reward} would get no answer; set {remedy} (a reward without the parameter `answer` "
            "needs none)"
        )


def _right_answer(problem: Problem) -> str | None:
    """Returns the right answer to a problem: its `answer`, or else the value of a column with a usual name."""
    found = (problem.info.get(name) for name in ANSWER_COLUMNS)
    likely = next((value for value in found if isinstance(value, str | int | float)), None)
    return answer_text(likely) if problem.answer is None else problem.answer


def _response(problem: Problem, text: str | None) -> RewardInput:
    return RewardInput(text or "", problem.answer, problem.prompt, problem.info)


def need_processes(config: Config, why: str) -> None:
    """Raises a `UserError` if reward.processes = 0, for a run that judges cannot join: nothing would compute its
    rewards. `why` is the end of the error's message, which says why judges cannot join, and what to do."""
    if not config.reward.processes:
        raise UserError(f"reward.processes = 0: must be 1 or more here, because {why}")


@dataclass(frozen=True)
class TokenLimits:
    """Tokenizer, context window and stop tokens of the model."""

    tokenizer: PreTrainedTokenizerBase
    window_tokens: int
    stop_token_ids: tuple[int, ...]
    vocab_size: int
    """Vocabulary size of the model, which may be larger than the tokenizer's."""

    def decode(self, responses: Sequence[np.ndarray]) -> list[str]:
        return self.tokenizer.batch_decode([r.tolist() for r in responses], skip_special_tokens=True)


def load_tokens(config: Config) -> TokenLimits:
    from transformers import AutoConfig

    path = config.model.path
    folder = resolve(path, need_weights=not is_hub_name(path))  # those of the hub are downloaded last
    tokenizer = load_tokenizer(config.model.tokenizer or path, config.model.chat_template)
    try:
        model = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"model.path = {path!r}: transformers cannot read its config.json: {' '.join(str(error).split())}"
        ) from error
    window, vocab_size = context_window(model), int(model.get_text_config().vocab_size)
    rollout = config.rollout
    beyond = " (longrope: beyond it, an answer depends on the other rows of its batch)" * (
        window in switching_lengths(model.get_text_config())
    )
    if rollout.max_prompt_tokens + rollout.max_new_tokens > window:
        raise UserError(
            f"rollout.max_prompt_tokens + rollout.max_new_tokens = {rollout.max_prompt_tokens} + "
            f"{rollout.max_new_tokens}: {path} has a window of {window} tokens{beyond}; lower one of them"
        )
    return TokenLimits(tokenizer, window, stop_token_ids(path, tokenizer), vocab_size)


def make_issuer(
    config: Config, mixture: Mixture, tokens: TokenLimits, parts: Mapping[str, PartInfo] | None = None
) -> Issuer:
    """Builds the issuer; `parts` describe the tools and environments of the sources that have some."""
    formats = episode_parts.make_formats(config, tokens, parts or {})
    rollout, evaluation = config.rollout, config.eval
    sampling = Sampling(
        max_new_tokens=rollout.max_new_tokens, temperature=rollout.temperature, stop_token_ids=tokens.stop_token_ids
    )
    plan = EvalPlan(
        every=evaluation.every if evaluation.every and mixture.held_out(evaluation.prompts) else 0,
        num_prompts=evaluation.prompts,
        num_samples=evaluation.samples,
        sampling=msgspec.structs.replace(sampling, temperature=evaluation.temperature, top_p=evaluation.top_p),
    )
    return Issuer(
        mixture,
        Renderer(
            tokens.tokenizer,
            max_prompt_tokens=rollout.max_prompt_tokens,
            max_new_tokens=rollout.max_new_tokens,
            window_tokens=tokens.window_tokens,
            cuts=rollout.long_prompts == "cut",
            tools=episode_parts.shown_tools(parts or {}),
        ),
        seed=config.run.seed,
        group_size=config.batch.members,
        num_siblings=config.batch.siblings,
        sampling=sampling,
        eval_plan=plan,
        skips_long=rollout.long_prompts == "skip",
        stop_token_ids={source: tuple(sorted(form.stop_token_ids)) for source, form in formats.items()},
    )


def make_coordinator(
    config: Config,
    ledger: Ledger,
    issuer: Issuer,
    pool: RewardPool,
    tokens: TokenLimits,
    clearing: WeightGarbageCollector,
) -> Coordinator:
    samples_per_step = config.batch.groups_per_step * config.batch.group_size
    watch = FailureWatch(config.reward.max_failure_share, window=max(samples_per_step, MIN_COUNT))
    shaping = make_shaping(config)
    untried = () if pool.num_processes else shaping.given_names
    scorer = Scorer(tokens.decode, watch, pool.log_path, shaping, untried)
    return Coordinator(
        ledger,
        issuer,
        RewardQueue(scorer, pool, issuer.mixture.rewards, config.reward.timeout_s),
        CoordinatorSettings(
            num_steps=config.run.steps,
            overlap=config.schedule.mode == "overlap",
            over_provision=config.schedule.factor,
            max_new_tokens=config.rollout.max_new_tokens,
            lease_ttl_s=config.rollout.lease_s,
            vocab_size=tokens.vocab_size,
            keep=MaintenanceSettings(config.ledger.keep_bodies, config.ledger.backup),
        ),
        clearing,
    )


def publishes_pieces(config: Config, *, is_away: bool) -> bool:
    """Returns whether the trainer publishes versions in pieces. A trainer that shares no disk with the coordinator
    (`is_away`) always does, because it can send only pieces."""
    if is_away or config.weights.deltas != "auto":
        return is_away or config.weights.deltas == "always"
    serve = config.serve
    return config.weights.store is not None or serve.behind_proxy or not is_this_machine(serve.host)


def open_pieces(config: Config, folder: Path) -> PieceStore:
    """Opens the store of the run's pieces: `weights.store`, which all machines reach, or, if it is not set, the weight
    folder `folder`."""
    return open_store(config.weights.store or folder)


def open_ledger(config: Config, path: Path) -> Ledger:
    """Opens or creates the run's ledger; a new ledger records the configuration's fixed keys."""
    batch = config.batch
    terms = LedgerTerms(
        groups_per_step=batch.claims_per_step,
        max_staleness=config.schedule.bound,
        max_kv_lag=config.rollout.kv_lag if config.rollout.kv == "stale" else 0,
        min_group=batch.min_group,
        max_no_signal=batch.max_redraws * batch.groups_per_step if resolve_loss(config).drop_no_signal else 0,
        max_attempts=config.rollout.max_attempts,
        episodes=frozenset(episode_parts.part_specs(config)),
        in_rounds=config.schedule.stops,
    )
    ledger = Ledger(path, terms)
    ledger.record_fixed_keys(fixed_keys(config))
    return ledger
