"""Who is calling, whether they may, and whether they call too often.

A caller proves who it is with the secret that it joined with, and one that wants to join with its token; both stand in
the head of the request, so that nothing of a stranger's body is looked at. Who a secret belongs to is looked up in the
ledger, on a connection that only reads, and remembered until some worker's state changes: what another process revoked
is over within `KNOWN_S`. Secrets are never logged.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Callable, Collection

from fastapi import Request

from offbeat.ledger.ledger import Ledger
from offbeat.ledger.workers import Role, Worker, WorkerState
from offbeat.serve.http.limits import Buckets, ServerSettings
from offbeat.serve.http.refusals import Refusal

HOW_TO_JOIN = "ask for another: offbeat worker token RUN"
MAX_SECRET_CHARACTERS = 256
KNOWN_S = 0.05
"""How long we may not notice a change: a look at the ledger costs as much as the rest of a small call."""
MAX_KNOWN = 10_000


class Access:
    """Lets callers in, or says why not."""

    def __init__(self, reader: Ledger, settings: ServerSettings, clock: Callable[[], float]):
        self.reader, self._clock = reader, clock
        self._known: dict[str, Worker] = {}
        """By secret."""
        self._num_moves, self._looked_s = -1, -math.inf
        self._calls = Buckets(settings.requests_per_s, settings.request_burst, clock)
        self._joins = Buckets(settings.joins_per_s, max(settings.joins_per_s, 1.0), clock)

    def admit(self, request: Request, roles: Collection[Role]) -> Worker:
        """The worker that calls, if its role may make this call."""
        worker = self.identify(request)
        if wait_s := self._calls.take(worker.name):
            raise Refusal(429, f"worker {worker.name}: too many calls", retry_after_s=wait_s)
        if worker.state is WorkerState.QUARANTINED:
            raise Refusal(403, f"worker {worker.name}: quarantined: {worker.reason or 'no reason given'}")
        if worker.role not in roles:
            allowed = " or ".join(sorted(role.value for role in roles))
            raise Refusal(403, f"worker {worker.name}: joined as {worker.role.value}; this is for {allowed}")
        return worker

    def admit_stranger(self, request: Request) -> str:
        """The join token of someone who tries one, a few times a second; refuses one that was never issued."""
        if wait_s := self._joins.take(address(request)):
            raise Refusal(429, "too many attempts to join", retry_after_s=wait_s)
        token = _bearer(request, "a join token")
        with self.reader.naming_damage():
            is_issued = self.reader.is_token(token)
        if not is_issued:
            raise Refusal(401, f"join token: never issued for this run; {HOW_TO_JOIN}")
        return token

    def identify(self, request: Request) -> Worker:
        secret = _bearer(request, "the secret that a worker joined with")
        worker = self._worker_of(secret)
        if worker is None:
            raise Refusal(401, "Authorization: nobody's secret; join again with a new token")
        if worker.state is WorkerState.REVOKED:
            raise Refusal(401, f"worker {worker.name}: revoked: {worker.reason or 'no reason given'}")
        return worker

    def look_again(self) -> None:
        """Some worker's state may have changed just now."""
        self._looked_s = -math.inf

    def _worker_of(self, secret: str) -> Worker | None:
        with self.reader.naming_damage():
            self._forget_the_moved()
            worker = self._known.get(secret) or self.reader.worker_of(secret)
        if worker is not None and len(self._known) < MAX_KNOWN:
            self._known[secret] = worker
        return worker

    def _forget_the_moved(self) -> None:
        now_s = self._clock()
        if now_s - self._looked_s < KNOWN_S:
            return
        num_moves, self._looked_s = self.reader.num_worker_moves(), now_s
        if num_moves != self._num_moves:
            self._known.clear()
            self._num_moves = num_moves


def _bearer(request: Request, what: str) -> str:
    """What a caller shows to prove who it is."""
    scheme, _, shown = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not shown:
        raise Refusal(401, f"Authorization: missing; {what} is needed")
    if len(shown) > MAX_SECRET_CHARACTERS:
        raise Refusal(401, f"Authorization: {what} is needed, and none is that long")
    return shown


def address(request: Request) -> str:
    return request.client.host if request.client else "unknown"


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
