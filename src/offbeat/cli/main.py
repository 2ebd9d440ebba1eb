"""The command line: finds the command, runs it, and turns errors into one line and an exit status.

Exit status 0: success. 1: a failure that Offbeat foresees. 2: an error that the user can fix. 3: a role that would
fail again if restarted. 130: interrupted. 143: ended by SIGTERM. A traceback is a bug.
Commands are imported when they are called, so that `--help` and errors in a configuration appear at once.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from offbeat import extras
from offbeat.errors import DiskError, OffbeatError, RunOver, UserError
from offbeat.files import disk_trouble
from offbeat.net import shown
from offbeat.spelling import nearest

SPIN_COUNT = "1000"
"""Iterations that an OpenMP thread spins before it sleeps: a few microseconds. The default is about a thousand times as
many. Such long spinning gains nothing on idle cores, and makes a step five to eight times slower beside one busy
process."""


def spin_briefly() -> None:
    """Limits how long idle OpenMP threads of this process and its children spin before they sleep, unless the user has
    set it. Must be called before torch is imported, because torch reads the setting at its import."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


COMMANDS = {
    "train": "train a model; without a configuration, the built-in demo",
    "serve": "coordinate a run that a trainer and workers join",
    "trainer": "train for a run that is coordinated elsewhere",
    "worker": "generate for a run; or issue join tokens to workers, list them, revoke them",
    "node": "run and restart the workers of one machine of a run, and trainer ranks where told so",
    "plan": "choose machines for a workload: which to rent, which train and which generate",
    "simulate": "simulate a run: what a fleet, a plan or a finished run would do, and what if",
    "calibrate": "measure a machine, or fit the planner's cost model to measurements",
    "eval": "score a model on held-out prompts",
    "export": "write a run's model as a Hugging Face folder",
    "model": "write a model that comes in a Python package as a Hugging Face folder",
    "ledger": "check a run's ledger, or summarise it",
    "doctor": "check what will work on this machine, and what to install or change",
    "replay": "repeat a step that met NaN or infinity, and find what was not finite first",
    "check-loss": "check your own loss or advantage for the properties that training relies on",
    "page": "show a run's curves, answers, workers and events in a browser, or write them as one HTML file",
    "show": "print what a run generated: the latest answers, the best, the worst, or one with its history",
}
"""Commands and their help. Each command is a module of this package with `add_arguments(parser)` and `run(arguments,
overrides)`; overrides are keys of the configuration, such as `--batch.group-size 16`."""
ACCESS = ("token", "list", "revoke")
"""Actions of `offbeat worker` that the module `access` implements."""
TAKES_OVERRIDES = ("train", "serve", "trainer", "worker", "node", "eval", "doctor")
ROLES = ("serve", "trainer", "worker", "node")
STOPPED = 3
"""Exit status of a coordinator, trainer or worker that would fail for the same reason if it were restarted."""
HELP_WORDS = ("-h", "--help", "help")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command in `argv` (None: in `sys.argv`) and returns its exit status."""
    extras.owns_process = argv is None
    spin_briefly()
    words = list(sys.argv[1:] if argv is None else argv)
    # A restarted role would meet the same disk error.
    on_bad_disk = STOPPED if words[:1] and words[0] in ROLES else 1
    try:
        status = _run(words)
        sys.stdout.flush()
        return status
    except RunOver as error:
        print(error)
        return 0
    except UserError as error:
        return _fail(error, 2)
    except DiskError as error:
        return _fail(error, on_bad_disk)
    except OffbeatError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:  # the reader of our output has ended, such as `head`
        _discard_output()
        return 1
    except OSError as error:
        trouble = disk_trouble(error, "then try again")
        if trouble is None:
            raise
        if error.filename is None:
            _discard_output()
        return _fail(trouble, on_bad_disk)
    except RuntimeError as error:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(error, torch.OutOfMemoryError):
            raise
        what = str(error).split(". GPU")[0]
        return _fail(f"{what}; end other programs on this GPU (nvidia-smi lists them), or lower rollout.slots", 1)


def _discard_output() -> None:
    """Drops unwritten standard output; otherwise Python would try to write it again at its exit."""
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
    return f"usage: offbeat COMMAND ...\n\n{commands}\n\noffbeat COMMAND --help lists its options."


def _fail(error: OffbeatError | str, status: int) -> int:
    print(f"offbeat: {shown(' '.join(str(error).split()))}", file=sys.stderr)
    return status
