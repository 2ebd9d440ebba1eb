"""`offbeat export`: writes the model that a run has trained as a Hugging Face folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from offbeat.cli.chosen_run import RUN_HELP, chosen_run, is_run, where_it_started
from offbeat.cli.parser import Parser
from offbeat.errors import UserError


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help=RUN_HELP)
    parser.add_argument("folder", metavar="DIR", help="where to write; must not hold anything yet")
    parser.add_argument("--adapter", action="store_true", help="write the run's adapter alone, in peft's format")


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from offbeat.launch.run_folder import stored_config

    folder = arguments.folder
    if arguments.run is None and is_run(folder):
        raise UserError(
            f"DIR = {folder!r} is a run; name a folder to write to as well: offbeat export {folder} MODEL_DIR"
        )
    source = chosen_run(arguments.run)
    stored_config(source)
    from offbeat.tools.export import adapter_folder, export_run

    here = Path.cwd()
    with where_it_started(source) as path:
        target = Path(folder) if Path.cwd() == here else here / folder
        step = export_run(path, target, adapter_alone=arguments.adapter)
    if arguments.adapter:
        print(
            f"{folder}: the adapter of {source} after {step} steps, for peft and vLLM; load it together with the "
            "model at the run's model.path"
        )
        return 0
    print(f"{folder}: the model of {source} after {step} steps; try offbeat eval {folder} {source}")
    if adapter := adapter_folder(source):
        print(
            f"{adapter}: the adapter that is merged into this model; to copy it, run offbeat export {source} DIR "
            "--adapter"
        )
    return 0
