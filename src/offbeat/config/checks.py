"""Checks across fields: what each key allows by itself, and what they do not allow together.

A check raises `ValueError` with one line that begins with the key to blame and its value.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from offbeat.config.learning import ADVANTAGES, BEYOND_SIBLINGS, HAVE_LEAST, HAVE_MOST, PRESETS, recipe
from offbeat.spelling import suggest

if TYPE_CHECKING:
    from offbeat.config.models import Config

SERVED = ("vllm", "sglang")
"""Engines that are servers of their own, in processes and perhaps an environment of their own."""
MIN_GROUP = 2
"""The least that batch.min_group can be, and its default."""


def batch_arithmetic_holds(config: Config) -> None:
    batch, rollout = config.batch, config.rollout
    if batch.min_group > batch.group_size:
        raise ValueError(f"batch.min_group = {batch.min_group}: allowed 2 to batch.group_size = {batch.group_size}")
    if batch.groups_per_step % batch.updates_per_step:
        raise ValueError(
            f"batch.updates_per_step = {batch.updates_per_step}: must divide batch.groups_per_step = "
            f"{batch.groups_per_step}, because each update trains whole groups"
        )
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    if batch.tokens_per_microbatch < longest:
        raise ValueError(
            f"batch.tokens_per_microbatch = {batch.tokens_per_microbatch}: allowed {longest} or more, because one "
            f"sample may hold rollout.max_prompt_tokens + rollout.max_new_tokens = {longest} tokens"
        )
    if config.optimizer.warmup_steps > config.run.steps:
        raise ValueError(
            f"optimizer.warmup_steps = {config.optimizer.warmup_steps}: allowed 0 to run.steps = {config.run.steps}"
        )
    if config.run.exact and rollout.slots < 16:
        raise ValueError(
            f"rollout.slots = {rollout.slots}: allowed 16 or more with run.exact = true, because below 16 rows "
            "a matrix product takes another path and results depend on their number"
        )


def schedule_holds_together(config: Config) -> None:
    schedule = config.schedule
    mode, bound, factor = schedule.mode, schedule.bound, schedule.over_provision
    if mode == "overlap" and bound == 0:
        raise ValueError(
            'schedule.max_staleness = 0: allowed 1 or more with schedule.mode = "overlap", where tokens wait for '
            "the step under way"
        )
    if config.run.exact and mode == "overlap":
        raise ValueError(
            'schedule.mode = "overlap": allowed "alternate" with run.exact = true, because what is trained next '
            "would depend on who was faster"
        )
    if config.run.exact and bound > 0:
        raise ValueError(
            f"schedule.max_staleness = {bound}: allowed 0 with run.exact = true, because what is trained next would "
            "depend on who was faster"
        )
    if isinstance(factor, float) and factor > bound + 1:
        why = "where every token must be fresh and nothing can be carried on" if bound == 0 else "or some would be late"
        raise ValueError(
            f"schedule.over_provision = {factor:g}: allowed 1{f' to {bound + 1}' if bound else ''} with "
            f"schedule.max_staleness = {bound}, {why}; raise schedule.max_staleness"
        )
    if schedule.new_version == "finish" and mode != "overlap":
        raise ValueError(
            'schedule.new_version = "finish": allowed "interrupt" with schedule.mode = "alternate", where no request '
            'runs across a load; set schedule.mode = "overlap"'
        )


def engine_can_do_it(config: Config) -> None:
    rollout, url = config.rollout, config.engine.url
    if config.run.exact and rollout.engine in SERVED:
        raise ValueError(
            f'rollout.engine = "{rollout.engine}": allowed "embedded" with run.exact = true, because what a server '
            "samples depends on what else it computes"
        )
    if rollout.kv == "stale":
        kept_kv_is_of_use(config)
    if config.model.lora_rank and rollout.engine == "sglang":
        raise ValueError(
            'rollout.engine = "sglang": allowed "embedded", "vllm", "paced" with model.lora_rank, because adapters '
            "are not loaded into SGLang yet"
        )
    if url is not None and rollout.engine not in SERVED:
        raise ValueError(
            f'engine.url = "{url}": rollout.engine = "{rollout.engine}" has no server; add --rollout.engine vllm '
            "or sglang, whichever listens there"
        )


def kept_kv_is_of_use(config: Config) -> None:
    """Old keys and values need an engine that keeps them, and answers that may be of several versions."""
    engine, refused = config.rollout.engine, 'rollout.kv = "stale": allowed "same", "refill"'
    if engine == "paced":
        raise ValueError(f'{refused} with rollout.engine = "paced", which keeps no keys and values across a load')
    if config.run.exact:
        raise ValueError(f"{refused} with run.exact = true, where an answer depends on weights, task and seed alone")
    if config.schedule.bound < 1:
        raise ValueError(
            f"{refused} with schedule.max_staleness = 0, where no answer is of more than one version; "
            'set schedule.mode = "overlap"'
        )
    if engine in SERVED and config.schedule.mode != "overlap":
        raise ValueError(
            f'{refused} with rollout.engine = "{engine}" and schedule.mode = "alternate", where no request runs '
            'across a load; set schedule.mode = "overlap"'
        )


def loss_is_known(config: Config) -> None:
    loss = config.loss
    if not loss.is_own and loss.name not in PRESETS:
        raise ValueError(
            f'loss.name = "{loss.name}": no such loss; {suggest(loss.name, PRESETS)} '
            "(your own: module:function or file.py:function)"
        )
    advantage = loss.advantage
    if advantage is not None and ":" not in advantage and advantage not in ADVANTAGES:
        raise ValueError(
            f'loss.advantage = "{advantage}": no such advantage; {suggest(advantage, ADVANTAGES)} '
            "(your own: module:function or file.py:function)"
        )
    chosen = recipe(config)
    for key, users in (("min_importance", HAVE_LEAST), ("max_importance", HAVE_MOST)):
        given = getattr(loss, key)
        if given is not None and chosen.correction not in users:
            raise ValueError(
                f'loss.{key} = {given:g}: loss.correction = "{chosen.correction}" has no such limit; those that have: '
                f"{', '.join(users)}"
            )
    if chosen.policy == "sequence_clip" and chosen.aggregate != "sequence_mean":
        raise ValueError(
            f'loss.aggregate = "{chosen.aggregate}": allowed "sequence_mean" with loss.name = "{loss.name}", whose '
            "ratio is that of a whole answer: anything else would weigh answers by their length"
        )
    if config.reward.overlong_tokens >= config.rollout.max_new_tokens:
        raise ValueError(
            f"reward.overlong_tokens = {config.reward.overlong_tokens}: allowed less than rollout.max_new_tokens = "
            f"{config.rollout.max_new_tokens}"
        )


def gate_has_a_baseline(config: Config) -> None:
    batch, chosen = config.batch, recipe(config)
    if batch.gate == "strict":
        if chosen.drop_no_signal and chosen.advantage in BEYOND_SIBLINGS:
            raise ValueError(
                f'batch.drop_no_signal = true: loss.advantage = "{chosen.advantage}" learns from groups whose rewards '
                "are all equal too"
            )
        return
    gate = f'batch.gate = "{batch.gate}"'
    if chosen.drop_no_signal:
        raise ValueError(
            f"batch.drop_no_signal = true: allowed false with {gate}, where answers are trained before anybody knows "
            "whether their group's rewards are all equal"
        )
    if batch.min_group != MIN_GROUP:
        raise ValueError(
            f"batch.min_group = {batch.min_group}: leave it out with {gate}, where an answer waits for no other"
        )
    if batch.gate == "release" and chosen.advantage in BEYOND_SIBLINGS:
        raise ValueError(
            f'{gate}: loss.advantage = "{chosen.advantage}" does not look at siblings; set batch.gate = "batch"'
        )
    if batch.gate == "batch" and chosen.advantage in set(ADVANTAGES) - set(BEYOND_SIBLINGS):
        raise ValueError(
            f'loss.advantage = "{chosen.advantage}": allowed {", ".join(BEYOND_SIBLINGS)} with {gate}, because it '
            'compares siblings; leave it out, or set batch.gate = "release"'
        )


def stale_data_is_corrected(config: Config) -> None:
    chosen, loss = recipe(config), config.loss
    if chosen.correction == "off" and config.schedule.bound > 0 and not loss.allow_uncorrected:
        raise ValueError(
            'loss.correction = "off": tokens up to schedule.max_staleness = '
            f"{config.schedule.bound} steps old would count like fresh ones; take another correction, or say "
            "loss.allow_uncorrected = true"
        )


def networks_are_some(config: Config) -> None:
    for network in config.serve.peer_networks:
        try:
            ipaddress.ip_network(network)
        except ValueError as error:
            raise ValueError(f'serve.peer_networks = ["{network}"]: {error}; write it as 10.0.0.0/8') from error


CHECKS = (
    batch_arithmetic_holds,
    schedule_holds_together,
    engine_can_do_it,
    loss_is_known,
    gate_has_a_baseline,
    stale_data_is_corrected,
    networks_are_some,
)
