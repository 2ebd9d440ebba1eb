"""`offbeat page`: shows a run's metrics, answers, workers and events in a browser, or writes them as one HTML file."""

from __future__ import annotations

import argparse
from pathlib import Path

from offbeat.cli.chosen_run import RUN_HELP, chosen_run, where_it_started
from offbeat.cli.parser import Parser
from offbeat.errors import UserError


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help=RUN_HELP)
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
        return _serve(arguments.run, arguments.port or 0)
    if arguments.port is not None:
        raise UserError("--port and --out do not go together; a file needs no port")
    return _write(arguments.run, arguments.out, with_text=not arguments.without_text)


def _write(run: str | None, file: str, *, with_text: bool) -> int:
    from offbeat.tools.page.document import write_page
    from offbeat.tools.page.run_data import RunData
    from offbeat.tools.trajectories import decoder

    out = Path(file).absolute()
    if not out.parent.is_dir():
        raise UserError(f"--out {file}: the folder {out.parent} does not exist; create it first")
    if out.is_dir():
        raise UserError(f"--out {file}: is a folder; give a file, such as run.html")
    folder = chosen_run(run)
    with where_it_started(folder) as path:
        held = write_page(path, out, RunData(path, decoder(path) if with_text else None))
    some = f"{held['num_kept']:,} of {held['num_answers']:,} answers"
    texts = "" if held["with_text"] else ", without their texts"
    print(f"{file}: {held['num_bytes'] / 1e6:.1f} MB with {some}{texts}; open it in a browser")
    return 0


def _serve(run: str | None, port: int) -> int:
    import asyncio
    import secrets

    from offbeat.tools.page.server import PageApp, serve_page

    folder = chosen_run(run)
    token = secrets.token_urlsafe(24)
    with where_it_started(folder) as path:

        def tell(found: int) -> None:
            print(f"{folder}: http://127.0.0.1:{found}/?token={token} (Ctrl-C ends it)", flush=True)

        async def serve() -> None:
            await serve_page(PageApp(path, token), port, tell)

        asyncio.run(serve())
    return 0
