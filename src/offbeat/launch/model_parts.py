"""Builds the parts of a run that need torch: policy, reference, embedded engine, publisher, and their settings.

A user's own loss or advantage is configured as `module:function` or `file.py:function`, with these signatures:

    def loss(tokens: offbeat.trainer.losses.Tokens, settings: offbeat.trainer.losses.LossSettings) -> Tensor
    def advantage(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray

A loss returns one value per token, or a `TokenLoss`, which also marks clipped tokens. `offbeat check-loss` tests both
kinds of function.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from offbeat.config import resolved, secrets
from offbeat.config.schema import Config, resolve_loss
from offbeat.engines.embedded import EmbeddedEngine
from offbeat.errors import UserError
from offbeat.launch import wiring
from offbeat.launch.gpu_memory import servers_bytes, trainer_bytes
from offbeat.locate import locate
from offbeat.model.devices import (
    avoid_fragments,
    be_deterministic,
    device_name,
    limit_memory,
    memory_bytes,
    pick_device,
    pick_dtype,
)
from offbeat.model.loading import load_model, load_without_weights
from offbeat.model.lora import AdapterDisabled, Lora, base_tensors, describe, load_adapted
from offbeat.model.usage import usage
from offbeat.spelling import a_kind
from offbeat.trainer import attention
from offbeat.trainer.advantages import ADVANTAGES, GaeSettings, group_normalised
from offbeat.trainer.losses import (
    DIVERGENCES,
    POLICY_LOSSES,
    CorrectionSettings,
    LossSettings,
    PolicyLoss,
    TokenLoss,
    Tokens,
)
from offbeat.trainer.microbatch_size import MicrobatchSize, SizeFile, measured
from offbeat.trainer.policy import AdamSettings, Policy, learning_rate
from offbeat.trainer.ranks import Gang
from offbeat.trainer.rounds import Ranks
from offbeat.trainer.step import StepSettings
from offbeat.trainer.trainer import TrainerSettings
from offbeat.weights.manifest import Anchoring
from offbeat.weights.publish import Publisher, RemotePublisher
from offbeat.weights.signing import SigningKey
from offbeat.weights.version import Adapter, weights_digest

log = logging.getLogger(__name__)

MAX_SAMPLE_GAP = 1.0
"""Largest mean difference, in nats, between the log-probs that came with an answer and the trainer's for the same
weights. Answers with a larger difference are not trained on. Another precision in the engine makes a difference of
hundredths; 1 means that text or model differs."""


def load_loss(spec: str) -> PolicyLoss:
    """Returns a function that calls the user's own loss, named by `spec` (module:function), and checks its result."""
    function = locate(spec, "loss.name")

    def loss(tokens: Tokens, settings: LossSettings) -> TokenLoss:
        found = function(tokens, settings)
        if isinstance(found, TokenLoss):
            return found
        if not isinstance(found, Tensor) or found.shape != tokens.mask.shape:
            what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else a_kind(found)
            raise UserError(
                f"loss.name = {spec!r}: the loss returned {what}; return a tensor of shape {tuple(tokens.mask.shape)}"
            )
        return TokenLoss(found, torch.zeros_like(tokens.mask))

    return loss


STATE_BYTES = 16
"""Bytes per trained parameter besides the model's own weights: a float32 master copy, its gradient, and two moments."""
STATE_SHARE = 0.94
"""Share of a GPU's memory that model, training state and engine servers may take; the rest is for a micro-batch."""
NUM_THREADS = torch.get_num_threads()
"""Torch's default number of threads, read before any run of this process changes it."""


def make_embedded(
    config: Config, name: str, version: int | None = None, model: PreTrainedModel | None = None
) -> EmbeddedEngine:
    """Makes an engine in this process. The engine takes over `model`, which no other code may use afterwards; None:
    loads the configured model. The engine serves the model's weights as version number `version`; None: it serves
    nothing before its first weights are loaded."""
    lora = _lora(config) if version is None else None  # a model served unchanged has no adapter
    model = model or _load(config, lora)
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


def load(config: Config, device: torch.device | None = None) -> PreTrainedModel:
    """Loads the configured model, with LoRA adapters if configured, onto `device` (None: the configured device); and
    probes how it can be run, so that its copies need no probe."""
    model = _load(config, _lora(config), device)
    usage(model)
    return model


def load_for_gang(config: Config) -> PreTrainedModel:
    """Loads the configured model for several ranks: without its weights, of which each rank then reads its rows, or
    whole and on the CPU, with adapters or if transformers converts the weights of this model."""
    dtype = pick_dtype(config.model.dtype, pick_device(config.model.device))
    empty = None if config.model.lora_rank else load_without_weights(config.model.path, dtype)
    return empty or load(config, torch.device("cpu"))


