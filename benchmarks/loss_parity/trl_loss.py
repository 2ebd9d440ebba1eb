"""Losses and gradients of TRL's GRPOTrainer, inside TRL's own environment: python trl_loss.py SPEC.json RESULT.json.

Uses a real trainer, made with the settings of the job. Its answers, rewards and log-probs are given instead of being
generated, scored and computed; it computes advantages, importance weights, counts and the loss itself, in float64.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig, GRPOTrainer

PADDING = -1.0
"""Log-prob at padding positions; not 0, so that a missing mask would show."""


def no_reward(completions: list[str], **_: Any) -> list[float]:
    raise AssertionError("rewards are given")


class GivenTrainer(GRPOTrainer):
    """GRPOTrainer that learns from one given batch, `answers`."""

    answers: list[dict[str, Any]]
    part: slice
    """Slice of the answers that the current update uses."""
    leaf: Tensor

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        tokens = [list(range(len(answer["logprobs"]))) for answer in self.answers]
        masks = [[int(trained) for trained in answer["mask"]] for answer in self.answers]
        sampled = [answer["behaviour"] for answer in self.answers] if self.use_vllm else None
        texts = [""] * len(tokens)
        return [[1]] * len(tokens), tokens, masks, texts, sampled, {}, None, None

    def _calculate_rewards(self, *_: Any) -> Tensor:
        return torch.tensor([[answer["reward"]] for answer in self.answers])

    def _get_per_token_logps_and_entropies(self, model: Any, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        if not torch.is_grad_enabled():
            logprobs = self.padded("reference" if model is self.ref_model else "start")
        else:
            logprobs = self.leaf[self.part]
        return logprobs, torch.zeros_like(logprobs), None

    def padded(self, which: str) -> Tensor:
        rows = [torch.tensor(answer[which]) for answer in self.answers]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)

    def learn(self, answers: list[dict[str, Any]], num_parts: int) -> list[dict[str, Any]]:
        """Returns loss, gradient and advantages of each update into which a batch is split."""
        self.answers = answers
        self.model.train()
        self.current_gradient_accumulation_steps = 1
        inputs = self._generate_and_score_completions([{"prompt": ""} for _ in answers])
        size, found = len(answers) // num_parts, []
        for i in range(num_parts):
            self.part, self.leaf = slice(i * size, (i + 1) * size), self.padded("logprobs").requires_grad_()
            of_part = {key: values[self.part] if values.dim() else values for key, values in inputs.items()}
            loss = self._compute_loss(self.model, of_part)
            loss.backward()
            assert self.leaf.grad is not None
            lengths = [len(answer["logprobs"]) for answer in answers]
            gradients = [row[:length].tolist() for row, length in zip(self.leaf.grad, lengths, strict=True)]
            advantages = of_part["advantages"].tolist()
            found.append({"loss": loss.item(), "gradients": gradients[self.part], "advantages": advantages})
        return found


def make_trainer(spec: dict[str, Any], job: dict[str, Any]) -> GivenTrainer:
    size, num_parts = len(job["answers"]), job["num_parts"]
    arguments = GRPOConfig(
        output_dir=spec["scratch"],
        num_generations=job["group_size"],
        per_device_train_batch_size=size // num_parts,
        gradient_accumulation_steps=1,
        steps_per_generation=num_parts,
        model_init_kwargs={"dtype": "float32"},
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to="none",
        **job["settings"],
    )
    dataset = Dataset.from_list([{"prompt": ""}] * size)
    trainer = GivenTrainer(spec["model"], no_reward, args=arguments, train_dataset=dataset)
    trainer.use_vllm = job["is_corrected"]  # after it was made: no server is wanted, only what is done with its tokens
    return trainer


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    disable_progress_bar()
    torch.set_default_dtype(torch.float64)
    spec = json.loads(Path(sys.argv[1]).read_text())
    trainers: dict[str, GivenTrainer] = {}
    results = []
    for job in spec["jobs"]:
        key = json.dumps({key: value for key, value in job.items() if key != "answers"} | {"n": len(job["answers"])})
        if key not in trainers:
            trainers[key] = make_trainer(spec, job)
        results.append(trainers[key].learn(job["answers"], job["num_parts"]))
    Path(sys.argv[2]).write_text(json.dumps({"version": version("trl"), "results": results}))


if __name__ == "__main__":
    main()
