"""The run that a command is about: the one named on the command line, else the newest."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from offbeat.config.schema import RunConfig
from offbeat.launch.run_folder import CONFIG, LEDGER, named_run, newest_run, started_in

RUN_HELP = "a run's folder, or its name; without it, the newest run"


def chosen_run(given: str | None) -> Path:
    """Returns the folder of the run `given`, which is a folder or a name in the default `run.dir`. Does not check that
    the run exists. If `given` is None, returns the newest run in that directory, and names it on standard error."""
    parent = Path(RunConfig().dir)
    if given is None:
        run = newest_run(parent)
        print(f"the newest run: {run}", file=sys.stderr)
        return run
    return named_run(given, parent)


@contextlib.contextmanager
def where_it_started(run: Path) -> Iterator[Path]:
    """Within the block, changes to the folder in which `run` was started, because relative paths in its configuration
    count from there. Yields the path of the run's folder."""
    home, path = started_in(run), run.absolute()
    if home == Path.cwd():
        yield run
        return
    with contextlib.chdir(home):
        yield path


def is_run(word: str) -> bool:
    """Whether `word` is a run's folder or name, and not, for example, a worker's name."""
    folders = (Path(word), Path(RunConfig().dir) / word)
    return any((folder / file).is_file() for folder in folders for file in (CONFIG, LEDGER))
