"""An event loop whose clock jumps to whatever comes next: hours of waiting take no time, and end when they should.

Threads do not exist in it: what is sent to one is done at once, so that every run of a scenario is the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        wait = self._selector.select

        def select(timeout: float | None) -> list:
            if timeout is None:
                raise RuntimeError("all wait, and nothing will ever happen")
            if timeout > 0:
                self._now_s = max(self._now_s, self._scheduled[0].when())
            return wait(0)

        self._selector.select = select

    def time(self) -> float:
        return self._now_s

    def run_in_executor(self, executor: object, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - it is for whoever awaits it
            future.set_exception(error)
        return future


def in_virtual_time(scenario: Coroutine[Any, Any, Result]) -> Result:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(scenario)


def now_s() -> float:
    return asyncio.get_running_loop().time()
