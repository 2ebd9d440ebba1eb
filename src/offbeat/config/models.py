"""The typed configuration: what a user may say, its defaults, its ranges and the checks across fields.

Nothing heavy is imported here: a wrong configuration is refused before torch is. Fields are *fixed* for the life of a
run, unless marked `free()`, which `--resume` may change. Errors name the key, the value and what is allowed.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from offbeat.config.checks import CHECKS, MIN_GROUP
from offbeat.config.learning import LossConfig, OptimizerConfig
from offbeat.config.section import Section, free
from offbeat.config.tasks import AnyTask, ArithmeticTask

DEFAULT_BOUND = 4
"""Steps of staleness at which quality is known to hold; it still does at 6, and no longer at 11."""


class RunConfig(Section):
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The run's folder below `dir`; without it, the date and time."""
    dir: str = free("runs")
    """Where runs are kept."""
    access: Literal["private", "group", "everyone"] = free("private")
    """Who else on this machine may read the run's folder, and what is written there."""
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
    lora_rank: int = Field(0, ge=0)
    """Train adapters of this rank beside frozen weights (LoRA), and publish them alone; 0: all weights are trained."""
    lora_alpha: float | None = Field(None, gt=0)
    """What adapters are multiplied by, times the rank; without it, twice the rank."""
    lora_targets: list[str] = Field([])
    """Layers that get an adapter, by the end of their names, such as q_proj; without it, all linear ones."""


class RewardConfig(Section):
    processes: int = free(1, ge=0, le=256)
    """Rewards computed at a time where the coordinator runs; 0: only by judges that join from elsewhere."""
    timeout_s: float = free(10.0, gt=0)
    """Longest wait for one reward; then its process is killed and the reward counts as failed."""
    max_failure_share: float = free(0.2, ge=0, le=1)
    """The run stops when a larger share of the latest rewards failed."""
    weights: dict[str, float] = Field({})
    """What each named part of a reward counts; those not named count 1."""
    overlong_tokens: int = Field(0, ge=0)
    """Answers that come this close to rollout.max_new_tokens lose reward, more the closer they come; 0: none does."""
    overlong_penalty: float = Field(1.0, gt=0)
    """What the longest answers lose."""


class BatchConfig(Section):
    groups_per_step: int = Field(32, ge=1)
    """Prompts per step."""
    group_size: int = Field(8, ge=2)
    """Answers per prompt, which are judged against each other."""
    gate: Literal["strict", "release", "batch"] = "strict"
    """When an answer may be trained on. strict: once its whole group is scored. release: once it is scored itself,
    judged against the siblings known by then. batch: the same, judged against the batch's mean."""
    min_group: int = Field(MIN_GROUP, ge=MIN_GROUP)
    """A group trains while this many members remain (gate = "strict")."""
    drop_no_signal: bool | None = None
    """Drop groups whose rewards are all equal, which teach nothing, and draw others; without it, for dapo alone."""
    max_redraws: float = Field(4.0, ge=0)
    """At most so many groups, times groups_per_step, are dropped for a step; then they are taken as they are."""
    updates_per_step: int = Field(1, ge=1)
    """Optimizer updates that a step's groups are dealt to."""
    tokens_per_microbatch: int = free(16384, ge=1)
    """Tokens in one forward and backward pass: less memory with fewer, the same result."""

    @property
    def members(self) -> int:
        """Answers that the ledger claims together: a prompt's, or each one by itself."""
        return self.group_size if self.gate == "strict" else 1

    @property
    def siblings(self) -> int:
        """What the ledger has of each prompt, of so many members each."""
        return self.group_size // self.members

    @property
    def claims_per_step(self) -> int:
        """What the ledger has of a step: as many answers with every gate."""
        return self.groups_per_step * self.siblings


