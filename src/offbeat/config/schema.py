"""The typed configuration: every key, its default, its range, and the checks across keys.

Nothing heavy is imported here, so a wrong configuration is refused before torch is loaded. A key is *fixed* for the
life of a run unless it is declared with `free()`; `--resume` may change free keys. The text below a key is its
documentation: `offbeat train --keys` prints its first sentence, docs/configuration.md all of it.
"""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from offbeat.spelling import suggest


def free(default: Any, **constraints: Any) -> Any:
    """Returns a field whose value may change when a run is resumed."""
    return Field(default, json_schema_extra={"free": True}, **constraints)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True, allow_inf_nan=False)


# [optimizer] and [loss]. A loss name such as `dapo` is a preset; each key that is given replaces the preset's value.
# `resolve_loss` returns what holds in the end, and everything downstream reads only that.

Aggregate = Literal["token_mean", "sequence_mean", "constant"]
Correction = Literal["off", "decoupled", "tis", "icepop", "sequence_tis", "sequence_mask"]
Divergence = Literal["k1", "k2", "k3"]

ADVANTAGES = ("group", "mean", "leave_one_out", "siblings", "batch", "gae")
"""The values of `loss.advantage` besides a user's function."""
BEYOND_SIBLINGS = ("batch", "gae")
"""Advantages that do not compare the answers to one prompt with each other."""
RELEASED = {"group": "siblings", "mean": "leave_one_out"}
"""Replacements for a preset's advantage with batch.gate = "release", where an answer may train before its siblings have
rewards. They leave the answer itself out of the baseline, so their scale is the same for any number of siblings."""


@dataclass(frozen=True)
class Preset:
    """The settings that an algorithm's name stands for."""

    policy: str
    """Form of the policy loss: `clip`, `sequence_clip`, `cispo` or `reinforce`; `own` for a user's function."""
    advantage: str
    aggregate: Aggregate
    clip_low: float = 0.2
    clip_high: float = 0.2
    drop_no_signal: bool = False


PRESETS = {
    "grpo": Preset("clip", "group", "sequence_mean"),
    "dr_grpo": Preset("clip", "mean", "constant"),
    "dapo": Preset("clip", "group", "token_mean", clip_high=0.28, drop_no_signal=True),
    "gspo": Preset("sequence_clip", "group", "sequence_mean", clip_low=3e-4, clip_high=4e-4),
    "cispo": Preset("cispo", "group", "token_mean"),
    "rloo": Preset("clip", "leave_one_out", "constant"),
    "reinforce": Preset("reinforce", "batch", "token_mean"),
    "reinforce++": Preset("clip", "batch", "token_mean"),
    "ppo": Preset("clip", "gae", "token_mean"),
}
OWN = Preset("own", "group", "token_mean")
"""Preset of a user's loss function."""

IMPORTANCE = {
    "off": (0.0, 1.0),
    "decoupled": (0.0, float("inf")),
    "tis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "sequence_tis": (0.0, 2.0),
    "sequence_mask": (0.5, 2.0),
}
"""Default lower and upper bound of the importance weight of a token or sequence, by off-policy correction."""
HAVE_LEAST = ("icepop", "sequence_mask")
HAVE_MOST = ("tis", "icepop", "sequence_tis", "sequence_mask")
"""Corrections with a lower bound of the importance weight (`HAVE_LEAST`, set by loss.min_importance) or with an upper
bound (`HAVE_MOST`, set by loss.max_importance)."""


class OptimizerConfig(Section):
    """AdamW; beta1 is 0.9 and eps 1e-8."""

    lr: float = free(1e-6, gt=0)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = free("constant")
    """Learning-rate schedule over run.steps, after the warmup."""
    warmup_steps: int = free(0, ge=0)
    """Warmup steps, in which the learning rate rises from 0."""
    beta2: float = free(0.999, ge=0, lt=1)
    """AdamW's beta2."""
    weight_decay: float = free(0.0, ge=0)
    """AdamW's weight decay (decoupled)."""
    max_grad_norm: float = free(1.0, gt=0)
    """Gradient clipping: a larger gradient norm is scaled down to this."""


