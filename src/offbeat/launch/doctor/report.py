"""What the doctor says: findings in the order in which people read them, then a verdict. Pure.

Plain lines, to be pasted where help is asked for: the home folder is written `~`, and nothing names the machine or
holds a password.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from offbeat.launch.doctor import around, configured, installed
from offbeat.launch.doctor.finding import Finding, Level
from offbeat.launch.doctor.needs import SERVED, Needs
from offbeat.launch.doctor.seen import Failed, Seen

PARTS: tuple[Callable[[Seen, Needs], Iterator[Finding]], ...] = (
    *(installed.offbeat, installed.machine, installed.torch, installed.packages, installed.engines),
    *(around.disk, around.clocks, around.limits, around.ports, configured.configuration),
)
MARKS = {Level.FINE: " ", Level.ABSENT: "-", Level.WARNS: "!", Level.STOPS: "x"}
SECRET = re.compile(r"//[^/@\s\"]*@")
"""A name and password within a URL."""
LEGEND = "- not there, not needed   ! worth mending   x stops the run"


@dataclass(frozen=True)
class Report:
    needs: Needs
    findings: list[Finding]
    works: list[str]
    changes: list[str]
    """What to install or change, that which stops the run first."""

    @property
    def can_run(self) -> bool:
        return all(finding.level is not Level.STOPS for finding in self.findings)


def report(seen: Seen, needs: Needs) -> Report:
    findings = [finding for part in PARTS for finding in part(seen, needs)]
    changes = [
        f"{finding.about}: {finding.remedy or finding.told}"
        for level in (Level.STOPS, Level.WARNS)
        for finding in findings
        if finding.level is level
    ]
    can_run = all(finding.level is not Level.STOPS for finding in findings)
    return Report(needs, findings, list(_works(seen, needs, can_run=can_run)), changes)


def lines(told: Report, home: str) -> list[str]:
    """All of it, as text."""
    width = max(len(finding.about) for finding in told.findings)
    rows = [f"{MARKS[f.level]} {f.about:<{width}}  {f.told}" for f in told.findings]
    used = {f.level for f in told.findings} - {Level.FINE}
    text = [
        f"offbeat doctor, for {told.needs.name}",
        "",
        *rows,
        *(["", LEGEND] if used else []),
        *_block("what will work", told.works),
        *_block("what to install or change", told.changes),
        "",
        f"{told.needs.name} {'can' if told.can_run else 'cannot'} run here",
    ]
    return [without_secrets(line.replace(f"{home}/", "~/") if len(home) > 1 else line) for line in text]


def without_secrets(text: str) -> str:
    return SECRET.sub("//", text)


def _block(title: str, items: Sequence[str]) -> list[str]:
    return ["", title, *(f"  {item}" for item in items)] if items else []


def _works(seen: Seen, needs: Needs, *, can_run: bool) -> Iterator[str]:
    if can_run and not isinstance(seen.torch, Failed):
        yield f"{needs.command}: trains on {seen.torch.picked}, generates with the {needs.engine} engine"
    if not isinstance(seen.torch, Failed):
        for device in seen.torch.devices:
            if not device.fault and device.name != seen.torch.picked:
                yield f"--model.device {device.name}: {device.model}"
    if not isinstance(seen.interpreter, Failed):
        for engine in (name for name in SERVED if name in seen.interpreter.found and name != needs.engine):
            python = f" --engine.python {seen.interpreter.path}" if needs.engine_python else ""
            found = f"{SERVED[engine]} {seen.interpreter.found[engine]}"
            yield f"--rollout.engine {engine} --rollout.workers 1{python}: {found}"
    if seen.server is not None and not isinstance(seen.server, Failed):
        kind = seen.server.name.split()[0]
        yield f"--rollout.engine {kind} --rollout.workers 1 --engine.url {seen.server.url}: {seen.server.name}"
    if not isinstance(seen.ports, Failed) and not seen.ports.loopback_fault:
        yield "coordinator, trainer and workers as processes of their own (--rollout.workers N, offbeat serve)"
