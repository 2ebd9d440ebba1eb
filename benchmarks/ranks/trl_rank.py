"""One rank of TRL's GRPOTrainer, sharded by accelerate with FSDP2, on a CPU.

`python trl_rank.py SPEC.json OUT.json`, with torchrun's environment variables, in an environment with TRL.

Answers and rewards are given, a list of them for each step. accelerate shards on
accelerators alone, though FSDP2 works on a CPU as well; so its state is set to FSDP here, as it sets it on a GPU.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

FSDP = {
    "version": 2,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"],
    "reshard_after_forward": True,
}


def no_reward(completions: list[str], **_: Any) -> list[float]:
    raise AssertionError("rewards are given")


class Clock(TrainerCallback):
    """Times at which steps end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())


class GivenTrainer(GRPOTrainer):
    """A trainer that meets other given prompts and answers at each step."""

    steps: list[list[dict[str, Any]]]
    num_steps = 0

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        answers = self.steps[self.num_steps]
        first = self.accelerator.process_index * len(prompts)
        own = answers[first : first + len(prompts)]
        tokens = [answer["response"] for answer in own]
        masks = [[1] * len(one) for one in tokens]
        return [answer["prompt"] for answer in own], tokens, masks, [""] * len(own), None, {}, None, None

    def _calculate_rewards(self, *_: Any) -> torch.Tensor:
        answers, self.num_steps = self.steps[self.num_steps], self.num_steps + 1
        return torch.tensor([[answer["reward"]] for answer in answers], device=self.accelerator.device)


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM._from_config(Qwen2Config.from_dict(spec["config"]), dtype=torch.float32)
    num_answers, size = len(spec["steps"][0]), int(os.environ["WORLD_SIZE"])
    if size > 1:
        _shard_on_a_cpu()
    arguments = GRPOConfig(
        output_dir=spec["scratch"],
        max_steps=len(spec["steps"]),
        num_generations=spec["group_size"],
        per_device_train_batch_size=spec["samples"],
        gradient_accumulation_steps=num_answers // size // spec["samples"],
        gradient_checkpointing=False,
        max_completion_length=spec["cap"],
        use_cpu=True,
        bf16=False,
        learning_rate=1e-6,
        beta=0.0,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **({"fsdp": True, "fsdp_config": FSDP} if size > 1 else {}),
    )
    clock = Clock()
    dataset = Dataset.from_list([{"prompt": "x"}] * num_answers)
    tokenizer = AutoTokenizer.from_pretrained(spec["tokenizer"])
    trainer = GivenTrainer(
        model, no_reward, args=arguments, train_dataset=dataset, processing_class=tokenizer, callbacks=[clock]
    )
    trainer.steps = spec["steps"]
    trainer.train()
    is_sharded = all(isinstance(parameter, DTensor) for parameter in trainer.model_wrapped.parameters())
    assert is_sharded == (size > 1), "accelerate has not sharded the model"
    seconds = [later - earlier for earlier, later in zip(clock.ends, clock.ends[1:], strict=False)]
    Path(sys.argv[2]).write_text(json.dumps({"seconds": seconds}))


def _shard_on_a_cpu() -> None:
    """Lets accelerate, which would take DDP on a CPU, take FSDP there too if it is asked for."""
    begin = AcceleratorState.__init__

    def begin_sharded(self: AcceleratorState, *given: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        begin(self, *given, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None and self.distributed_type is DistributedType.MULTI_CPU:
            self.fsdp_plugin, self.distributed_type = fsdp_plugin, DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = begin_sharded


if __name__ == "__main__":
    main()