class LossConfig(Section):
    name: str = "grpo"
    """grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce, reinforce++ or ppo. Your own loss is `module:function` or
    `file.py:function`; see docs/algorithms.md."""
    advantage: str | None = None
    """group, mean, leave_one_out, siblings, batch, gae, or your own function. Without it, the default of loss.name, or
    the most similar that batch.gate allows. Your own function is `module:function` or `file.py:function`."""
    aggregate: Aggregate | None = None
    """Aggregation of token losses: by token, by sequence, or by a constant. Without it, the default of loss.name."""
    aggregate_tokens: int | None = Field(None, ge=1)
    """The constant of aggregate = "constant". Without it, rollout.max_new_tokens."""
    clip_low: float | None = free(None, gt=0, lt=1)
    """Clipping distance of the probability ratio below 1. Without it, the default of loss.name."""
    clip_high: float | None = free(None, gt=0)
    """Clipping distance of the probability ratio above 1. Without it, the default of loss.name."""
    dual_clip: float | None = free(None, gt=1)
    """Largest probability ratio of a token with a negative advantage. Without it, no limit."""
    ratio_max: float = free(5.0, ge=1)
    """Largest weight of a token in cispo. It limits the probability ratio itself, not its distance from 1."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL divergence to the starting model. 0 loads no reference model."""
    kl: Divergence = "k3"
    """Estimator of the KL divergence."""
    correction: Correction | None = free(None)
    """Off-policy correction for tokens of older weights or of another engine. Without it, tis (sequence_tis for gspo)
    wherever data can be off-policy, otherwise off."""
    min_importance: float | None = free(None, ge=0, le=1)
    """Smallest importance weight; tokens below it are ignored. For icepop and sequence_mask; without it, 0.5."""
    max_importance: float | None = free(None, ge=1)
    """Largest importance weight of a token or sequence. Without it, 2, and 5 for icepop."""
    gamma: float = free(1.0, gt=0, le=1)
    """Discount per token of advantage = "gae"."""
    gae_lambda: float = free(0.95, ge=0, le=1)
    """Lambda of advantage = "gae". 1 uses rewards alone, 0 the value head alone."""
    value_coef: float = free(0.1, gt=0)
    """Weight of the value head's loss in advantage = "gae"."""
    max_logprob_gap: float = free(0.05, gt=0)
    """Mean gap of engine's and trainer's log-probs that raises an alarm. Only tokens of the current weights are
    compared."""
    audit_share: float = free(0.3, ge=0, le=1)
    """Share of tokens of older weights whose log-probs are audited. Where workers are separate processes, the trainer
    recomputes them with the weights that sampled the tokens. Fresh tokens are always compared. With 0, a worker can
    evade the audit by claiming to have used older weights."""

    @property
    def is_own(self) -> bool:
        """Whether the loss is a user's function."""
        return ":" in self.name

    @property
    def preset(self) -> Preset:
        return OWN if self.is_own else PRESETS[self.name]


@dataclass(frozen=True)
class ResolvedLoss:
    """The loss settings of a run, with defaults filled in for all keys that are not set."""

    policy: str
    advantage: str
    aggregate: Aggregate
    aggregate_tokens: int
    clip_low: float
    clip_high: float
    correction: Correction
    min_importance: float
    max_importance: float
    drop_no_signal: bool


def resolve_loss(config: Config) -> ResolvedLoss:
    """Returns the loss settings of a run: the value of each key that is set, otherwise the default for `loss.name`."""
    loss, preset = config.loss, config.loss.preset
    correction = loss.correction or _correction(config)
    low, high = IMPORTANCE[correction]
    chosen = config.batch.drop_no_signal
    return ResolvedLoss(
        policy=preset.policy,
        advantage=loss.advantage or _advantage(config),
        aggregate=loss.aggregate or preset.aggregate,
        aggregate_tokens=loss.aggregate_tokens or config.rollout.max_new_tokens,
        clip_low=preset.clip_low if loss.clip_low is None else loss.clip_low,
        clip_high=preset.clip_high if loss.clip_high is None else loss.clip_high,
        correction=correction,
        min_importance=low if loss.min_importance is None else loss.min_importance,
        max_importance=high if loss.max_importance is None else loss.max_importance,
        drop_no_signal=preset.drop_no_signal if chosen is None else chosen,
    )


def _advantage(config: Config) -> str:
    """Returns the default of `loss.advantage`: the advantage of the preset `loss.name` or, if `batch.gate` does not
    allow this one, its replacement."""
    preset, gate = config.loss.preset.advantage, config.batch.gate
    if gate == "batch" and preset not in BEYOND_SIBLINGS:
        return "batch"
    return RELEASED.get(preset, preset) if gate == "release" else preset


def _correction(config: Config) -> Correction:
    """Returns the default of `loss.correction`: "off" if all tokens come from the current weights and the embedded
    engine, otherwise "sequence_tis" for gspo and "tis" for other losses."""
    is_embedded = config.rollout.engine == "embedded" or config.run.exact
    if config.schedule.bound == 0 and is_embedded:
        return "off"
    return "sequence_tis" if config.loss.preset.policy == "sequence_clip" else "tis"


# Checks across keys. Each raises `ValueError` with one line that begins with the key to blame and its value.

SERVED = ("vllm", "sglang")
"""Engines that run as a server process, perhaps in another Python environment."""
ALONE_SHARE = 0.85
"""Share of a GPU's memory for a server that has the GPU to itself, if engine.memory_share is "auto"."""
MICROBATCH_TOKENS = 16384
"""Tokens of a micro-batch if batch.tokens_per_microbatch is "auto" and nothing is measured, as on a CPU."""
MIN_GROUP = 2
"""Minimum and default of batch.min_group."""
TESTING = "OFFBEAT_TESTING"
"""Name of the environment variable that, set to 1, allows rollout.engine = "paced"."""


