"""Built-in rewards, and the lookup of any reward by its name.

- `exact`: the response equals the answer, except for white space at both ends;
- `number`: the last number in the response equals the answer;
- `math`: math-verify finds response and answer mathematically equal;
- `gym`: the score of the reasoning-gym data set that posed the question;
- `environment`: what the environment says was earned.

Of an episode with tools, the first four read only the model's last turn.

A built-in raises if the problem has no answer that it can read. This counts as a failed reward, never as reward 0.
Optional packages are imported when a reward is loaded, so that a missing one is reported before training.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from offbeat.errors import UserError
from offbeat.extras import import_extra
from offbeat.locate import Function, locate
from offbeat.spelling import suggest

NUMBER = re.compile(
    r"(?:(?<![0-9.])-)?"
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
    r"(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,3})?"
)
"""Pattern of a number. A minus sign belongs to it, except right after another number: 10-5 ends with 5."""
ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
LATEX_MARKS = ("$", "\\(", "\\[", "\\boxed")


def exact(response: str, answer: str | None) -> float:
    return float(response.strip() == _known(answer, "exact").strip())


def number(response: str, answer: str | None) -> float:
    wanted = last_number(_known(answer, "number"))
    if wanted is None:
        raise ValueError(f"the reward 'number' needs a number in the problem's answer, but {answer!r} holds none")
    return float(last_number(response) == wanted)


def environment(claims: Sequence[tuple[int, float, str]]) -> list[tuple[int, float, str]]:
    """Returns the rewards that an environment reported, as (position, value, name); a single 0 if a limit ended the
    episode before the environment reported any."""
    return [(int(position), value, name) for position, value, name in claims] or [(-1, 0.0, "environment")]


def last_number(text: str) -> Decimal | None:
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def final_answer(text: str) -> str:
    """Returns the text between the last pair of answer tags, or the whole text if there is none."""
    tagged = ANSWER_TAG.findall(text)
    return (tagged[-1] if tagged else text).strip()


def load_math() -> Function:
    math_verify = import_extra("math_verify", "math", "the reward 'math'")
    gold_of: dict[str, Any] = {}
    # math-verify hides errors of its parser, such as a wrong version: then every answer would count as wrong.
    half = math_verify.parse(r"$\frac{1}{2}$", parsing_timeout=None)
    if not math_verify.verify(half, math_verify.parse("0.5", parsing_timeout=None), timeout_seconds=None):
        raise UserError("the reward 'math': math-verify cannot read LaTeX here; run pip install 'offbeat[math]'")

    def math(response: str, answer: str | None) -> float:
        text = _known(answer, "math")
        if text not in gold_of:
            gold_of.clear()  # the samples of a group share an answer and arrive together, so one entry is enough
            marked = text if any(mark in text for mark in LATEX_MARKS) else f"${text}$"
            # Its own time limits need signals; the process's deadline replaces them.
            gold_of[text] = math_verify.parse(marked, parsing_timeout=None)
        if not gold_of[text]:
            raise ValueError(f"math-verify cannot read the problem's answer {text!r}")
        found = math_verify.parse(response, parsing_timeout=None)
        return float(math_verify.verify(gold_of[text], found, timeout_seconds=None))

    return math


def load_gym() -> Function:
    from offbeat.data.gym import judge

    import_extra("reasoning_gym", "gym", "the reward 'gym'")

    def gym(prompt: str, response: str, info: Mapping[str, Any]) -> float:
        return judge(prompt, final_answer(response), info)

    return gym


LOADERS: dict[str, Callable[[], Function]] = {
    "exact": lambda: exact,
    "number": lambda: number,
    "math": load_math,
    "gym": load_gym,
    "environment": lambda: environment,
}


def load_reward(spec: str) -> Function:
    """Loads the reward that a configuration names: a built-in, `module:function` or `file.py:function`."""
    if ":" in spec or spec.endswith(".py"):
        return locate(spec, "task.reward")
    if spec not in LOADERS:
        raise UserError(
            f"task.reward = {spec!r}: no such reward; {suggest(spec, LOADERS, lists_few=True)} "
            "(your own: module:function or file.py:function)"
        )
    return LOADERS[spec]()


def _known(answer: str | None, reward: str) -> str:
    if answer is None:
        raise ValueError(f"the reward {reward!r} needs an answer, but the problem has none")
    return answer
