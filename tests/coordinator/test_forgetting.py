"""Workers and judges that came and went: a coordinator that runs for months remembers none of them."""

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from coordinator_scenes import SOON_S, coordinator, version

from offbeat.coordinator import coordinator as serve_coordinator
from offbeat.coordinator.relays import WorkerSite
from offbeat.ledger.ledger import Ledger

GHOST = "ghost"
"""How the names begin of all who come and go here."""


def names_within(thing: Any, seen: set[int]) -> Iterator[str]:
    """Names of ghosts in anything that hangs on an object of Offbeat's, apart from what is on disk."""
    if id(thing) in seen or isinstance(thing, Ledger):
        return
    seen.add(id(thing))
    if isinstance(thing, str):
        if thing.startswith(GHOST):
            yield thing
    elif isinstance(thing, Mapping):
        for key, value in list(thing.items()):
            yield from names_within(key, seen)
            yield from names_within(value, seen)
    elif isinstance(thing, (list, tuple, set, frozenset, deque)):
        for part in list(thing):
            yield from names_within(part, seen)
    elif type(thing).__module__.startswith("offbeat."):
        yield from names_within(getattr(thing, "__dict__", {}), seen)


async def work(made, name: str) -> None:
    """Everything that makes a coordinator take note of a worker or a judge."""
    lease = await made.lease(name, 1, 0, SOON_S)
    await made.heartbeat(name, [(task.id, task.fence) for task in lease.tasks], "life", {"bytes": 1.0})
    made.relays.sources(name, WorkerSite("here", "http://127.0.0.1:1"))
    await made.rewards.lease(f"{name} the judge", 1, 0.0)


@pytest.mark.parametrize("say_goodbye", [True, False], ids=["left", "vanished"])
def test_nothing_remembers_those_who_are_gone(tmp_path, say_goodbye):
    sections = {"schedule": {"max_staleness": 1, "over_provision": "auto"}}

    async def scenario():
        async with coordinator(tmp_path, **sections) as made:
            await made.publish(version(0, 0))
            for number in range(3):
                await work(made, f"{GHOST} {number}")
            assert len(set(names_within(made, set()))) == 6
            if say_goodbye:
                for number in range(3):
                    await made.leave(f"{GHOST} {number}")
                    await made.leave(f"{GHOST} {number} the judge")
            else:
                await made.call(made.ledger.release)
                made.lease_manager.leases.end(range(1000))
                later_s = made.presence._clock() + serve_coordinator.FORGET_AFTER_S + 1
                made.presence._clock = made.rewards._clock = lambda: later_s
                made.forget_silent()
            assert sorted(set(names_within(made, set()))) == []

    asyncio.run(scenario())


def test_a_worker_that_is_heard_of_is_not_forgotten(tmp_path):
    async def scenario():
        async with coordinator(tmp_path) as made:
            await made.publish(version(0, 0))
            await work(made, f"{GHOST} 1")
            made.forget_silent()
            assert made.present(60.0) == [f"{GHOST} 1", f"{GHOST} 1 the judge"]

    asyncio.run(scenario())
