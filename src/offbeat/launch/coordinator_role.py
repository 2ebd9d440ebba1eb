"""The coordinator's process with its HTTP server: `offbeat serve`.

It ends when the last step is trained, evaluated and in a checkpoint, or when it is asked to stop. After a kill, it
continues when it is restarted on the same folder; workers and trainer find it at the same address.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from offbeat.config import resolved, secrets
from offbeat.config.schema import Config
from offbeat.coordinator.api.app import PAGE
from offbeat.coordinator.api.server import Address, HttpServer
from offbeat.coordinator.api.state import ServedRun
from offbeat.files import write_atomic
from offbeat.launch import wiring
from offbeat.launch.address import address_of, port_before
from offbeat.launch.coordinator_runtime import (
    CoordinatorRuntime,
    await_last_evaluation,
    first_to_evaluate,
    open_coordinator,
    report_evaluations,
)
from offbeat.launch.given import received
from offbeat.launch.join_line import far_url, join_lines
from offbeat.launch.joining import READY
from offbeat.launch.preflight import checking
from offbeat.launch.run_folder import ADDRESS, RunFolder
from offbeat.launch.stopping import Stopping
from offbeat.tools.page.server import BESIDE_SHARE, PageApp, page_token
from offbeat.weights.version import WeightFolder

NUM_THREADS = 6
"""Number of threads that process large HTTP bodies and files. On a large machine asyncio would use 32, and each thread
keeps as much memory as its largest body needed."""
NOTE_SEEN_EVERY_S = 5.0
END_NOTICE_S = 15.0
"""Longest time for which the server answers after the run's end, so that workers learn of it at their next call."""


async def serve(folder: RunFolder, command: str = "serve") -> dict[str, Any]:
    """Serves the coordinator of a run until the run ends; returns the run's summary. `command` is the command that the
    user gave: `serve`, or `train` if the same command also started the trainer and workers."""
    config, start_s = folder.config, time.monotonic()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(NUM_THREADS))
    async with AsyncExitStack() as stack:
        given = received()
        checked = await stack.enter_async_context(checking(config, given, folder.path))
        checked.announce(folder)
        runtime = await stack.enter_async_context(
            open_coordinator(folder, checked.mixture, checked.pool, checked.prepared, given)
        )
        stopping = Stopping(runtime.reporter.stopping)
        stack.enter_context(stopping.listening())
        stack.enter_context(stopping.asked_by_parent())
        await runtime.coordinator.start(keep_leases=True)
        saved = folder.last_event("checkpoint")
        # A finished trainer may have reported its last checkpoint to an earlier process.
        if saved is not None and "step" in saved:
            runtime.coordinator.note_checkpoint(saved["step"])
        served = _served(folder, runtime)
        server = await stack.enter_async_context(_serving(served, address_of(config, folder.path)))
        near = server  # for processes on this machine, which need no certificate
        if server.address.has_tls or not server.address.is_loopback:
            loopback = Address(port=port_before(folder.path, "near_url"))
            near = await stack.enter_async_context(_serving(served, loopback))
        _announce(folder, server, near.url, runtime, needs_trainer=command == "serve")
        is_finished = await _until_over(folder, runtime, stopping)
        summary = runtime.reporter.finish(
            seconds=time.monotonic() - start_s,
            stopped_by=None if is_finished else stopping.why,
            counts=await runtime.coordinator.call(runtime.ledger.counts),
            command=command,
        )
        interrupted = "" if is_finished else f"stopped at step {summary['steps']} of {config.run.steps}"
        await _let_workers_leave(runtime, config.rollout.lease_s, interrupted)
        await runtime.coordinator.call(runtime.ledger.note_seen, dict(runtime.coordinator.seen), is_last=True)
        return summary


def _served(folder: RunFolder, runtime: CoordinatorRuntime) -> ServedRun:
    return ServedRun(
        coordinator=runtime.coordinator,
        name=folder.path.name,
        config=secrets.shown_value(resolved(folder.config)),
        ledger_path=str(folder.ledger),
        weights=WeightFolder(folder.weights),
        pieces=wiring.open_pieces(folder.config, folder.weights),
        peer_networks=folder.config.serve.peer_networks,
        page=PageApp([folder.path], page_token(folder.path), share=BESIDE_SHARE),
    )


