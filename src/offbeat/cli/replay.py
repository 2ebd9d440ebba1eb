"""`offbeat replay`: repeats a step that met NaN or infinity, and says what was not finite first."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.cli.parser import Parser
from offbeat.errors import UserError

if TYPE_CHECKING:
    from offbeat.launch.replay import Replay

NUM_WORST = 5
REPRODUCED = 1


def add_arguments(parser: Parser) -> None:
    parser.add_argument("file", metavar="FILE", help="a batch that a run kept: runs/NAME/broken/step-*.batch")
    parser.add_argument("--device", help="instead of the run's model.device, such as cpu")
    parser.add_argument("--model", metavar="FOLDER", help="instead of the run's model.path")
    parser.add_argument("--worst", metavar="N", type=int, default=NUM_WORST, help=f"samples to list ({NUM_WORST})")
    parser.epilog = "Exit status 1 if something was not finite again, 0 if all was. The run is left as it is."


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    file = Path(arguments.file)
    if file.is_dir():
        kept = sorted((file / "broken").glob("*.batch"))
        there = f"; it kept {kept[-1]}" if kept else "; it kept none"
        raise UserError(f"{file}: is a folder; give a file of a run's broken/{there}")
    if not file.is_file():
        raise UserError(f"{file}: no such file; a run that met NaN or infinity names the one that it kept")
    from offbeat.launch.replay import replay

    done = replay(file, arguments.device, arguments.model)
    print("\n".join([*_told(file, done), "", *_table(done, arguments.worst), "", *_words(done)]))
    return 0 if done.repeated.problem is None else REPRODUCED


def _told(file: Path, done: Replay) -> list[str]:
    found, repeated = done.broken, done.repeated
    num_tokens = sum(int(member.mask.sum()) for member in found.members)
    lines = [
        f"{file}: step {found.batch.step}, from version {found.version}: {len(found.members)} samples of "
        f"{len(found.batch.groups)} groups, {num_tokens} tokens to train on",
        f"then      {found.tensor} was not finite{_where(done, found.sample, found.token)}",
    ]
    problem, figures, firsts = repeated.problem, repeated.figures, repeated.firsts
    if problem is not None:
        lines.append(f"now       {problem}{_where(done, problem.sample, problem.token)}")
        if problem.num_updates:
            lines.append(f"          in update {problem.num_updates + 1} of the step")
    elif figures is not None:
        lines.append(f"now       everything is finite: loss {figures.loss:.4g}, gradient norm {figures.grad_norm:.4g}")
    if firsts.module is not None:
        given = "its input was finite" if firsts.had_finite_input else "its input was not finite either"
        lines.append(f"forward   {firsts.module} was first not to be finite; {given}")
    elif problem is not None:
        lines.append("forward   every module's output is finite")
    if firsts.gradient is not None:
        lines.append(f"backward  the gradient of {firsts.gradient} was first not to be finite")
    if not done.has_optimizer:
        lines.append("state     without the optimizer's, whose checkpoint is gone: only a step's first update is exact")
    return lines


def _where(done: Replay, sample: int | None, token: int | None) -> str:
    if sample is None:
        return ""
    task = done.broken.members[sample].task
    return f" (task {task})" if token is None else f" (task {task}, token {token})"


def _table(done: Replay, count: int) -> list[str]:
    lines = [
        f"{'task':>8} {'tokens':>7} {'reward':>9} {'advantage':>10} {'loss':>11} {'|log-ratio|':>12} {'gradient':>10}"
    ]
    for row in done.repeated.samples[:count]:
        member = done.broken.members[row.sample]
        why = f"  {row.problem}" if row.problem is not None else ""
        lines.append(
            f"{member.task:>8} {int(member.mask.sum()):>7} {member.reward:>9.4g} {row.advantage:>10.4g} "
            f"{row.loss:>11.4g} {row.max_log_ratio:>12.4g} {row.grad_norm:>10.4g}{why}"
        )
    left = len(done.repeated.samples) - count
    return [*lines, f"and {left} more"] if left > 0 else lines


def _words(done: Replay) -> list[str]:
    prompt, answer = done.texts
    task = done.broken.members[done.sample].task
    return [f"prompt of task {task}: {prompt!r}", f"answer of task {task}: {answer!r}"]
