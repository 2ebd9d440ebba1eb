import asyncio
import os
import signal
import threading
from contextvars import ContextVar

import pytest

from offbeat.launch import stopping
from offbeat.launch.stopping import SIGNALS, Stopping


@pytest.fixture
def own_handlers():
    """Handlers of the program around the run, which must be in force again afterwards."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    mine = {number: lambda *_: None for number in SIGNALS}
    for number, handler in mine.items():
        signal.signal(number, handler)
    yield mine
    for number, handler in before.items():
        signal.signal(number, handler)


def in_force() -> dict:
    return {number: signal.getsignal(number) for number in SIGNALS}


async def until_asked(told: list[str], send: signal.Signals = signal.SIGINT, times: int = 1) -> str | None:
    """A run that is asked to stop by signals to its own process, and takes its time to do so."""
    asked = Stopping(told.append)
    with asked.listening():
        for _ in range(times):
            signal.raise_signal(send) if is_main() else signal.pthread_kill(threading.main_thread().ident, send)
            await asked.requested.wait()
        if times > 1:
            await asyncio.sleep(60)
    return asked.why


def is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


async def inside_a_loop(what):
    """As in a notebook: a plain call, by a coroutine."""
    await asyncio.sleep(0)
    return what()


def outside(what):
    return what()


def inside(what):
    return asyncio.run(inside_a_loop(what))


EITHER = pytest.mark.parametrize("around", [outside, inside])


@EITHER
@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_asks_to_stop_and_what_handled_it_before_does_so_again(own_handlers, around, number):
    told: list[str] = []
    assert around(lambda: stopping.run(until_asked(told, number))) == number.name
    assert told == [number.name]
    assert in_force() == own_handlers


@EITHER
def test_the_second_signal_ends_it_at_once(own_handlers, around):
    told: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        around(lambda: stopping.run(until_asked(told, times=2)))
    assert told == ["SIGINT"]
    assert in_force() == own_handlers


@EITHER
def test_an_error_is_the_same_wherever_it_is_raised(own_handlers, around):
    async def fail():
        with Stopping().listening():
            raise LookupError("no such thing")

    with pytest.raises(LookupError, match="no such thing"):
        around(lambda: stopping.run(fail()))
    assert in_force() == own_handlers


def test_ctrl_c_before_anyone_listens_ends_it_at_once_in_a_notebook_too(own_handlers):
    async def load():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        await asyncio.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        inside(lambda: stopping.run(load()))
    assert in_force() == own_handlers


def test_the_loop_around_a_run_is_left_as_it_was():
    async def notebook():
        mine = asyncio.get_running_loop()
        heard = asyncio.Event()
        mine.add_signal_handler(signal.SIGTERM, heard.set)
        assert stopping.run(until_asked([], signal.SIGTERM)) == "SIGTERM"
        assert asyncio.get_running_loop() is mine
        assert not heard.is_set()
        signal.raise_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            await heard.wait()

    asyncio.run(notebook())


def test_whatever_else_ends_the_wait_ends_the_run_first():
    ended: list[str] = []

    async def train():
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            await asyncio.sleep(60)
        finally:
            ended.append("the run")

    def too_late(*_):
        raise TimeoutError("the caller's own alarm")

    before = signal.signal(signal.SIGALRM, too_late)
    try:
        with pytest.raises(TimeoutError, match="the caller's own alarm"):
            inside(lambda: stopping.run(train()))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert ended == ["the run"]


def test_other_threads_leave_signals_to_the_main_one(own_handlers):
    seen = []

    async def look():
        with Stopping().listening():
            return in_force()

    for around in (outside, inside):
        thread = threading.Thread(target=lambda around=around: seen.append(around(lambda: stopping.run(look()))))
        thread.start()
        thread.join()
    assert seen == [own_handlers] * 2


def test_a_limit_of_hours_asks_too():
    async def run():
        asked = Stopping()
        await asked.after(1e-6)
        return asked.why

    assert stopping.run(run()) == "run.max_hours = 1e-06"


@EITHER
def test_a_run_sees_the_context_of_its_caller(around):
    """As a notebook sets it, for logging or for a progress bar."""
    said: ContextVar[str] = ContextVar("said", default="nothing")

    async def look() -> str:
        return said.get()

    token = said.set("hello")
    try:
        assert around(lambda: stopping.run(look())) == "hello"
    finally:
        said.reset(token)


@pytest.mark.parametrize("written, why", [(b"stop()", "stop()"), (b"", None)], ids=["asked", "parent ended"])
def test_a_parent_process_asks_to_stop_for_a_reason_of_its_own(monkeypatch, written, why):
    reads, writes = os.pipe()
    monkeypatch.setenv(stopping.REASONS, str(reads))

    async def run() -> str | None:
        asked = Stopping()
        with asked.asked_by_parent():
            os.write(writes, written)
            os.close(writes)
            await asyncio.sleep(0.05)
        return asked.why

    assert asyncio.run(run()) == why
    os.close(reads)
