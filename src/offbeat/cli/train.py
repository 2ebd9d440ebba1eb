"""`offbeat train`: starts or resumes a run, or previews it.

Everything that can be checked without torch is checked before torch is imported.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.cli.parser import Parser
from offbeat.config import Config, load
from offbeat.errors import UserError
from offbeat.extras import hidden

if TYPE_CHECKING:
    from offbeat.launch.engine_choice import Choice
    from offbeat.launch.supervisor import Devices
    from offbeat.observability.advice import Advice

EPILOG = """\
Any key of the configuration can be given as --section.key value, such as --batch.group-size 16; a key of the only
task as --task.level 3, of one among several as --task.0.level 3.
"""


LAUNCHERS = ("local", "slurm", "ray")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("config", nargs="?", metavar="CONFIG.toml", help="without it, the built-in demo")
    parser.add_argument("--name", help="the run's name, the same as --run.name")
    parser.add_argument(
        "--resume", nargs="?", const="", metavar="RUN", help="continue a run; without RUN, the newest one"
    )
    parser.add_argument(
        "--from-scratch",
        action="store_true",
        help="with --resume: if the checkpoints are lost, undo all steps of the run and begin again",
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything, print a summary of the run, and stop")
    parser.add_argument(
        "--on", choices=LAUNCHERS, help="place the run: on this machine's GPUs, or on the nodes of a cluster"
    )
    parser.add_argument(
        "--nodes",
        metavar="CLASS:NODES",
        action="append",
        default=[],
        help="on a cluster: how many; else all that are idle",
    )
    parser.add_argument("--train-on", metavar="CLASS", help="on a cluster: class of the node that trains")
    parser.add_argument(
        "--slurm",
        metavar="OPTION",
        action="append",
        default=[],
        help="with --on slurm: for sbatch, as --slurm=--time=8:00",
    )
    parser.add_argument("--workers-here", metavar="N", type=int, help="with --on local: workers on this machine")
    parser.add_argument(
        "--join-file",
        metavar="FILE",
        type=Path,
        help="write the file with which offbeat node joins this run from elsewhere",
    )
    parser.add_argument(
        "--keys", nargs="?", const="common", choices=("common", "all"), help="list the common keys, or all, and stop"
    )
    parser.add_argument("--count", action="store_true", help="with --keys: print the number of all keys")
    parser.epilog = EPILOG


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    if arguments.keys:
        from offbeat.cli.preview import list_keys
        from offbeat.config.keys import known_keys

        print(len(known_keys()) if arguments.count else list_keys(only_common=arguments.keys == "common"))
        return 0
    if arguments.from_scratch and arguments.resume is None:
        raise UserError("--from-scratch goes only with --resume; a new run begins from scratch anyway")
    if arguments.name:
        overrides = [*overrides, f"--run.name={arguments.name}"]
    config, resume = resolve(arguments.config, overrides, arguments.resume)
    _check_words(arguments)
    if arguments.on == "slurm":
        return _on_slurm(arguments, overrides, config, resume)
    if arguments.on == "ray":
        return _on_ray(arguments, overrides, config, resume)
    if resume is None:
        return _start(arguments, overrides, config, None)
    from offbeat.cli.chosen_run import where_it_started

    if arguments.config is not None:
        arguments.config = str(Path(arguments.config).absolute())
    with where_it_started(resume) as resume:
        return _start(arguments, overrides, config, resume)


def _start(arguments: argparse.Namespace, overrides: list[str], config: Config, resume: Path | None) -> int:
    """Starts or resumes a run, or previews it; returns the exit status."""
    from offbeat.cli.preview import check
    from offbeat.launch.engine_choice import announce, with_chosen_engine
    from offbeat.launch.engine_parts import check_engine

    devices = None
    if arguments.on == "local":
        config, devices = _placed_here(arguments, overrides, config)
    given = config
    config, choice = with_chosen_engine(given)
    check_engine(config, config.rollout.workers)
    check(config, resume)
    if arguments.dry_run:
        return _dry_run(given, config, choice, resume)
    announce(choice, config)
    if resume:
        from offbeat.launch.run_folder import refuse_in_use, refuse_trainer_elsewhere

        refuse_in_use(resume)
        if not arguments.from_scratch:
            refuse_trainer_elsewhere(resume)
    if arguments.join_file is not None and config.rollout.workers is None:
        raise UserError(
            f"--join-file {arguments.join_file}: this run is one process, which nobody can join; add "
            "--rollout.workers 0, or more to generate here, too"
        )
    if config.rollout.workers is not None:
        return _supervise(config, resume, arguments, overrides, devices)
    from offbeat.launch import local

    return status_of(local.train(config, resume=resume, from_scratch=arguments.from_scratch))


def _check_words(arguments: argparse.Namespace) -> None:
    """Raises `UserError` for options that do not go together."""
    clusters = ("slurm", "ray")
    belongs = {"nodes": clusters, "train_on": clusters, "slurm": ("slurm",), "workers_here": ("local",)}
    for name, launchers in belongs.items():
        if getattr(arguments, name) not in (None, []) and arguments.on not in launchers:
            raise UserError(f"--{name.replace('_', '-')} goes with --on {' or '.join(launchers)}")
    if arguments.workers_here is not None and arguments.workers_here < 0:
        raise UserError(f"--workers-here {arguments.workers_here}: give 0 or more")


def _placed_here(arguments: argparse.Namespace, overrides: list[str], config: Config) -> tuple[Config, Devices | None]:
    """Places a run on this machine and prints how. Returns its configuration with the number of workers that the run's
    supervisor starts itself, and the GPUs of trainer and workers where each has some of its own. Adds the keys that it
    sets to `overrides`."""
    import platform

    from offbeat.config import resolved
    from offbeat.config.load import from_dict
    from offbeat.launch import gpus
    from offbeat.launch.cluster import Machine, Placement, place, refuse_network_folder
    from offbeat.launch.processes import num_cores
    from offbeat.launch.supervisor import Devices

    refuse_network_folder(config)
    found = gpus.visible_gpus()
    here = Machine(platform.node().partition(".")[0] or "here", "this machine", len(found), num_cores())
    wanted = arguments.workers_here
    placed = Placement((here,), config.trainer.ranks) if wanted == 0 else place([here], config)
    num_workers = placed.num_workers if wanted is None else wanted
    rest = found[config.trainer.ranks :]
    devices = None
    if wanted and found and len(rest) < wanted * placed.gpus_per_worker:
        raise UserError(f"--workers-here {wanted}: {len(rest)} of {len(found)} GPUs are left by trainer.ranks")
    if num_workers and len(rest) >= placed.gpus_per_worker:
        devices = Devices(found[: config.trainer.ranks], rest, num_workers, here.name)
    own = 0 if devices else num_workers
    overrides.append(f"--rollout.workers={own}")
    if wanted is None and config.log.console != "quiet":
        print("\n".join(placed.lines(with_names=True)), flush=True)
    return from_dict(resolved(config), {"rollout.workers": own}), devices


def _on_slurm(arguments: argparse.Namespace, overrides: list[str], config: Config, resume: Path | None) -> int:
    """Submits a run as a Slurm job and follows it; returns the run's exit status."""
    import sys
    import time

    from offbeat.cli.preview import check
    from offbeat.launch import slurm
    from offbeat.launch.cluster import place, refuse_network_folder, wanted_machines

    refuse_network_folder(config)
    check(config, resume)
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    options.add_argument("-p", "--partition")
    found = slurm.find_machines(options.parse_known_args(arguments.slurm)[0].partition)
    machines = wanted_machines(found.machines, arguments.nodes, found.idle)
    placed = place(machines, config, arguments.train_on)
    name = resume.name if resume else config.run.name or time.strftime("%Y%m%d-%H%M%S")
    run = (resume or Path(config.run.dir).expanduser() / name).absolute()
    reached = ["--rollout.workers=0", *([] if config.serve.host != HOME else REACHED)]
    file = [str(Path(arguments.config).absolute())] if arguments.config else []
    fresh = [*file, *overrides, *([] if config.run.name else [f"--run.name={name}"]), *reached]
    job = slurm.Job(name, Path("jobs").absolute() / name, run, placed, fresh, (), arguments.slurm)
    lines = placed.lines(with_names=False)
    if arguments.dry_run:
        print("\n".join(f"# {line}" for line in lines))
        print(slurm.script(job), end="")
        return 0
    number = slurm.submit(job)
    print("\n".join([*lines, f"job          {number}: log {job.folder / slurm.LOG}, run {run}"]), flush=True)
    return slurm.follow(job, number, lambda text: print(f"offbeat: {text}", file=sys.stderr, flush=True))


