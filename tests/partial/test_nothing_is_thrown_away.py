"""Bug class 10: work that was finished, or begun, is thrown away where a batch is complete without it."""

from __future__ import annotations

from partial_scenes import (
    SteppedEngine,
    Teacher,
    claim_while_generating,
    generate_until,
    has_no_lease,
    num_ready,
    play,
    until,
    whole,
    working,
)

from offbeat.engines.protocol import Generation, Request
from offbeat.ledger.records import Counts


class CountingEngine(SteppedEngine):
    """Counts every token that it has answered with."""

    num_tokens = 0

    async def generate(self, request: Request) -> Generation:
        generation = await super().generate(request)
        self.num_tokens += sum(len(segment.tokens) for segment in generation.segments)
        return generation


def assert_conserved(counts: Counts, num_generated: int) -> None:
    tokens = counts.tokens
    assert tokens.generated == num_generated, "the engine made more, or less, than was ever handed in"
    delivered = tokens.trained + sum(tokens.masked.values())
    assert num_generated == delivered + tokens.waiting + tokens.partial + sum(tokens.wasted.values())
    assert tokens.wasted == {}
    assert counts.trajectories.dropped == 0
    assert counts.dropped_groups == {}


def test_every_token_is_delivered_or_waits_at_every_step_and_groups_that_were_left_over_come_next(tmp_path):
    async def scenario() -> None:
        schedule = {"max_staleness": 3, "over_provision": 4.0}
        async with whole(tmp_path, schedule=schedule) as made:
            teacher, engine = Teacher(made, tmp_path), CountingEngine(num_slots=16)
            await teacher.begin()
            num_partials = 0
            async with working(made, engine):
                for _ in range(5):

                    async def enough() -> bool:
                        return await num_ready(made) >= 3

                    await generate_until(engine, enough)
                    before = await num_ready(made)
                    await claim_while_generating(teacher, [engine])
                    assert await num_ready(made) >= before - 2, "finished groups are gone"
                    await until(lambda: has_no_lease(made), "the end of the round")
                    assert_conserved(await made.call(made.ledger.counts), engine.num_tokens)
                    num_partials += made.step_figures()["partials"]
                    await teacher.commit()
                    assert_conserved(await made.call(made.ledger.counts), engine.num_tokens)
            assert num_partials > 0
            taken = [member.task for batch in teacher.batches for group in batch.groups for member in group.members]
            assert len(taken) == len(set(taken)) == 5 * 4
            assert (await made.call(made.ledger.verify)).violations == ()

    play(scenario())
