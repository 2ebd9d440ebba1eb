"""A run behind a real socket: the real coordinator, ledger and reward pool, on an event loop of their own thread.

Tests speak to it as anyone on the network could, and look at the ledger's file beside it.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from safetensors.numpy import save

from offbeat.client import wire
from offbeat.client.protocol import LeaseResponse
from offbeat.config import from_dict
from offbeat.coordinator.api.limits import ServerSettings
from offbeat.coordinator.api.server import Address, HttpServer
from offbeat.coordinator.api.state import ServedRun
from offbeat.coordinator.maintenance import WeightGarbageCollector
from offbeat.launch import wiring
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.workers import Role, new_secret, secret_hash
from offbeat.trajectory import End, Segment, Task, Trajectory
from offbeat.weights.version import FILE_NAME, Version, WeightFolder, file_digest

SOON_S = 60.0
WEIGHTS = save({"w": np.random.default_rng(0).standard_normal(750_000).astype(np.float32)})
"""Nobody opens them here."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def error(self) -> str:
        return json.loads(self.body)["error"]

    def record(self, kind: type) -> Any:
        return wire.decode(self.body, kind)


class LiveRun:
    """Serves from `with` to its end; version 0 is published, and whatever a test did, the ledger's laws hold."""

    def __init__(
        self,
        folder: Path,
        *,
        settings: ServerSettings | None = None,
        address: Address | None = None,
        opened: bool = True,
        **sections: Any,
    ):
        self.folder, self.settings, self.address, self._opened = folder, settings, address or Address(), opened
        given = {"run": {"steps": 3}, "batch": {"groups_per_step": 32, "group_size": 4}, "eval": {"every": 0}}
        self.config = from_dict({**given, "rollout": {"lease_s": 3600.0}, **sections})
        folder.mkdir(exist_ok=True)
        self.weights = WeightFolder(folder / "weights")
        self.reports: list[Mapping[str, Any]] = []

    def __enter__(self) -> LiveRun:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._stack = AsyncExitStack()
        try:
            self.ask(self._start())
        except BaseException:
            self.__exit__()
            raise
        self.ledger = Ledger(self.folder / "ledger.sqlite", read_only=True)
        return self

    def __exit__(self, *problem: Any) -> None:
        try:
            self.ask(self._stack.aclose())
            if hasattr(self, "ledger"):
                violations = self.ledger.verify().violations
                self.ledger.close()
                assert problem[:1] != (None,) or violations == ()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def ask(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine beside the server."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=SOON_S)

    async def _start(self) -> None:
        tokens = wiring.load_tokens(self.config)
        mixture = wiring.make_mixture(self.config, None)
        ledger = wiring.open_ledger(self.config, self.folder / "ledger.sqlite")
        self._stack.callback(ledger.close)
        pool = await wiring.open_pool(self.config, mixture, self.folder / "rewards.log")
        self._stack.push_async_callback(pool.close)
        issuer = wiring.make_issuer(self.config, mixture, tokens)
        self.coordinator = wiring.make_coordinator(
            self.config, ledger, issuer, pool, tokens, WeightGarbageCollector(self.weights)
        )
        self.coordinator.on_report = self.reports.append
        self._stack.push_async_callback(self.coordinator.close)
        await self.coordinator.start(keep_leases=True)
        served = ServedRun(
            self.coordinator, "live", {"run": {"name": "live"}}, str(self.folder / "ledger.sqlite"), self.weights
        )
        self.server = HttpServer(served, self.address, self.settings)
        await self.server.start()
        self._stack.push_async_callback(self.server.stop)
        if await self.coordinator.call(ledger.latest_version) is None:
            await self.coordinator.publish(self.version_on_disk(0, 0))
        if self._opened:
            self.server.open()

    def version_on_disk(self, number: int, step: int, parent: int | None = None) -> Version:
        place = self.weights.path(number)
        place.mkdir(parents=True)
        (place / FILE_NAME).write_bytes(WEIGHTS)
        return Version(number, step, parent, file_digest(place / FILE_NAME), place)

    # --- as a caller ---

    def token(self, role: Role = Role.ROLLOUT, minutes: float = 15) -> str:
        return self.ask(self.coordinator.call(self.coordinator.ledger.issue_token, role, minutes))

    def secret(self, name: str = "w", role: Role = Role.ROLLOUT) -> str:
        """Joins without the wire, so that no join is counted."""
        ledger, secret = self.coordinator.ledger, new_secret()
        self.ask(self.coordinator.call(ledger.redeem, self.token(role), name, {}, secret_hash(secret)))
        return secret

    def connect(self) -> socket.socket:
        return socket.create_connection((self.address.host, self.server.port), timeout=SOON_S)

    def send(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None, secret: str = ""
    ) -> Answer:
        """One request with exactly these headers, besides length and host."""
        connection = http.client.HTTPConnection(self.address.host, self.server.port, timeout=SOON_S)
        held = dict(headers or {})
        if secret:
            held["Authorization"] = f"Bearer {secret}"
        try:
            connection.request(method, path, body, held)
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())
        finally:
            connection.close()

    def post(self, path: str, record: Any, secret: str = "") -> Answer:
        return self.post_bytes(path, wire.encode(record), secret)

    def post_bytes(self, path: str, body: bytes, secret: str = "", **changes: Any) -> Answer:
        return self.send("POST", path, body, headers_of(body, **changes), secret)

    def submit(self, trajectory: Trajectory, fence: int, secret: str, **changes: Any) -> Answer:
        return self.put(trajectory.task, fence, trajectory.encode(), secret, **changes)

    def put(self, task: int, fence: int, body: bytes, secret: str, **changes: Any) -> Answer:
        return self.send("PUT", f"/v1/trajectories/{task}/{fence}", body, headers_of(body, **changes), secret)

    def lease(self, secret: str, capacity: int = 1, have_version: int = 0, wait_s: float = SOON_S) -> list[Task]:
        call = wire.LeaseCall(capacity=capacity, have_version=have_version, wait_s=wait_s)
        answer = self.post("/v1/lease", call, secret)
        assert answer.status == 200, answer.error
        return list(answer.record(LeaseResponse).tasks)

    def settle(self) -> None:
        """Waits until every answer has its reward, which comes after the call that handed it in."""
        deadline_s = time.monotonic() + SOON_S
        while self.config.reward.processes and self._num_without_reward():
            assert time.monotonic() < deadline_s, "rewards do not come"
            time.sleep(0.01)

    def _num_without_reward(self) -> int:
        ((number,),) = self.ledger.execute("SELECT COUNT(*) FROM tasks WHERE state = 'accepted'")
        return int(number)

    def content(self) -> str:
        """A digest of every row of the ledger, workers and tokens apart."""
        digest = blake3()
        tables = [name for (name,) in self.ledger.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in sorted(set(tables) - {"workers", "join_tokens"}):
            for row in self.ledger.execute(f"SELECT * FROM {table}"):
                if row[0] == "worker_moves":
                    continue
                digest.update(repr((table, row)).encode())
        return digest.hexdigest()


def headers_of(body: bytes, **changes: Any) -> dict[str, str]:
    """Those that every call has; `changes` may take some away."""
    headers = {"Content-Type": wire.MSGPACK, wire.CONTENT_DIGEST: wire.content_digest(body), **changes}
    return {name: value for name, value in headers.items() if value is not None}


def answer(task: Task, number: int = 0, tokens: tuple[int, ...] = (5, 6), **changes: Any) -> Trajectory:
    """A finished answer, with its stop token; `changes` go into its only segment."""
    trajectory = task.new_trajectory()
    tokens = (*tokens, task.sampling.stop_token_ids[0])
    given = {"logprobs": np.full(len(tokens), -0.1), "version": number, "kv_version": number, "worker": "w"}
    trajectory.append(Segment(0, np.array(tokens), **{**given, **changes}), End.STOP)
    return trajectory