def batch_arithmetic_holds(config: Config) -> None:
    batch, rollout = config.batch, config.rollout
    if batch.min_group > batch.group_size:
        raise ValueError(f"batch.min_group = {batch.min_group}: must be 2 to batch.group_size = {batch.group_size}")
    if batch.groups_per_step % batch.updates_per_step:
        raise ValueError(
            f"batch.updates_per_step = {batch.updates_per_step}: must divide batch.groups_per_step = "
            f"{batch.groups_per_step}, because each update trains whole groups"
        )
    if config.optimizer.warmup_steps > config.run.steps:
        raise ValueError(
            f"optimizer.warmup_steps = {config.optimizer.warmup_steps}: must be 0 to run.steps = {config.run.steps}"
        )
    if config.run.exact and rollout.slots < 16:
        raise ValueError(
            f"rollout.slots = {rollout.slots}: must be 16 or more with run.exact = true, because with fewer "
            "slots the last bits of a result depend on how many are in use"
        )


def schedule_holds_together(config: Config) -> None:
    schedule = config.schedule
    mode, bound, factor = schedule.mode, schedule.bound, schedule.over_provision
    if mode == "overlap" and bound == 0:
        raise ValueError(
            'schedule.max_staleness = 0: must be 1 or more with schedule.mode = "overlap", because tokens are '
            "generated while an earlier step trains"
        )
    if config.run.exact and mode == "overlap":
        raise ValueError(
            'schedule.mode = "overlap": must be "alternate" with run.exact = true, because otherwise the '
            "order of training would depend on which worker was faster"
        )
    if config.run.exact and bound > 0:
        raise ValueError(
            f"schedule.max_staleness = {bound}: must be 0 with run.exact = true, because otherwise the order of "
            "training would depend on which worker was faster"
        )
    if isinstance(factor, float) and factor > bound + 1:
        why = "because surplus groups would be too old to train"
        raise ValueError(
            f"schedule.over_provision = {factor:g}: must be 1{f' to {bound + 1}' if bound else ''} with "
            f"schedule.max_staleness = {bound}, {why}; raise schedule.max_staleness"
        )
    if schedule.new_version == "finish" and mode != "overlap":
        raise ValueError(
            'schedule.new_version = "finish": works only with schedule.mode = "overlap", because with "alternate" no '
            'request is running when weights are loaded; set schedule.mode = "overlap"'
        )


def engine_can_do_it(config: Config) -> None:
    rollout, url = config.rollout, config.engine.url
    if rollout.engine == "paced" and os.environ.get(TESTING) != "1":
        raise ValueError(
            'rollout.engine = "paced" is only for tests, because the paced engine has no model; set it to "auto", '
            f'"embedded", "vllm" or "sglang" (tests set {TESTING}=1)'
        )
    if config.run.exact and rollout.engine in SERVED:
        raise ValueError(
            f'rollout.engine = "{rollout.engine}": must be "embedded" with run.exact = true, because a '
            "server's answers depend on the other requests that it computes at the same time"
        )
    if rollout.kv == "stale":
        stale_kv_is_usable(config)
    if config.model.lora_rank and rollout.engine == "sglang":
        raise ValueError(
            f'rollout.engine = "sglang": cannot be used with model.lora_rank = {config.model.lora_rank}, because '
            'adapters are not loaded into SGLang yet; set rollout.engine to "embedded" or "vllm"'
        )
    if url is not None and rollout.engine not in SERVED:
        raise ValueError(
            f'engine.url = "{url}": cannot be used with rollout.engine = "{rollout.engine}"; set rollout.engine to '
            '"vllm" or "sglang", the program that serves this URL'
        )


def stale_kv_is_usable(config: Config) -> None:
    """Raises `ValueError` if `rollout.kv = "stale"` cannot be used: the engine drops its KV cache when weights are
    loaded, no answer continues after new weights are loaded, or `run.exact` is true."""
    engine, refused = config.rollout.engine, 'rollout.kv = "stale": cannot be used'
    if engine == "paced":
        raise ValueError(
            f'{refused} with rollout.engine = "paced", which drops its KV cache when weights are loaded; set '
            'rollout.kv = "same"'
        )
    if config.run.exact:
        raise ValueError(
            f"{refused} with run.exact = true, because an answer must then depend on weights, task and seed alone; set "
            'rollout.kv = "same"'
        )
    if config.schedule.bound < 1:
        raise ValueError(
            f"{refused} with schedule.max_staleness = 0, because no answer then continues with new weights; "
            'raise schedule.max_staleness, or set schedule.mode = "overlap"'
        )
    if engine in SERVED and config.schedule.mode != "overlap":
        raise ValueError(
            f'{refused} with rollout.engine = "{engine}" and schedule.mode = "alternate", because no request is then '
            'running when weights are loaded; set schedule.mode = "overlap"'
        )


