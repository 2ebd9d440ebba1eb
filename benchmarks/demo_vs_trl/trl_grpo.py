"""Trains with TRL's GRPOTrainer, inside TRL's own environment: python trl_grpo.py SPEC.json.

The same run as Offbeat's: model, prompts in the same order, reward, batch, loss, optimizer; the task and its reward are
imported from Offbeat, which needs nothing heavy. Writes a row a step to `rows` (seconds of the whole step and of its
generation, the training reward) and the weights after the steps in `save_at`, with the clock stopped meanwhile.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from offbeat.data.arithmetic import Arithmetic
from offbeat.rewards.verifiers import number

OURS = ("samples_per_microbatch", "samples_per_generation", "threads")
"""Settings that are not arguments of GRPOConfig."""


@dataclass(frozen=True)
class Spec:
    """One run, as the benchmark requests it."""

    model: str
    rows: str
    weights: str
    scratch: str
    seed: int
    steps: int
    save_at: list[int]
    level: int
    tail: float
    max_new_tokens: int
    groups_per_step: int
    group_size: int
    lr: float
    settings: dict[str, Any]
    """How TRL goes about it, see `make_arguments`; and `threads` of torch, its own choice by default."""


def make_arguments(spec: Spec) -> GRPOConfig:
    """The run's arguments; `settings` may name any of GRPOConfig, and two that are all samples of a step by default.

    `samples_per_microbatch` go through one forward and backward pass. `samples_per_generation` are generated at a time;
    when they are fewer than a step's, generation and back-propagation take turns until the step's one update.
    """
    samples = spec.groups_per_step * spec.group_size
    samples_per_microbatch = spec.settings.get("samples_per_microbatch", samples)
    samples_per_generation = spec.settings.get("samples_per_generation", samples)
    further = {key: value for key, value in spec.settings.items() if key not in OURS}
    chosen: dict[str, Any] = {
        # the batch: one optimizer update, from samples of the weights that it updates
        "num_generations": spec.group_size,
        "per_device_train_batch_size": samples_per_microbatch,
        "gradient_accumulation_steps": samples // samples_per_microbatch,
        "steps_per_generation": samples_per_generation // samples_per_microbatch,
        "num_iterations": 1,
        "shuffle_dataset": False,
        "max_completion_length": spec.max_new_tokens,
        # sampling from the whole distribution
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        # the loss: sequence mean, advantages over the group's standard deviation, no reference
        "loss_type": "grpo",
        "scale_rewards": "group",
        "beta": 0.0,
        "epsilon": 0.2,
        "mask_truncated_completions": False,
        # the optimizer
        "learning_rate": spec.lr,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        # float32 on the CPU, nothing besides training
        "model_init_kwargs": {"dtype": "float32"},
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "max_steps": spec.steps,
        "seed": spec.seed,
        "output_dir": spec.scratch,
    }
    return GRPOConfig(**{**chosen, **further})


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [number(completion, right) for completion, right in zip(completions, answer, strict=True)]


class Timed(GRPOTrainer):
    """Trainer that measures the time of generation in a step."""

    generation_s = 0.0

    def _generate_single_turn(self, *arguments: Any, **named: Any) -> Any:
        start_s = time.perf_counter()
        try:
            return super()._generate_single_turn(*arguments, **named)
        finally:
            self.generation_s += time.perf_counter() - start_s


class Recorder(TrainerCallback):
    """Callback that writes a row when a step has been logged, and weights after the steps in `save_at`."""

    def __init__(self, spec: Spec):
        self.spec = spec
        self.trainer: Timed | None = None
        self.start_s = self.start_cpu_s = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._restart()

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Comes last in a step, with its figures; once more at the very end, without them."""
        logs = given["logs"]
        if "reward" not in logs:
            return
        assert self.trainer is not None
        row = {
            "step": state.global_step,
            "samples": self.spec.groups_per_step * self.spec.group_size,
            "seconds": time.perf_counter() - self.start_s,
            "cpu_s": time.process_time() - self.start_cpu_s,
            "generation_s": self.trainer.generation_s,
            "reward": logs["reward"],
            "length": logs["completions/mean_length"],
            "cut_share": logs["completions/clipped_ratio"],
            "loss": logs["loss"],
            "grad_norm": logs["grad_norm"],
            "entropy": logs["entropy"],
        }
        with Path(self.spec.rows).open("a") as rows:
            rows.write(json.dumps(row) + "\n")
        if state.global_step in self.spec.save_at:
            self._save(state.global_step)
        self._restart()

    def _save(self, step: int) -> None:
        assert self.trainer is not None
        self.trainer.model.save_pretrained(Path(self.spec.weights) / f"{step:08d}")

    def _restart(self) -> None:
        assert self.trainer is not None
        self.trainer.generation_s = 0.0
        self.start_s, self.start_cpu_s = time.perf_counter(), time.process_time()


def main() -> None:
    spec = Spec(**json.loads(Path(sys.argv[1]).read_text()))
    if "threads" in spec.settings:
        torch.set_num_threads(spec.settings["threads"])
    task = Arithmetic(spec.seed, level=spec.level, tail=spec.tail)
    problems = [task.problem(ordinal) for ordinal in range(spec.steps * spec.groups_per_step)]
    recorder = Recorder(spec)
    trainer = Timed(
        model=spec.model,
        reward_funcs=reward,
        args=make_arguments(spec),
        train_dataset=Dataset.from_list([{"prompt": p.prompt, "answer": p.answer} for p in problems]),
        callbacks=[recorder],
    )
    trainer.remove_callback(PrinterCallback)
    recorder.trainer = trainer
    trainer.train()


if __name__ == "__main__":
    main()
