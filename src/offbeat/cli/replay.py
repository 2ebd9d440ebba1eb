"""`offbeat replay`: repeats a step that met NaN or infinity, and names the first value that was not finite."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.cli.chosen_run import chosen_run
from offbeat.cli.parser import Parser
from offbeat.errors import UserError

if TYPE_CHECKING:
    from offbeat.tools.replay import StepReplay

NUM_WORST = 5


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        help="a batch that a run kept: runs/NAME/broken/step-*.batch; without it, the latest one of the newest run",
    )
    parser.add_argument("--device", help="instead of the run's model.device, such as cpu")
    parser.add_argument("--model", metavar="FOLDER", help="instead of the run's model.path")
    parser.add_argument("--worst", metavar="N", type=int, default=NUM_WORST, help=f"samples to list ({NUM_WORST})")
    parser.epilog = "Exit status 1 if something was not finite again, 0 if everything was. The run is not changed."


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    file = _latest(chosen_run(None)) if arguments.file is None else Path(arguments.file)
    if file.is_dir():
        kept = sorted((file / "broken").glob("*.batch"))
        there = f", such as {kept[-1]}" if kept else "; this folder has none"
        raise UserError(f"{file} is a folder; give a file broken/*.batch of a run{there}")
    if not file.is_file():
        raise UserError(f"{file}: no such file; give the file that a run named when it met NaN or infinity")
    from offbeat.tools.replay import replay

    done = replay(file, arguments.device, arguments.model)
    task = done.dump.members[done.sample].task
    texts = [f"prompt of task {task}: {done.prompt!r}", f"answer of task {task}: {done.answer!r}"]
    print("\n".join([*_summary(file, done), "", *_table(done, arguments.worst), "", *texts]))
    return 0 if done.repeated.problem is None else 1


def _latest(run: Path) -> Path:
    """Returns the file of the latest batch that a run kept because of NaN or infinity."""
    kept = sorted((run / "broken").glob("*.batch"))
    if not kept:
        raise UserError(f"{run}: has kept no batch with NaN or infinity, so there is no step to replay")
    return kept[-1]


def _summary(file: Path, done: StepReplay) -> list[str]:
    dump, repeated, problem = done.dump, done.repeated, done.repeated.problem
    num_tokens = sum(int(member.mask.sum()) for member in dump.members)
    lines = [
        f"{file}: step {dump.batch.step + 1}, from version {dump.version}: {len(dump.members)} samples of "
        f"{len(dump.batch.groups)} groups, {num_tokens} tokens to train on",
        f"then      {dump.tensor} was not finite{_where(done, dump.sample, dump.token)}",
    ]
    if problem is not None:
        in_update = f", in update {problem.num_updates + 1} of the step" if problem.num_updates else ""
        lines.append(f"now       {problem}{_where(done, problem.sample, problem.token)}{in_update}")
    elif repeated.metrics is not None:
        loss, norm = repeated.metrics.loss, repeated.metrics.grad_norm
        lines.append(f"now       everything is finite: loss {loss:.4g}, gradient norm {norm:.4g}")
    if repeated.module is not None:
        given = "its input was finite" if repeated.had_finite_input else "its input was not finite either"
        lines.append(f"forward   {repeated.module} was the first whose output was not finite; {given}")
    elif problem is not None:
        lines.append("forward   every module's output is finite")
    if repeated.gradient is not None:
        lines.append(f"backward  the gradient of {repeated.gradient} was the first that was not finite")
    if not done.has_optimizer:
        lines.append("state     the optimizer's checkpoint is gone, so only the first update of the step is exact")
    return lines


def _where(done: StepReplay, sample: int | None, token: int | None) -> str:
    if sample is None:
        return ""
    task = done.dump.members[sample].task
    return f" (task {task})" if token is None else f" (task {task}, token {token})"


def _table(done: StepReplay, count: int) -> list[str]:
    lines = [f"{'task':>8} {'tokens':>7} {'reward':>9} {'loss':>11} {'|log-ratio|':>12} {'gradient':>10}"]
    for row in done.repeated.samples[:count]:
        member = done.dump.members[row.sample]
        lines.append(
            f"{member.task:>8} {int(member.mask.sum()):>7} {member.reward:>9.4g} {row.loss:>11.4g} "
            f"{row.max_log_ratio:>12.4g} {row.grad_norm:>10.4g}"
        )
    left = len(done.repeated.samples) - count
    return [*lines, f"and {left} more"] if left > 0 else lines