def loss_is_known(config: Config) -> None:
    loss = config.loss
    if not loss.is_own and loss.name not in PRESETS:
        raise ValueError(
            f'loss.name = "{loss.name}": no such loss; {suggest(loss.name, PRESETS, lists_few=True)} '
            "(your own: module:function or file.py:function)"
        )
    advantage = loss.advantage
    if advantage is not None and ":" not in advantage and advantage not in ADVANTAGES:
        raise ValueError(
            f'loss.advantage = "{advantage}": no such advantage; {suggest(advantage, ADVANTAGES, lists_few=True)} '
            "(your own: module:function or file.py:function)"
        )
    chosen = resolve_loss(config)
    for key, users in (("min_importance", HAVE_LEAST), ("max_importance", HAVE_MOST)):
        given = getattr(loss, key)
        if given is not None and chosen.correction not in users:
            raise ValueError(
                f'loss.{key} = {given:g}: loss.correction = "{chosen.correction}" has no such limit; it works with '
                f"{', '.join(users)}"
            )
    if chosen.policy == "sequence_clip" and chosen.aggregate != "sequence_mean":
        raise ValueError(
            f'loss.aggregate = "{chosen.aggregate}": must be "sequence_mean" with loss.name = "{loss.name}", '
            "because this loss has one ratio per answer, and any other aggregate would weight answers by their length"
        )
    if config.reward.overlong_tokens >= config.rollout.max_new_tokens:
        raise ValueError(
            f"reward.overlong_tokens = {config.reward.overlong_tokens}: must be less than rollout.max_new_tokens = "
            f"{config.rollout.max_new_tokens}"
        )


def gate_has_a_baseline(config: Config) -> None:
    batch, chosen = config.batch, resolve_loss(config)
    if batch.gate == "strict":
        if chosen.drop_no_signal and chosen.advantage in BEYOND_SIBLINGS:
            raise ValueError(
                f'batch.drop_no_signal = true: must be false with loss.advantage = "{chosen.advantage}", because '
                "groups whose rewards are all equal can then be trained on, too"
            )
        return
    gate = f'batch.gate = "{batch.gate}"'
    if chosen.drop_no_signal:
        raise ValueError(
            f"batch.drop_no_signal = true: must be false with {gate}, because answers are then trained before it is "
            "known whether their group's rewards are all equal"
        )
    if batch.min_group != MIN_GROUP:
        raise ValueError(
            f"batch.min_group = {batch.min_group}: leave it out with {gate}, because each answer is then trained on "
            "its own"
        )
    if batch.gate == "release" and chosen.advantage in BEYOND_SIBLINGS:
        raise ValueError(
            f'{gate}: cannot be used with loss.advantage = "{chosen.advantage}", which does not compare the answers to '
            'one prompt; set batch.gate = "batch"'
        )
    if batch.gate == "batch" and chosen.advantage in set(ADVANTAGES) - set(BEYOND_SIBLINGS):
        raise ValueError(
            f'loss.advantage = "{chosen.advantage}": must be {" or ".join(BEYOND_SIBLINGS)} with {gate}, because it '
            'compares answers to one prompt; leave it out, or set batch.gate = "release"'
        )


def stale_data_is_corrected(config: Config) -> None:
    if resolve_loss(config).correction == "off" and config.schedule.bound > 0:
        raise ValueError(
            f'loss.correction = "off": cannot be used with schedule.max_staleness = {config.schedule.bound}, because '
            "tokens of older weights would be trained on without a correction; set another loss.correction"
        )


DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")


def device_is_known(config: Config) -> None:
    if not DEVICE.fullmatch(config.model.device):
        raise ValueError(
            f'model.device = "{config.model.device}": must be "auto", "cpu", "cuda", "cuda:1" and so on, or "mps"'
        )


def ranks_have_processes_and_devices(config: Config) -> None:
    ranks = config.trainer.ranks
    if ranks == 1:
        return
    if config.rollout.workers is None:
        raise ValueError(
            f"trainer.ranks = {ranks}: needs rollout.workers, because without it one process does everything; set "
            "rollout.workers to 1 or more, or to 0 if workers join from elsewhere"
        )
    if re.fullmatch(r"cuda:\d+|mps", config.model.device):
        raise ValueError(
            f'model.device = "{config.model.device}": must be "auto", "cpu" or "cuda" with trainer.ranks = {ranks}, '
            "because each rank takes a GPU of its own"
        )


def peer_networks_are_valid(config: Config) -> None:
    for network in config.serve.peer_networks:
        try:
            ipaddress.ip_network(network)
        except ValueError as error:
            raise ValueError(f'serve.peer_networks = ["{network}"]: {error}; write it like 10.0.0.0/8') from error


def episodes_are_possible(config: Config) -> None:
    if not any(is_episode(task) for task in config.task):
        return
    if config.schedule.new_version == "finish":
        raise ValueError(
            'schedule.new_version = "finish": cannot be used with tools or environments, because new weights would '
            'wait for the slowest tool; set schedule.new_version = "interrupt"'
        )


def is_episode(task: TaskConfig) -> bool:
    """Whether the task's answers are episodes: it has tools or an environment."""
    return bool(task.tools) or isinstance(task, EnvironmentTask)


