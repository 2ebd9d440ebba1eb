"""What a configuration needs of a machine, worked out from it alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from offbeat.config import Config
from offbeat.config.arithmetic import BYTES_PER_PARAMETER, disk_bytes
from offbeat.config.tasks import AnyTask, FileTask
from offbeat.model.loading import HUB_ID

SERVED = {"vllm": "vLLM", "sglang": "SGLang"}
"""Engines that are servers of their own, as people call them."""
STATE_BYTES = 16
"""A parameter's master, its two moments and its gradient, in float32."""
STORES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
"""The package that reaches a store, by how its URL begins."""


@dataclass(frozen=True)
class Needs:
    name: str
    """What the configuration is called in sentences."""
    command: str
    """What would start it."""
    engine: str
    engine_python: str | None
    engine_url: str | None
    num_engine_devices: int
    engine_memory_share: float
    device: str
    model: str
    context_tokens: int
    temperature: float
    kv: str
    extras: dict[str, str]
    """The extras that it needs, each with the key that does."""
    stores: dict[str, str]
    """Packages without an extra, likewise."""
    has_roles: bool
    """Whether coordinator, trainer and workers are processes that talk over HTTP."""
    host: str
    port: int
    config: Config

    @property
    def is_served(self) -> bool:
        return self.engine in SERVED

    @property
    def is_on_hub(self) -> bool:
        """Whether the model may be fetched when the run starts."""
        return HUB_ID.fullmatch(self.model) is not None

    def disk_bytes(self, num_parameters: int | None) -> int:
        return sum(disk_bytes(self.config, num_parameters).values())

    def memory_bytes(self, num_parameters: int, *, on_gpu: bool) -> int:
        """The least that trainer and engine hold on one device, without activations and keys and values."""
        dtype = "bfloat16" if self.config.model.dtype == "auto" and on_gpu else self.config.model.dtype
        weights = BYTES_PER_PARAMETER[dtype]
        if self.config.model.lora_rank:  # frozen, and its own reference; adapters are too small to count
            return num_parameters * weights * (1 + (self.engine == "embedded"))
        num_copies = (weights < 4) + (self.engine == "embedded") + (self.config.loss.kl_coef > 0)
        return num_parameters * (STATE_BYTES + num_copies * weights)


def needs_of(config: Config, name: str, command: str, engine_url: str | None = None) -> Needs:
    """The needs of a configuration, and of whoever asks about one more server."""
    engine = config.engine
    stores = (("weights.store", config.weights.store), ("ledger.backup", config.ledger.backup))
    remote = {key: url for key, url in stores if url and "://" in url}
    extras = {extra: key for task in config.task for extra, key in _extras_of(task)}
    extras |= dict.fromkeys(config.log.sinks, "log.sinks")
    if config.model.lora_rank:
        extras["lora"] = "model.lora_rank"
    if remote:
        extras["remote"] = " and ".join(remote)
    return Needs(
        name=f"{name} with {engine_url}" if engine_url else name,
        command=command,
        engine=config.rollout.engine,
        engine_python=engine.python,
        engine_url=engine_url or engine.url,
        num_engine_devices=engine.tensor_parallel,
        engine_memory_share=engine.memory_share,
        device=config.model.device,
        model=config.model.path,
        context_tokens=config.rollout.max_prompt_tokens + config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        kv=config.rollout.kv,
        extras=extras,
        stores={STORES[url.split("://")[0]]: key for key, url in remote.items() if url.split("://")[0] in STORES},
        has_roles=config.rollout.workers is not None,
        host=config.serve.host,
        port=config.serve.port,
        config=config,
    )


def _extras_of(task: AnyTask) -> Iterator[tuple[str, str]]:
    if task.source == "reasoning-gym":
        yield "gym", "task.source"
    if isinstance(task, FileTask) and (task.source == "dataset" or task.path.endswith(".parquet")):
        yield "data", "task.path"
    if task.reward == "math":
        yield "math", "task.reward"
