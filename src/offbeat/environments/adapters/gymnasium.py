"""Environments of Gymnasium whose observations are text, or can be told as text: `path = "gymnasium:ID"`.

The model's turn is the action: text as it is for a space of texts, a whole number for a discrete space, and JSON for
any other. `task.options` go to `gymnasium.make`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from offbeat.environments.protocol import Done, Reply, Turn
from offbeat.errors import UserError
from offbeat.extras import import_extra
from offbeat.locate import one_line


def environment(name: str) -> type:
    """Returns the class of the environment that Gymnasium knows by `name`."""

    class Named(GymnasiumText):
        def __init__(self, **options: Any):
            super().__init__(name, options)

    return Named


class GymnasiumText:
    """An episode in an environment of Gymnasium."""

    def __init__(self, name: str, options: Mapping[str, Any]):
        gymnasium = import_extra("gymnasium", "gymnasium", f'path = "gymnasium:{name}"')
        try:
            self.env = gymnasium.make(name, disable_env_checker=True, **options)
        except Exception as error:  # every environment refuses in its own way
            raise UserError(f'path = "gymnasium:{name}": it cannot be made: {one_line(error)}') from error

    def begin(self, problem: Mapping[str, Any], seed: int) -> str:
        observation, info = self.env.reset(seed=seed % 2**32)
        return told(observation, info)

    def step(self, turn: Turn) -> Reply | Done:
        observation, reward, is_over, is_cut, info = self.env.step(self._action(turn.text.strip()))
        if is_over or is_cut:
            state = {"observation": told(observation, {}), "cut": bool(is_cut)}
            return Done(float(reward), state)
        return Reply(told(observation, info), float(reward))

    def close(self) -> None:
        self.env.close()

    def _action(self, text: str) -> Any:
        space = self.env.action_space
        kind = type(space).__name__
        if kind == "Text":
            action: Any = text
        elif kind == "Discrete":
            first, last = int(space.start), int(space.start) + int(space.n) - 1
            try:
                action = int(text)
            except ValueError:
                raise ValueError(f"answer with a whole number from {first} to {last}") from None
        else:
            try:
                action = json.loads(text)
            except ValueError:
                raise ValueError(f"answer with JSON for an action of {space}") from None
        if not space.contains(action):
            raise ValueError(f"{text[:60]!r} is no action; allowed {space}")
        return action


def told(observation: Any, info: Mapping[str, Any]) -> str:
    """Returns an observation as text: a text as it is, else `info["text"]` if it is there, else JSON."""
    if isinstance(observation, str):
        return observation
    if isinstance(info.get("text"), str):
        return info["text"]
    try:
        return json.dumps(observation, default=lambda value: value.tolist(), ensure_ascii=False)
    except (TypeError, ValueError, AttributeError):
        return str(observation)