CHECKS = (
    batch_arithmetic_holds,
    schedule_holds_together,
    engine_can_do_it,
    loss_is_known,
    gate_has_a_baseline,
    stale_data_is_corrected,
    device_is_known,
    ranks_have_processes_and_devices,
    peer_networks_are_valid,
    episodes_are_possible,
)


class TaskConfig(Section):
    """The keys that every source of prompts has."""

    weight: float = Field(1.0, gt=0)
    """Share of prompts drawn from this source, relative to the other sources."""
    reward: str | None = None
    """`exact`, `number`, `math`, `module:function` or `file.py:function`. Without it, the default of the source."""
    system: str | None = None
    """System message, for models with a chat template."""
    tools: list[str] = Field([])
    """Functions or classes whose functions the model may call. Each is `module:name` or `file.py:name`; see
    docs/environments.md."""


class ArithmeticTask(TaskConfig):
    source: Literal["arithmetic"] = "arithmetic"
    """Source: arithmetic, reasoning-gym, file, dataset, function or environment."""
    level: int = Field(2, ge=1, le=5)
    """Difficulty, from two digits to eight terms of up to three digits."""
    tail: float = Field(0.0, ge=0, le=1)
    """Share of problems whose worked answer is long."""
    tail_median: int = Field(6, ge=2, le=64)
    """Median number of lines of a long answer. The longest has 40 lines."""
    tail_sigma: float = Field(0.8, ge=0, le=2)
    """Log-normal spread of the lines of long answers."""


class GymTask(TaskConfig):
    source: Literal["reasoning-gym"]
    name: str
    """Name of the data set in reasoning-gym, such as `chain_sum`."""
    options: dict[str, Any] = Field({})
    """Configuration of the data set."""
    chat: bool | None = None
    """Apply the chat template to text prompts. Without it, true if the model has a template."""


class FileTask(TaskConfig):
    source: Literal["file", "dataset"]
    path: str
    """A .jsonl or .parquet file, or a Hugging Face dataset's hub name or folder. A dataset's configuration follows a
    colon, as in openai/gsm8k:main."""
    split: str = "train"
    """Split of a dataset."""
    prompt: str = "prompt"
    """Column with the prompt as text."""
    messages: str | None = None
    """Column with the prompt as chat messages, instead of `prompt`."""
    answer: str | None = "answer"
    """Column with the right answer, which the reward receives."""
    chat: bool | None = None
    """Apply the chat template to text prompts. Without it, true if the model has a template."""
    held_out: float = Field(0.05, ge=0, lt=1)
    """Share of rows held out for evaluation, chosen by a hash of their prompt."""
    shuffle: bool = True
    """Shuffle the rows in every epoch, by run.seed."""


class FunctionTask(TaskConfig):
    source: Literal["function"]
    path: str
    """`module:function` or `file.py:function`. It is called with (ordinal, seed, held_out) and returns a problem as a
    dict."""
    chat: bool | None = None
    """Apply the chat template to text prompts. Without it, true if the model has a template."""


class EnvironmentTask(TaskConfig):
    source: Literal["environment"]
    path: str
    """The environment's class, as `module:class` or `file.py:class`. It has the methods `begin` and `step`; see
    docs/environments.md."""
    options: dict[str, Any] = Field({})
    """Arguments with which an object of the class is made for each episode."""
    prompt: str = ""
    """Text in front of what the environment says first."""
    chat: bool | None = None
    """Apply the chat template. Without it, true if the model has a template."""


AnyTask = Annotated[ArithmeticTask | GymTask | FileTask | FunctionTask | EnvironmentTask, Field(discriminator="source")]


DEFAULT_BOUND = 4
"""Default staleness bound for schedule.mode = "overlap". Training is known to work as well at a staleness of up to 6
steps, and to suffer at 11."""


class RunConfig(Section):
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run's folder below `dir`. Without it, the date and time."""
    dir: str = free("runs")
    """Folder that runs are kept in."""
    access: Literal["private", "group", "everyone"] = free("private")
    """Users of this machine who may read the run's folder."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed for prompt order, sampling and all other randomness."""
    steps: int = free(300, ge=1)
    """Steps to train. With --resume, counted from the run's beginning."""
    max_hours: float | None = free(None, gt=0)
    """Time after which the run stops with a checkpoint."""
    exact: bool = False
    """Bit-identical results, also after kills and resumes. Needs the embedded engine and max_staleness = 0."""
    threads: int | None = free(None, ge=1)
    """CPU threads of torch. Without it, torch's default."""


class ModelConfig(Section):
    path: str = "offbeat-tiny"
    """Hugging Face model: folder or hub name. Offbeat has `offbeat-tiny` and `offbeat-tiny-tools`."""
    tokenizer: str | None = None
    """Folder of a tokenizer, if not the model's own."""
    chat_template: str | None = None
    """File with a Jinja chat template that replaces the tokenizer's."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of the published weights. auto: bfloat16 on a GPU, else float32."""
    device: str = free("auto")
    """`cpu`, `cuda`, `cuda:1` or `mps`; auto is the fastest available."""
    gradient_checkpointing: bool | Annotated[float, Field(gt=0, lt=1)] = free(False)
    """Recompute activations in the backward pass: true, or a share of layers. Saves memory, takes time."""
    lora_rank: int = Field(0, ge=0)
    """Rank of LoRA adapters; only they are trained and published. 0: all weights are trained."""
    lora_alpha: float | None = Field(None, gt=0)
    """LoRA's alpha. Without it, twice the rank."""
    lora_targets: list[str] = Field([])
    """Layers with an adapter, by the end of their names, such as q_proj. Without it, all linear layers."""


