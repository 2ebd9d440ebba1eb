"""A reward process, `python -m offbeat.rewards.child`: loads rewards, then judges samples until its pool ends.

- It imports neither torch nor anything that does, so it starts in a fraction of a second.
- The output of a reward goes to the log, never into the pipe to the pool. Standard streams that a reward closes or
  replaces are restored after the sample. If a reward changes the descriptors of the pipes or the log, the process ends
  at once. So no other sample is blamed.
- A plain function judges samples one after another, an async function concurrently. Each sample has a deadline.
- A function with TRL's signature is called once for many samples, with lists (`ListReward`).
- A reward that raises, or does not return a finite number, gives an error, never a value; the traceback is in the log.
- The process ends when its pool closes the pipe or ends. On Linux, a signal ends it even in the middle of a sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import inspect
import math
import os
import pickle
import resource
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from offbeat.errors import UserError
from offbeat.locate import Function, accepted_arguments, is_async, one_line
from offbeat.rewards import wire
from offbeat.rewards.verifiers import load_reward
from offbeat.spelling import a_kind

SEND_EVERY_S = 0.005
"""Answers are collected for this long before they are sent. If the process is killed, at most this much work is lost
and repeated."""
HAND_BACK_AFTER_S = 0.1
"""Seconds after which a process hands back the samples of a message that it has not begun, for other processes to
judge. So messages can be large, and slow samples are still spread over all processes."""
SHORT_SHARE = 0.25
"""If a call of a `ListReward` takes less than this share of the time limit, which applies to the whole call, the next
call may have twice as many samples."""
MAX_ERROR_CHARS = 400
FAR = 700
"""Lowest file descriptor for the pipes to the pool and the log. User code rarely touches descriptors this high: daemons
close the first 256."""
LAST = -1
"""Position in a reward that stands for the answer's last token."""
SET_PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""


class Pipes:
    """A reward process's pipes to its pool, and its log. Their file descriptors are `FAR` or higher."""

    def __init__(self) -> None:
        far = min(FAR, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        nothing = os.open(os.devnull, os.O_RDONLY)
        found = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, far) for fd in (0, 1, 2, nothing)]
        os.close(nothing)
        incoming, outgoing, self.log, self.nothing = found
        self._streams = {0: self.nothing, 1: self.log, 2: self.log}
        for stream, source in self._streams.items():  # user code reads an empty input and prints to the log
            os.dup2(source, stream)
        self._own = {fd: _identity(fd) for fd in found}
        self._watched = [(fd, os.fstat(fd).st_ino) for fd in (incoming, outgoing, 1, 2)]
        self.incoming, self.outgoing = os.fdopen(incoming, "rb"), os.fdopen(outgoing, "wb")

    def restore(self) -> None:
        """Restores the standard streams after user code; ends the process if user code changed its pipes or its log."""
        try:
            is_whole = all(os.fstat(fd).st_ino == number for fd, number in self._watched)
        except OSError:
            is_whole = False
        if is_whole and sys.stdout and not sys.stdout.closed and sys.stderr and not sys.stderr.closed:
            return  # the usual case, which must be fast
        if any(_identity(fd) != identity for fd, identity in self._own.items()):
            os._exit(wire.HARMED)
        for stream, source in self._streams.items():
            os.dup2(source, stream)
        if not sys.stdout or sys.stdout.closed:
            sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - open until the process ends
        if not sys.stderr or sys.stderr.closed:
            sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115

    def send(self, message: wire.Ready | wire.RewardRefused | wire.Answers) -> None:
        self.outgoing.write(wire.frame(message))
        self.outgoing.flush()

    def write_log(self, text: str) -> None:
        """Appends to the log, even if user code has replaced `sys.stderr`."""
        with contextlib.suppress(OSError):  # a log that cannot be written costs no sample
            os.write(self.log, text.encode(errors="replace"))


