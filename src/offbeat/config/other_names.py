"""Names of settings in TRL, verl and elsewhere, with the keys that do the same in Offbeat, for errors about unknown
keys and docs.

Each table maps a name elsewhere to a key of the configuration, perhaps with a remark in brackets. If no key does the
same, the name is mapped to a text that begins with "no key" and says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offbeat.config.schema import Config
from offbeat.spelling import nearest

TRL = {
    "model": "model.path",
    "model_name_or_path": "model.path",
    "processing_class": "model.tokenizer",
    "args": "no key: its entries are sections here",
    "output_dir": "run.dir (with run.name)",
    "run_name": "run.name",
    "seed": "run.seed",
    "max_steps": "run.steps",
    "num_train_epochs": "run.steps (in steps, not epochs)",
    "train_dataset": "task.path",
    "dataset_name": 'task.path (with task.source = "dataset")',
    "eval_dataset": "task.held_out (a share of the same rows)",
    "reward_funcs": "task.reward",
    "reward_weights": "reward.weights (by the names of a reward's parts)",
    "num_generations": "batch.group_size",
    "per_device_train_batch_size": "batch.groups_per_step (in prompts, not answers)",
    "generation_batch_size": "batch.groups_per_step (in prompts, not answers)",
    "gradient_accumulation_steps": "batch.tokens_per_microbatch (micro-batches are cut by tokens)",
    "steps_per_generation": "batch.updates_per_step",
    "num_iterations": "batch.updates_per_step (each answer is trained on once)",
    "max_prompt_length": "rollout.max_prompt_tokens",
    "max_completion_length": "rollout.max_new_tokens",
    "temperature": "rollout.temperature",
    "top_p": "eval.top_p (training samples from the whole distribution)",
    "top_k": "no key: training samples from the whole distribution",
    "min_p": "no key: training samples from the whole distribution",
    "use_vllm": 'rollout.engine = "vllm" (with rollout.workers = 1)',
    "vllm_mode": 'rollout.engine = "vllm" (with rollout.workers = 1)',
    "vllm_server_base_url": "engine.url",
    "vllm_server_host": "engine.url",
    "vllm_gpu_memory_utilization": "engine.memory_share",
    "vllm_tensor_parallel_size": "engine.tensor_parallel",
    "vllm_importance_sampling_correction": "loss.correction",
    "learning_rate": "optimizer.lr",
    "lr_scheduler_type": "optimizer.schedule",
    "warmup_steps": "optimizer.warmup_steps",
    "warmup_ratio": "optimizer.warmup_steps (in steps)",
    "weight_decay": "optimizer.weight_decay",
    "adam_beta1": "no key: it is 0.9",
    "adam_beta2": "optimizer.beta2",
    "max_grad_norm": "optimizer.max_grad_norm",
    "beta": "loss.kl_coef",
    "epsilon": "loss.clip_low (and loss.clip_high)",
    "epsilon_high": "loss.clip_high",
    "delta": "loss.dual_clip",
    "loss_type": "loss.name",
    "scale_rewards": 'loss.advantage ("group" divides by the standard deviation, "mean" does not)',
    "importance_sampling_level": 'loss.name = "gspo"',
    "top_entropy_quantile": "no key: all tokens are trained on",
    "remove_unused_columns": "no key: a reward gets every column that it names",
    "mask_truncated_completions": "no key: see reward.overlong_tokens",
    "bf16": 'model.dtype = "bfloat16"',
    "fp16": "model.dtype (bfloat16 or float32)",
    "gradient_checkpointing": "model.gradient_checkpointing",
    "use_peft": "model.lora_rank",
    "peft_config": "model.lora_rank (with model.lora_alpha and model.lora_targets)",
    "lora_r": "model.lora_rank",
    "lora_alpha": "model.lora_alpha",
    "lora_target_modules": "model.lora_targets",
    "logging_steps": "no key: every step is logged",
    "log_completions": "no key: every answer is kept, see offbeat show",
    "report_to": "log.sinks",
    "eval_steps": "eval.every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "resume_from_checkpoint": "no key: use --resume",
    "deepspeed": "trainer.ranks (with FSDP2)",
    "fsdp": "trainer.ranks",
}
VERL = {
    "data.train_files": "task.path",
    "data.val_files": "task.held_out (a share of the same rows)",
    "data.prompt_key": "task.messages (or task.prompt for plain text)",
    "data.train_batch_size": "batch.groups_per_step",
    "data.max_prompt_length": "rollout.max_prompt_tokens",
    "data.max_response_length": "rollout.max_new_tokens",
    "data.filter_overlong_prompts": 'rollout.long_prompts = "skip"',
    "data.truncation": "rollout.long_prompts",
    "data.shuffle": "task.shuffle",
    "model.enable_gradient_checkpointing": "model.gradient_checkpointing",
    "actor.optim.lr": "optimizer.lr",
    "optim.lr": "optimizer.lr",
    "actor.ppo_mini_batch_size": "batch.updates_per_step (updates, not prompts per update)",
    "ppo_micro_batch_size_per_gpu": "batch.tokens_per_microbatch",
    "ppo_max_token_len_per_gpu": "batch.tokens_per_microbatch",
    "ppo_epochs": "no key: each answer is trained on once",
    "use_kl_loss": "loss.kl_coef",
    "kl_loss_coef": "loss.kl_coef",
    "kl_loss_type": "loss.kl",
    "clip_ratio": "loss.clip_low (and loss.clip_high)",
    "clip_ratio_low": "loss.clip_low",
    "clip_ratio_high": "loss.clip_high",
    "clip_ratio_c": "loss.dual_clip",
    "loss_agg_mode": "loss.aggregate",
    "entropy_coeff": "no key: there is no entropy bonus",
    "rollout.n": "batch.group_size",
    "rollout.name": "rollout.engine",
    "rollout.tensor_model_parallel_size": "engine.tensor_parallel",
    "rollout.gpu_memory_utilization": "engine.memory_share",
    "algorithm.adv_estimator": "loss.name",
    "adv_estimator": "loss.name",
    "norm_adv_by_std_in_grpo": 'loss.advantage ("group" divides by the standard deviation, "mean" does not)',
    "custom_reward_function.path": "task.reward",
    "reward_model.reward_manager": "task.reward",
    "trainer.total_training_steps": "run.steps",
    "trainer.total_epochs": "run.steps (in steps, not epochs)",
    "trainer.save_freq": "checkpoint.every",
    "trainer.test_freq": "eval.every",
    "trainer.logger": "log.sinks",
    "trainer.project_name": "log.project",
    "trainer.experiment_name": "run.name",
    "trainer.default_local_dir": "run.dir",
    "trainer.n_gpus_per_node": "trainer.ranks",
}
ELSEWHERE = {
    "dataset": "task.path",
    "data": "task.path",
    "batch_size": "batch.groups_per_step (in prompts, not answers)",
    "epochs": "run.steps (in steps, not epochs)",
    "num_epochs": "run.steps (in steps, not epochs)",
}
LIBRARIES = {"TRL's ": TRL, "verl's ": VERL, "": ELSEWHERE}
"""Tables of names by origin, which an error puts before a name, as in "TRL's beta"."""
IN_PYTHON = {
    "model.path": "model=",
    "task.path": "task=",
    "task.reward": "reward=",
    "run.steps": "steps=",
    "run.name": "name=",
    "optimizer.lr": "lr=",
}
"""Arguments of `offbeat.train` that stand for keys."""

ARGUMENTS = ("model", "task", "reward", "steps", "name", "lr", "callbacks", "loggers", "resume", "wait")
"""Arguments of `offbeat.train`, including the short forms of keys in `IN_PYTHON`."""

SECTIONS = {
    **dict.fromkeys(("dataset", "datasets", "data"), "[[task]]"),
    **dict.fromkeys(("train", "training", "training_args"), "[run], [batch] and [optimizer]"),
    **dict.fromkeys(("grpo", "ppo", "rl", "algorithm", "algo"), "[loss] and [batch]"),
    **dict.fromkeys(("generation", "sampling", "inference", "vllm"), "[rollout] and [engine]"),
    **dict.fromkeys(("lora", "peft"), "[model]"),
    "actor": "[model], [optimizer] and [loss]",
}
"""Usual names of sections elsewhere, with the sections that hold such settings here."""


def nearest_argument(word: str) -> str | None:
    """Returns the argument of `offbeat.train` that is most similar to `word`; None if no argument is similar, or if
    the name of a section is more similar."""
    near = nearest(word, [*ARGUMENTS, *Config.model_fields])
    return near if near in ARGUMENTS else None


def known_elsewhere(
    place: Sequence[str | int], value: object = None, before: str = "", *, in_python: bool = False
) -> str | None:
    """Returns a sentence about the key at `place`, which may be a key of TRL, verl or others, such as "TRL's beta is
    loss.kl_coef here"; None if the key is not in `LIBRARIES`. If the key's `value` is a mapping, the sentence is about
    the first key in this mapping that is in `LIBRARIES`. `before` is put in front of Offbeat's key, such as the dashes
    of a command line. With `in_python`, the sentence names an argument of `offbeat.train` in place of a key that has
    one."""
    if isinstance(value, Mapping):
        inner = (known_elsewhere((*place, name), entry, before, in_python=in_python) for name, entry in value.items())
        return next((text for text in inner if text), None)
    names = [str(name).replace("-", "_") for name in place]
    for library, table in LIBRARIES.items():
        for start in range(len(names)):  # the longest end of the name that a table has
            name = ".".join(names[start:])
            if ours := table.get(name):
                key, bracket, remark = ours.partition(" (")
                if key.startswith("no key"):
                    return f"{library}{name} has {ours}"
                key = IN_PYTHON.get(key, key) if in_python else key
                return f"{library}{name} is {before}{key} here{bracket}{remark}"
    return None