class RewardConfig(Section):
    processes: int = free(1, ge=0, le=256)
    """Reward processes beside the coordinator. 0: only judges that join compute rewards."""
    timeout_s: float = free(10.0, gt=0)
    """Time limit of one reward. Then the reward process is killed, and the reward counts as failed."""
    max_failure_share: float = free(0.2, ge=0, le=1)
    """Largest share of failed rewards among the latest rewards. Above it, the run stops."""
    weights: dict[str, float] = Field({})
    """Weight of each named part of a reward. Parts without a weight count 1."""
    overlong_tokens: int = Field(0, ge=0)
    """Answers within this many tokens of rollout.max_new_tokens lose reward. The penalty grows linearly to 1 (times
    reward.weights.overlong) at rollout.max_new_tokens. 0: no penalty."""


class BatchConfig(Section):
    groups_per_step: int = Field(32, ge=1)
    """Prompts per step."""
    group_size: int = Field(8, ge=2)
    """Answers per prompt, which are compared with each other."""
    gate: Literal["strict", "release", "batch"] = "strict"
    """Condition for training on an answer. strict: its whole group is scored. release: the answer itself is scored; its
    baseline comes from the siblings scored by then. batch: as release, but the baseline comes from the batch."""
    min_group: int = Field(MIN_GROUP, ge=MIN_GROUP)
    """Scored answers that a group needs to be trained on (gate = "strict")."""
    drop_no_signal: bool | None = None
    """Replace groups whose rewards are all equal (dynamic sampling). Without it, only for dapo."""
    max_redraws: float = Field(4.0, ge=0)
    """Limit on the groups replaced per step by drop_no_signal. It is a multiple of groups_per_step. Further groups are
    trained anyway."""
    updates_per_step: int = Field(1, ge=1)
    """Optimizer updates per step; the step's groups are divided among them."""
    tokens_per_microbatch: Annotated[int, Field(ge=1)] | Literal["auto"] = free("auto")
    """Tokens in one forward and backward pass. A smaller number takes less memory and gives the same result. A longer
    sample gets a pass of its own. auto: measured on a GPU at the start; 16384 on CPUs and with run.exact."""

    @property
    def assumed_tokens(self) -> int:
        """Largest number of tokens of a micro-batch, for a run in which this number is not measured on a GPU."""
        return MICROBATCH_TOKENS if self.tokens_per_microbatch == "auto" else self.tokens_per_microbatch

    @property
    def members(self) -> int:
        """Number of answers that the ledger claims together: with gate = "strict" all answers to a prompt, else one."""
        return self.group_size if self.gate == "strict" else 1

    @property
    def siblings(self) -> int:
        """Number of groups in which the ledger keeps the answers to one prompt: one with gate = "strict", else as many
        as answers."""
        return self.group_size // self.members

    @property
    def claims_per_step(self) -> int:
        """Number of the ledger's groups that a step trains."""
        return self.groups_per_step * self.siblings


class ScheduleConfig(Section):
    mode: Literal["alternate", "overlap"] = "alternate"
    """alternate: generate, then train; overlap: workers never stop. With alternate and max_staleness above 0, answers
    that are unfinished when a batch is complete are continued with the next weights. With overlap, the trainer takes
    finished groups."""
    max_staleness: int | None = Field(None, ge=0, le=64)
    """Steps that a token may be older than the weights it trains. Without it, 0 for alternate and 4 for overlap."""
    over_provision: Annotated[float, Field(ge=1)] | Literal["auto"] | None = free(None)
    """Groups in flight, as a multiple of groups per step. At most max_staleness + 1. auto: with overlap, as many as
    keep the trainer busy; with alternate, max_staleness + 1, or 1 if this is measured to be about as fast. Without it,
    auto where max_staleness is 1 or more, otherwise 1."""
    new_version: Literal["interrupt", "finish"] = free("interrupt")
    """Effect of new weights on running answers (overlap). interrupt: answers continue with the new weights at once.
    finish: answers end with the old weights, and the worker starts no others before it has loaded the new weights. Slow
    answers delay this load."""

    @property
    def bound(self) -> int:
        """Largest staleness that is trained on."""
        if self.max_staleness is not None:
            return self.max_staleness
        return DEFAULT_BOUND if self.mode == "overlap" else 0

    @property
    def stops(self) -> bool:
        """Whether generation stops when a batch is complete, so that unfinished answers are continued later."""
        return self.mode == "alternate" and self.bound > 0

    @property
    def factor(self) -> float | Literal["auto"]:
        """Configured number of groups in flight, divided by groups per step, or "auto"."""
        if self.bound == 0:
            return 1.0
        return "auto" if self.over_provision is None else self.over_provision