def _identity(descriptor: int) -> tuple[int, int] | None:
    """Returns device and inode of a descriptor; None if it is closed."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino


class RewardServer:
    """Loads rewards and judges samples; sends the answers through `pipes`."""

    def __init__(self, setup: wire.Setup, pipes: Pipes, progress: wire.Progress):
        self.timeout_s, self.pipes, self.progress = setup.timeout_s, pipes, progress
        self.functions = {name: load_reward(spec) for name, spec in setup.named.items()}
        self.functions |= {name: _unpickle(name, data) for name, data in setup.pickled.items()}
        self.lists = {
            name: ListReward(function, f"reward {name}")
            for name, function in self.functions.items()
            if takes_lists(function)
        }
        self.loop = asyncio.Runner()

    def describe(self) -> wire.Ready:
        rewards = {}
        for name, function in self.functions.items():
            is_list = name in self.lists
            arguments = (
                wire.ARGUMENTS
                if is_list
                else accepted_arguments(function, wire.ARGUMENTS, f"reward {name}", wire.OTHER_NAMES)
            )
            answer = inspect.signature(function).parameters.get("answer")
            rewards[name] = wire.RewardsLoaded(
                arguments,
                in_turn=not is_list and not is_async(function),
                needs_answer=answer is not None and answer.default is answer.empty,
            )
        return wire.Ready(rewards)

    def judge(self, work: wire.Work) -> None:
        function = self.functions[work.reward]
        if work.reward in self.lists:
            self._judge_lists(work, self.lists[work.reward])
        elif is_async(function):
            self.loop.run(self._judge_side_by_side(work, function))
        else:
            self._judge_in_turn(work, function)

    def _judge_in_turn(self, work: wire.Work, function: Function) -> None:
        answers: list[wire.RewardAnswer] = []
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
                answers.append(wire.RewardAnswer(index, parts_of(value)))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's code may raise anything; it is reported
                answers.append(wire.RewardAnswer(index, error=self._report(work.reward, error)))
            self.pipes.restore()
        self._send(answers, last=True)

    def _judge_lists(self, work: wire.Work, reward: ListReward) -> None:
        """Judges several samples per call, as many as should fit into the time limit. If a call raises, its samples are
        judged one by one, so that only the samples at fault get an error. If a process's first work is one sample, as
        in a trial, the function is also called with this sample twice, because a function that always returns one
        number would pass with one sample."""
        start_s, begun = time.monotonic(), 0
        while begun < len(work.samples) and (not begun or time.monotonic() - start_s < HAND_BACK_AFTER_S):
            chunk = work.samples[begun : begun + reward.num_samples]
            is_trial, reward.is_untried = reward.is_untried and len(work.samples) == 1, False
            call_s = time.monotonic()
            answers, is_divisible = self._call_with_lists(work.reward, reward, chunk, begun)
            if is_divisible and len(chunk) > 1:
                singles = (self._call_with_lists(work.reward, reward, [s], begun + i) for i, s in enumerate(chunk))
                answers = [answer for (answer,), _ in singles]
            reward.note_duration(time.monotonic() - call_s, SHORT_SHARE * self.timeout_s)
            if is_trial and reward.num_samples > 1 and answers[0].error is None:  # quick enough for two
                pair, _ = self._call_with_lists(work.reward, reward, chunk * 2, begun)
                answers = answers if pair[0].error is None else pair[:1]
            begun += len(chunk)
            self._send(answers)
        self._send([], last=True)

    def _call_with_lists(
        self, name: str, reward: ListReward, samples: Sequence[Mapping[str, Any]], first: int
    ) -> tuple[list[wire.RewardAnswer], bool]:
        """Judges samples in one call and returns their answers, numbered from `first`. If the call raises, each answer
        is an error. Also returns whether the samples should be judged again one by one, so that fewer of them fail.
        This is False after a success. It is also False if the reward did not return a list with a value for each
        sample, because then the reward is wrong and not a sample."""
        self.progress.begin(len(samples))
        try:
            value = reward.function(**reward.arguments(samples))
            if inspect.isawaitable(value):
                value = self.loop.run(_finish(value))
            parts = reward.parts(value, len(samples))
            return [wire.RewardAnswer(first + i, found) for i, found in enumerate(parts)], False
        except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
            text = self._report(name, error, reward.hint(error, samples[0]))
            return [wire.RewardAnswer(first + i, error=text) for i in range(len(samples))], not isinstance(
                error, NoList
            )
        finally:
            self.pipes.restore()

    async def _judge_side_by_side(self, work: wire.Work, function: Function) -> None:
        self.progress.begin(len(work.samples))
        await asyncio.gather(
            *(self._judge_async(work.reward, function, i, sample) for i, sample in enumerate(work.samples))
        )
        self._send([], last=True)

    async def _judge_async(self, reward: str, function: Function, index: int, sample: Mapping[str, Any]) -> None:
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                answer = wire.RewardAnswer(index, parts_of(await function(**sample)))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
            hung = isinstance(error, TimeoutError) and limit.expired()
            text = wire.timeout_error(self.timeout_s) if hung else self._report(reward, error)
            answer = wire.RewardAnswer(index, error=text)
        self.pipes.restore()
        self._send([answer])

    def _send(self, answers: list[wire.RewardAnswer], last: bool = False) -> None:
        self.pipes.send(wire.Answers(answers, last))

    def _report(self, reward: str, error: BaseException, hint: str = "") -> str:
        """Writes an error to the log, with a traceback if the reward raised it, and returns it as one line that ends
        with `hint`."""
        is_value = isinstance(error, BadValue)
        text = (f"value: {error}" if is_value else f"raised: {one_line(error)}") + hint
        self.pipes.write_log(
            f"reward {reward} {text}\n{'' if is_value else ''.join(traceback.format_exception(error))}"
        )
        return text if len(text) <= MAX_ERROR_CHARS else text[: MAX_ERROR_CHARS - 3] + "..."


class BadValue(ValueError):
    """A reward function returned a value that is not a reward."""


class NoList(BadValue):
    """A reward with TRL's signature returned something else than a list with an entry for each completion."""


