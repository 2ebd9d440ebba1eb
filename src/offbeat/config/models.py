"""The typed configuration: what a user may say, its defaults, its ranges and the checks across fields.

Nothing heavy is imported here: a wrong configuration is refused before torch is. Fields are *fixed* for the life of a
run, unless marked `free()`, which `--resume` may change. Errors name the key, the value and what is allowed.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


def free(default: Any, **constraints: Any) -> Any:
    """A field whose value may change when a run is resumed."""
    return Field(default, json_schema_extra={"free": True}, **constraints)


DEFAULT_BOUND = 4
"""Steps of staleness at which quality is known to hold; it still does at 6, and no longer at 11."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True, allow_inf_nan=False)


class RunConfig(Section):
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The run's folder below `dir`; without it, the date and time."""
    dir: str = free("runs")
    """Where runs are kept."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Of prompts, sampling and everything else that is drawn."""
    steps: int = free(300, ge=1)
    """Batches to train; with --resume, counted from the run's beginning."""
    max_hours: float | None = free(None, gt=0)
    """Stop, with a checkpoint, after this long."""
    exact: bool = False
    """Bit-equal results whatever is killed and resumed (embedded engine, max_staleness = 0)."""
    threads: int | None = free(None, ge=1)
    """CPU threads for torch; without it, torch's own choice."""


class ModelConfig(Section):
    path: str = "offbeat-tiny"
    """A Hugging Face folder, or `offbeat-tiny`, the model that ships with Offbeat."""
    tokenizer: str | None = None
    """A folder with another tokenizer than the model's own."""
    chat_template: str | None = None
    """A file with a Jinja chat template to use instead of the tokenizer's."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the published weights. auto: bfloat16 on a GPU, float32 elsewhere."""
    device: str = free("auto")
    """`cpu`, `cuda`, `cuda:1`, `mps`. auto: the fastest there is."""
    gradient_checkpointing: bool = free(False)
    """Compute activations twice instead of keeping them: slower, in less memory."""


class TaskConfig(Section):
    """What every source of prompts can be told."""

    weight: float = Field(1.0, gt=0)
    """How often this source is drawn from, beside the others."""
    reward: str | None = None
    """`exact`, `number`, `math`, `module:function` or `file.py:function`; without it, the source's own."""
    system: str | None = None
    """A system message, for models with a chat template."""


class ArithmeticTask(TaskConfig):
    source: Literal["arithmetic"] = "arithmetic"
    level: int = Field(2, ge=1, le=5)
    """How hard: from two digits to eight terms of up to three digits."""
    tail: float = Field(0.0, ge=0, le=1)
    """The share of problems whose worked answer is long."""
    tail_median: int = Field(6, ge=2, le=64)
    """Lines in the median long answer."""
    tail_sigma: float = Field(0.8, ge=0, le=2)
    """Spread of their log-normal law."""
    tail_cap: int = Field(40, ge=2, le=64)
    """Lines in the longest."""


class GymTask(TaskConfig):
    source: Literal["reasoning-gym"]
    name: str
    """The data set's name in reasoning-gym, such as `chain_sum`."""
    options: dict[str, Any] = {}
    """Passed to its configuration."""
    chat: bool | None = None
    """Put the question through the chat template; without it, whenever the model has one."""


class FileTask(TaskConfig):
    source: Literal["file", "dataset"]
    path: str
    """A .jsonl or .parquet file (`file`), or the name or folder of a Hugging Face dataset (`dataset`)."""
    split: str = "train"
    """Of a dataset."""
    prompt: str = "prompt"
    """The column with the prompt as text."""
    messages: str | None = None
    """The column with the prompt as chat messages, instead of `prompt`."""
    answer: str | None = "answer"
    """The column with the right answer, handed to the reward."""
    chat: bool | None = None
    """Put a text prompt through the chat template; without it, whenever the model has one."""
    held_out: float = Field(0.05, ge=0, lt=1)
    """The share of rows kept for evaluation, chosen by their content."""
    shuffle: bool = True
    """Another order in every epoch, drawn from run.seed."""


class FunctionTask(TaskConfig):
    source: Literal["function"]
    path: str
    """`module:function` or `file.py:function`, called with (ordinal, seed, held_out), returning a problem as a dict."""
    chat: bool | None = None
    """Put a text prompt through the chat template; without it, whenever the model has one."""


AnyTask = Annotated[ArithmeticTask | GymTask | FileTask | FunctionTask, Field(discriminator="source")]


