"""Writes word problems with the columns and the answer format of GSM8K, for trying a configuration without the hub:

    python examples/word_problems.py problems.jsonl --rows 500 --seed 0

Rows have `question` and `answer`; the answer is worked out in steps and ends with "#### NUMBER". The same seed gives
the same rows, and a longer file begins with those of a shorter one.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

NAMES = ("Aisha", "Ben", "Carmen", "Dmitri", "Elif", "Femi", "Grace", "Hiro", "Ines", "Jonas", "Kavya", "Liam")
GOODS = ("apples", "books", "candles", "mugs", "pencils", "stamps", "tickets", "tulips")

Problem = tuple[str, list[str], int]
"""A question, the lines that work it out, and the result."""


def calculation(text: str, result: int) -> str:
    """A calculation in GSM8K's notation: with its annotation in double angle brackets."""
    return f"{text} = <<{text.replace(' ', '')}={result}>>{result}"


def shopping(rng: random.Random) -> Problem:
    name, goods = rng.choice(NAMES), rng.choice(GOODS)
    count, price, extra = rng.randint(3, 12), rng.randint(2, 9), rng.randint(4, 30)
    cost = count * price
    return (
        f"{name} buys {count} {goods} for ${price} each and pays ${extra} for the delivery. "
        f"How many dollars does {name} pay in all?",
        [
            f"The {goods} cost ${calculation(f'{count} * {price}', cost)}.",
            f"With the delivery that is ${calculation(f'{cost} + {extra}', cost + extra)}.",
        ],
        cost + extra,
    )


def sharing(rng: random.Random) -> Problem:
    giver, goods = rng.choice(NAMES), rng.choice(GOODS)
    friends, each, kept = rng.randint(3, 9), rng.randint(2, 12), rng.randint(1, 15)
    total = friends * each + kept
    return (
        f"{giver} has {total} {goods}, keeps {kept} of them and shares the rest equally among {friends} friends. "
        f"How many {goods} does each friend get?",
        [
            f"There are {calculation(f'{total} - {kept}', total - kept)} {goods} to share.",
            f"Each friend gets {calculation(f'{total - kept} / {friends}', each)} {goods}.",
        ],
        each,
    )


def halves(rng: random.Random) -> Problem:
    name, goods = rng.choice(NAMES), rng.choice(GOODS)
    second, days = rng.randint(5, 48), rng.randint(2, 5)
    first = 2 * second
    return (
        f"{name} sold {first} {goods} in April, half as many in May, and in June {days} times as many as in May. "
        f"How many {goods} did {name} sell in the three months?",
        [
            f"In May it was {calculation(f'{first} / 2', second)} {goods}.",
            f"In June it was {calculation(f'{second} * {days}', second * days)} {goods}.",
            f"In all it was {calculation(f'{first} + {second} + {second * days}', first + second + second * days)}.",
        ],
        first + second + second * days,
    )


def saving(rng: random.Random) -> Problem:
    name = rng.choice(NAMES)
    weekly, weeks = rng.randint(5, 40), rng.randint(3, 12)
    saved = weekly * weeks
    spent = rng.randint(1, saved - 1)
    return (
        f"{name} saves ${weekly} a week for {weeks} weeks and then spends ${spent}. How many dollars are left?",
        [
            f"{name} saves ${calculation(f'{weekly} * {weeks}', saved)}.",
            f"After spending there are ${calculation(f'{saved} - {spent}', saved - spent)} left.",
        ],
        saved - spent,
    )


KINDS: tuple[Callable[[random.Random], Problem], ...] = (shopping, sharing, halves, saving)


def row(ordinal: int, seed: int) -> dict[str, str]:
    rng = random.Random(f"{seed}:{ordinal}")
    question, steps, result = rng.choice(KINDS)(rng)
    return {"question": question, "answer": "\n".join([*steps, f"#### {result}"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0] + ".")
    parser.add_argument("file", type=Path, help="JSONL file to write")
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    lines = [json.dumps(row(ordinal, chosen.seed)) + "\n" for ordinal in range(chosen.rows)]
    chosen.file.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