class ServeConfig(Section):
    host: str = free("127.0.0.1")
    """Address that the coordinator listens on. Other addresses than loopback need a certificate, here or in a proxy."""
    port: int = free(0, ge=0, le=65535)
    """Port of the coordinator. 0: any free port, which a resumed run keeps."""
    certificate: str | None = free(None)
    """PEM file with the coordinator's TLS certificate. auto: one of the run's own, made in its folder, which workers
    need as --ca-file. plain: no TLS, within a private network. Workers then need --allow-plain."""
    key: str | None = free(None)
    """PEM file with the certificate's private key."""
    behind_proxy: bool = free(False)
    """Whether a proxy in front of the coordinator terminates TLS."""
    peer_networks: list[str] = free([])
    """Networks in which workers may announce their own address to peers. Needed for workers behind NAT, in a network
    such as 10.0.0.0/8."""


class RolloutConfig(Section):
    workers: int | None = free(None, ge=0, le=64)
    """Worker processes on this machine; more may join from elsewhere. Without it, one process does everything."""
    engine: Literal["auto", "embedded", "vllm", "sglang", "paced"] = "auto"
    """Inference engine: auto, embedded, vllm or sglang. auto: vllm if it is installed and there is a GPU, otherwise
    embedded. embedded: the model itself, in the worker. vllm, sglang: a server beside each worker, see [engine]."""
    kv: Literal["same", "refill", "stale"] = "same"
    """KV cache of running answers when weights change. same: recomputed with the new weights. refill: like same, but no
    cache is ever reused, not even that of an equal prompt. stale: kept across a load (max_staleness of 1 or more)."""
    kv_lag: int = Field(1, ge=1)
    """Versions that a kept KV cache may lag behind (kv = "stale")."""
    slots: int = free(256, ge=1)
    """Requests that an engine runs at the same time."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature in training; evaluation has its own. There is no top-p or top-k in training."""
    max_prompt_tokens: int = free(64, ge=1)
    """Longest prompt, in tokens; `long_prompts` is for longer ones."""
    long_prompts: Literal["error", "skip", "cut"] = free("error")
    """Treatment of prompts that are too long. error: the run does not start. skip: they are left out. cut: only the end
    of their text is kept. A long prompt that turns up after the start is left out instead of ending the run."""
    max_new_tokens: int = Field(32, ge=1)
    """Longest answer, in tokens; longer answers are cut."""
    max_attempts: int = free(3, ge=1)
    """Attempts at a task, retries included, before it fails."""
    lease_s: float = free(60.0, gt=0)
    """Seconds without a heartbeat after which a worker's tasks go to others."""
    deadline_s: float = free(1800.0, gt=0)
    """Longest wait for a batch; then the run stops with the reason."""


class EngineConfig(Section):
    """The server that each worker uses if `rollout.engine` is vllm or sglang."""

    url: str | None = free(None)
    """URL of a running server, used by one worker. Without it, every worker starts its own server on this machine."""
    python: str | None = free(None)
    """Python of the environment with the engine. Without it, the Python that runs Offbeat."""
    tensor_parallel: int = free(1, ge=1)
    """GPUs per server (tensor parallelism)."""
    memory_share: Annotated[float, Field(gt=0, lt=1)] | Literal["auto"] = free("auto")
    """Share of each GPU's memory that the server may take. auto: 0.85; on the trainer's GPU, half of what the trainer's
    weights and optimizer leave."""
    arguments: list[str] = free([])
    """Further arguments for the server's command line."""

    start_within_s: float = free(600.0, gt=0)
    """Longest wait for a started server to respond."""
    weights: Literal["auto", "path", "ipc"] = free("auto")
    """Transfer of new weights into the server. path: files. ipc: GPU memory. auto: ipc on a GPU."""

    @property
    def assumed_share(self) -> float:
        """Share of a GPU's memory for a server that does not share the GPU with the trainer."""
        return ALONE_SHARE if self.memory_share == "auto" else self.memory_share


class EnvironmentConfig(Section):
    """Episodes: tasks with `tools`, or with source = "environment". Environments run in processes of each worker."""

    processes: int = free(2, ge=1, le=64)
    """Processes with environments, for each worker. Each holds many episodes."""
    episodes: int | None = free(None, ge=1)
    """Episodes that a worker carries on at the same time. Those that wait for a tool take no slot of the engine.
    Without it, twice rollout.slots."""
    max_turns: int = Field(8, ge=1)
    """Turns of the model after which an episode ends."""
    max_turn_tokens: int = Field(128, ge=1)
    """Longest turn, in tokens. An episode ends with a turn that reaches this limit."""
    max_observation_tokens: int = Field(256, ge=1)
    """Longest observation, in tokens. The middle of a longer one is left out. Turns and observations together have at
    most rollout.max_new_tokens tokens."""
    parallel_calls: int = Field(4, ge=1, le=64)
    """Calls of one turn that are run, all at once. The model is told that further ones are not."""
    bad_calls: int = Field(1, ge=0)
    """Mistakes in a row of which the model is told, such as unknown tools. With one more, the episode ends."""
    calls: str | None = None
    """Format in which a model with a chat template writes calls, such as hermes. Without it, that of the template."""
    step_timeout_s: float = free(30.0, gt=0)
    """Longest time of a call or of a step of the environment. Then the call is given up, which the model is told, or
    the attempt at the episode fails."""
    episode_timeout_s: float = free(600.0, gt=0)
    """Longest time of an episode. Then it ends as it is."""
    memory_mb: int = free(512, ge=64)
    """Memory of a process with environments, for all of its episodes together."""