class RewardConfig(Section):
    processes: int = free(1, ge=0, le=256)
    """Rewards computed at a time where the coordinator runs; 0: only by judges that join from elsewhere."""
    timeout_s: float = free(10.0, gt=0)
    """Longest wait for one reward; then its process is killed and the reward counts as failed."""
    max_failure_share: float = free(0.2, ge=0, le=1)
    """The run stops when a larger share of the latest rewards failed."""


class BatchConfig(Section):
    groups_per_step: int = Field(32, ge=1)
    """Prompts per step."""
    group_size: int = Field(8, ge=2)
    """Answers per prompt, which are judged against each other."""
    min_group: int = Field(2, ge=2)
    """A group trains while this many members remain."""
    updates_per_step: int = Field(1, ge=1)
    """Optimizer updates that a step's groups are dealt to."""
    tokens_per_microbatch: int = free(16384, ge=1)
    """Tokens in one forward and backward pass: less memory with fewer, the same result."""


class ScheduleConfig(Section):
    mode: Literal["alternate", "overlap"] = "alternate"
    """alternate: generate, then train. overlap: workers never stop, and the trainer takes what is finished."""
    max_staleness: int | None = Field(None, ge=0, le=64)
    """Steps that a token may be older than the weights it trains; without it, 0 for alternate and 4 for overlap."""

    @property
    def bound(self) -> int:
        """The largest staleness that is trained on."""
        if self.max_staleness is not None:
            return self.max_staleness
        return DEFAULT_BOUND if self.mode == "overlap" else 0


class ServeConfig(Section):
    host: str = free("127.0.0.1")
    """Where the coordinator listens; beyond this machine it wants a certificate, or a proxy that has one."""
    port: int = free(0, ge=0, le=65535)
    """0: any that is free, and the same again when the run is resumed."""
    certificate: str | None = free(None)
    """A PEM file, with which the coordinator proves who it is (TLS)."""
    key: str | None = free(None)
    """The certificate's private key."""
    behind_proxy: bool = free(False)
    """A proxy in front of the coordinator ends TLS."""


class RolloutConfig(Section):
    workers: int | None = free(None, ge=0, le=64)
    """Worker processes on this machine, beside those that join from elsewhere; without it, one process does all."""
    engine: Literal["embedded", "paced"] = "embedded"
    """What generates. embedded: the model itself. paced: no model, random tokens at a modelled pace, to try a swarm."""
    slots: int = free(256, ge=1)
    """Requests that the engine runs at a time."""
    temperature: float = Field(1.0, gt=0)
    """Of training's answers; evaluation has its own."""
    top_p: float = Field(1.0, ge=1, le=1)
    """Training samples from the whole distribution; evaluation may cut it, see eval.top_p."""
    max_prompt_tokens: int = free(64, ge=1)
    """Longer prompts are refused."""
    max_new_tokens: int = Field(32, ge=1)
    """Longer answers are cut."""
    max_attempts: int = free(3, ge=1)
    """Tries that a task gets before it fails."""
    lease_s: float = free(60.0, gt=0)
    """A worker that is not heard of for so long loses its tasks to others."""
    deadline_s: float = free(1800.0, gt=0)
    """Longest wait for a batch before the run stops and says whom it waited for."""


class PacedConfig(Section):
    """How fast a paced engine is."""

    base_s: float = free(0.01, ge=0)
    """Seconds that a step takes with no row in it."""
    per_row_s: float = free(0.0002, gt=0)
    """Seconds that each row adds."""
    prefill_s: float = free(0.0, ge=0)
    """Seconds for each token that a new request brings."""
    load_s: float = free(0.0, ge=0)
    """Seconds that new weights take."""
    speed: float = free(1.0, gt=0)
    """Divides all times of steps: 3 is three times as fast."""
    median_tokens: float = free(16.0, gt=0)
    """Half of the answers are longer."""
    sigma: float = free(0.8, ge=0, le=3)
    """Spread of their log-normal law; near 1 there is a long tail."""


class OptimizerConfig(Section):
    lr: float = free(1e-6, gt=0)
    """Learning rate, at its highest."""
    schedule: Literal["constant", "linear", "cosine"] = free("constant")
    """How it falls towards run.steps."""
    warmup_steps: int = free(0, ge=0)
    """Steps in which it rises from 0."""
    beta1: float = free(0.9, ge=0, lt=1)
    """Of AdamW: how slowly the mean of gradients forgets."""
    beta2: float = free(0.999, ge=0, lt=1)
    """The same for their squares."""
    eps: float = free(1e-8, gt=0)
    """Added to the root of that mean, so that nothing is divided by 0."""
    weight_decay: float = free(0.0, ge=0)
    """The share of every weight, times lr, that an update takes away."""
    max_grad_norm: float = free(1.0, gt=0)
    """Longer gradients are shortened to this."""


