"""Problems of an environment: all have the same prompt, and the environment makes each from its seed."""

from __future__ import annotations

from offbeat.data.prompts import Problem


class EnvironmentSource:
    """Source of episodes in an environment. What the environment says first follows the prompt `prompt`."""

    default_reward = "environment"
    is_opened = True

    def __init__(self, path: str, prompt: str = "", chat: bool | None = None):
        self.name, self.prompt, self.chat = path.rpartition(":")[2], prompt, chat

    def problem(self, ordinal: int) -> Problem:
        return Problem(self.prompt, info={"ordinal": ordinal, "held_out": False}, place=f"task {self.name}")

    def held_out(self, count: int) -> list[Problem]:
        info = [{"ordinal": ordinal, "held_out": True} for ordinal in range(count)]
        return [Problem(self.prompt, info=one, place=f"task {self.name}") for one in info]
