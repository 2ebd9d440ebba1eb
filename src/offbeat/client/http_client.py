"""HTTP clients of the coordinator for workers, trainers and judges (which compute rewards).

`join` exchanges a join token for credentials. `RemoteWorker`, `RemoteTrainer` and `RemoteJudge` implement the protocols
of `offbeat.client.protocol` and raise the same errors as the coordinator.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from offbeat.client import wire
from offbeat.client.connection import Connection
from offbeat.client.credentials import Credentials
from offbeat.client.protocol import Heartbeat, LeaseResponse, RewardLease
from offbeat.client.weight_transfer import CoordinatorReceiver, send_version
from offbeat.errors import DeadlineError, UserError
from offbeat.ledger.errors import Forbidden, LedgerError
from offbeat.ledger.records import Batch, ComparedSegment, Outcome, Reconciled
from offbeat.ledger.workers import new_secret, secret_hash
from offbeat.rewards.pool import RewardResult
from offbeat.trajectory import Trajectory
from offbeat.weights.piece_store import PieceStore
from offbeat.weights.version import Version, verify

T = TypeVar("T")

POLL_S = 20.0
"""Longest wait in seconds that one request asks for; shorter than the timeouts of proxies."""
MAX_REASON = 4000
"""Largest number of characters of a failure's reason that are sent; the rest is cut off."""


@dataclass(frozen=True)
class Membership:
    """Result of joining a run."""

    credentials: Credentials
    config: Mapping[str, Any]
    """The run's configuration, with all defaults filled in."""


async def join(connection: Connection, token: str, name: str, secret: str | None = None) -> Membership:
    """Joins a run with a join token. Later calls over `connection` are authenticated with `secret`; None: a new secret
    is made. Joining again with the same token and secret returns the same worker."""
    secret = secret or new_secret()
    call = wire.Join(name=name, secret_hash=secret_hash(secret))
    try:
        found = await connection.call("/v1/join", call, wire.Welcome, secret=token)
    except LedgerError as error:
        raise UserError(f"{connection.url}: {error}") from error
    connection.secret = secret
    return Membership(Credentials(connection.url, found.worker, secret, found.role, found.run), found.config)


async def rejoin(connection: Connection, credentials: Credentials) -> Membership:
    """Rejoins a run with saved credentials, whose secret the connection uses from now on."""
    connection.secret = credentials.secret
    try:
        found = await connection.get("/v1/run", wire.RunInfo)
    except Forbidden as error:
        raise UserError(f"{connection.url}: {error}") from error
    return Membership(credentials, found.config)


async def _poll(call: Callable[[float], Awaitable[T]], is_done: Callable[[T], object], wait_s: float) -> T:
    """Repeats `call` until `is_done(answer)` is true or `wait_s` seconds have passed; returns the last answer. The
    argument of `call` is the number of seconds that the coordinator may wait before it answers."""
    deadline_s = time.monotonic() + wait_s
    while True:
        left_s = max(deadline_s - time.monotonic(), 0.0)
        poll_s = min(left_s, POLL_S)
        if is_done(found := await call(poll_s)) or left_s <= poll_s:
            return found


class RemoteWorker:
    """Implements `WorkerClient` over a connection that has joined as a worker."""

    def __init__(
        self,
        connection: Connection,
        cache: Path,
        *,
        shares_disk: bool = False,
        receiver: CoordinatorReceiver | None = None,
        figures: Callable[[], Mapping[str, float]] = dict,
    ):
        """`receiver` downloads the weights; None: they are downloaded from the coordinator into the folder `cache`.
        With `shares_disk`, the weights of a coordinator on the same machine are used where they are, without a
        download. `figures` returns measurements of this worker, which are sent with every heartbeat."""
        self._connection, self._shares_disk = connection, shares_disk
        self._receiver = receiver or CoordinatorReceiver(connection, cache)
        self._figures = figures
        self._life = secrets.token_hex(8)

    async def lease(self, capacity: int, have_version: int | None, wait_s: float) -> LeaseResponse:
        async def poll(poll_s: float) -> LeaseResponse:
            call = wire.LeaseCall(capacity=capacity, have_version=have_version, wait_s=poll_s)
            return await self._connection.call("/v1/lease", call, LeaseResponse, wait_s=poll_s)

        return await _poll(poll, lambda lease: lease.tasks or lease.version is not None or lease.is_over, wait_s)

    async def heartbeat(self, held: Sequence[tuple[int, int]]) -> Heartbeat:
        call = wire.HeartbeatCall(held=list(held), life=self._life, figures=dict(self._figures()))
        return await self._connection.call("/v1/heartbeat", call, Heartbeat)

    async def submit(self, trajectory: Trajectory, fence: int) -> Outcome:
        path = f"/v1/trajectories/{trajectory.task}/{fence}"
        data = await self._connection.send("PUT", path, trajectory.encode())
        return self._connection.decoded(data, wire.Submitted).outcome

    async def fail(self, task: int, fence: int, reason: str) -> None:
        await self._connection.post("/v1/fail", wire.FailCall(task=task, fence=fence, reason=reason[:MAX_REASON]))

    async def give_back(self, leases: Sequence[tuple[int, int]]) -> None:
        await self._connection.post("/v1/give-back", wire.GiveBackCall(leases=list(leases)))

    async def round_over(self, number: int, wait_s: float) -> bool:
        async def poll(poll_s: float) -> wire.RoundOver:
            call = wire.RoundOverCall(number=number, wait_s=poll_s)
            return await self._connection.call("/v1/round-over", call, wire.RoundOver, wait_s=poll_s)

        return (await _poll(poll, lambda found: found.is_over, wait_s)).is_over

    async def newer(self, have_version: int | None, wait_s: float) -> Version | None:
        async def poll(poll_s: float) -> wire.Newer:
            call = wire.NewerCall(have_version=have_version, wait_s=poll_s)
            return await self._connection.call("/v1/newer", call, wire.Newer, wait_s=poll_s)

        return (await _poll(poll, lambda found: found.version is not None, wait_s)).version

    async def fetch(self, version: Version) -> Version:
        if self._shares_disk and version.path.is_dir():
            await asyncio.to_thread(verify, version)
            return version
        return await self._receiver.fetch(version)

    async def leave(self) -> None:
        await self._connection.post("/v1/leave", wire.Nothing())


