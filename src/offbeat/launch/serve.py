"""A run's coordinator in a process of its own, behind HTTP: `offbeat serve`.

It ends with the run: when the last step is trained, judged and in a checkpoint, or when it is asked to stop. Killed and
started again on the same folder, it goes on: workers and trainer find it at the same address.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from offbeat.config import resolved, secrets
from offbeat.config.models import Config
from offbeat.files import write_atomic
from offbeat.launch import sources, wiring
from offbeat.launch.folder import RunFolder
from offbeat.launch.joining import READY
from offbeat.launch.office import Office, await_last_evaluation, open_office, prepare, report_evaluations
from offbeat.launch.stopping import Stopping, interruptible
from offbeat.serve.http.desk import Served
from offbeat.serve.http.server import Address, HttpServer
from offbeat.watch.console import held_out
from offbeat.watch.history import read_metrics
from offbeat.weights.folder import WeightFolder

ADDRESS = "serve.json"
FAREWELL_S = 15.0
"""How long workers have to hear that the run is over, which they do at their next call."""


async def serve(folder: RunFolder) -> dict[str, Any]:
    """Coordinates until the run ends and returns its summary."""
    config, start_s = folder.config, time.monotonic()
    async with AsyncExitStack() as stack:
        mixture = sources.make_mixture(config, None)
        pool = await sources.open_pool(config, mixture, folder.logs / "rewards.log")
        stack.push_async_callback(pool.close)
        with interruptible():
            prepared = prepare(config, mixture)
        office = await stack.enter_async_context(open_office(folder, mixture, pool, prepared))
        stopping = Stopping(office.reporter.stopping)
        stack.enter_context(stopping.listening())
        await office.coordinator.start(keep_leases=True)
        saved = folder.last_event("checkpoint")
        # Told to our predecessor, perhaps by a trainer that is done and will not tell it again.
        if saved is not None and "step" in saved:
            office.coordinator.learn_of_checkpoint(saved["step"])
        served = _served(folder, office)
        server = await stack.enter_async_context(_serving(served, _address(config, folder.path)))
        near = server
        if server.address.has_tls or not server.address.is_loopback:
            near = await stack.enter_async_context(_serving(served, _near_address(folder.path)))
        _tell(folder, server.url, near.url, office)
        is_finished = await _until_over(folder, office, stopping)
        summary = office.reporter.finish(
            seconds=time.monotonic() - start_s,
            stopped_by=None if is_finished else stopping.why,
            counts=await office.coordinator.call(office.ledger.counts),
        )
        await _say_goodbye(office, config.rollout.lease_s)
        return summary


def _served(folder: RunFolder, office: Office) -> Served:
    return Served(
        coordinator=office.coordinator,
        name=folder.path.name,
        config=secrets.shown_value(resolved(folder.config)),
        ledger_path=str(folder.ledger),
        weights=WeightFolder(folder.weights),
        pieces=wiring.open_pieces(folder.config, folder.weights),
        peer_networks=folder.config.serve.peer_networks,
    )


@asynccontextmanager
async def _serving(served: Served, address: Address) -> AsyncIterator[HttpServer]:
    server = HttpServer(served, address)
    await server.start()
    try:
        server.open()
        yield server
    finally:
        await server.stop()


def _address(config: Config, run: Path) -> Address:
    """Where the configuration says; with any port, the one that the run had before, where callers expect us."""
    wanted = config.serve
    return Address(
        host=wanted.host,
        port=wanted.port or _port_before(run, "url"),
        certificate=None if wanted.certificate is None else Path(wanted.certificate),
        key=None if wanted.key is None else Path(wanted.key),
        behind_proxy=wanted.behind_proxy,
    )


def _near_address(run: Path) -> Address:
    """For those on this machine, who need no certificate to trust it, where the world comes in by another door."""
    return Address(port=_port_before(run, "near_url"))


def _port_before(run: Path, which: str) -> int:
    """The port that the run had when it was served last; 0, which means any, if it was not.

    A copy of a run leaves the port to the run that it was copied from, whose workers look for it there.
    """
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        told = json.loads((run / ADDRESS).read_text())
        home = Path(told.get("run") or run)
        if home.resolve() == run.resolve() or not (home / ADDRESS).is_file():
            return int(told[which].rsplit(":", 1)[1])
    return 0


def _tell(folder: RunFolder, url: str, near_url: str, office: Office) -> None:
    write_atomic(
        folder.path / ADDRESS,
        json.dumps({"url": url, "near_url": near_url, "run": str(folder.path.resolve())}).encode(),
    )
    folder.event("serve", url=url)
    descriptor = os.environ.pop(READY, None)
    if descriptor is not None:
        with open(int(descriptor), "w") as pipe:
            print(json.dumps({"url": near_url, "run": str(folder.path)}), file=pipe)
    office.console.note(f"serving {url}; workers join with: {_how_to_join(folder.path, url)}")
    if not folder.config.reward.processes:
        how = f"OFFBEAT_TOKEN=$(offbeat worker token {folder.path} --role reward) offbeat worker --role reward"
        office.console.note(f"reward.processes = 0: judges join with: {how} --join {url}{_own_rewards(folder.config)}")


def _how_to_join(run: Path, url: str) -> str:
    return f"OFFBEAT_TOKEN=$(offbeat worker token {run}) offbeat worker --join {url}"


def _own_rewards(config: Config) -> str:
    """What a judge is to be told besides: code runs on its machine that only its owner can allow."""
    own = {number: task.reward for number, task in enumerate(config.task) if task.reward and ":" in task.reward}
    place = "task" if len(config.task) == 1 else "task.{}"
    return "".join(f" --{place.format(number)}.reward {reward}" for number, reward in own.items())


async def _until_over(folder: RunFolder, office: Office, stopping: Stopping) -> bool:
    """Waits for the end of the run; True if it was its last step."""
    config, coordinator = folder.config, office.coordinator
    try:
        async with asyncio.TaskGroup() as parts:
            broken = parts.create_task(coordinator.until_broken())
            judging = parts.create_task(report_evaluations(config, office, _first_to_judge(folder)))
            clock = parts.create_task(stopping.after(config.run.max_hours))
            asked = parts.create_task(stopping.requested.wait())
            saved = parts.create_task(coordinator.until_checkpointed(config.run.steps))
            await asyncio.wait({asked, saved}, return_when=asyncio.FIRST_COMPLETED)
            if saved.done():
                await await_last_evaluation(config, office, judging, asked)
            is_finished = saved.done()
            for part in (broken, judging, clock, asked, saved):
                part.cancel()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return is_finished


def _first_to_judge(folder: RunFolder) -> int:
    """The step after the last whose evaluation is in the metrics: our predecessor may have died with one under way."""
    judged = [row["step"] for row in read_metrics(folder.metrics_file) if held_out(row) is not None]
    return max(judged, default=-1) + 1


async def _say_goodbye(office: Office, lease_s: float) -> None:
    """Lets workers and judges hear that the run is over: those heard of within a lease or so, who have not left."""
    office.coordinator.end()
    deadline_s = time.monotonic() + FAREWELL_S
    while time.monotonic() < deadline_s:
        if not office.coordinator.present(within_s=max(lease_s, FAREWELL_S)):
            return
        await asyncio.sleep(0.2)
