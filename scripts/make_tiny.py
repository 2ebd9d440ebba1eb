"""Makes `offbeat-tiny`, the model that ships with Offbeat: python scripts/make_tiny.py FOLDER [--seed 0].

A Llama of about one million parameters over bytes, pre-trained by next-token loss on worked answers of
`offbeat.data.arithmetic`, held-out problems never among them. First on right answers, until it can add; then,
briefly, on answers with slips, which carry on from the wrong total as a person's would. So it knows the way but is
unsure of each step: sampled at temperature 1 it gets about a third of the problems right, in the right form, and
reinforcement learning has something to find. Two minutes on a GPU, where the shipped one was made with seed 0, and much
longer on a CPU; another machine's arithmetic makes another model of the same kind.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from offbeat.data.arithmetic import Arithmetic, last_number
from offbeat.data.prompts import Problem
from offbeat.model.devices import pick_device
from offbeat.model.loading import save_hf

PAD, EOS = 256, 257
"""The ids below them are bytes."""
IGNORED = -100
PRODUCT_SHARE = 0.2
"""Of the problems; products are longer, so this is most of the tokens."""
SLIP_IN_SUM, SLIP_IN_PRODUCT = 0.5, 0.1
"""Share of totals that are wrong in the second phase. A product has more lines, each of which must be right."""
SLIPS = (-10, -2, -1, 1, 2, 10)
RIGHT_STEPS, SLIP_STEPS, WARMUP_STEPS = 2000, 200, 50
LEARNING_RATE = 3e-3
TOKENS_PER_BATCH = 4096
PROBLEMS_PER_CHUNK = 4096
"""Problems sorted by length together, so that a batch has little padding."""
EVAL_EVERY = 100

Pair = tuple[list[int], list[int]]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token per byte, its id the byte's value: any text comes back exactly."""
    vocab = {char: byte for byte, char in _byte_chars().items()}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "<eos>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
        padding_side="left",
    )
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (PAD, EOS)
    return tokenizer


def _byte_chars() -> dict[int, str]:
    """The printable stand-in of each byte in a byte-level vocabulary, as GPT-2 chose them."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    return {byte: chr(byte) for byte in own} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def make_model() -> Any:
    """Few and wide layers, which CPUs like; grouped-query attention and tied embeddings, as larger models have."""
    config = LlamaConfig(
        vocab_size=EOS + 1,
        hidden_size=192,
        intermediate_size=640,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.06,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, top_k=0, eos_token_id=EOS, pad_token_id=PAD)
    return model


def problems(seed: int) -> Iterator[Problem]:
    """Training problems without end: sums of levels 1 to 3, mostly 2, and worked multiplications, long ones too."""
    sums = [Arithmetic(seed, level=level) for level in (1, 2, 2, 2, 2, 3)]
    products = Arithmetic(seed, tail=1.0)
    rng = random.Random(seed)
    ordinal = 0
    while True:
        source = products if rng.random() < PRODUCT_SHARE else rng.choice(sums)
        yield source.problem(ordinal)
        ordinal += 1


def answer_with_slips(prompt: str, rng: random.Random, slips: bool) -> str:
    """A worked answer; with slips, some totals are off, and what follows goes on from there."""
    left = prompt.rstrip("=")
    share = slips * (SLIP_IN_PRODUCT if "*" in left else SLIP_IN_SUM)

    def slip() -> int:
        return rng.choice(SLIPS) if rng.random() < share else 0

    if "*" in left:
        factor, num_lines = map(int, left.split("*"))
        totals = [factor]
        for _ in range(num_lines - 1):
            totals.append(max(1, totals[-1] + factor + slip()))
        return " ".join(f"{line}:{total}" for line, total in enumerate(totals, start=1))
    first, *terms = map(int, left.split("+"))
    totals = [first]
    for term in terms:
        totals.append(max(1, totals[-1] + term + slip()))
    return " ".join(map(str, totals[1:]))


def batches(tokenizer: PreTrainedTokenizerFast, seed: int, slips: bool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and labels, right-padded, each batch of problems of like length; prompt and padding bear no loss."""
    stream, rng = problems(seed), random.Random(seed)
    while True:
        chunk = []
        for problem in islice(stream, PROBLEMS_PER_CHUNK):
            prompt = str(problem.prompt)
            answer = answer_with_slips(prompt, rng, slips)
            chunk.append((tokenizer.encode(prompt), [*tokenizer.encode(answer), EOS]))
        chunk.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
        cut: list[list[Pair]] = [[]]
        for pair in chunk:
            if (len(cut[-1]) + 1) * (len(pair[0]) + len(pair[1])) > TOKENS_PER_BATCH:
                cut.append([])
            cut[-1].append(pair)
        rng.shuffle(cut)
        yield from map(_padded, cut)


