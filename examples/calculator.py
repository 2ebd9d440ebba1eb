"""A tool that works out sums and products, problems of which half need it, and a reward that charges for each call."""

import math
import random
import zlib


def calculator(expression: str) -> str:
    """Works out sums and products, such as 37*48."""
    return str(sum(math.prod(map(int, term.split("*"))) for term in expression.split("+")))


# An episode can be carried on elsewhere, by calling again.
calculator.deterministic = True  # type: ignore[attr-defined]


def problem(ordinal: int, seed: int, held_out: bool) -> dict:
    """Half of the problems are sums of digits, which the model can do; half are products, which it cannot."""
    rng = random.Random(f"{seed}:{ordinal}:{held_out}")
    if ordinal % 2:
        left, right = rng.randint(1, 9), rng.randint(1, 9)
        return {"prompt": f"{left}+{right}=", "answer": left + right, "info": {"kind": "sum"}}
    while True:
        left, right = rng.randint(10, 99), rng.randint(10, 99)
        prompt = f"{left}*{right}="
        if (zlib.crc32(prompt.encode()) % 10 == 0) == held_out:  # a tenth of the products is never trained
            return {"prompt": prompt, "answer": left * right, "info": {"kind": "product"}}


def reward(final: str, answer: str, messages: list, info: dict) -> float:
    """1 if the last turn is right, less a tenth for each call."""
    num_calls = sum(message["role"] == "tool" for message in messages)
    return float(final.strip() == answer) - 0.1 * num_calls
