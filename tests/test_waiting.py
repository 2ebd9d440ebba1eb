"""Waiting beside other tasks: no wake-up is lost, every wait ends, and cancelled work finishes."""

import asyncio
import gc
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.waiting import BackgroundTasks, Notifier, in_thread, run_to_end, unless

SOON_S = 5.0


def test_a_change_between_check_and_wait_is_not_lost():
    async def scenario():
        notifier, state = Notifier(), []

        async def check():
            found = list(state)
            await asyncio.sleep(0)  # as a ledger call does
            if not state:
                state.append(1)
                notifier.notify()
            return found or None

        assert await asyncio.wait_for(notifier.first(check), SOON_S) == [1]

    asyncio.run(scenario())


@given(
    wanted=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    yields=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    timed=st.booleans(),
)
def test_every_waiter_sees_the_state_it_waits_for(wanted, yields, timed):
    """Waiters whose checks take several turns of the loop, while the state changes at any of them."""

    async def scenario():
        notifier, level = Notifier(), 0

        async def wait(at_least: int) -> int | None:
            async def check():
                found = level
                for _ in range(at_least % 3):
                    await asyncio.sleep(0)
                return found if found >= at_least else None

            return await notifier.first(check, time.monotonic() + SOON_S) if timed else await notifier.first(check)

        waiters = [asyncio.ensure_future(wait(number)) for number in wanted]
        plain = asyncio.ensure_future(notifier.wait_for(lambda: level >= max(wanted)))
        for num_turns in yields:
            for _ in range(num_turns):
                await asyncio.sleep(0)
            level += 1
            notifier.notify()
        found = await asyncio.wait_for(asyncio.gather(*waiters), SOON_S)
        assert all(seen >= number for seen, number in zip(found, wanted, strict=True))
        await asyncio.wait_for(plain, SOON_S)

    asyncio.run(scenario())


def test_a_wait_ends_at_its_deadline():
    async def scenario():
        notifier = Notifier()

        async def never():
            return None

        assert await notifier.first(never, time.monotonic() + 0.01) is None
        assert not await notifier.wait(notifier.changed, time.monotonic() - 1.0)

    asyncio.run(scenario())


def test_the_failure_of_a_background_task_ends_every_wait_now_and_later():
    async def scenario():
        background = BackgroundTasks()
        notifier = Notifier(background.failure)
        waiting = asyncio.ensure_future(notifier.wait_for(lambda: False))

        async def fails():
            raise OSError("disk")

        background.spawn(fails())
        with pytest.raises(OSError, match="disk"):
            await asyncio.wait_for(waiting, SOON_S)
        background.fail(ValueError("later"))
        with pytest.raises(OSError, match="disk"):
            await asyncio.wait_for(notifier.wait_for(lambda: False), SOON_S)
        await background.close()

    asyncio.run(scenario())


def test_closing_cancels_background_tasks():
    async def scenario():
        background, ended = BackgroundTasks(), []

        async def endless():
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        background.spawn(endless())
        await asyncio.sleep(0)
        await background.close()
        assert ended

    asyncio.run(scenario())


def test_cancelled_work_runs_to_its_end_or_its_deadline():
    async def scenario():
        done = []

        async def work(seconds: float):
            await asyncio.sleep(seconds)
            done.append(seconds)

        for seconds, within_s in ((0.02, SOON_S), (SOON_S, 0.02)):
            caller = asyncio.ensure_future(run_to_end(work(seconds), within_s))
            await asyncio.sleep(0)
            for _ in range(2):
                caller.cancel()
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await caller
        assert done == [0.02]

    asyncio.run(scenario())


def test_a_cancelled_call_in_a_thread_is_waited_for():
    async def scenario():
        done = []

        def write():
            time.sleep(0.02)
            done.append(True)

        caller = asyncio.ensure_future(in_thread(write))
        await asyncio.sleep(0)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert done

    asyncio.run(scenario())


def test_a_thread_that_fails_after_its_caller_was_cancelled_leaves_no_complaint():
    complaints = []

    async def scenario():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context["message"]))
        has_begun, may_end = threading.Event(), threading.Event()

        def failing():
            has_begun.set()
            assert may_end.wait(30)
            raise ZeroDivisionError

        caller = asyncio.ensure_future(in_thread(failing))
        assert await asyncio.to_thread(has_begun.wait, 30)
        caller.cancel()
        await asyncio.sleep(0.01)
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await caller
        del caller
        gc.collect()

    asyncio.run(scenario())
    assert complaints == []


def test_work_ends_by_itself_or_is_cancelled_when_a_stop_is_asked_for():
    async def scenario():
        stop, ended = asyncio.Event(), []

        async def work(seconds: float) -> None:
            try:
                await asyncio.sleep(seconds)
            finally:
                ended.append(seconds)

        async def failing() -> None:
            raise ValueError("broken")

        assert await unless(stop, work(0.0))
        with pytest.raises(ValueError, match="broken"):
            await unless(stop, failing())
        asyncio.get_running_loop().call_soon(stop.set)
        assert not await asyncio.wait_for(unless(stop, work(60.0)), SOON_S)
        assert ended == [0.0, 60.0]

    asyncio.run(scenario())
