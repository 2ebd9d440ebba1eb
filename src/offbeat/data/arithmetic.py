"""Built-in arithmetic problems: sums of several numbers and, to have some long answers, multiplication tables.

The answer to a sum such as `47+38+6=` is its running totals, `85 91`. The answer to a multiplication such as `7*4=` is
its table, `1:7 2:14 3:21 4:28`; the multiplier, here 4, is drawn from a log-normal distribution. `tail` is the share of
multiplications among the problems. The reward looks only at an answer's last number. A tenth of all problems, chosen by
a hash of their text, is held out: neither pre-training nor RL ever sees them.
"""

from __future__ import annotations

import math
import random
import re
import zlib

from offbeat.data.prompts import Problem

NUM_TERMS = {1: (2, 2), 2: (2, 3), 3: (2, 4), 4: (3, 5), 5: (4, 8)}
"""Smallest and largest number of terms of a sum, by level."""
LARGEST_TERM = {1: 9, 2: 49, 3: 99, 4: 99, 5: 499}
MAX_LINES = 40
"""Largest multiplier, which is the number of entries of the longest multiplication table."""
HELD_OUT_IN = 10
"""One problem out of this many is held out of training."""
LAST_NUMBER = re.compile(r"(\d+)\s*$")


def is_held_out(prompt: str) -> bool:
    return zlib.crc32(prompt.encode()) % HELD_OUT_IN == 0


def worked_answer(prompt: str) -> str:
    """Returns the full answer to a prompt, with its intermediate results, as used in pre-training."""
    left = prompt.rstrip("=")
    if "*" in left:
        factor, times = map(int, left.split("*"))
        return " ".join(f"{i}:{factor * i}" for i in range(1, times + 1))
    terms = list(map(int, left.split("+")))
    return " ".join(str(sum(terms[: i + 1])) for i in range(1, len(terms)))


def last_number(text: str) -> str | None:
    """Returns the number at the end of an answer, which the reward checks; None if it does not end in a number."""
    match = LAST_NUMBER.search(text)
    return match.group(1) if match else None


class Arithmetic:
    """Source of sums and multiplications; a problem depends only on the constructor's arguments and its ordinal.
    `tail_median` and `tail_sigma` are parameters of the multiplier's log-normal distribution."""

    name = "arithmetic"
    default_reward = "number"
    chat = False

    def __init__(self, seed: int = 0, level: int = 2, tail: float = 0.0, tail_median: int = 6, tail_sigma: float = 0.8):
        self.seed, self.level = seed, level
        self.tail, self.tail_median, self.tail_sigma = tail, tail_median, tail_sigma

    def problem(self, ordinal: int) -> Problem:
        return self._draw(random.Random(f"{self.seed}:{ordinal}"), held_out=False)

    def held_out(self, count: int) -> list[Problem]:
        """Returns up to `count` held-out problems, the same for every seed, so that runs can be compared."""
        rng = random.Random("held out")
        drawn: dict[str, Problem] = {}
        for _ in range(50 * count):  # low levels may have fewer than `count` held-out problems
            problem = self._draw(rng, held_out=True)
            drawn.setdefault(str(problem.prompt), problem)
            if len(drawn) == count:
                break
        return list(drawn.values())

    def _draw(self, rng: random.Random, held_out: bool) -> Problem:
        long = rng.random() < self.tail
        while True:
            prompt = self._product(rng) if long else self._sum(rng)
            if is_held_out(prompt) == held_out:
                break
        return Problem(prompt, answer=last_number(worked_answer(prompt)))

    def _sum(self, rng: random.Random) -> str:
        count = rng.randint(*NUM_TERMS[self.level])
        return "+".join(str(rng.randint(1, LARGEST_TERM[self.level])) for _ in range(count)) + "="

    def _product(self, rng: random.Random) -> str:
        lines = round(math.exp(rng.gauss(math.log(self.tail_median), self.tail_sigma)))
        return f"{rng.randint(2, 29)}*{max(2, min(MAX_LINES, lines))}="