def _padded(pairs: list[Pair]) -> tuple[torch.Tensor, torch.Tensor]:
    length = max(len(prompt) + len(answer) for prompt, answer in pairs)
    tokens, labels = torch.full((len(pairs), length), PAD), torch.full((len(pairs), length), IGNORED)
    for row, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return tokens, labels


def make_optimizers(model: Any) -> list[torch.optim.Optimizer]:
    """Muon for the matrices: it got past the plateau before a small model can add in half of AdamW's tokens."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=LEARNING_RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def learning_rate(step: int) -> float:
    """Warmed up, constant, then falling to nothing over the last half."""
    total = RIGHT_STEPS + SLIP_STEPS
    return LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS, 2 * (total - step) / total)


def pretrain(model: Any, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    optimizers = make_optimizers(model)
    right, slipping = batches(tokenizer, seed, slips=False), batches(tokenizer, seed + 1, slips=True)
    started_s = time.monotonic()
    for step in range(RIGHT_STEPS + SLIP_STEPS):
        tokens, labels = next(right if step < RIGHT_STEPS else slipping)
        tokens, labels = tokens.to(model.device), labels.to(model.device)
        logits = model(tokens[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step)
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % EVAL_EVERY == 0 or step + 1 in (RIGHT_STEPS, RIGHT_STEPS + SLIP_STEPS):
            sums = mean_reward(model, tokenizer, Arithmetic(level=2).held_out(200), max_new_tokens=24)
            print(
                f"step {step + 1}, {time.monotonic() - started_s:.0f} s: reward of held-out sums {sums:.2f}", flush=True
            )


@torch.no_grad()
def sample(model: Any, tokenizer: PreTrainedTokenizerFast, asked: list[Problem], max_new_tokens: int) -> list[str]:
    """An answer to each problem, at temperature 1."""
    inputs = tokenizer([str(problem.prompt) for problem in asked], padding=True, return_tensors="pt").to(model.device)
    tokens = model.generate(
        inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=max_new_tokens, use_cache=True
    )
    return tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def mean_reward(model: Any, tokenizer: PreTrainedTokenizerFast, asked: list[Problem], max_new_tokens: int) -> float:
    """The share of sampled answers whose last number is right."""
    answers = sample(model, tokenizer, asked, max_new_tokens)
    return sum(last_number(text) == problem.answer for text, problem in zip(answers, asked, strict=True)) / len(asked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new folder for the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    tokenizer, model = make_tokenizer(), make_model().to(pick_device(arguments.device))
    pretrain(model, tokenizer, arguments.seed)
    for level in (1, 2, 3, 4, 5):
        sums = mean_reward(model, tokenizer, Arithmetic(level=level).held_out(400), max_new_tokens=48)
        print(f"reward of held-out sums of level {level}: {sums:.3f}")
    products = mean_reward(model, tokenizer, Arithmetic(tail=1.0).held_out(200), max_new_tokens=320)
    print(f"reward of held-out products: {products:.3f}")
    save_hf(model, tokenizer, arguments.folder)


if __name__ == "__main__":
    main()