@asynccontextmanager
async def _serving(served: ServedRun, address: Address) -> AsyncIterator[HttpServer]:
    server = HttpServer(served, address)
    await server.start()
    try:
        server.open()
        yield server
    finally:
        await server.stop()


def _announce(
    folder: RunFolder, server: HttpServer, near_url: str, runtime: CoordinatorRuntime, *, needs_trainer: bool
) -> None:
    url = server.url
    write_atomic(
        folder.path / ADDRESS,
        json.dumps({"url": url, "near_url": near_url, "run": str(folder.path.resolve())}).encode(),
    )
    has_served = folder.last_event("serve") is not None  # then workers may have joined
    folder.event("serve", url=url)
    descriptor = os.environ.pop(READY, None)
    if descriptor is not None:
        with open(int(descriptor), "w") as pipe:
            print(json.dumps({"url": near_url, "run": str(folder.path)}), file=pipe)
    address = server.address
    has_trained = folder.last_event("checkpoint") is not None  # then only its own trainer may go on with the run
    lines = []
    if needs_trainer and not has_trained:
        lines += join_lines(folder.path, url, near_url, address, role="trainer")
    lines += join_lines(folder.path, url, near_url, address)
    if not folder.config.reward.processes:
        own = _own_rewards(folder.config)
        lines += join_lines(folder.path, url, near_url, address, role="reward", more=own)
    link = f"{PAGE}/?token={page_token(folder.path)}"
    lines.append(f"see the run in a browser: {near_url}{link}")
    if near_url != url:
        lines.append(f"from other machines: {far_url(url, address)}{link}")
    if has_served:
        lines.append("workers that joined before need no token; those that still run come back by themselves")
        if needs_trainer and has_trained:
            lines.append("the trainer needs none either; start it again with the same --dir, unless it still runs")
    for line in lines:
        runtime.console.note(line)


def _own_rewards(config: Config) -> str:
    """Returns options of `offbeat worker` that allow a judge to run the user's own rewards, such as module:function."""
    own = {number: task.reward for number, task in enumerate(config.task) if task.reward and ":" in task.reward}
    key = "task" if len(config.task) == 1 else "task.{}"
    return "".join(f" --{key.format(number)}.reward {reward}" for number, reward in own.items())


async def _until_over(folder: RunFolder, runtime: CoordinatorRuntime, stopping: Stopping) -> bool:
    """Waits, without a time limit, for the end of the run; returns whether the last step's checkpoint was saved."""
    config, coordinator = folder.config, runtime.coordinator
    try:
        async with asyncio.TaskGroup() as parts:
            broken = parts.create_task(coordinator.wait_failed())
            judging = parts.create_task(report_evaluations(config, runtime, first_to_evaluate(folder)))
            clock = parts.create_task(stopping.after(config.run.max_hours))
            asked = parts.create_task(stopping.requested.wait())
            saved = parts.create_task(coordinator.wait_checkpointed(config.run.steps))
            noting = parts.create_task(_note_seen(runtime))
            await asyncio.wait({asked, saved}, return_when=asyncio.FIRST_COMPLETED)
            if saved.done():
                await await_last_evaluation(config, runtime, judging, asked)
            is_finished = saved.done()
            for part in (broken, judging, clock, asked, saved, noting):
                part.cancel()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return is_finished


async def _note_seen(runtime: CoordinatorRuntime) -> None:
    """Records in the ledger, every few seconds, when each worker, judge and trainer called last; `offbeat worker list`
    shows these times."""
    while True:
        await runtime.coordinator.call(runtime.ledger.note_seen, dict(runtime.coordinator.seen))
        await asyncio.sleep(NOTE_SEEN_EVERY_S)


async def _let_workers_leave(runtime: CoordinatorRuntime, lease_s: float, interrupted: str) -> None:
    """Lets workers and judges learn, at their next call, that the run has ended. `interrupted` tells them where it was
    stopped, such as "stopped at step 3 of 12"; "" means that the run is finished. Waits until all workers and judges
    that called lately have left, but at most `END_NOTICE_S`."""
    runtime.coordinator.end(interrupted)
    deadline_s = time.monotonic() + END_NOTICE_S
    while time.monotonic() < deadline_s:
        if not runtime.coordinator.present(within_s=max(lease_s, END_NOTICE_S)):
            return
        await asyncio.sleep(0.2)