class RemoteTrainer:
    """Implements `TrainerClient` over a connection that has joined as a trainer."""

    def __init__(
        self, connection: Connection, *, shares_disk: bool = False, store: PieceStore | None = None, signer: str = ""
    ):
        """With `shares_disk`, the trainer writes versions into the coordinator's folder and sends no weights. Otherwise
        it sends weights from `store`; None: it sends none, because all machines use one shared store. `signer` is the
        public key that verifies this trainer's manifests; "": it signs no manifests."""
        self._connection, self._shares_disk, self._store, self._signer = connection, shares_disk, store, signer

    async def reconcile(
        self, step: int, version: int | None, *, home: str = "", from_scratch: bool = False
    ) -> Reconciled:
        call = wire.ReconcileCall(
            step=step, version=version, host=socket.gethostname(), home=home, from_scratch=from_scratch
        )
        reconciled = await self._connection.call("/v1/reconcile", call, Reconciled)
        self._connection.generation = reconciled.generation
        if self._signer:  # must precede the first signed manifest
            await self._connection.post("/v1/introduce", wire.IntroduceCall(key=self._signer))
        return reconciled

    async def next_version(self) -> int:
        return (await self._connection.call("/v1/next-version", wire.Nothing(), wire.NextVersion)).number

    async def publish(self, version: Version) -> None:
        await self._send_weights(version)
        await self._connection.post("/v1/publish", wire.PublishCall(version=version))

    async def claim(self, step: int, within_s: float) -> Batch:
        deadline_s = time.monotonic() + within_s
        while True:
            left_s = max(deadline_s - time.monotonic(), 0.0)
            poll_s = min(left_s, POLL_S)
            try:
                return await self._connection.call(
                    "/v1/claim", wire.ClaimCall(step=step, wait_s=poll_s), Batch, wait_s=poll_s
                )
            except DeadlineError as error:
                if left_s <= poll_s:
                    why = str(error).partition("; ")[2] or str(error)
                    raise DeadlineError(
                        f"step {step + 1}: no batch within rollout.deadline_s = {within_s:.0f} s; {why}"
                    ) from error

    async def commit(
        self, step: int, version: Version, audited: Sequence[int] = (), compared: Sequence[ComparedSegment] = ()
    ) -> None:
        await self._send_weights(version)
        call = wire.CommitCall(step=step, version=version, audited=list(audited), compared=list(compared))
        await self._connection.post("/v1/commit", call)

    async def checkpointed(self, step: int) -> None:
        await self._connection.post("/v1/checkpointed", wire.CheckpointedCall(step=step))

    async def report(self, row: Mapping[str, Any]) -> None:
        await self._connection.post("/v1/report", wire.ReportCall(row=dict(row)))

    async def _send_weights(self, version: Version) -> None:
        if not self._shares_disk and self._store is not None:
            await send_version(self._connection, self._store, version.number, version.manifest, self._signer)


class RemoteJudge:
    """Implements `JudgeClient` over a connection that has joined as a judge."""

    def __init__(self, connection: Connection):
        self._connection = connection

    async def lease_rewards(self, capacity: int, wait_s: float) -> RewardLease:
        async def poll(poll_s: float) -> RewardLease:
            call = wire.LeaseRewardsCall(capacity=capacity, wait_s=poll_s)
            return await self._connection.call("/v1/rewards/lease", call, RewardLease, wait_s=poll_s)

        return await _poll(poll, lambda lease: lease.ticket or lease.is_over or not capacity, wait_s)

    async def submit_rewards(self, ticket: str, results: Sequence[RewardResult]) -> None:
        bodies = [wire.result_body(result, MAX_REASON) for result in results]
        await self._connection.post("/v1/rewards", wire.SubmitRewardsCall(ticket=ticket, results=bodies))

    async def leave(self) -> None:
        await self._connection.post("/v1/leave", wire.Nothing())
