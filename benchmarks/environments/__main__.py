"""Measures episodes: `python -m benchmarks.environments [--only PART ...] [--law LAW] [--scale SCALE] [--quick]`.

- `slots`: tokens per second of an engine whose episodes wait for tools, as a share of those without waits. For
  comparison, the share if an episode that waits kept its slot.
- `steps`: steps per second through one process with environments, with 64 episodes and with one.
- `faults`: 64 episodes in one process, one of which hangs, one forks and one eats memory.
- `rounds`: seconds until all partials are handed in when a round ends while 64 tools sleep.
- `turns`: tokens that the embedded engine prefills for a turn, and its speed against a prefill of all turns before.
- `demos`: `examples/calculator.toml` and `examples/guess.toml`, as they are shipped. Not in the quick form.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.environments.scene import (
    CODE,
    EOS,
    SOURCE,
    TaskList,
    TimedEngine,
    make_episodes,
    make_tasks,
    open_pool,
)
from benchmarks.report import REPOSITORY, Bar, Unmeasured, at_least, at_most, scratch, show
from offbeat.engines.protocol import Request
from offbeat.environments.pool import EnvironmentFailed, EnvironmentPool, EnvironmentSession
from offbeat.environments.protocol import Turn
from offbeat.environments.wire import PartSpec
from offbeat.errors import OffbeatError
from offbeat.trajectory import Sampling
from offbeat.worker.worker import Worker

PARTS = ("slots", "steps", "faults", "rounds", "turns", "demos")
NUM_SLOTS, TOKEN_S, CUT_S = 32, 0.02, 60.0
"""Slots of the modelled engine, seconds of a token, and the time limit of a call, before they are scaled."""
NUM_EPISODES = 64
STEP_TIMEOUT_S = 2.0
Bars = dict[str, Bar | Unmeasured]


def measure_slots(folder: Path, law: str, scale: float, *, quick: bool) -> tuple[Bars, list[tuple[str, str]]]:
    def rate(wait_scale: float, episodes: int) -> float:
        return asyncio.run(_rate(folder, law, wait_scale, scale, episodes, quick=quick))

    shares, kept = [], []
    for _ in range(1 if quick else 3):
        ideal = rate(0.0, 3 * NUM_SLOTS)
        shares.append(rate(scale, 3 * NUM_SLOTS) / ideal)
        kept.append(rate(scale, NUM_SLOTS) / ideal)
    bars: Bars = {"tokens_per_second_share": at_least(0.9, shares, quick=quick)}
    rows = [
        ("engine tokens/s, waiting episodes hold no slot", f"{statistics.median(shares):.2f} of those without waits"),
        ("engine tokens/s, waiting episodes hold a slot", f"{statistics.median(kept):.2f} of those without waits"),
    ]
    return bars, rows


async def _rate(folder: Path, law: str, wait_scale: float, scale: float, episodes: int, *, quick: bool) -> float:
    spec = PartSpec(f"{CODE}:Waiting", {"law": law, "scale": wait_scale, "cut_s": CUT_S})
    pool = open_pool(folder, spec)
    await pool.start()
    try:
        count = (8 if quick else 24) * NUM_SLOTS
        tasks, engine = TaskList(make_tasks(count, (EOS,))), TimedEngine(NUM_SLOTS, TOKEN_S * scale)
        worker = asyncio.create_task(Worker("w", engine, tasks, episodes=make_episodes(pool, episodes)).run())
        await tasks.until(lambda: tasks.whole)
        begin_s, before = time.monotonic(), engine.num_tokens
        await tasks.until(lambda: len(tasks.whole) >= count // 2)  # at the end, few episodes are left
        rate = (engine.num_tokens - before) / (time.monotonic() - begin_s)
        worker.cancel()
        await asyncio.wait({worker})
        assert not tasks.failed, tasks.failed
        return rate
    finally:
        await pool.close()


async def _steps(pool: EnvironmentPool, episodes: int, each: int) -> float:
    """Returns steps per second of some episodes that are stepped at the same time."""
    sessions = [await pool.open(SOURCE) for _ in range(episodes)]
    await asyncio.gather(*(session.begin({}, 10**6) for session in sessions))

    async def play(session: EnvironmentSession) -> None:
        for number in range(each):
            await session.step(Turn(number, "a turn of the model"))

    begin_s = time.perf_counter()
    await asyncio.gather(*map(play, sessions))
    seconds = time.perf_counter() - begin_s
    for session in sessions:
        session.close()
    return episodes * each / seconds


def measure_steps(folder: Path, *, quick: bool) -> tuple[Bars, list[tuple[str, str]]]:
    async def scenario() -> tuple[list[float], list[float]]:
        pool = open_pool(folder, PartSpec(f"{CODE}:Faulty"), processes=1)
        await pool.start()
        try:
            repetitions = range(2 if quick else 5)
            many = [await _steps(pool, NUM_EPISODES, 200) for _ in repetitions]
            alone = [1e3 / await _steps(pool, 1, 1000) for _ in repetitions]
            return many, alone
        finally:
            await pool.close()

    many, alone = asyncio.run(scenario())
    bars: Bars = {
        "steps_per_second_64": at_least(10_000, many, quick=quick),
        "step_ms_alone": at_most(0.6, alone, quick=quick),
    }
    rows = [
        ("steps/s through one process, 64 episodes", f"{statistics.median(many):,.0f}"),
        ("one step, alone", f"{statistics.median(alone):.2f} ms"),
    ]
    return bars, rows


def measure_faults(folder: Path, *, quick: bool) -> tuple[Bars, list[tuple[str, str]]]:
    async def scenario() -> tuple[float, float, int, int]:
        pool = open_pool(folder, PartSpec(f"{CODE}:Faulty"), processes=1, step_timeout_s=STEP_TIMEOUT_S)
        await pool.start()
        guards = {process._transport.get_pid() for process in pool._processes}
        begin_s, failed_s, ok = time.monotonic(), list[float](), 0

        async def play(seed: int) -> None:
            nonlocal ok
            session = await pool.open(SOURCE)
            await session.begin({}, seed)
            try:
                for number in range(50):
                    await session.step(Turn(number, "a turn"))
                    await asyncio.sleep(0.02)
                ok += 1
            except EnvironmentFailed:
                failed_s.append(time.monotonic() - begin_s)
            except OffbeatError:
                pass
            session.close()

        await asyncio.gather(*(play(seed) for seed in range(NUM_EPISODES)))
        await pool.close()
        left = sum(_descends(guard) for guard in guards)
        return ok / (NUM_EPISODES - 3), max(failed_s) - STEP_TIMEOUT_S, len(failed_s), left

    share, late_s, num_failed, left = asyncio.run(scenario())
    bars: Bars = {
        "others_unharmed": at_least(0.98, [share], quick=False),
        "failed_after_timeout_s": at_most(1.0, [late_s], quick=False),
        "processes_left": at_most(0, [left], quick=False),
    }
    rows = [
        ("episodes beside one that hangs, one that forks, one that eats memory", f"{share:.0%} unharmed"),
        ("episodes that failed", f"{num_failed}, the last {late_s:+.2f} s after its time limit"),
        ("processes left", f"{left}"),
    ]
    return bars, rows


def _descends(guard: int) -> int:
    """Returns whether a guard, with everything that it started, is still there."""
    return int(Path(f"/proc/{guard}").exists() and Path(f"/proc/{guard}/stat").read_text().split()[2] != "Z")


def measure_rounds(folder: Path, *, quick: bool) -> tuple[Bars, list[tuple[str, str]]]:
    async def scenario() -> float:
        pool = open_pool(folder, PartSpec(tools=(f"{CODE}:nap",)))
        await pool.start()
        try:
            episodes = make_episodes(pool, NUM_EPISODES)
            tasks = TaskList(make_tasks(NUM_EPISODES, episodes.forms[SOURCE].stop_token_ids))
            worker = asyncio.create_task(Worker("w", TimedEngine(64, 0.001, "[1]"), tasks, episodes=episodes).run())
            await asyncio.sleep(3.0)
            begin_s = time.monotonic()
            tasks.round_ends.set()
            await tasks.until(lambda: len(tasks.partials_s) == NUM_EPISODES)
            worker.cancel()
            await asyncio.wait({worker})
            return max(tasks.partials_s) - begin_s
        finally:
            await pool.close()

    seconds = [asyncio.run(scenario()) for _ in range(1 if quick else 3)]
    bars: Bars = {"partials_s": at_most(1.0, seconds, quick=False)}
    return bars, [("partials of 64 episodes whose tools sleep", f"{statistics.median(seconds):.2f} s")]


TURNS, OWN, GIVEN = 8, 32, 16
"""Turns of an episode, tokens of each, and tokens that are given after it."""
NUM_ROWS = 16
STOPS = tuple(range(0, 258, 258 // 8))
"""One token in 32, for a model that samples all tokens about equally often."""


def measure_turns(*, quick: bool) -> tuple[Bars, list[tuple[str, str]]]:
    kept, plain = [], []
    for _ in range(1 if quick else 3):
        kept.append(asyncio.run(_turns(is_turn=True)))
        plain.append(asyncio.run(_turns(is_turn=False)))
    ratios = [before[0] / after[0] for after, before in zip(kept, plain, strict=True)]
    bars: Bars = {
        "prefilled_tokens_per_turn": at_most(OWN + GIVEN + 1, [tokens for _, tokens in kept], quick=False),
        "speed_of_kept_turns": at_least(2.5, ratios, quick=quick),
    }
    rows = [
        ("prefilled tokens a turn, kept and from the beginning", f"{kept[0][1]:.0f} and {plain[0][1]:.0f}"),
        (f"{TURNS} turns, speed against a prefill of everything before", f"{statistics.median(ratios):.2f}"),
    ]
    return bars, rows


async def _turns(*, is_turn: bool) -> tuple[float, float]:
    """Returns CPU seconds of some episodes in the embedded engine, and tokens prefilled for each turn after the
    first."""
    import torch

    from offbeat.engines.embedded.engine import EmbeddedEngine
    from offbeat.model.loading import TINY, load_model

    torch.set_num_threads(1)
    model = load_model(TINY, torch.float32, torch.device("cpu"))
    engine = EmbeddedEngine(model, num_slots=NUM_ROWS, max_context_tokens=512, version=0)
    rng = np.random.default_rng(0)
    prompts, said = rng.integers(1, 200, (NUM_ROWS, 16)), rng.integers(1, 200, (NUM_ROWS, TURNS, GIVEN))

    async def episode(number: int) -> None:
        tokens = prompts[number]
        for index in range(TURNS):
            sampling = Sampling(max_new_tokens=3 * OWN, temperature=8.0, stop_token_ids=STOPS)
            position = len(tokens) - 16
            request = Request(f"{number}-{index}", tokens, number, sampling, position, is_turn=is_turn)
            generation = await engine.generate(request)
            tokens = np.concatenate([tokens, generation.segments[0].tokens, said[number, index]])

    try:
        start_s = time.process_time()
        await asyncio.gather(*map(episode, range(NUM_ROWS)))
        seconds = time.process_time() - start_s
        return seconds, (engine.metrics.num_prefilled_tokens or 0) / (NUM_ROWS * TURNS)
    finally:
        await engine.close()


def measure_demos(folder: Path) -> tuple[Bars, list[tuple[str, str]]]:
    bars: Bars = {}
    rows = []
    for name in ("calculator", "guess"):
        words = ["train", f"examples/{name}.toml", f"--run.dir={folder}", f"--run.name={name}", "--log.console=quiet"]
        start_s = time.monotonic()
        environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY / 'src'}{os.pathsep}{REPOSITORY}"}
        subprocess.run([sys.executable, "-m", "offbeat", *words], cwd=REPOSITORY, env=environment, check=True)
        seconds = time.monotonic() - start_s
        found = _last_evaluation(folder / name)
        if name == "calculator":
            bars["calculator_products_right"] = at_least(0.9, [found["product"][0]], quick=False)
            bars["calculator_calls_per_sum"] = at_most(0.05, [found["sum"][1]], quick=False)
            bars["calculator_s"] = at_most(90.0, [seconds], quick=False)
        else:
            bars["guess_solved"] = at_least(0.8, [found[""][0]], quick=False)
            bars["guess_s"] = at_most(240.0, [seconds], quick=False)
        for kind, (right, calls) in found.items():
            rows.append((f"{name} {kind}".strip(), f"{right:.2f} right, {calls:.2f} further turns, {seconds:.0f} s"))
    return bars, rows


def _last_evaluation(run: Path) -> dict[str, tuple[float, float]]:
    """Returns, by kind of problem, the share of right answers and the mean number of turns after the first."""
    connection = sqlite3.connect(f"file:{run / 'ledger.sqlite'}?mode=ro", uri=True)
    query = """SELECT g.problem, r.value, j.num_turns FROM groups g JOIN tasks t ON t.group_id = g.id
               JOIN trajectories j ON j.task = t.id JOIN rewards r ON r.task = t.id
               WHERE g.eval = (SELECT id FROM evals ORDER BY step DESC LIMIT 1)"""
    found: dict[str, list[tuple[bool, int]]] = {}
    for problem, value, num_turns in connection.execute(query):
        kind = json.loads(problem)["info"].get("kind", "")
        found.setdefault(kind, []).append((value > 0.5, num_turns - 1))
    connection.close()
    return {kind: tuple(np.mean(rows, axis=0)) for kind, rows in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=None)
    parser.add_argument("--law", default="coding", help="law of latency of `slots`")
    parser.add_argument("--scale", type=float, default=0.01, help="factor of all times of `slots`")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    chosen = arguments.only or [part for part in PARTS if part != "demos" or not arguments.quick]
    bars: Bars = {}
    rows: list[tuple[str, str]] = []
    with scratch("environments") as folder:
        for part in chosen:
            if part == "slots":
                found = measure_slots(folder, arguments.law, arguments.scale, quick=arguments.quick)
            elif part == "steps":
                found = measure_steps(folder, quick=arguments.quick)
            elif part == "faults":
                found = measure_faults(folder, quick=arguments.quick)
            elif part == "rounds":
                found = measure_rounds(folder, quick=arguments.quick)
            elif part == "turns":
                found = measure_turns(quick=arguments.quick)
            else:
                found = measure_demos(folder)
            bars |= found[0]
            rows += found[1]
    show("environments", ("what", "figure"), rows, bars, quick=arguments.quick)


if __name__ == "__main__":
    main()
