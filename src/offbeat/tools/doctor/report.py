"""The doctor's report: findings, what works, what to change, and whether the configuration can run.

Safe to paste into a request for help: the home folder is written as `~`, and logins are removed from URLs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from offbeat.net import LOGIN


class Level(StrEnum):
    FINE = "fine"
    ABSENT = "absent"
    """Missing, and not needed."""
    WARNS = "warns"
    """The run starts, but something is worth fixing."""
    STOPS = "stops"
    """The configuration cannot run."""


MARKS = {Level.FINE: " ", Level.ABSENT: "-", Level.WARNS: "!", Level.STOPS: "x"}
LEGEND = "- optional, not installed   ! warning   x error"


@dataclass(frozen=True)
class Finding:
    about: str
    text: str
    level: Level = Level.FINE
    remedy: str = ""
    """The way out: a command to type or a key to change."""
    works: str = ""
    """Command-line options that will work here according to this finding, such as `--model.device cuda:0`."""


def judged(about: str, text: str, *, bad: bool, remedy: str, level: Level = Level.WARNS) -> Finding:
    """Returns a finding with `level` and `remedy` if the fact is `bad`, and with level FINE and no remedy otherwise."""
    return Finding(about, text, level, remedy) if bad else Finding(about, text)


@dataclass(frozen=True)
class DoctorReport:
    name: str
    """Name of the configuration in the report's sentences."""
    command: str
    """The command that would start the run."""
    findings: list[Finding]

    @property
    def can_run(self) -> bool:
        return all(finding.level is not Level.STOPS for finding in self.findings)

    @property
    def changes(self) -> list[str]:
        """Packages to install and settings to change; changes without which the run cannot start come first."""
        levels = (Level.STOPS, Level.WARNS)
        return [f"{f.about}: {f.remedy or f.text}" for level in levels for f in self.findings if f.level is level]

    @property
    def works(self) -> list[str]:
        return [self.command] * self.can_run + [finding.works for finding in self.findings if finding.works]

    def lines(self, home: str) -> list[str]:
        found, width = self.findings, max(len(finding.about) for finding in self.findings)
        hints = [f"; {f.remedy}" if f.level is Level.ABSENT else "" for f in found]
        rows = [f"{MARKS[f.level]} {f.about:<{width}}  {f.text}{hint}" for f, hint in zip(found, hints, strict=True)]
        text = [
            f"offbeat doctor, for {self.name}",
            "",
            *rows,
            *(["", LEGEND] if any(f.level is not Level.FINE for f in found) else []),
            *_block("what will work", self.works),
            *_block("what to install or change", self.changes),
            "",
            f"{self.name} {'can' if self.can_run else 'cannot'} run here",
        ]
        return [without_secrets(line.replace(f"{home}/", "~/") if len(home) > 1 else line) for line in text]


def without_secrets(text: str) -> str:
    return LOGIN.sub("", text)


def _block(title: str, items: Sequence[str]) -> list[str]:
    return ["", title, *(f"  {item}" for item in items)] if items else []
