"""Environments that an OpenEnv server runs: `path = "openenv:http://HOST:PORT"`. The package openenv is not needed.

An episode is a connection of its own to the server's socket. `task.options` are `action_key`, the field of an action
that holds the model's turn, or without it a turn must be an action written as a JSON object; `observation_key`, the
field of an observation that the model is told, or without it all fields as JSON; `timeout_s`; and `reset`, arguments of
reset.
A server that dies, or refuses a connection, fails the episode; it is never a reward of 0.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from offbeat.environments.protocol import Done, EpisodeFailed, Reply, Turn

MAX_MESSAGE_BYTES = 16 << 20
HIDDEN = ("reward", "done", "metadata")
"""Fields of an observation that the model is not told."""


def environment(url: str) -> type:
    """Returns the class of the environment at this address."""

    class Served(OpenEnv):
        def __init__(self, **options: Any):
            super().__init__(url, **options)

    return Served


class OpenEnv:
    """An episode at an OpenEnv server."""

    def __init__(
        self,
        url: str,
        action_key: str | None = None,
        observation_key: str | None = None,
        timeout_s: float = 30.0,
        reset: Mapping[str, Any] | None = None,
    ):
        self.url = url.rstrip("/").removesuffix("/ws") + "/ws"
        self.action_key, self.observation_key = action_key, observation_key
        self.timeout_s, self.reset = timeout_s, dict(reset or {})
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def begin(self, problem: Mapping[str, Any], seed: int) -> str:
        self._session = aiohttp.ClientSession()
        try:
            async with asyncio.timeout(self.timeout_s):
                self._socket = await self._session.ws_connect(self.url, max_msg_size=MAX_MESSAGE_BYTES)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            await self.close()
            raise EpisodeFailed(f"{self.url}: no connection: {error or type(error).__name__}") from error
        observation, _, is_done = await self._ask("reset", {"seed": seed % 2**31, **self.reset})
        if is_done:
            raise EpisodeFailed(f"{self.url}: the episode is over before it has begun")
        return self._told(observation)

    async def step(self, turn: Turn) -> Reply | Done:
        observation, reward, is_done = await self._ask("step", self._action(turn.text.strip()))
        if is_done:
            return Done(reward, {"observation": self._told(observation)})
        return Reply(self._told(observation), reward)

    async def close(self) -> None:
        session, socket, self._session, self._socket = self._session, self._socket, None, None
        try:
            async with asyncio.timeout(self.timeout_s):
                if socket is not None and not socket.closed:
                    await socket.send_str(json.dumps({"type": "close"}))
                    await socket.close()
        except (aiohttp.ClientError, OSError, TimeoutError):
            pass  # it is gone already
        finally:
            if session is not None:
                await session.close()

    def _action(self, text: str) -> dict[str, Any]:
        if self.action_key is not None:
            return {self.action_key: text}
        try:
            action = json.loads(text)
        except ValueError:
            action = None
        if not isinstance(action, dict):
            raise ValueError("an action must be a JSON object")
        return action

    def _told(self, observation: Any) -> str:
        if isinstance(observation, Mapping):
            if self.observation_key is not None:
                observation = observation.get(self.observation_key, "")
            else:
                observation = {key: value for key, value in observation.items() if key not in HIDDEN}
        return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> tuple[Any, float, bool]:
        """Sends a message; returns observation, reward and whether the episode is over."""
        assert self._socket is not None
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._socket.send_str(json.dumps({"type": kind, "data": dict(data)}))
                message = await self._socket.receive()
        except TimeoutError:
            raise EpisodeFailed(f"{self.url}: no answer to {kind} within {self.timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EpisodeFailed(f"{self.url}: the connection broke at {kind}: {error}") from error
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise EpisodeFailed(f"{self.url}: the server has closed the connection at {kind}")
        return self._answer(kind, message.data)

    def _answer(self, kind: str, text: str) -> tuple[Any, float, bool]:
        try:
            answer = json.loads(text)
            data = answer["data"]
            if answer["type"] == "error":
                message = " ".join(str(data.get("message", data)).split())[:300]
                if kind == "step" and data.get("code") == "VALIDATION_ERROR":
                    raise ValueError(message)  # an action of the model's, of which it is told
                raise EpisodeFailed(f"{self.url}: error at {kind}: {message}")
            return data["observation"], float(data.get("reward") or 0.0), bool(data.get("done", False))
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise EpisodeFailed(f"{self.url}: what it answers to {kind} is no observation: {text[:120]!r}") from error
