"""A process with environments, `python -m offbeat.environments.child`: runs episodes until its pool ends.

- It imports neither torch nor anything that does. Episodes run side by side on threads, so that one that waits delays
  no other; async functions share an event loop.
- What an environment prints goes to the log, never into the pipe to the pool. A copy that it forks cannot answer.
- What `step` or a tool raises is an observation. What the class or `begin` raises, or a reply of a wrong kind, fails
  the episode. So does a lack of memory, since nobody knows what state it left.
- A tool that does not return in time is given up: the model is told so, and the pool learns that it still runs here.
- The process ends when its pool closes the pipe or ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import os
import resource
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as CallTimeout
from dataclasses import dataclass, field
from typing import Any

import msgspec

from offbeat.environments import wire
from offbeat.environments.adapters.find import find_environment, find_tools
from offbeat.environments.protocol import Call, CallStatus, Done, EpisodeFailed, Opening, Reply, facts_of
from offbeat.environments.tools import Tool, as_text, bind_calls, by_name, make_tool, tools_of
from offbeat.errors import UserError
from offbeat.locate import is_async, one_line
from offbeat.rewards.child import Pipes, die_with

MAX_THREADS = 512
"""Calls that run at the same time; more than a worker has episodes, unless some were given up."""
STACK_BYTES = 1 << 20
MAX_CHARS = 1 << 16
"""Longest text that is sent to the worker, which cuts it to its own limit in tokens. The middle is left out."""
MAX_ERROR_CHARS = 400
LEFT_OUT = " ... "


class Unusable(Exception):
    """Raised if an environment returned something that is no reply."""


@dataclass
class Part:
    """A loaded `PartSpec`."""

    spec: wire.PartSpec
    environment: Callable[..., Any] | None
    tools: list[Tool]
    classes: list[type]
    """Classes whose methods are tools; each episode gets its own objects."""
    info: wire.PartInfo


@dataclass
class Episode:
    part: Part
    environment: Any = None
    tools: dict[str, Tool] = field(default_factory=dict)
    objects: list[Any] = field(default_factory=list)


def load_part(source: str, spec: wire.PartSpec) -> Part:
    """Loads what a task needs; raises `UserError` for what the user can correct."""
    environment = find_environment(spec.path, f"task.path of {source}") if spec.path else None
    if environment is not None:
        _check_environment(environment, spec)
    found_tools: list[tuple[str, Tool]] = []
    classes: list[type] = []
    stop_tokens: list[str] = list(facts_of(environment).stop_tokens) if environment else []
    for name in spec.tools:
        found = find_tools(name, f"task.tools of {source}")
        stop_tokens += facts_of(found).stop_tokens
        label = f"task.tools = {name!r}"
        if isinstance(found, type):
            classes.append(found)
            found_tools += [(name, tool) for tool in tools_of(_made(found, name), label)]
        else:
            found_tools.append((name, make_tool(found, label)))
    tools = list(by_name(found_tools).values())
    parts = [environment] if environment is not None else []
    own_facts = [facts_of(part) for part in [*parts, *(tool.function for tool in tools), *classes]]
    return Part(
        spec,
        environment,
        [tool for tool in tools if not hasattr(tool.function, "__self__")],
        classes,
        wire.PartInfo(
            deterministic=bool(own_facts) and all(facts.deterministic for facts in own_facts),
            isolated=any(facts.isolated for facts in own_facts),
            stop_tokens=tuple(dict.fromkeys(stop_tokens)),
            can_save=environment is not None and facts_of(environment).can_save,
            tools=tuple(wire.ToolInfo(tool.name, dict(tool.schema)) for tool in tools),
            has_environment=environment is not None,
        ),
    )


def _check_environment(environment: Callable[..., Any], spec: wire.PartSpec) -> None:
    for name in ("begin", "step"):
        if not callable(getattr(environment, name, None)):
            raise UserError(f"task.path = {spec.path!r}: it has no method {name!r}; an environment has begin and step")
    try:
        inspect.signature(environment).bind(**spec.options)
    except TypeError as error:
        raise UserError(f"task.options of {spec.path}: {error}") from error
    except ValueError:  # a class whose parameters cannot be read is tried when an episode begins
        pass


def _made(kind: type, name: str) -> Any:
    try:
        return kind()
    except Exception as error:
        raise UserError(
            f"task.tools = {name!r}: the class cannot be made without arguments: {one_line(error)}"
        ) from error


def shortened(text: str) -> str:
    """Returns `text`, without its middle if it is longer than `MAX_CHARS`."""
    if len(text) > MAX_CHARS:
        text = text[: MAX_CHARS // 2] + LEFT_OUT + text[-(MAX_CHARS // 2) :]
    return text.encode(errors="replace").decode()  # a lone surrogate cannot be sent


def told(error: BaseException) -> str:
    """Returns an exception of an environment or a tool as the model is told of it."""
    text = " ".join("".join(traceback.format_exception_only(error)).split())
    return "error: " + (text if len(text) <= MAX_ERROR_CHARS else text[: MAX_ERROR_CHARS - 3] + "...")


class EnvironmentServer:
    """Runs episodes and sends what comes of them through `pipes`."""

    def __init__(self, setup: wire.Load, pipes: Pipes):
        self.setup, self.pipes = setup, pipes
        self.parts = {source: load_part(source, spec) for source, spec in setup.parts.items()}
        self.episodes: dict[int, Episode] = {}
        self._process = os.getpid()
        self._sending, self._loop_lock = threading.Lock(), threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        threading.stack_size(STACK_BYTES)
        self._steps = ThreadPoolExecutor(MAX_THREADS, "step")
        self._calls = ThreadPoolExecutor(MAX_THREADS, "call")
        self._stuck: set[Future[Any]] = set()

    def take(self, message: wire.ToProcess) -> None:
        if isinstance(message, wire.Ping):
            self.send(wire.Pong())
        elif isinstance(message, wire.Begin | wire.Step | wire.Close):
            self._steps.submit(self._run, message)

    def send(self, message: wire.FromProcess) -> None:
        self._write(wire.frame(message))

    def _write(self, data: bytes) -> None:
        if os.getpid() != self._process:  # a copy that an environment has forked; the pipe is not its own
            os._exit(0)
        with self._sending:
            self.pipes.outgoing.write(data)
            self.pipes.outgoing.flush()

    def _run(self, message: wire.Begin | wire.Step | wire.Close) -> None:
        try:
            if isinstance(message, wire.Begin):
                answer: wire.FromProcess | None = self._begin(message)
            elif isinstance(message, wire.Step):
                answer = self._step(message)
            else:
                answer = None
                self._close(message)
            data = b"" if answer is None else wire.frame(answer)
        except MemoryError:
            self.episodes.pop(message.episode, None)
            limit = self.setup.memory_bytes // 2**20
            data = wire.frame(wire.Failed(message.episode, f"it needs more than environment.memory_mb = {limit}"))
        except BaseException as error:  # noqa: BLE001 - a user's code may raise anything; it is reported
            self._log(error)
            self.episodes.pop(message.episode, None)
            text = str(error) if isinstance(error, Unusable | EpisodeFailed) else one_line(error)
            data = wire.frame(wire.Failed(message.episode, shortened(text[:MAX_ERROR_CHARS])))
        self.pipes.restore()
        self._write(data)

    def _log(self, error: BaseException) -> None:
        with contextlib.suppress(Exception):
            self.pipes.write_log("".join(traceback.format_exception(error)))

    # An episode

    def _begin(self, message: wire.Begin) -> wire.Began:
        part = self.parts[message.part]
        episode = Episode(part, tools={tool.name: tool for tool in part.tools})
        for kind in part.classes:
            made = kind()
            episode.objects.append(made)
            episode.tools |= {tool.name: tool for tool in tools_of(made, kind.__name__)}
        opening = Opening()
        if part.environment is not None:
            episode.environment = part.environment(**part.spec.options)
            episode.objects.append(episode.environment)
            opening = _opening(self._await(episode.environment.begin(message.problem, message.seed)))
        own = []
        for function in opening.tools:
            tool = make_tool(function, "a tool that begin returned")
            if tool.name in episode.tools:
                raise Unusable(f"begin returned a tool named {tool.name!r}, which the episode already has")
            episode.tools[tool.name] = tool
            own.append(wire.ToolInfo(tool.name, dict(tool.schema)))
        self.episodes[message.episode] = episode
        content = opening.content
        if isinstance(content, str):
            return wire.Began(message.episode, shortened(content), tuple(own))
        return wire.Began(message.episode, [dict(entry) for entry in content], tuple(own))

    def _step(self, message: wire.Step) -> wire.Stepped:
        episode, turn = self.episodes[message.episode], message.turn
        if turn.calls and episode.tools:
            return self._run_calls(message.episode, episode, turn.calls)
        if episode.environment is None:
            return wire.Stepped(message.episode, is_done=True)
        try:
            found = self._await(episode.environment.step(turn))
        except (MemoryError, EpisodeFailed):
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the model is told
            self._log(error)
            return wire.Stepped(message.episode, told(error), error=True)
        return _stepped(message.episode, found)

    def _run_calls(self, number: int, episode: Episode, calls: Sequence[Call]) -> wire.Stepped:
        calls = bind_calls(calls, episode.tools)
        known = [episode.tools.get(call.name) for call in calls]
        in_turn = any(facts_of(tool.function).sequential for tool in known if tool is not None)
        in_turn = in_turn or facts_of(episode.environment).sequential
        limit = self.setup.parallel_calls
        outcomes: list[tuple[str, str, float]]
        if in_turn or len(calls) == 1:
            outcomes = [self._call(call, tool) for call, tool in zip(calls[:limit], known, strict=False)]
        else:
            running = [
                self._steps.submit(self._call, call, tool) for call, tool in zip(calls[:limit], known, strict=False)
            ]
            outcomes = [one.result() for one in running]
        late = f"error: at most {limit} calls in one turn are run"
        outcomes += [(late, CallStatus.MALFORMED.value, 0.0)] * (len(calls) - len(outcomes))
        failed = any(status not in (CallStatus.OK, wire.CUT) for _, status, _ in outcomes)
        self._stuck = {one for one in self._stuck if not one.done()}
        return wire.Stepped(
            number,
            [shortened(text) for text, _, _ in outcomes],
            error=failed,
            calls=[(call.name[:100], status, ms) for call, (_, status, ms) in zip(calls, outcomes, strict=True)],
            num_stuck=len(self._stuck),
        )

    def _call(self, call: Call, tool: Tool | None) -> tuple[str, str, float]:
        """Runs one call and returns its observation, its status and its milliseconds."""
        if call.status is not CallStatus.OK:
            return f"error: {call.problem or call.status.value}", call.status.value, 0.0
        assert tool is not None, f"call of {call.name!r} was not checked"
        start_s = time.monotonic()
        timeout_s = self.setup.step_timeout_s
        doing: Future[Any]
        if is_async(tool.function):
            doing = asyncio.run_coroutine_threadsafe(tool.function(**call.arguments), self._event_loop())
        else:
            doing = self._calls.submit(tool.function, **call.arguments)
        try:
            text, status = as_text(doing.result(timeout_s)), CallStatus.OK.value
        except CallTimeout as error:
            if doing.done():  # the tool raised a TimeoutError of its own
                text, status = told(error), wire.RAISED
            else:
                if not is_async(tool.function):
                    self._stuck.add(doing)
                doing.cancel()
                text, status = f"error: no result within {timeout_s:g} s", wire.CUT
        except (MemoryError, EpisodeFailed):
            raise
        except BaseException as error:  # noqa: BLE001 - the model is told
            self._log(error)
            text, status = told(error), wire.RAISED
        return text, status, 1e3 * (time.monotonic() - start_s)

    def _close(self, message: wire.Close) -> None:
        episode = self.episodes.pop(message.episode, None)
        for made in episode.objects if episode is not None else ():
            if callable(close := getattr(made, "close", None)):
                self._await(close())

    def _await(self, value: Any) -> Any:
        if not inspect.isawaitable(value):
            return value
        return asyncio.run_coroutine_threadsafe(_finish(value), self._event_loop()).result()

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        with self._loop_lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="async", daemon=True).start()
            return self._loop


async def _finish(value: Awaitable[Any]) -> Any:
    return await value


def _opening(value: Any) -> Opening:
    if value is None:
        return Opening()
    if isinstance(value, str):
        return Opening(value)
    if isinstance(value, Opening):
        return value
    if isinstance(value, Sequence) and all(isinstance(entry, Mapping) for entry in value):
        return Opening(value)
    raise Unusable(f"begin returned {value!r:.80}; return text, a list of messages, an Opening or None")


def _stepped(number: int, value: Any) -> wire.Stepped:
    if isinstance(value, Done):
        rewards = value.reward if isinstance(value.reward, Mapping) else {"environment": value.reward}
        earned = {str(name): _finite(reward) for name, reward in rewards.items()}
        state = msgspec.to_builtins(dict(value.state), str_keys=True)
        return wire.Stepped(number, is_done=True, rewards=earned, state=state)
    reply = value if isinstance(value, Reply) else Reply("" if value is None else value)
    content = reply.content
    if isinstance(content, Sequence) and not isinstance(content, str):
        if not all(isinstance(entry, str) for entry in content):
            raise Unusable(f"step returned {content!r:.80}; the entries of a list must be text")
        return wire.Stepped(number, [shortened(entry) for entry in content], _finite(reply.reward))
    if not isinstance(content, str):
        raise Unusable(f"step returned {value!r:.80}; return text, a list of texts, a Reply or Done")
    return wire.Stepped(number, shortened(content), _finite(reply.reward))


def _finite(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise Unusable(f"the reward {value!r:.80} is no number") from None
    if not math.isfinite(number):
        raise Unusable(f"the reward {number} is not finite")
    return number


def limit_memory(num_bytes: int) -> None:
    """Limits the memory that this process may write to. Beyond it, an allocation raises `MemoryError`."""
    if sys.platform == "linux" and num_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))


def main() -> None:
    die_with(int(sys.argv[1]))
    pipes = Pipes()
    setup = wire.read_from_pool(pipes.incoming)
    if not isinstance(setup, wire.Load):
        return
    try:
        server = EnvironmentServer(setup, pipes)
    except UserError as error:
        pipes.restore()
        pipes.outgoing.write(wire.frame(wire.RefusedLoad(str(error))))
        pipes.outgoing.flush()
        return
    limit_memory(setup.memory_bytes)  # now, because what a tool imports belongs to no episode
    pipes.restore()
    server.send(wire.Loaded({source: part.info for source, part in server.parts.items()}))
    while (message := wire.read_from_pool(pipes.incoming)) is not None:
        server.take(message)
    os._exit(0)  # threads of environments may still run


if __name__ == "__main__":
    main()