class LossConfig(Section):
    name: Literal["grpo"] = "grpo"
    """grpo: advantages within each group, clipped probability ratios."""
    clip_low: float = free(0.2, gt=0, lt=1)
    """How far below 1 a probability ratio still counts."""
    clip_high: float = free(0.2, gt=0)
    """How far above 1."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the k3 estimate of the KL divergence to the starting model; 0 loads no reference."""
    max_logprob_gap: float = free(0.05, gt=0)
    """Alarm when engine and trainer disagree by more than this, on average, about fresh tokens."""
    stop_logprob_gap: float | None = free(None, gt=0)
    """Stop the run at this gap."""
    max_sample_gap: float = free(1.0, gt=0)
    """An answer whose log-probs are off by more than this, on average over fresh tokens, is not learnt from."""
    max_importance: float = free(2.0, ge=1)
    """The most that a token of older weights counts (overlap)."""


class EvalConfig(Section):
    every: int = free(20, ge=0)
    """Steps between evaluations on the held-out split; 0: never."""
    prompts: int = free(200, ge=1)
    """Held-out prompts per evaluation."""
    samples: int = free(1, ge=1)
    """Answers per prompt, the k of mean@k and pass@k."""
    temperature: float = free(1.0, ge=0)
    """0 takes the likeliest token."""
    top_p: float = free(1.0, gt=0, le=1)
    """Draw from the likeliest tokens that make up this share of the probability; 1: all tokens."""
    top_k: int = free(0, ge=0)
    """Draw from so many of the likeliest tokens; 0: all tokens."""


class CheckpointConfig(Section):
    every: int = free(50, ge=0)
    """Steps between checkpoints; 0: only at the end."""
    keep: int = free(2, ge=1)
    """The newest so many stay."""


class LedgerConfig(Section):
    keep_bodies: int | None = free(None, ge=0)
    """Steps before the last checkpoint whose answers are kept to look at; without it, those of all steps."""
    backup: str | None = free(None)
    """A folder, or a URL such as s3://bucket/run, that gets a copy of the ledger with every checkpoint."""


class LogConfig(Section):
    console: Literal["auto", "rich", "plain", "quiet"] = free("auto")
    """auto: rich on a terminal, plain elsewhere."""
    sinks: list[Literal["tensorboard", "wandb", "trackio"]] = free([])
    """Where metrics go besides the run's folder."""
    project: str = free("offbeat")
    """The project's name in W&B and trackio."""


class Config(Section):
    """A whole run."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    task: list[AnyTask] = Field([ArithmeticTask()], min_length=1)
    reward: RewardConfig = RewardConfig()
    batch: BatchConfig = BatchConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    rollout: RolloutConfig = RolloutConfig()
    serve: ServeConfig = ServeConfig()
    paced: PacedConfig = PacedConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    ledger: LedgerConfig = LedgerConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def batch_arithmetic_holds(self) -> Self:
        batch, rollout = self.batch, self.rollout
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
        if self.optimizer.warmup_steps > self.run.steps:
            raise ValueError(
                f"optimizer.warmup_steps = {self.optimizer.warmup_steps}: allowed 0 to run.steps = {self.run.steps}"
            )
        mode, bound = self.schedule.mode, self.schedule.max_staleness
        if mode == "alternate" and bound:
            raise ValueError(
                f'schedule.max_staleness = {bound}: allowed 0 with schedule.mode = "alternate", where nothing is '
                'generated while training; set schedule.mode = "overlap"'
            )
        if mode == "overlap" and bound == 0:
            raise ValueError(
                'schedule.max_staleness = 0: allowed 1 or more with schedule.mode = "overlap", where tokens wait for '
                "the step under way"
            )
        if self.run.exact and mode == "overlap":
            raise ValueError(
                'schedule.mode = "overlap": allowed "alternate" with run.exact = true, because what is trained next '
                "would depend on who was faster"
            )
        if self.run.exact and rollout.slots < 16:
            raise ValueError(
                f"rollout.slots = {rollout.slots}: allowed 16 or more with run.exact = true, because below 16 rows "
                "a matrix product takes another path and results depend on their number"
            )
        return self


DEMO = {
    "run": {"steps": 150},
    "task": [{"source": "arithmetic"}],
    "optimizer": {"lr": 1e-4},
    "eval": {"every": 25},
}
"""What `offbeat train` runs when it is given no file."""