class ScheduleConfig(Section):
    mode: Literal["alternate", "overlap"] = "alternate"
    """alternate: generate, then train; with max_staleness, what is unfinished when a batch is complete is carried on
    with the next weights. overlap: workers never stop, and the trainer takes what is finished."""
    max_staleness: int | None = Field(None, ge=0, le=64)
    """Steps that a token may be older than the weights it trains; without it, 0 for alternate and 4 for overlap."""
    over_provision: Annotated[float, Field(ge=1)] | Literal["auto"] | None = free(None)
    """Groups under way over groups that a step trains, at most max_staleness + 1. auto: as many as pay; without it,
    auto where max_staleness is 1 or more, and 1 elsewhere."""
    new_version: Literal["interrupt", "finish"] = free("interrupt")
    """What new weights do to answers under way (overlap). interrupt: they go on with the new ones at once. finish: they
    end as they began, and the worker begins nothing until it has the new ones: slow answers delay them."""

    @property
    def bound(self) -> int:
        """The largest staleness that is trained on."""
        if self.max_staleness is not None:
            return self.max_staleness
        return DEFAULT_BOUND if self.mode == "overlap" else 0

    @property
    def stops(self) -> bool:
        """Whether generation stops when a batch is complete, and what is unfinished then is carried on later."""
        return self.mode == "alternate" and self.bound > 0

    @property
    def factor(self) -> float | Literal["auto"]:
        """Groups under way over groups that a step trains."""
        if self.bound == 0:
            return 1.0
        return "auto" if self.over_provision is None else self.over_provision


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
    peer_networks: list[str] = free([])
    """Networks such as 10.0.0.0/8 in which workers behind one address may name their own for peers."""


class RolloutConfig(Section):
    workers: int | None = free(None, ge=0, le=64)
    """Worker processes on this machine, beside those that join from elsewhere; without it, one process does all."""
    engine: Literal["embedded", "paced", "vllm", "sglang"] = "embedded"
    """What generates. embedded: the model itself. vllm, sglang: a server beside each worker, see [engine]. paced: no
    model, random tokens at a modelled pace, to try a swarm."""
    kv: Literal["same", "refill", "stale"] = "same"
    """Keys and values that tokens attend to. same: the sampling version's own. refill: also computed anew for every
    request. stale: a request keeps those that it has across a load (max_staleness of 1 or more; not paced)."""
    kv_lag: int = Field(1, ge=1)
    """Versions that kept keys and values may lag behind (kv = "stale")."""
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


class EngineConfig(Section):
    """The server of an engine that has one (vllm, sglang)."""

    url: str | None = free(None)
    """A server to use, for one worker alone; without it, every worker starts one of its own on this machine."""
    python: str | None = free(None)
    """The Python of the environment that has the engine; without it, the one that runs Offbeat."""
    tensor_parallel: int = free(1, ge=1)
    """GPUs that one server spreads the model over."""
    memory_share: float = free(0.85, gt=0, lt=1)
    """Of each GPU's memory, what the server may take."""
    arguments: list[str] = free([])
    """More words for its command line, handed on as they are."""
    start_within_s: float = free(600.0, gt=0)
    """Longest wait for a server that was started to answer."""
    weights: Literal["auto", "path", "ipc"] = free("auto")
    """How versions get into it. path: it reads files. ipc: by way of the GPU's memory. auto: ipc on a GPU."""


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


class WeightsConfig(Section):
    deltas: Literal["auto", "always", "never"] = free("auto")
    """Publish what changed, in signed pieces; auto: where workers elsewhere can join; always: for all workers."""
    anchor_every: int = free(10, ge=1)
    """Versions from one whole one to the next; workers that join late start from the newest."""
    store: str | None = free(None)
    """A folder or URL such as s3://bucket/run that trainer and workers reach; without it, the coordinator has all."""


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
    engine: EngineConfig = EngineConfig()
    serve: ServeConfig = ServeConfig()
    paced: PacedConfig = PacedConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
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
"""What `offbeat train` runs when it is given no file."""
