"""`offbeat page`: writes a run's metrics, answers, workers and events as one HTML file."""

from __future__ import annotations

import argparse
from pathlib import Path

from offbeat.cli.chosen_run import RUN_HELP, chosen_run, where_it_started
from offbeat.cli.parser import Parser
from offbeat.errors import UserError


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help=RUN_HELP)
    parser.add_argument("--out", metavar="FILE", required=True, help="write one HTML file, which needs no server")
    parser.add_argument("--without-text", action="store_true", help="leave prompts and answers out of the file")
    parser.epilog = "The file has everything within it: it opens from a disk, without a network."


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from offbeat.tools.page.document import write_page
    from offbeat.tools.page.run_data import RunData
    from offbeat.tools.trajectories import decoder

    out = Path(arguments.out).absolute()
    if not out.parent.is_dir():
        raise UserError(f"--out {arguments.out}: the folder {out.parent} does not exist; create it first")
    if out.is_dir():
        raise UserError(f"--out {arguments.out}: is a folder; give a file, such as run.html")
    folder = chosen_run(arguments.run)
    with where_it_started(folder) as path:
        decode = None if arguments.without_text else decoder(path)
        held = write_page(path, out, RunData(path, decode))
    some = f"{held['num_kept']:,} of {held['num_answers']:,} answers"
    texts = "" if held["with_text"] else ", without their texts"
    print(f"{arguments.out}: {held['num_bytes'] / 1e6:.1f} MB with {some}{texts}; open it in a browser")
    return 0
