"""Steps of TRL's GRPOTrainer on given answers: python trl_step.py SPEC.json RESULT.json, in an environment with TRL.

The trainer is TRL's own; what it would generate and score is given instead, so that a step is its preparation of the
batch, its loss, its backward passes and its update.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def no_reward(completions: list[str], **_: Any) -> list[float]:
    raise AssertionError("rewards are given")


class GivenTrainer(GRPOTrainer):
    """A trainer that meets the same prompts and answers at every step."""

    answers: list[dict[str, Any]]

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        tokens = [answer["response"] for answer in self.answers]
        masks = [[1] * len(own) for own in tokens]
        prompt_ids = [answer["prompt"] for answer in self.answers]
        return prompt_ids, tokens, masks, [""] * len(tokens), None, {}, None, None

    def _calculate_rewards(self, *_: Any) -> torch.Tensor:
        return torch.tensor([[answer["reward"]] for answer in self.answers], device=self.accelerator.device)


class Clock(TrainerCallback):
    """Seconds of each step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            if len(self.ends) == 0:
                torch.cuda.reset_peak_memory_stats()
        self.ends.append(time.perf_counter())


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    has_gpu = torch.cuda.is_available()
    torch.manual_seed(0)
    with torch.device("cuda" if has_gpu else "cpu"):
        dtype = torch.bfloat16 if has_gpu else torch.float32
        model = Qwen2ForCausalLM._from_config(Qwen2Config.from_dict(spec["config"]), dtype=dtype)
    answers = spec["answers"]
    arguments = GRPOConfig(
        output_dir=spec["scratch"],
        max_steps=spec["steps"],
        num_generations=spec["group_size"],
        per_device_train_batch_size=spec["samples"],
        gradient_accumulation_steps=len(answers) // spec["samples"],
        gradient_checkpointing=spec["how"] == "checkpointing",
        max_completion_length=spec["cap"],
        bf16=has_gpu,
        use_cpu=not has_gpu,
        learning_rate=1e-6,
        beta=0.0,
        torch_compile=spec["how"] == "compiled",
        use_liger_kernel=spec["how"] == "Liger's kernels",
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
    )
    clock = Clock()
    dataset = Dataset.from_list([{"prompt": "x"}] * len(answers))
    tokenizer = AutoTokenizer.from_pretrained(spec["tokenizer"])
    trainer = GivenTrainer(
        model, no_reward, args=arguments, train_dataset=dataset, processing_class=tokenizer, callbacks=[clock]
    )
    trainer.answers = answers
    trainer.train()
    peak = torch.cuda.max_memory_allocated() / 2**30 if has_gpu else None
    seconds = [later - earlier for earlier, later in zip(clock.ends, clock.ends[1:], strict=False)]
    Path(sys.argv[2]).write_text(json.dumps({"step_s": seconds, "peak_gib": peak}))


if __name__ == "__main__":
    main()
