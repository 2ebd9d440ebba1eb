"""Summarises the run that a configuration describes: batch sizes, evaluations, checkpoints and disk space, as text.

Numbers are exact if the configuration alone decides them, and "at most" if they depend on the model's answers.
"""

from __future__ import annotations

import math

from offbeat.config.schema import Config, resolve_loss

BYTES_PER_PARAMETER = {"auto": 4, "float32": 4, "bfloat16": 2}
"""Bytes per parameter of published weights, by dtype; for `auto`, those of the larger dtype."""
CHECKPOINT_BYTES_PER_PARAMETER = 12
"""Bytes per parameter of a checkpoint: master weight and two moments, in float32."""
VERSIONS_ON_DISK = 2
TRAJECTORY_BYTES_PER_TOKEN = 8
"""Bytes of a token id and its log-prob."""
TRAJECTORY_BYTES = 500
"""Bytes of a trajectory in the ledger besides its tokens: other columns and index entries."""


def summarise(config: Config, num_parameters: int | None = None, num_held_out: int | None = None) -> list[str]:
    """Returns lines of text about a step, the run, its evaluations, checkpoints and disk space. `num_parameters` None:
    the model's size is unknown. `num_held_out` is the number of prompts of an evaluation; None: unknown."""
    batch, steps = config.batch, config.run.steps
    groups = batch.groups_per_step
    samples = groups * batch.group_size
    new_tokens = samples * config.rollout.max_new_tokens
    updates = batch.updates_per_step
    dealt = (groups, "group") if batch.gate == "strict" else (samples, "sample")
    each = "one update" if updates == 1 else f"{updates} updates of {count(dealt[0] // updates, dealt[1])}"
    apart = "" if batch.gate == "strict" else ", each claimed by itself"
    lines = [
        f"a step       {count(groups, 'group')} × {batch.group_size} = {count(samples, 'sample')}{apart}, {each}",
        f"tokens       at most {config.rollout.max_new_tokens:,} new per sample, {new_tokens:,} per step",
        f"micro-batch  {_microbatch_tokens(config)}; at most "
        f"{count(microbatches_per_update(config), 'micro-batch')} per update",
        f"engine       {count(config.rollout.slots, 'slot')}: a step's samples take "
        f"at most {count(math.ceil(samples / config.rollout.slots), 'wave')}",
        f"the run      {count(steps, 'step')} = {count(steps * groups, 'group')} = "
        f"{count(steps * samples, 'sample')}, at most {new_tokens * steps:,} new tokens",
        _learning(config),
        _evaluation(config, num_held_out),
        _checkpoints(config),
    ]
    return [*lines, _disk(config, num_parameters)]


def _microbatch_tokens(config: Config) -> str:
    text = count(config.batch.assumed_tokens, "token")
    return f"{text} (on a GPU, what fits)" if config.batch.tokens_per_microbatch == "auto" else text


def _learning(config: Config) -> str:
    """Returns the line about the loss: each setting as configured, or else its default for the chosen loss."""
    chosen, loss = resolve_loss(config), config.loss
    held = {
        "clip": f"clip {chosen.clip_low:g} below and {chosen.clip_high:g} above",
        "sequence_clip": f"sequences' clip {chosen.clip_low:g} below and {chosen.clip_high:g} above",
        "cispo": f"ratios up to {loss.ratio_max:g}",
    }
    bounds = {"off": "", "decoupled": "", "tis": f" up to {chosen.max_importance:g}"}
    bounds["sequence_tis"] = bounds["tis"]
    between = f" from {chosen.min_importance:g} to {chosen.max_importance:g}"
    parts = [f"advantage {chosen.advantage}", held.get(chosen.policy, ""), f"{chosen.aggregate}"]
    parts.append(f"correction {chosen.correction}{bounds.get(chosen.correction, between)}")
    if chosen.drop_no_signal:
        parts.append("groups without signal are drawn anew")
    return f"learning     {loss.name}: {', '.join(part for part in parts if part)}"


