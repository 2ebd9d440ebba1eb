"""Ways to vLLM, and the embedded engine beside them: `python -m benchmarks.engines [--quick]`.

Tokens per second with the same settings (random weights in a real shape), by four ways to vLLM, and without it:
- in process: vLLM's own `LLM.generate`, in a process that holds nothing else;
- worker: as a worker generates, with vLLM in a process of its own;
- server: as a worker generates with vLLM's HTTP server (engine.url);
- naive: what one would write first, a thread with a connection per request, answers not streamed;
- embedded: as a worker generates with the embedded engine.
Each request has a prompt of its own and a seed, and brings log-probs of its tokens. A batch is as many requests as run
at a time, a stream four times that. In-process runs stand before and after the others; with `--once`, only before.

Seconds of generation that a change of weights costs, while requests never stop coming (`changes.py`).

On a machine with a GPU, with vLLM in the environment at hand (`--python PATH` names another; `--server-arg` hands an
argument on to the engine, once for each word):

    python -m benchmarks.engines --server-arg=--attention-backend --server-arg=FLASH_ATTN

All of it, with four starts of the engine, takes about fourteen minutes; `--only batch,stream`, `--only changes` and
`--ways "in process,worker"` run a part. `--concurrency 256,1024` measures both with the same engines. `--url URL`
measures a server that runs already, started on a model of the shape that is named; it is not compared with in-process
runs then. Without a GPU, and with `--quick`, the shape is a tiny one and nothing is decided: it shows that all parts
work. A quick run starts the engine three times, which on a few cores takes longer than a minute.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.common.load import Load
from benchmarks.common.shapes import SHAPES
from benchmarks.engines.bench import FULL, QUICK, SMALL, Size, measured
from benchmarks.engines.findings import KINDS, WAYS, Findings, bars_of, raw_of, rows_of, say
from benchmarks.engines.processes import find_vllm
from offbeat.errors import OffbeatError, UserError

MEMORY = Path("/dev/shm")
"""Where versions lie if there is room: a disk would be what is measured."""


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description="Rates of engines.")
    parser.add_argument("--quick", action="store_true", help="a tiny shape, few tokens, three starts; decides nothing")
    parser.add_argument("--python", default=sys.executable, metavar="PATH", help="of an environment with the engine")
    parser.add_argument("--url", help="a server that runs already, instead of one that is started")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--concurrency", type=numbers, metavar="N,N", help="requests at a time; each is measured")
    parser.add_argument("--tokens", type=int, dest="num_tokens", help="of each answer")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--once", action="store_true", help="in process only before the other ways, not after them too")
    parser.add_argument("--server-arg", action="append", default=[], metavar="WORD", help="for the engine; repeatable")
    parser.add_argument("--only", type=some_of(KINDS), default=KINDS, metavar="A,B", help="comma-separated")
    parser.add_argument("--ways", type=some_of(WAYS), default=WAYS, metavar="A,B", help="comma-separated")
    parser.add_argument("--log", type=Path, help="a file for what the engine says; kept then")
    return parser.parse_args(arguments)


def some_of(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    def chosen(text: str) -> list[str]:
        found = text.split(",")
        if unknown := set(found) - set(allowed):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: allowed are {', '.join(allowed)}")
        return found

    return chosen


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def size_of(options: argparse.Namespace) -> Size:
    size = QUICK if options.quick else FULL if torch.cuda.is_available() else SMALL
    given = {name: getattr(options, name) for name in ("shape", "concurrency", "num_tokens", "repeats")}
    return replace(size, **{name: value for name, value in given.items() if value is not None})


def room_for(shape: str) -> Path | None:
    """A folder in memory, where two versions fit twice; else wherever temporary files go."""
    needed = 8 * SHAPES[shape].num_parameters
    return MEMORY if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > needed else None


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # an orderly end: no engine goes on alone
    options, load = options_of(), Load()
    size, findings = size_of(options), Findings()
    decides = not options.quick and torch.cuda.is_available() and size.num_tokens == FULL.num_tokens
    try:
        if not options.url:
            find_vllm(options.python)
        with tempfile.TemporaryDirectory(dir=room_for(size.shape), prefix="engines-") as folder:
            findings = measured(options, size, Path(folder), options.log or Path(folder) / "engine.log")
    except UserError as error:
        say(str(error))
        if not options.quick:
            return 2
    except OffbeatError as error:
        say(str(error))
        return 1
    report.show(
        "engines",
        ("", "median", "spread", "x in process"),
        rows_of(findings),
        bars_of(findings, size.concurrency, decides=decides),
        quick=options.quick,
        size=asdict(size),
        server_arguments=options.server_arg,
        **load.shares(),
        **raw_of(findings),
    )
    if findings.failure:
        say(findings.failure)
    return 1 if findings.failure else 0


if __name__ == "__main__":
    sys.exit(main())