def _load(config: Config, lora: Lora | None, device: torch.device | None = None) -> PreTrainedModel:
    """Loads the configured model, with LoRA adapters unless `lora` is None."""
    dtype = pick_dtype(config.model.dtype, pick_device(config.model.device))
    device = device or pick_device(config.model.device)
    if lora is None:
        return load_model(config.model.path, dtype, device)
    return load_adapted(config.model.path, dtype, device, lora, config.run.seed)


def _lora(config: Config) -> Lora | None:
    rank, alpha = config.model.lora_rank, config.model.lora_alpha
    return Lora(rank, alpha or 2.0 * rank, tuple(config.model.lora_targets)) if rank else None


def make_adapter(config: Config, model: PreTrainedModel, *, is_divided: bool = False) -> Adapter | None:
    """Returns what all adapter versions of a run share: the base model, its digest and the adapters' configuration.
    None without LoRA. With `is_divided`, the model is going to be divided among ranks, and is loaded again if its base
    weights are needed."""
    if (lora := _lora(config)) is None:
        return None
    base = weights_digest(base_tensors(model))
    if is_divided:
        return Adapter(base, describe(model, lora), lambda: base_tensors(load(config, torch.device("cpu"))))
    return Adapter(base, describe(model, lora), lambda: base_tensors(model))


def make_policy(
    config: Config, model: PreTrainedModel | None = None, gang: Gang | None = None
) -> tuple[Policy, PreTrainedModel | None]:
    """Returns the policy to train, and the reference (the frozen initial model), which is None without a KL term. The
    policy takes over `model`, which no other code may use afterwards; None: loads the configured model. With a `gang`,
    policy and reference are divided among its ranks, all of which must call this."""
    model = model or load(config)
    device = model.device if gang is None else gang.device
    if memory := memory_bytes(device):
        limit_memory(device, trainer_bytes(config, memory[1]))
    needs_copy = bool(config.loss.kl_coef) and not config.model.lora_rank
    reference = copy.deepcopy(model).requires_grad_(False) if needs_copy else None
    options: dict[str, Any] = {
        "temperature": config.rollout.temperature,
        "gradient_checkpointing": config.model.gradient_checkpointing,
        "has_value_head": resolve_loss(config).advantage == "gae",
        "moments_on_host": _fits_without_moments_alone(config, model, device, 1 if gang is None else gang.size),
        "compiles": not config.run.exact and device.type == "cuda",
        "exact": config.run.exact,
    }
    if gang is None:
        policy = Policy(model, _adam_settings(config), **options)
    else:
        from offbeat.trainer.sharded import ShardedPolicy, shard  # not for a trainer of one rank

        policy = ShardedPolicy(model, _adam_settings(config), **options, gang=gang, path=config.model.path)
        if reference is not None:
            shard(reference, gang, trains=False, path=config.model.path)
    if reference is not None:
        attention.use_packed_attention(reference)
        policy.drop_gathered(reference)
    elif config.loss.kl_coef:
        reference = cast(PreTrainedModel, AdapterDisabled(policy.model))  # only ever called like a model
    return policy, reference


def _adam_settings(config: Config) -> AdamSettings:
    optimizer = config.optimizer
    return AdamSettings(
        beta2=optimizer.beta2, weight_decay=optimizer.weight_decay, max_grad_norm=optimizer.max_grad_norm
    )


def _fits_without_moments_alone(
    config: Config, model: PreTrainedModel, device: torch.device, num_ranks: int = 1
) -> bool:
    """Whether AdamW's moments must stay in host memory, because model and training state together are too large for the
    GPU `device`, even divided among `num_ranks`."""
    memory = memory_bytes(device)
    if device.type != "cuda" or memory is None:
        return False
    room = STATE_SHARE * memory[1] - servers_bytes(config, memory[1])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    masters_in_place = sum(parameter.nbytes for parameter in trained if parameter.dtype == torch.float32)
    needed = sum(parameter.nbytes for parameter in model.parameters()) - masters_in_place
    needed += STATE_BYTES * sum(parameter.numel() for parameter in trained)
    needed //= num_ranks
    if needed <= room:
        return False
    log.info(
        "AdamW's moments stay in host memory: model and training state need %.0f GB, which do not fit into the GPU's "
        "%.0f GB beside a micro-batch and the engine",
        needed / 1e9,
        memory[1] / 1e9,
    )
    return True


