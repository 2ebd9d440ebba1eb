"""Where prompts come from: the sections `[[task]]`, one model for each kind of source."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from offbeat.config.section import Section


class TaskConfig(Section):
    """What every source of prompts can be told."""

    weight: float = Field(1.0, gt=0)
    """How often this source is drawn from, beside the others."""
    reward: str | None = None
    """`exact`, `number`, `math`, `module:function` or `file.py:function`; without it, the source's own."""
    system: str | None = None
    """A system message, for models with a chat template."""


class ArithmeticTask(TaskConfig):
    source: Literal["arithmetic"] = "arithmetic"
    level: int = Field(2, ge=1, le=5)
    """How hard: from two digits to eight terms of up to three digits."""
    tail: float = Field(0.0, ge=0, le=1)
    """The share of problems whose worked answer is long."""
    tail_median: int = Field(6, ge=2, le=64)
    """Lines in the median long answer."""
    tail_sigma: float = Field(0.8, ge=0, le=2)
    """Spread of their log-normal law."""
    tail_cap: int = Field(40, ge=2, le=64)
    """Lines in the longest."""


class GymTask(TaskConfig):
    source: Literal["reasoning-gym"]
    name: str
    """The data set's name in reasoning-gym, such as `chain_sum`."""
    options: dict[str, Any] = Field({})
    """Passed to its configuration."""
    chat: bool | None = None
    """Put the question through the chat template; without it, whenever the model has one."""


class FileTask(TaskConfig):
    source: Literal["file", "dataset"]
    path: str
    """A .jsonl or .parquet file (`file`), or the name or folder of a Hugging Face dataset (`dataset`)."""
    split: str = "train"
    """Of a dataset."""
    prompt: str = "prompt"
    """The column with the prompt as text."""
    messages: str | None = None
    """The column with the prompt as chat messages, instead of `prompt`."""
    answer: str | None = "answer"
    """The column with the right answer, handed to the reward."""
    chat: bool | None = None
    """Put a text prompt through the chat template; without it, whenever the model has one."""
    held_out: float = Field(0.05, ge=0, lt=1)
    """The share of rows kept for evaluation, chosen by their content."""
    shuffle: bool = True
    """Another order in every epoch, drawn from run.seed."""


class FunctionTask(TaskConfig):
    source: Literal["function"]
    path: str
    """`module:function` or `file.py:function`, called with (ordinal, seed, held_out), returning a problem as a dict."""
    chat: bool | None = None
    """Put a text prompt through the chat template; without it, whenever the model has one."""


AnyTask = Annotated[ArithmeticTask | GymTask | FileTask | FunctionTask, Field(discriminator="source")]