class PacedConfig(Section):
    """Speed of the paced engine, which has no model and only waits, for tests."""

    base_s: float = free(0.01, ge=0)
    """Seconds that a decode step takes, without the time for its rows (running answers)."""
    per_row_s: float = free(0.0002, gt=0)
    """Seconds that each row adds to a decode step."""
    prefill_s: float = free(0.0, ge=0)
    """Seconds for each prompt token of a new request."""
    load_s: float = free(0.0, ge=0)
    """Seconds that a load of new weights takes."""
    speed: float = free(1.0, gt=0)
    """Divides the times of decode steps: 3 is three times as fast."""
    median_tokens: float = free(16.0, gt=0)
    """Median length of answers."""
    sigma: float = free(0.8, ge=0, le=3)
    """Log-normal spread of the lengths."""


class TrainerConfig(Section):
    """The processes (ranks) that train together. With run.exact, results do not depend on their number."""

    ranks: int = free(1, ge=1, le=1024)
    """Trainer processes on this machine, each with a GPU of its own. For ranks on several machines, start offbeat
    trainer with torchrun."""
    start_within_s: float = free(300.0, gt=0)
    """Longest wait for all ranks at the start. Then the trainer ends, and names the ranks that are missing."""
    lost_after_s: float = free(30.0, ge=1)
    """Seconds without a sign of life after which a rank counts as lost. All ranks then start again from the last
    checkpoint."""
    timeout_s: float = free(600.0, gt=0)
    """Longest wait of one rank for another within a pass or a checkpoint."""


class EvalConfig(Section):
    every: int = free(20, ge=0)
    """Steps between evaluations on the held-out split. 0: never."""
    prompts: int = free(200, ge=1)
    """Held-out prompts per evaluation."""
    samples: int = free(1, ge=1)
    """Answers per prompt, the k of mean@k and pass@k."""
    temperature: float = free(1.0, ge=0)
    """Sampling temperature in evaluation. 0: greedy decoding."""
    top_p: float = free(1.0, gt=0, le=1)
    """Top-p (nucleus) sampling in evaluation. 1: all tokens."""


class CheckpointConfig(Section):
    every: int = free(50, ge=0)
    """Steps between checkpoints. 0: only at the end."""
    keep: int = free(2, ge=1)
    """Number of newest checkpoints to keep."""


class LedgerConfig(Section):
    keep_bodies: int | None = free(None, ge=0)
    """Number of steps before the last checkpoint whose answers are kept. Without it, all answers are kept."""
    backup: str | None = free(None)
    """Folder or URL that gets a copy of the ledger with every checkpoint. A URL looks like s3://bucket/run."""


class WeightsConfig(Section):
    deltas: Literal["auto", "always", "never"] = free("auto")
    """Publish sparse, signed weight deltas. auto: if workers on other machines can join; always: for all workers."""
    store: str | None = free(None)
    """Place of the weights: a folder or URL that all roles can reach. A URL looks like s3://bucket/run. Without it, the
    coordinator serves the weights."""


class LogConfig(Section):
    console: Literal["auto", "rich", "plain", "quiet"] = free("auto")
    """Console output. auto: a table in a notebook, rich on a terminal, plain elsewhere."""
    sinks: list[Literal["tensorboard", "wandb", "trackio"]] = free([])
    """Metric loggers: tensorboard, wandb, trackio."""
    project: str = free("offbeat")
    """Project name in W&B and trackio."""


class Config(Section):
    """The configuration of a whole run."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    task: list[AnyTask] = Field([ArithmeticTask()], min_length=1)
    reward: RewardConfig = RewardConfig()
    batch: BatchConfig = BatchConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    serve: ServeConfig = ServeConfig()
    paced: PacedConfig = Field(PacedConfig(), json_schema_extra={"hidden": True})
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    trainer: TrainerConfig = TrainerConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    ledger: LedgerConfig = LedgerConfig()
    weights: WeightsConfig = WeightsConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def fields_agree(self) -> Self:
        for check in CHECKS:
            check(self)
        return self


DEMO = {
    "run": {"steps": 150},
    "task": [{"source": "arithmetic"}],
    "optimizer": {"lr": 1e-4},
    "eval": {"every": 25},
}
"""The configuration of `offbeat train` without a file."""
