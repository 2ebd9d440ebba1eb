"""Word problems that a small chat model answers at natural length, some of them never: rows, their reward, and the
sections of a configuration that train on them. TRL and verl train on the same rows by the same reward.

Imports nothing of Offbeat's, because the reward also runs in the environments of other systems.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

NAMES = ("Tom", "Ana", "Li", "Omar", "Eva", "Raj", "Mia", "Ben")
THINGS = ("apples", "books", "coins", "pens", "cards", "shells")
REQUEST = " Think step by step and end with 'Answer: ' and the number."
MAX_PROMPT_TOKENS, MAX_NEW_TOKENS = 192, 512


def write_rows(path: Path, count: int = 4000, seed: int = 7) -> None:
    """Writes problems with the columns `question` and `answer`, the same for the same arguments."""
    rng = random.Random(seed)
    rows = (dict(zip(("question", "answer"), _problem(rng), strict=True)) for _ in range(count))
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def _problem(rng: random.Random) -> tuple[str, str]:
    one, other = rng.sample(NAMES, 2)
    things = rng.choice(THINGS)
    a, b, c = rng.randint(2, 20), rng.randint(2, 9), rng.randint(2, 9)
    text, answer = rng.choice(
        (
            (f"{one} has {a} {things} and buys {b} more. How many {things} does {one} have now?", a + b),
            (f"{one} has {a + b} {things} and gives {b} to {other}. How many {things} does {one} have left?", a),
            (f"{one} fills {b} bags with {c} {things} each. How many {things} are in the bags?", b * c),
            (
                f"{one} has {a} {things}. {other} has {b} more than {one}. How many {things} do they have together?",
                2 * a + b,
            ),
        )
    )
    return text + REQUEST, str(answer)


def reward(response: str, answer: str) -> float:
    """1 if the first number after the last "Answer:" is the right one, else 0."""
    _, found, after = response.rpartition("Answer:")
    numbers = re.findall(r"-?\d+", after) if found else []
    return float(bool(numbers) and numbers[0] == str(answer))


def sections(
    model: str, rows: Path, num_steps: int, *, groups_per_step: int = 32, group_size: int = 8
) -> dict[str, Any]:
    """Returns a configuration of Offbeat's for a run on these problems, without schedule and engine."""
    return {
        "run": {"steps": num_steps},
        "model": {"path": model},
        "task": [
            {
                "source": "file",
                "path": str(rows),
                "prompt": "question",
                "reward": f"{__name__}:reward",
                "held_out": 0.05,
            }
        ],
        "batch": {"groups_per_step": groups_per_step, "group_size": group_size},
        "rollout": {"max_prompt_tokens": MAX_PROMPT_TOKENS, "max_new_tokens": MAX_NEW_TOKENS},
        "eval": {"every": 0},
        "optimizer": {"lr": 2e-5, "warmup_steps": 2},
        "log": {"console": "plain"},
    }