def count(number: int, noun: str) -> str:
    """Returns a number with its noun, such as `1 group`, `2 groups` or `3 micro-batches`."""
    plural = "es" if noun.endswith(("ch", "s")) else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def microbatches_per_update(config: Config) -> int:
    """Returns the number of micro-batches of an optimizer update if all prompts and answers had the greatest length.
    Answers of a group share one copy of the prompt per micro-batch. An answer that is claimed by itself counts as a
    group."""
    batch, rollout = config.batch, config.rollout
    own, prompt = rollout.max_new_tokens - 1, rollout.max_prompt_tokens
    groups = batch.claims_per_step // batch.updates_per_step
    whole_group = prompt + batch.members * own
    if whole_group <= batch.assumed_tokens:
        return math.ceil(groups / (batch.assumed_tokens // whole_group))
    samples_at_a_time = max(1, (batch.assumed_tokens - prompt) // max(own, 1))
    return groups * math.ceil(batch.members / samples_at_a_time)


def num_evaluations(config: Config) -> int:
    """Returns the number of evaluations: before the first step, every `eval.every` steps, and after the last step."""
    every = config.eval.every
    return 1 + math.ceil(config.run.steps / every) if every else 0


def num_checkpoints(config: Config) -> int:
    """Returns the number of checkpoints: one every `checkpoint.every` steps, and one after the last step."""
    every = config.checkpoint.every
    return math.ceil(config.run.steps / every) if every else 1


def _evaluation(config: Config, num_held_out: int | None) -> str:
    times, options = num_evaluations(config), config.eval
    if not times:
        return "evaluation   none (eval.every = 0)"
    if num_held_out == 0:
        return "evaluation   none: no task has a held-out split"
    num_prompts = options.prompts if num_held_out is None else num_held_out
    answers = num_prompts * options.samples
    fewer = "" if num_prompts == options.prompts else f" (all that are held out; eval.prompts = {options.prompts:,})"
    return (
        f"evaluation   {count(times, 'time')}: at the start, every {count(options.every, 'step')}, at the end; "
        f"{count(num_prompts, 'prompt')} × {options.samples} = {count(answers, 'answer')} each{fewer}"
    )


def _checkpoints(config: Config) -> str:
    written, kept = num_checkpoints(config), config.checkpoint.keep
    when = f"every {count(config.checkpoint.every, 'step')} and at the end" if config.checkpoint.every else "at the end"
    return f"checkpoints  {written:,}, {when}; the newest {min(kept, written)} kept"


def disk_bytes(config: Config, num_parameters: int | None) -> dict[str, int]:
    """Returns the largest number of bytes that a run's files take, by kind of file. Weights and checkpoints are left
    out if `num_parameters` is None, and for adapters, which are small."""
    num_samples = config.run.steps * config.batch.groups_per_step * config.batch.group_size
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    trajectories = num_samples * (TRAJECTORY_BYTES + TRAJECTORY_BYTES_PER_TOKEN * longest)
    if num_parameters is None or config.model.lora_rank:  # adapters are small
        return {"trajectories": trajectories}
    kept = min(config.checkpoint.keep, num_checkpoints(config)) + 1  # a new one is whole before an old one is deleted
    return {
        "trajectories": trajectories,
        "checkpoints": kept * CHECKPOINT_BYTES_PER_PARAMETER * num_parameters,
        "weights": VERSIONS_ON_DISK * BYTES_PER_PARAMETER[config.model.dtype] * num_parameters,
    }


def _disk(config: Config, num_parameters: int | None) -> str:
    kinds = disk_bytes(config, num_parameters)
    if "weights" not in kinds:
        return f"disk         at most {size(kinds['trajectories'])} of trajectories, besides weights and checkpoints"
    parts = ", ".join(f"{kind} {size(num_bytes)}" for kind, num_bytes in kinds.items())
    return f"disk         at most {size(sum(kinds.values()))}: {parts}"


def size(num_bytes: int) -> str:
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{math.ceil(num_bytes / 1000)} kB"
