"""Makes `offbeat-tiny-tools`, the model of the demos with tools: python scripts/make_tiny_tools.py FOLDER [--seed 0].

`offbeat-tiny`, trained further on demonstrations of two games, as `examples/calculator.toml` and `examples/guess.toml`
play them. It learns the form of a call and of a guess, and nothing about when to call or what to guess: it calls the
calculator for sums that it can do and guesses products that it cannot, makes slips in expressions, and picks any number
that is still possible. Reinforcement learning does the rest. The loss counts only what a model would write itself.
Three minutes on one CPU core; another machine's arithmetic makes another model of the same kind.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from offbeat.model.loading import TINY, resolve, save_hf

PAD, EOS = 256, 257
IGNORED = -100
STEPS, WARMUP_STEPS, DEMONSTRATIONS_PER_STEP = 300, 20, 96
LEARNING_RATE = 1e-3
CALLS_IN_PRODUCTS, CALLS_IN_SUMS, SLIPS = 0.55, 0.4, 0.2
"""Share of products and of sums for which the calculator is called, and of calls and copies with a slip."""
HIGHEST, MAX_GUESSES = 31, 5
PRINT_EVERY = 50

Piece = tuple[str, bool]
"""A text, and whether the model writes it; if so, it ends the model's turn."""


def slipped(digits: str, rng: random.Random) -> str:
    """Returns `digits`, in a fifth of all cases with one digit replaced."""
    if rng.random() >= SLIPS:
        return digits
    at = rng.choice([i for i, char in enumerate(digits) if char.isdigit()])
    return digits[:at] + rng.choice("123456789") + digits[at + 1 :]


def calculation(rng: random.Random) -> list[Piece]:
    if rng.random() < 0.5:
        left, right = rng.randint(1, 9), rng.randint(1, 9)
        expression, answer, share = f"{left}+{right}", left + right, CALLS_IN_SUMS
        guess = answer if rng.random() < 0.75 else rng.randint(2, 18)
    else:
        left, right = rng.randint(10, 99), rng.randint(10, 99)
        expression, answer, share = f"{left}*{right}", left * right, CALLS_IN_PRODUCTS
        guess = rng.randint(100, 9801)
    if rng.random() >= share:
        return [(f"{expression}=", False), (f"{guess}<eos>", True)]
    called = slipped(expression, rng)
    result = str(eval(called))
    final = slipped(result, rng) + "<eos>"
    return [(f"{expression}=", False), (f"[{called}]", True), (f"{{{result}}}", False), (final, True)]


def guessing(rng: random.Random) -> list[Piece]:
    secret, low, high = rng.randint(1, HIGHEST), 1, HIGHEST
    pieces: list[Piece] = [(f"Guess a number, 1 to {HIGHEST}: ", False)]
    for _ in range(MAX_GUESSES):
        guess = rng.randint(low, high)
        pieces.append((f"{guess}<eos>", True))
        if guess == secret:
            break
        if guess < secret:
            low = guess + 1
            pieces.append((">", False))
        else:
            high = guess - 1
            pieces.append(("<", False))
    return pieces


def encoded(pieces: list[Piece]) -> tuple[list[int], list[int]]:
    """Returns the tokens of a demonstration and its labels."""
    tokens: list[int] = []
    labels: list[int] = []
    for text, is_own in pieces:
        ends = text.endswith("<eos>")
        ids = [*text.removesuffix("<eos>").encode(), *([EOS] if ends else [])]
        tokens += ids
        labels += ids if is_own else [IGNORED] * len(ids)
    return tokens, labels


def batch(game: Callable[[random.Random], list[Piece]], rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [encoded(game(rng)) for _ in range(DEMONSTRATIONS_PER_STEP // 2)]
    length = max(len(tokens) for tokens, _ in rows)
    tokens, labels = torch.full((len(rows), length), PAD), torch.full((len(rows), length), IGNORED)
    for row, (ids, wanted) in enumerate(rows):
        tokens[row, : len(ids)] = torch.tensor(ids)
        labels[row, : len(wanted)] = torch.tensor(wanted)
    return tokens, labels


def learning_rate(step: int) -> float:
    return LEARNING_RATE * min((step + 1) / WARMUP_STEPS, 0.5 * (1 + math.cos(math.pi * step / STEPS)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new folder for the model")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    rng = random.Random(arguments.seed)
    base = resolve(TINY)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    started_s = time.monotonic()
    for step in range(STEPS):
        losses = []
        for game in (calculation, guessing):
            tokens, labels = batch(game, rng)
            logits = model(tokens[:, :-1], use_cache=False).logits
            loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
            loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % PRINT_EVERY == 0:
            print(
                f"step {step + 1}, {time.monotonic() - started_s:.0f} s: losses {losses[0]:.3f} and {losses[1]:.3f}",
                flush=True,
            )
    save_hf(model, tokenizer, arguments.folder)


if __name__ == "__main__":
    main()