LISTS = ("completions", "completion_ids")
"""Parameters by which a function of TRL's signature is recognised."""
NOT_PASSED = ("trainer_state", "log_extra", "log_metric", "environments")
"""Arguments that TRL's trainer passes and that have no counterpart here."""
MAX_SAMPLES = 64
MISTAKEN_FORM = (TypeError, IndexError, KeyError, AttributeError)
"""Errors that a function raises if it takes a text for a list of messages, or the other way round."""


def takes_lists(function: Function) -> bool:
    """Returns whether a function has TRL's signature, such as `reward(completions, **columns)`."""
    try:
        return not inspect.signature(function).parameters.keys().isdisjoint(LISTS)
    except (TypeError, ValueError):  # `accepted_arguments` reports it
        return False


class ListReward:
    """A reward function with TRL's signature. It is called by keyword with lists that have an entry for each sample:
    `prompts`, `completions`, `completion_ids`, and a list for each column of the problems' rows. It returns a list of
    numbers, with None for a sample to which the reward does not apply."""

    def __init__(self, function: Function, label: str):
        self.function = function
        self.is_untried = True
        """Whether this process has not called the function yet."""
        self.num_samples = 1
        """Samples for the next call; grows while calls are short."""
        parameters = inspect.signature(function).parameters.values()
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._accepted = {p.name for p in named}
        self._required = [p.name for p in named if p.default is p.empty]
        for name in self._required:
            if name in NOT_PASSED:
                raise UserError(f"{label}: only TRL's trainer passes {name!r}, Offbeat does not; remove this parameter")

    def arguments(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
        rows = [{"answer": sample["answer"], **sample["info"]} for sample in samples]
        columns = {name for row in rows for name in row} - {"prompt", "completion", "completion_ids"}
        lists: dict[str, list[Any]] = {name: [row.get(name) for row in rows] for name in columns}
        lists["prompts"] = [sample["prompt"] for sample in samples]
        lists["completions"] = [_completion(sample) for sample in samples]
        lists["completion_ids"] = [sample["tokens"] for sample in samples]
        for name in self._required:
            if name not in lists:
                raise BadValue(
                    f"the reward needs a column {name!r}, but the problem has only {', '.join(sorted(columns))}"
                )
        return lists if self._takes_all else {name: lists[name] for name in lists if name in self._accepted}

    def parts(self, value: Any, count: int) -> list[list[tuple[float, str, int]]]:
        """Returns the reward parts of each of `count` samples, given the `value` that the function returned for all of
        them. If the reward does not apply to a sample, the sample's list is empty."""
        if not isinstance(value, list | tuple) and hasattr(value, "tolist"):  # an array or a tensor
            value = value.tolist()
        if not isinstance(value, list | tuple):
            raise NoList(
                f"the reward returned {_shown(value)}, {a_kind(value)}; a reward that takes "
                f"{' or '.join(LISTS)} must return a list with a number for each completion"
            )
        if len(value) != count:
            numbers = "1 number" if len(value) == 1 else f"{len(value)} numbers"
            completions = "1 completion" if count == 1 else f"{count} completions"
            raise NoList(f"the reward returned {numbers} for {completions}; return one for each")
        values = (entry.item() if getattr(entry, "ndim", None) == 0 else entry for entry in value)
        return [[] if entry is None else [(_finite(entry, ""), "reward", LAST)] for entry in values]

    def hint(self, error: BaseException, sample: Mapping[str, Any]) -> str:
        """Returns text to append to the message about `error`, which the function raised. The text names the form of
        completions if the function may have expected another one; otherwise it is empty."""
        if not isinstance(error, MISTAKEN_FORM):
            return ""
        if isinstance(sample["prompt"], str):
            return "; completions are text here, because the prompt is text"
        return "; completions are lists of messages here, because the prompt is a chat"

    def note_duration(self, call_s: float, short_s: float) -> None:
        """Doubles the size of the next call if the last one took `call_s` < `short_s` seconds; otherwise halves it."""
        size = self.num_samples * 2 if call_s < short_s else self.num_samples // 2
        self.num_samples = min(max(size, 1), MAX_SAMPLES)


def _completion(sample: Mapping[str, Any]) -> str | list[dict[str, str]]:
    """Returns the response as TRL writes it: as text, or as a chat message if the prompt is a chat."""
    text = sample["response"]
    return text if isinstance(sample["prompt"], str) else [{"role": "assistant", "content": text}]


def parts_of(value: Any) -> list[tuple[float, str, int]]:
    """Returns (value, name, position) for each part of `value`. Raises `BadValue` if `value` is not a number, a dict of
    numbers by name, or a list of (position, value, name)."""
    if isinstance(value, list | tuple):
        if not value:
            raise BadValue("the reward returned an empty list; return a number, or a list of (position, value, name)")
        return [_positioned(entry) for entry in value]
    if not isinstance(value, Mapping):
        return [(_finite(value, ""), "reward", LAST)]
    if not value:
        raise BadValue("the reward returned an empty dict; return a number, or numbers by name")
    for name in value:
        if not isinstance(name, str):
            raise BadValue(f"the reward returned a dict with the key {name!r} of type {type(name).__name__}; use str")
    return [(_finite(number, f" as {name!r}"), name, LAST) for name, number in value.items()]


def _positioned(entry: Any) -> tuple[float, str, int]:
    match entry:
        case [Integral() as position, number, str() as name] if type(position) is not bool and int(position) >= LAST:
            return _finite(number, f" as {name!r} at {position}"), name, int(position)
    raise BadValue(
        f"the reward returned a list with {_shown(entry)}; its entries must be (position, value, name), with a "
        "position of 0 or more, or -1 for the last token"
    )


def _finite(value: Any, place: str) -> float:
    shown = _shown(value)
    if not isinstance(value, Real):  # bool is Real, and so are numpy's scalars
        raise BadValue(f"the reward returned {shown}{place}, {a_kind(value)}; return a finite number")
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
        raise UserError(
            f"reward {name}: cannot be loaded in the reward process: {one_line(error)}; put the function in a file and "
            "name it as file.py:function"
        ) from error


def die_with(parent: int) -> None:
    """Makes this process end when its parent does. On Linux, the kernel kills it as soon as the parent's thread that
    started it ends; elsewhere, only a parent that has already ended is noticed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # if memory runs out, this process is killed and not the trainer
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    cell, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with(parent)
    pipes = Pipes()
    setup = wire.read_from_pool(pipes.incoming)
    if not isinstance(setup, wire.Setup):
        return
    progress = wire.Progress(cell)
    os.close(cell)  # the mapping stays; processes that a reward starts must not inherit the file
    try:
        server = RewardServer(setup, pipes, progress)
        reply: wire.Ready | wire.RewardRefused = server.describe()
    except UserError as error:
        reply = wire.RewardRefused(str(error))
    pipes.restore()  # user code was imported
    pipes.send(reply)
    while isinstance(work := wire.read_from_pool(pipes.incoming), wire.Work) and isinstance(reply, wire.Ready):
        server.judge(work)


if __name__ == "__main__":
    main()
