"""`offbeat eval`: scores a run's newest weights on the run's own held-out prompts, or a model on the held-out prompts
of a configuration's tasks."""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from pathlib import Path

from offbeat.cli.chosen_run import chosen_run, where_it_started
from offbeat.cli.parser import Parser
from offbeat.config import Config, load
from offbeat.errors import UserError
from offbeat.launch.run_folder import CONFIG, LEDGER


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "model",
        metavar="RUN|MODEL",
        nargs="?",
        help="a run, a Hugging Face folder or id, or offbeat-tiny; without it, the newest run",
    )
    parser.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG.toml|RUN",
        help="whose tasks to use; without it, the run's own, or for a model those of the built-in demo",
    )
    parser.add_argument("--prompts", metavar="N", help="held-out prompts, the same as --eval.prompts")
    parser.add_argument("--samples", metavar="K", help="answers per prompt, the same as --eval.samples")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    if arguments.config is None and (arguments.model or "").endswith(".toml"):
        remedy = f"give the model, then the configuration: offbeat eval MODEL {arguments.model}"
        raise UserError(f"{arguments.model}: is a configuration, not a run or a model; {remedy}")
    given = [("eval.prompts", arguments.prompts), ("eval.samples", arguments.samples)]
    words = [*overrides, *(f"--{key}={value}" for key, value in given if value is not None), "--run.name=none"]
    source = _run_of(arguments.model)
    tasks = _run_of(arguments.config) if arguments.config is not None else source
    with ExitStack() as stack:
        if source is not None:
            source = source.absolute()
        else:
            model = Path(arguments.model).expanduser()
            moves = tasks is not None and model.is_dir()  # to the folder from which the run of the tasks was started
            words.append(f"--model.path={model.absolute() if moves else arguments.model}")
        if tasks is not None:
            tasks = stack.enter_context(where_it_started(tasks))
        file = tasks / CONFIG if tasks is not None else arguments.config
        config = load(file, words)
        from offbeat.cli.preview import check

        check(config)
        from offbeat.launch import wiring
        from offbeat.tools.evaluate import evaluate, warn_of_few, weights_of

        mixture = wiring.make_mixture(config, home=tasks)
        if arguments.prompts is not None:
            warn_of_few(mixture, config.eval.prompts)
        if source is not None:
            with where_it_started(source):
                folder = stack.enter_context(weights_of(source))
            config = load(file, [*words, f"--model.path={folder}"])
        figures = evaluate(config, mixture)
    _print(figures, config, as_json=arguments.json)
    return 0


def _run_of(word: str | None) -> Path | None:
    """Returns the folder of the run that `word` names; None if it names a model or a configuration. If `word` is None,
    returns the newest run."""
    if word is None:
        return chosen_run(None)
    folder = chosen_run(word)
    return folder if (folder / LEDGER).is_file() else None


def _print(figures: dict[str, float], config: Config, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(figures))
        return
    from offbeat.data.mixture import source_names

    print(f"{'task':<24} {', '.join(source_names(config.task))}")
    for name, value in figures.items():
        print(f"{name:<24} {value:.4g}" if isinstance(value, float) else f"{name:<24} {value}")