def _on_ray(arguments: argparse.Namespace, overrides: list[str], config: Config, resume: Path | None) -> int:
    """Runs a run on a Ray cluster, as long as this process lives; returns the run's exit status."""
    import sys
    import time

    from offbeat.cli.preview import check
    from offbeat.launch import ray_cluster
    from offbeat.launch.cluster import place, refuse_network_folder, wanted_machines

    refuse_network_folder(config)
    check(config, resume)
    ray = ray_cluster.connect()
    machines = list(ray_cluster.find_machines(ray).values())
    placed = place(
        wanted_machines(machines, arguments.nodes, [machine.name for machine in machines]), config, arguments.train_on
    )
    name = resume.name if resume else config.run.name or time.strftime("%Y%m%d-%H%M%S")
    run = (resume or Path(config.run.dir).expanduser() / name).absolute()
    print("\n".join([*placed.lines(with_names=True), f"run          {run}, on {placed.trains.name}"]), flush=True)
    if arguments.dry_run:
        return 0
    file = [str(Path(arguments.config).absolute())] if arguments.config else []
    reached = ["--rollout.workers=0", *([] if config.serve.host != HOME else REACHED)]
    fresh = [
        *file,
        *overrides,
        f"--run.dir={run.parent}",
        *([] if config.run.name else [f"--run.name={name}"]),
        *reached,
    ]
    train = ["--resume", str(resume.absolute())] if resume else fresh
    say = lambda text: print(f"offbeat: {text}", file=sys.stderr, flush=True)  # noqa: E731
    return ray_cluster.RayRun(ray, name, placed, train, say).to_end()


