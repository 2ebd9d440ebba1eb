"""The writer's promises, on a real ledger: what shares a transaction, what does not, and who hears of an error."""

import asyncio
import threading

import pytest
from blake3 import blake3

from offbeat.coordinator.writer import Writer
from offbeat.ledger.errors import LedgerError, Unknown
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.workers import Role


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        yield ledger


def tokens(ledger: Ledger) -> int:
    return ledger.execute("SELECT COUNT(*) FROM join_tokens").fetchone()[0]


def issue(ledger: Ledger) -> bytes:
    return blake3(ledger.issue_token(Role.ROLLOUT, 1).encode()).digest()


def num_transactions(ledger: Ledger) -> list[str]:
    """Grows with every transaction that is written from now on."""
    seen: list[str] = []
    ledger.connection.set_trace_callback(lambda text: seen.append(text) if text.startswith("COMMIT") else None)
    return seen


def use(ledger, body):
    """Runs `body(writer)` and closes the writer behind it."""

    async def run():
        writer = Writer(ledger)
        try:
            return await body(writer)
        finally:
            await writer.close()

    return asyncio.run(run())


def test_calls_of_one_moment_share_one_transaction(ledger):
    commits = num_transactions(ledger)

    async def body(writer):
        return await asyncio.gather(*(writer.call(issue, ledger) for _ in range(10)))

    assert len(set(use(ledger, body))) == 10
    assert (tokens(ledger), len(commits)) == (10, 1)


def test_a_call_that_fails_changes_nothing_and_takes_no_other_along(ledger):
    def fail_after_writing():
        with ledger.transaction():
            ledger.issue_token(Role.ROLLOUT, 1)
            raise Unknown("task 7: never issued")

    async def body(writer):
        calls = [writer.call(issue, ledger), writer.call(fail_after_writing), writer.call(issue, ledger)]
        return await asyncio.gather(*calls, return_exceptions=True)

    first, failed, last = use(ledger, body)
    assert isinstance(failed, Unknown)
    assert isinstance(first, bytes)
    assert isinstance(last, bytes)
    assert tokens(ledger) == 2


def test_where_the_transaction_itself_fails_nothing_is_kept_and_everyone_hears_of_it(ledger):
    def end_the_transaction():
        ledger.execute("ROLLBACK")  # what SQLite does on a full disk
        raise LedgerError("disk full")

    async def body(writer):
        calls = [writer.call(issue, ledger), writer.call(end_the_transaction), writer.call(issue, ledger)]
        told = await asyncio.gather(*calls, return_exceptions=True)
        return told, await writer.call(issue, ledger)

    told, after = use(ledger, body)
    assert [str(error) for error in told] == ["disk full"] * 3
    assert isinstance(after, bytes)
    assert tokens(ledger) == 1


def test_a_call_that_is_to_be_alone_shares_no_transaction_and_keeps_its_place(ledger):
    order = []

    def note(what):
        order.append((what, ledger.connection.in_transaction))

    async def body(writer):
        await asyncio.gather(
            writer.call(note, "a"), writer.call(note, "b"), writer.alone(note, "c"), writer.call(note, "d")
        )

    use(ledger, body)
    assert order == [("a", True), ("b", True), ("c", False), ("d", False)]  # the last had nobody to share with


def test_a_read_that_many_ask_for_at_one_moment_is_made_once(ledger):
    made = []

    def look():
        made.append(threading.get_ident())
        return len(made)

    async def body(writer):
        together = await asyncio.gather(*(writer.read(look) for _ in range(20)))
        return together, await writer.read(look)

    assert use(ledger, body) == ([1] * 20, 2)


def test_a_read_sees_what_was_acknowledged_before_it_was_asked_for(ledger):
    """A read that is under way may have looked too early: whoever asks now gets a look of its own."""
    entered, go_on = threading.Event(), threading.Event()

    def look():
        found = tokens(ledger)
        if not entered.is_set():
            entered.set()
            go_on.wait(10)
        return found

    async def body(writer):
        early = asyncio.create_task(writer.read(look))
        await asyncio.to_thread(entered.wait, 10)
        issued = asyncio.create_task(writer.call(issue, ledger))
        await asyncio.sleep(0)
        late = asyncio.create_task(writer.read(look))
        await asyncio.sleep(0)
        go_on.set()
        await issued
        return await early, await late

    assert use(ledger, body) == (0, 1)


def test_whoever_stops_waiting_keeps_nobody_else_from_an_answer(ledger):
    async def body(writer):
        gone, stays = (asyncio.create_task(writer.read(ledger.num_worker_moves)) for _ in range(2))
        await asyncio.sleep(0)
        gone.cancel()
        return await stays

    assert use(ledger, body) == 0


def test_closing_answers_what_was_asked_and_refuses_what_comes_later(ledger):
    async def run():
        writer = Writer(ledger)
        asked = [asyncio.create_task(writer.call(issue, ledger)) for _ in range(3)]
        await asyncio.sleep(0)
        await writer.close()
        assert all(isinstance(task.result(), bytes) for task in asked)
        with pytest.raises(RuntimeError):
            await asyncio.wait_for(writer.call(issue, ledger), 10)

    asyncio.run(run())


def test_an_error_that_no_future_can_hold_is_told_to_its_caller_alone(ledger):
    """A future refuses a StopIteration; whoever asked must hear of it all the same."""

    def run_out():
        return next(iter(()))

    async def body(writer):
        calls = [writer.call(issue, ledger), writer.call(run_out), writer.call(issue, ledger)]
        told = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
        return told, await asyncio.wait_for(writer.call(issue, ledger), 10)

    (first, failed, last), after = use(ledger, body)
    assert isinstance(failed, RuntimeError)
    assert "StopIteration" in str(failed)
    assert all(isinstance(done, bytes) for done in (first, last, after))


def test_a_bug_in_the_writer_fails_those_it_owes_an_answer_and_it_goes_on(ledger):
    together = ledger.together
    ledger.together = lambda calls: together(calls)[:-1]  # one result too few

    async def body(writer):
        asked = [writer.call(issue, ledger), writer.call(issue, ledger)]
        told = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 10)
        ledger.together = together
        return told, await asyncio.wait_for(asyncio.gather(*(writer.call(issue, ledger) for _ in range(2))), 10)

    told, after = use(ledger, body)
    assert [type(result) for result in told] == [bytes, ValueError]
    assert len(set(after)) == 2


def test_a_writer_that_is_ended_from_outside_leaves_nobody_waiting(ledger):
    """Calls that wait for their turn, and reads that others share, end with it; closing does not hang."""
    entered, go_on = threading.Event(), threading.Event()

    def block():
        entered.set()
        go_on.wait(10)

    async def run():
        writer = Writer(ledger)
        asked = [asyncio.create_task(writer.alone(block))]
        await asyncio.to_thread(entered.wait, 10)
        asked += [asyncio.create_task(writer.read(ledger.num_worker_moves)) for _ in range(2)]
        asked.append(asyncio.create_task(writer.call(issue, ledger)))
        await asyncio.sleep(0)
        writer._writing.cancel()
        done, _ = await asyncio.wait(asked, timeout=10)
        go_on.set()
        assert len(done) == len(asked)
        assert all(isinstance(task.exception(), LedgerError) for task in asked)
        assert await asyncio.wait_for(writer.read(ledger.num_worker_moves), 10) == 0
        await asyncio.wait_for(writer.close(), 10)

    asyncio.run(run())
