"""`offbeat page`: shows metrics, answers, workers and events of runs in a browser, or writes them as one HTML file."""

from __future__ import annotations

import argparse
from pathlib import Path

from offbeat.cli.chosen_run import RUN_HELP, chosen_run, where_it_started
from offbeat.cli.parser import Parser
from offbeat.errors import UserError
from offbeat.launch.run_folder import stored_config


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "runs", metavar="RUN", nargs="*", help=f"{RUN_HELP}; the curves of several are laid over each other"
    )
    parser.add_argument("--out", metavar="FILE", help="write one HTML file, which needs no server, instead")
    parser.add_argument("--without-text", action="store_true", help="with --out: leave prompts and answers out")
    parser.add_argument(
        "--port", metavar="N", type=int, help="port on this machine to serve at; without it, any free one"
    )
    parser.epilog = (
        "Without --out, the page is served to this machine until Ctrl-C, and follows the run. The file of --out has "
        "everything within it: it opens from a disk, without a network."
    )


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    if arguments.out is None:
        if arguments.without_text:
            raise UserError("--without-text goes only with --out, as in offbeat page RUN --out run.html --without-text")
        return _serve(arguments.runs, arguments.port or 0)
    if arguments.port is not None:
        raise UserError("--port and --out do not go together; a file needs no port")
    return _write(arguments.runs, arguments.out, with_text=not arguments.without_text)


def _chosen(given: list[str]) -> list[Path]:
    """Returns the folders of the runs on the command line."""
    runs = [chosen_run(word) for word in given] or [chosen_run(None)]
    for run in runs:
        stored_config(run)
    twice = [str(run) for number, run in enumerate(runs) if run.resolve() in {r.resolve() for r in runs[:number]}]
    if twice:
        raise UserError(f"{twice[0]}: is named twice; name each run once")
    return runs


def _write(given: list[str], file: str, *, with_text: bool) -> int:
    from offbeat.tools.page.document import write_page
    from offbeat.tools.page.run_data import RunData
    from offbeat.tools.trajectories import decoder

    out = Path(file).absolute()
    if not out.parent.is_dir():
        raise UserError(f"--out {file}: the folder {out.parent} does not exist; create it first")
    if out.is_dir():
        raise UserError(f"--out {file}: is a folder; give a file, such as run.html")
    runs = []
    for folder in _chosen(given):
        path = folder.absolute()
        with where_it_started(folder):
            runs.append(RunData(path, decoder(path) if with_text else None))
    held = write_page(out, runs)
    some = f"{held['num_kept']:,} of {held['num_answers']:,} answers"
    texts = "" if held["with_text"] else ", without their texts"
    print(f"{file}: {held['num_bytes'] / 1e6:.1f} MB with {some}{texts}; open it in a browser")
    return 0


def _serve(given: list[str], port: int) -> int:
    import asyncio
    import secrets

    from offbeat.tools.page.server import PageApp, serve_page

    runs = _chosen(given)
    names, paths = ", ".join(map(str, runs)), [run.absolute() for run in runs]
    with where_it_started(runs[0]):
        app = PageApp(paths, secrets.token_urlsafe(24))
        asyncio.run(serve_page(app, port, lambda link: print(f"{names}: {link} (Ctrl-C ends it)", flush=True)))
    return 0