HOME = "127.0.0.1"
REACHED = ("--serve.host=0.0.0.0", "--serve.certificate=auto")
"""Keys with which the coordinator of a job can be reached by its other nodes."""


def _supervise(
    config: Config, resume: Path | None, arguments: argparse.Namespace, overrides: list[str], devices: Devices | None
) -> int:
    """Runs coordinator, trainer and workers as separate processes; returns the exit status."""
    import asyncio

    from offbeat.launch.preflight import check_roles
    from offbeat.launch.run_folder import discard_unbegun
    from offbeat.launch.supervisor import Supervisor

    asyncio.run(check_roles(config))
    engine = [f"--rollout.engine={config.rollout.engine}", f"--rollout.workers={config.rollout.workers}"]
    file = arguments.config
    again = ["serve", *([file] if file else []), *overrides, *engine]
    first = [*again, "--resume", str(resume)] if resume else again
    supervisor = Supervisor(
        config, first, again, from_scratch=arguments.from_scratch, join_file=arguments.join_file, devices=devices
    )
    try:
        return status_of(asyncio.run(supervisor.run_to_end()))
    except UserError:
        if not resume and supervisor.url:  # otherwise no folder is known, and the coordinator has cleared up
            discard_unbegun(supervisor.run)
        raise


def _dry_run(given: Config, config: Config, choice: Choice | None, resume: Path | None) -> int:
    """Checks everything that needs no GPU. Prints a summary of the run, what was checked, and every mistake found. A
    missing device or engine does not stop the other checks. `config` is `given` with an engine chosen."""
    import asyncio

    from offbeat.cli.preview import preview
    from offbeat.net import shown

    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # no warning about a missing torch
    lines: list[str] = []
    advice: list[Advice] = []
    mistakes: list[UserError] = []
    # A tokenizer does not need torch, but transformers would load it.
    with hidden("torch"):
        from offbeat.launch.preflight import check_device, check_server, checking, print_advice

        async def examine() -> None:
            roles = [f"engine       {choice.told}"] if choice else []
            for check in (check_device(config.model.device), check_server(config)):
                try:
                    roles.extend(await check)
                except UserError as error:
                    mistakes.append(error)
            try:
                async with checking(config, home=resume) as found:
                    lines.extend(preview(config, resume, found.num_parameters, found.num_held_out, given=given))
                    lines.extend(["", "checked", *found.lines(), *roles])
                    advice.extend(found.advice())
            except UserError as error:
                mistakes.append(error)

        asyncio.run(examine())
    if lines:
        print("\n".join(lines), flush=True)
    print_advice(advice)
    for mistake in mistakes[:-1]:
        print(f"offbeat: {shown(str(mistake))}", file=sys.stderr)
    if mistakes:
        raise mistakes[-1]
    return 0


def status_of(summary: Mapping[str, Any], command: str = "train", *, is_quiet: bool = False) -> int:
    """Returns the exit status of a run: 128 plus the signal's number if a signal stopped it, otherwise 0. After a
    signal, prints how to resume the run with `command`, unless `is_quiet`."""
    name = summary["stopped_by"]
    if name not in signal.Signals.__members__:
        return 0
    if not is_quiet:
        steps = summary["steps"]
        when = f"after step {steps}, with a checkpoint" if steps else "before its first step was trained"
        print(
            f"offbeat: stopped by {name} {when}; continue with offbeat {command} --resume {summary['run']}",
            file=sys.stderr,
        )
    return 128 + signal.Signals[name]


def resolve(file: str | None, overrides: list[str], resume: str | None) -> tuple[Config, Path | None]:
    """Returns the configuration, and the folder of the run to resume (None for a new run). A resumed run uses its
    stored configuration, or `file` if that is given. `resume` is a run's name or path, or None for a new run. If it is
    "", the run that `run.name` names is resumed or, without a name, the newest run."""
    if resume is None:
        return load(file, overrides), None
    if file is None and resume.endswith(".toml"):  # train --resume CONFIG.toml
        file, resume = resume, ""
    from offbeat.launch.run_folder import check_resumable

    path = _run_to_resume(file, overrides, resume)
    config = load(file if file is not None else path / "config.json", overrides)
    return check_resumable(path, config), path


def _run_to_resume(file: str | None, overrides: list[str], resume: str) -> Path:
    from offbeat.launch.run_folder import named_run, newest_run, stored_config

    about_run = overrides if file else _of_section("run", overrides)
    run = load(file, about_run).run
    if not resume:
        path = Path(run.dir) / run.name if run.name else newest_run(Path(run.dir))
    else:
        path = named_run(resume, Path(run.dir))
    stored_config(path)
    return path


def _of_section(section: str, overrides: list[str]) -> list[str]:
    """Returns the command-line words that set keys of `section`: options such as `--run.name`, and their values."""
    kept: list[str] = []
    is_ours = False
    for word in overrides:
        is_ours = word.startswith(f"--{section}.") if word.startswith("--") else is_ours
        if is_ours:
            kept.append(word)
    return kept
