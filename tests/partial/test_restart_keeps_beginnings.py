"""Bug class 9: a restart loses the beginnings that wait, or skips prompts that were drawn for them."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from partial_scenes import SteppedEngine, Teacher, claim_while_generating, has_no_lease, play, until, whole, working

from offbeat.client.in_process import InProcessWorker
from offbeat.coordinator.coordinator import Coordinator
from offbeat.ledger.errors import Unknown
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import Outcome
from offbeat.trajectory import Trajectory

FREELY = 10**9
MOMENTS = [("partial", 1), ("partial", 4), ("stored", 3), ("stored", 13), ("claimed", 2), ("committed", 2)]


def looks(ledger: Ledger):
    """Every task there is."""
    found = []
    while True:
        try:
            found.append(ledger.task_detail(len(found) + 1))
        except Unknown:
            return found


def kept(ledger: Ledger) -> dict[int, list[int]]:
    """Of every task, the tokens that are there."""
    return {one.task: one.trajectory.tokens.tolist() for one in looks(ledger) if one.trajectory is not None}


class Witness(InProcessWorker):
    """Notes what was acknowledged, and tells when."""

    def __init__(self, made: Coordinator, name: str, happened: Callable[[str], None]):
        super().__init__(made, name)
        self.acknowledged: dict[int, list[int]] = {}
        self._happened = happened

    async def submit(self, trajectory: Trajectory, fence: int) -> Outcome:
        outcome = await super().submit(trajectory, fence)
        self.acknowledged[trajectory.task] = trajectory.tokens.tolist()
        self._happened(outcome.value)
        return outcome


async def first_life(folder: Path, copy: Path, kind: str, count: int) -> tuple[dict, dict]:
    """Works until something has happened so many times, and copies at this moment what is on disk: what is left after
    a kill. Tells what had been acknowledged by then, and what the ledger held."""
    happened: Counter[str] = Counter()
    is_time = asyncio.Event()

    def note(what: str) -> None:
        happened[what] += 1
        if happened[kind] >= count:
            is_time.set()

    async with whole(folder) as made:
        teacher, engine, witness = Teacher(made, folder), SteppedEngine(num_slots=8), Witness(made, "w", note)

        async def teach() -> None:
            await teacher.begin()
            for _ in range(5):
                await claim_while_generating(teacher, [engine])
                note("claimed")
                await until(lambda: has_no_lease(made), "the end of the round")
                await teacher.commit()
                note("committed")

        def kill() -> dict[int, list[int]]:
            """On the ledger's own thread, so that it falls between two transactions."""
            shutil.copytree(folder, copy)
            return kept(made.ledger)

        async with working(made, engine, client=witness):
            teaching = asyncio.create_task(teach())
            await is_time.wait()
            acknowledged = dict(witness.acknowledged)
            held = await made.call(kill)
            teaching.cancel()
            await asyncio.wait({teaching})
        return acknowledged, held


async def second_life(folder: Path, held: dict[int, list[int]]) -> None:
    async with whole(folder) as made:
        assert await made.call(kept, made.ledger) == held, "a restart changed what is there"
        teacher, engine = Teacher(made, folder), SteppedEngine(num_slots=8)
        await teacher.begin()
        assert await made.call(kept, made.ledger) == held, "a resume changed what is there"
        engine.steps_left = FREELY
        async with working(made, engine):
            while teacher.step < 6:
                await teacher.claim()
                await teacher.commit()
            await until(lambda: has_no_lease(made), "the end of the round")
        found = await made.call(looks, made.ledger)
        ended = {one.task: one.trajectory.tokens.tolist() for one in found if one.trajectory is not None}
        for task, tokens in held.items():
            assert ended[task][: len(tokens)] == tokens
        drawn = Counter((one.ordinal, one.member) for one in found)
        num_drawn = (await made.call(made.ledger.cursor)).next_ordinal
        assert drawn == Counter((ordinal, member) for ordinal in range(num_drawn) for member in range(2))
        assert len({one.prompt.tobytes() for one in found if one.group_state == "trained"}) > 1
        assert (await made.call(made.ledger.verify)).violations == ()


@pytest.mark.parametrize(("kind", "count"), MOMENTS)
def test_killed_at_any_moment_a_run_has_every_beginning_and_every_prompt_once(kind, count, tmp_path):
    (tmp_path / "run").mkdir()
    acknowledged, held = play(first_life(tmp_path / "run", tmp_path / "copy", kind, count))
    for task, tokens in acknowledged.items():
        assert held[task][: len(tokens)] == tokens, "what was acknowledged is gone"
    play(second_life(tmp_path / "copy", held))
