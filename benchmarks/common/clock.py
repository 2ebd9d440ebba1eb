"""An event loop in modelled time: its clock jumps to the next timer instead of waiting for it.

Work sent to a thread is done at once and takes no modelled time, so neither the disk nor a busy machine shows in the
figures. Nothing in the loop may wait for another process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class ModelledLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        wait = self._selector.select  # type: ignore[attr-defined]

        def select(timeout: float | None) -> Any:
            if timeout is None:
                raise RuntimeError("all tasks wait and no timer is set")
            if timeout > 0:
                self._now_s = max(self._now_s, self._scheduled[0].when())  # type: ignore[attr-defined]
            return wait(0)

        self._selector.select = select  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._now_s

    def run_in_executor(self, executor: object, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - raised where it is awaited
            future.set_exception(error)
        return future


def in_modelled_time(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=ModelledLoop) as runner:
        return runner.run(work)


def now_s() -> float:
    return asyncio.get_running_loop().time()
