"""A reward process: loads rewards, then answers samples until its pool goes away. `python -m offbeat.reward.child`.

- It imports neither torch nor anything that does, so it starts in a fraction of a second.
- What a reward prints goes to the log, never into the protocol.
- Samples of a plain function run one after another, those of an async one side by side, each under the deadline.
- A reward that raises or returns no finite number gives an error, never a value; the traceback is in the log.
- It ends when its pool does: with the pipe, and on Linux by the kernel's own hand even in the middle of a sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import math
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Mapping
from numbers import Integral, Real
from typing import Any, BinaryIO

from offbeat.errors import UserError
from offbeat.locate import Function, accepted_arguments, is_async, one_line
from offbeat.reward.verifiers import load_reward
from offbeat.reward.wire import (
    ARGUMENTS,
    Answer,
    Answers,
    Loaded,
    Progress,
    Ready,
    Refused,
    Setup,
    Work,
    frame,
    read_from_pool,
    timeout_error,
)

SEND_EVERY_S = 0.005
"""Answers wait this long for company. What a killed process had not sent is computed again, so this is also the most
work of finished samples that a kill can cost."""
HAND_BACK_AFTER_S = 0.1
"""Then a process hands back what it has not begun, for whoever is free: slow samples are shared out one by one, quick
ones travel in the largest messages."""
MAX_ERROR_CHARS = 400
LAST = -1
"""The position of the last token."""
SET_PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""


class RewardServer:
    """Loads rewards and judges samples; talks through `outgoing`."""

    def __init__(self, setup: Setup, outgoing: BinaryIO, progress: Progress):
        self.timeout_s, self.outgoing, self.progress = setup.timeout_s, outgoing, progress
        self.functions = {name: load_reward(spec) for name, spec in setup.named.items()}
        self.functions |= {name: _unpickle(name, data) for name, data in setup.pickled.items()}
        self.loop = asyncio.Runner()

    def describe(self) -> Ready:
        rewards = {}
        for name, function in self.functions.items():
            rewards[name] = Loaded(accepted_arguments(function, ARGUMENTS, f"reward {name}"), is_async(function))
        return Ready(rewards)

    def judge(self, work: Work) -> None:
        function = self.functions[work.reward]
        if is_async(function):
            self.loop.run(self._judge_side_by_side(work, function))
        else:
            self._judge_in_turn(work, function)

    def _judge_in_turn(self, work: Work, function: Function) -> None:
        answers: list[Answer] = []
        start_s = sent_s = time.monotonic()
        for index, sample in enumerate(work.samples):
            now_s = time.monotonic()
            if index and now_s - start_s > HAND_BACK_AFTER_S:
                break
            if answers and now_s - sent_s > SEND_EVERY_S:
                self._send(answers)
                answers, sent_s = [], now_s
            self.progress.begin()
            try:
                value = function(**sample)
                if inspect.isawaitable(value):
                    value = self.loop.run(_finish(value))
                answers.append(Answer(index, parts_of(value)))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's code may raise anything; it is reported
                answers.append(Answer(index, error=_report(work.reward, error)))
        self._send(answers, last=True)

    async def _judge_side_by_side(self, work: Work, function: Function) -> None:
        self.progress.begin(len(work.samples))
        await asyncio.gather(
            *(self._judge_async(work.reward, function, i, sample) for i, sample in enumerate(work.samples))
        )
        self._send([], last=True)

    async def _judge_async(self, reward: str, function: Function, index: int, sample: Mapping[str, Any]) -> None:
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                answer = Answer(index, parts_of(await function(**sample)))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
            hung = isinstance(error, TimeoutError) and limit.expired()
            answer = Answer(index, error=timeout_error(self.timeout_s) if hung else _report(reward, error))
        self._send([answer])

    def _send(self, answers: list[Answer], last: bool = False) -> None:
        self.outgoing.write(frame(Answers(answers, last)))
        self.outgoing.flush()


class BadValue(ValueError):
    """A reward returned something that is no reward."""


def parts_of(value: Any) -> list[tuple[float, str, int]]:
    """Checks what a reward returned: one finite number, several by name, or several with position and name."""
    if isinstance(value, list | tuple):
        if not value:
            raise BadValue("the reward returned an empty list; return a number, or (position, value, name) for each")
        return [_placed(entry) for entry in value]
    if not isinstance(value, Mapping):
        return [(_finite(value, ""), "reward", LAST)]
    if not value:
        raise BadValue("the reward returned an empty dict; return a number, or numbers by name")
    for name in value:
        if not isinstance(name, str):
            raise BadValue(f"the reward returned a dict with the key {name!r} of type {type(name).__name__}; use str")
    return [(_finite(number, f" as {name!r}"), name, LAST) for name, number in value.items()]


def _placed(entry: Any) -> tuple[float, str, int]:
    match entry:
        case [Integral() as position, number, str() as name] if type(position) is not bool and int(position) >= LAST:
            return _finite(number, f" as {name!r} at {position}"), name, int(position)
    raise BadValue(
        f"the reward returned a list with {_shown(entry)}; its entries are (position, value, name), with a position "
        "from 0 on, or -1 for the last token"
    )


def _finite(value: Any, place: str) -> float:
    shown = _shown(value)
    if not isinstance(value, Real):  # bool is Real, and so are numpy's scalars
        raise BadValue(f"the reward returned {shown}{place}, a {type(value).__name__}; return a finite number")
    if not math.isfinite(value):
        raise BadValue(f"the reward returned {shown}{place}; return a finite number")
    return float(value)


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


async def _finish(value: Awaitable[Any]) -> Any:
    return await value


def _unpickle(name: str, data: bytes) -> Function:
    try:
        return pickle.loads(data)
    except Exception as error:
        raise UserError(f"reward {name}: cannot be rebuilt in a process of its own: {one_line(error)}") from error


def _report(reward: str, error: BaseException) -> str:
    """Writes the error to the log, with the traceback of one that was raised, and returns it as one line."""
    is_value = isinstance(error, BadValue)
    text = f"value: {error}" if is_value else f"raised: {one_line(error)}"
    with contextlib.suppress(OSError):  # a log on a full disk costs no sample
        sys.stderr.write(f"reward {reward} {text}\n{'' if is_value else ''.join(traceback.format_exception(error))}")
        sys.stderr.flush()
    return text if len(text) <= MAX_ERROR_CHARS else text[: MAX_ERROR_CHARS - 3] + "..."


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Keeps the protocol's pipes to ourselves: user code reads nothing, and its prints join the log."""
    incoming, outgoing = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return os.fdopen(incoming, "rb"), os.fdopen(outgoing, "wb")


def _die_with(parent: int) -> None:
    """On Linux the kernel kills us when the thread that started us ends, whatever we are doing then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # a reward that eats all memory is the one to die, not the trainer
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    parent, cell = int(sys.argv[1]), int(sys.argv[2])
    _die_with(parent)
    incoming, outgoing = _take_pipes()
    setup = read_from_pool(incoming)
    if not isinstance(setup, Setup):
        return
    progress = Progress(cell)
    os.close(cell)  # the mapping stays; what a reward starts must not inherit the file
    try:
        server = RewardServer(setup, outgoing, progress)
        reply: Ready | Refused = server.describe()
    except UserError as error:
        reply = Refused(str(error))
    outgoing.write(frame(reply))
    outgoing.flush()
    while isinstance(work := read_from_pool(incoming), Work) and isinstance(reply, Ready):
        server.judge(work)


if __name__ == "__main__":
    main()
