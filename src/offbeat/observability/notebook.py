"""The console of a notebook: one display with the newest steps and the reward curve, redrawn as the run goes on."""

from __future__ import annotations

import base64
import io
import time
from html import escape
from typing import Any

from offbeat.observability.console import (
    PLAIN_WIDTH,
    Clock,
    Console,
    Row,
    closing_lines,
    columns,
    duration,
    header,
    line,
)
from offbeat.observability.plot import draw_rewards

Data = dict[str, str]
"""An output of a notebook cell in several forms, by MIME type."""

NUM_ROWS = 12
"""Number of newest rows that are shown; metrics.jsonl has all."""
MAX_TEXTS = 20
EVERY_S, CURVE_EVERY_S = 1.0, 5.0
"""Shortest times in seconds between two updates of the output, and between two drawings of the reward curve. A drawing
takes about 0.2 s."""
STYLE = "font-family: monospace; white-space: pre; line-height: 1.35; overflow-x: auto"


class Output:
    """An output of the notebook cell that calls `show`; each call replaces what the previous call showed."""

    def __init__(self) -> None:
        from IPython.display import display

        self._display, self._handle = display, None
        self._shown: Data | None = None

    def show(self, data: Data) -> None:
        if data is self._shown:
            return
        self._shown = data
        if self._handle is None:
            self._handle = self._display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


class NotebookConsole(Console):
    """Console in a notebook's cell. Every update replaces the previous one, so even a long run has only one output.

    Once the cell that started a run in the background has ended, the notebook's front end may drop further output of
    the run. So another cell may show `data` as well, in an `Output` of its own.
    """

    def __init__(
        self, num_steps: int, *, has_workers: bool = False, has_episodes: bool = False, clock: Clock = time.monotonic
    ):
        self.data: Data | None = None
        """Output shown now, by MIME type; None: nothing yet."""
        self._output = Output()
        self.num_steps, self.clock, self.start_s = num_steps, clock, clock()
        self.columns = columns(num_steps, PLAIN_WIDTH, has_workers=has_workers, has_episodes=has_episodes)
        self.rows: list[Row] = []
        self.texts: list[str] = []
        self.status, self.closing = "", list[tuple[str, str]]()
        self._curve, self._num_drawn = "", 0
        self._shown_s = self._drawn_s = -float("inf")

    def step(self, row: Row) -> None:
        self.rows.append({key: row[key] for key in row if "/" not in key})
        self.status = ""  # what it was doing is over
        self._update()

    def doing(self, text: str) -> None:
        self.status = f"{text}, {duration(self.clock() - self.start_s)}"
        self._update()

    def note(self, text: str) -> None:
        self._say(text)

    def alarm(self, text: str) -> None:
        self._say(f"warning: {text}")

    def finish(self, summary: Row, folder: str, *, from_python: bool = False, command: str = "train") -> None:
        self.closing = closing_lines(summary, folder, from_python=from_python, command=command)
        self.status = ""
        self._update(at_once=True)

    def __exit__(self, *error: object) -> None:
        self.status = ""
        self._update(at_once=True)

    def _say(self, text: str) -> None:
        self.texts = [*self.texts, text][-MAX_TEXTS:]
        self._update(at_once=True)

    def _update(self, *, at_once: bool = False) -> None:
        now_s = self.clock()
        if not at_once and now_s - self._shown_s < EVERY_S:
            return
        self._shown_s = now_s
        if len(self.rows) > self._num_drawn and (at_once or now_s - self._drawn_s >= CURVE_EVERY_S):
            self._curve, self._num_drawn, self._drawn_s = curve(self.rows), len(self.rows), now_s
        self.data = {"text/plain": self._text(), "text/html": self._html()}
        self._output.show(self.data)

    def _lines(self) -> list[str]:
        lines = list(self.texts)
        if self.rows:
            lines += [header(self.columns), *(line(row, self.columns) for row in self.rows[-NUM_ROWS:])]
        if self.status:
            lines.append(self.status)
        return lines + [f"{name:<10} {text}" for name, text in self.closing]

    def _text(self) -> str:
        return "\n".join(self._lines())

    def _html(self) -> str:
        return f'<div style="{STYLE}">{escape(self._text())}</div>{self._curve}'


def curve(rows: list[Row]) -> str:
    """Returns the reward curve as an HTML image; empty without matplotlib or a reward."""
    figure: Any = draw_rewards(rows)
    if figure is None:
        return ""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=80)
    return f'<img alt="reward by step" src="data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}">'
