"""The command line: finds the command, runs it, and turns errors into one line and an exit status.

0: done. 1: a failure that Offbeat foresaw. 2: something that the user can mend. 3: a role that would fail again. 130:
interrupted; 143: by SIGTERM. A traceback is a bug.
Commands are imported when they are called, so that `--help` and a wrong configuration answer at once, and so that
Ctrl-C meets us rather than an import.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from offbeat.errors import DiskError, OffbeatError, RunOver, UserError
from offbeat.files import disk_trouble
from offbeat.redact import shown
from offbeat.spelling import nearest
from offbeat.threads import spin_briefly

COMMANDS = {
    "train": "train a model; without a configuration, the built-in demo",
    "serve": "coordinate a run that a trainer and workers join",
    "trainer": "train for a run that is coordinated elsewhere",
    "worker": "generate for a run; or let workers in, list them, shut them out",
    "plan": "say which machines to rent for a workload, and which of them train and which generate",
    "calibrate": "measure a machine, or fit the planner's cost model to measurements",
    "eval": "score a model on held-out prompts",
    "export": "write a run's model as a Hugging Face folder",
    "model": "write a model that comes in a Python package as a Hugging Face folder",
    "ledger": "check a run's ledger, or tell what is in it",
    "doctor": "say what will work on this machine, and what to install or change",
    "replay": "repeat a step that met NaN or infinity, and say what was not finite first",
    "check-loss": "try whether a loss or an advantage of your own keeps to what training relies on",
    "show": "look at what a run generated: the latest answers, the best, the worst, or one with its history",
}
"""Each is a module of this package with `add_arguments(parser)` and `run(arguments, overrides)`."""
ACCESS = ("token", "list", "revoke")
"""`offbeat worker` with one of these is about who may join; a module of its own."""
TAKES_OVERRIDES = ("train", "serve", "trainer", "worker", "eval", "doctor")
ROLES = ("serve", "trainer", "worker")
STOPPED = 3
"""The exit status of a role that ended for a reason which starting it again would meet again."""
HELP_WORDS = ("-h", "--help", "help")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status."""
    spin_briefly()
    words = list(sys.argv[1:] if argv is None else argv)
    # A role that is started again would meet the same disk.
    on_bad_disk = STOPPED if words[:1] and words[0] in ROLES else 1
    try:
        status = _run(words)
        sys.stdout.flush()
        return status
    except RunOver as error:
        print(error)
        return 0
    except UserError as error:
        return _say(error, 2)
    except DiskError as error:
        return _say(error, on_bad_disk)
    except OffbeatError as error:
        return _say(error, 1)
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    except BrokenPipeError:  # whoever read our output has gone, as `head` does
        _print_no_more()
        return 1
    except OSError as error:
        told = disk_trouble(error, "then try again")
        if told is None:
            raise
        if error.filename is None:
            _print_no_more()
        return _say(told, on_bad_disk)


def _print_no_more() -> None:
    """Drops what standard output still holds: Python would try to write it once more at its end, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in HELP_WORDS:
        print(_help())
        return 0
    if argv[0] == "--version":
        print(f"offbeat {_version()}")
        return 0
    name, words = argv[0], argv[1:]
    if name not in COMMANDS:
        near = nearest(name, list(COMMANDS))
        raise UserError(f"{name}: unknown command; " + (f"did you mean {near}?" if near else "see offbeat --help"))
    from offbeat.cli.parser import Parser
    from offbeat.config.load import split

    overrides: list[str] = []
    is_access = name == "worker" and words[:1] != [] and words[0] in ACCESS
    if name in TAKES_OVERRIDES and not is_access:
        words, overrides = split(words)
    command = importlib.import_module(f"offbeat.cli.{'access' if is_access else name.replace('-', '_')}")
    parser = Parser(prog=f"offbeat {name}", description=f"{COMMANDS[name]}.")
    command.add_arguments(parser)
    return command.run(parser.parse_args(words), overrides)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("offbeat")
    except PackageNotFoundError:
        return "from a folder, not installed"


def _help() -> str:
    commands = "\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())
    return f"usage: offbeat COMMAND ...\n\n{commands}\n\noffbeat COMMAND --help tells more."


def _say(error: OffbeatError | str, status: int) -> int:
    print(f"offbeat: {shown(' '.join(str(error).split()))}", file=sys.stderr)
    return status