def make_microbatch_size(config: Config, policy: Policy, folder: Path, event: Callable[..., None]) -> MicrobatchSize:
    """Returns the size of micro-batches, as configured or measured on the GPU. A measured size, and later each size
    that is halved for lack of memory, is stored in the trainer's `folder` and reported by calling `event`."""
    is_measured = config.batch.tokens_per_microbatch == "auto" and policy.device.type == "cuda" and not config.run.exact
    file, ranks = SizeFile(folder / "microbatch.json", device_name(policy.device)), policy.ranks

    def on_change(tokens: int) -> None:
        if ranks.rank == 0:
            file.write(tokens)
            event("microbatch", tokens=tokens)

    # A rank that runs out of memory has left a pass that the others are still in, so it cannot try again.
    size = MicrobatchSize(config.batch.assumed_tokens, not config.run.exact and ranks.size == 1, on_change)
    if is_measured:
        stored, memory = _told_by_rank_0(ranks, file.read()), memory_bytes(policy.device)
        num_taken = memory[1] - trainer_bytes(config, memory[1]) if memory else 0
        size.tokens = stored or _smallest(ranks, measured(policy, num_taken, _longest(config)))
        if stored is None:
            on_change(size.tokens)
    return size


def _told_by_rank_0(ranks: Ranks, tokens: int | None) -> int | None:
    told = ranks.gather(str(tokens or "").encode())[0]
    return int(told) if told else None


def _smallest(ranks: Ranks, tokens: int) -> int:
    return min(int(told) for told in ranks.gather(str(tokens).encode()))


def _longest(config: Config) -> int:
    return config.rollout.max_prompt_tokens + config.rollout.max_new_tokens


def make_publisher(config: Config, folder: Path, key: Path, adapter: Adapter | None, *, is_away: bool) -> Publisher:
    """Makes the trainer's publisher of weight versions. It writes whole files into `folder` for engines that share this
    disk and, if engines may run elsewhere, also pieces that other machines fetch.

    `key` is the file of the signing key. `is_away`: trainer and coordinator share no disk.
    """
    if not wiring.publishes_pieces(config, is_away=is_away):
        return Publisher(folder, adapter=adapter)
    anchoring = Anchoring(0) if config.weights.deltas == "never" else Anchoring()
    store = wiring.open_pieces(config, folder)
    signing = SigningKey.load_or_create(key)
    if is_away:
        return RemotePublisher(folder, store, signing, anchoring, adapter, clears_store=config.weights.store is None)
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
        num_witnesses=config.schedule.bound + 1 if config.schedule.bound and loss.audit_share else 0,
        claim_ahead=config.schedule.mode == "overlap",
        config=secrets.shown_value(resolved(config)),
    )


def step_settings(config: Config) -> StepSettings:
    loss, chosen = config.loss, resolve_loss(config)
    uses_gae = chosen.advantage == "gae"
    advantage = group_normalised if uses_gae else ADVANTAGES.get(chosen.advantage)
    return StepSettings(
        updates_per_step=config.batch.updates_per_step,
        tokens_per_microbatch=config.batch.assumed_tokens,
        advantage=advantage or locate(chosen.advantage, "loss.advantage"),
        recalls_siblings=config.batch.gate == "release",
        gae=GaeSettings(loss.gamma, loss.gae_lambda, loss.value_coef) if uses_gae else None,
        policy_loss=load_loss(loss.name) if loss.is_own else POLICY_LOSSES[chosen.policy],
        is_own=loss.is_own,
        loss=LossSettings(chosen.clip_low, chosen.clip_high, loss.dual_clip, loss.ratio_max),
        correction=CorrectionSettings(chosen.correction, chosen.min_importance, chosen.max_importance),
        aggregate=chosen.aggregate,
        aggregate_tokens=chosen.aggregate_tokens,
        kl_coef=loss.kl_coef,
        divergence=DIVERGENCES[loss.kl],
        # A paced engine's log-probs come from no model.
        max_sample_gap=None if config.rollout.engine == "paced" else MAX_SAMPLE_GAP,
        audit_share=loss.audit_share,
    )


def prepare_torch(config: Config) -> None:
    """Sets up torch; must be called before a model is loaded.

    For the calling thread, sets torch's number of threads: `run.threads`, or else torch's default. The default is set
    too, because a new thread would otherwise have the number that any thread set last. For the whole process, sets how
    memory is allocated on a GPU and, with `run.exact`, deterministic algorithms.
    """
    torch.set_num_threads(config.run.threads or NUM_THREADS)
    device = pick_device(config.model.device)
    avoid_fragments(device)
    if config.run.exact:
        be_deterministic(device)
