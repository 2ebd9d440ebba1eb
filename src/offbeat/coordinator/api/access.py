"""Authentication, roles and rate limits of callers.

A member (a worker, judge or trainer that has joined) authenticates with the secret that it joined with, a newcomer with
its join token. Both are sent in a request header, so the body of an unknown caller is never read. Secrets are never
logged. They are looked up in the ledger and cached until the state of any worker changes. So a revocation by another
process takes effect within `KNOWN_S` seconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection

from starlette.requests import Request

from offbeat.coordinator.api.errors import Refusal
from offbeat.coordinator.api.limits import Buckets, ServerSettings
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.workers import Role, WorkerRecord, WorkerState

HOW_TO_JOIN = "get another with offbeat worker token RUN, on the coordinator's machine"
MAX_SECRET_CHARACTERS = 256
KNOWN_S = 0.05
"""Seconds after which the ledger is checked again for changed worker states. It is not checked at every call, because
one ledger read costs as much as the rest of a small call."""
MAX_KNOWN = 10_000


class Access:
    """Admits callers, or refuses them with a reason."""

    def __init__(self, reader: Ledger, settings: ServerSettings, clock: Callable[[], float], seen: dict[str, float]):
        """`seen` receives the wall time of each member's latest call."""
        self.reader, self._clock, self._seen = reader, clock, seen
        self._known: dict[str, WorkerRecord] = {}
        """Cached workers by secret."""
        self._num_moves, self._checked_s = -1, -math.inf
        self._calls = Buckets(settings.requests_per_s, settings.request_burst, clock)
        self._joins = Buckets(settings.joins_per_s, max(settings.joins_per_s, 1.0), clock)

    def admit(self, request: Request, roles: Collection[Role]) -> WorkerRecord:
        """Returns the calling member. Raises `Refusal` if its secret is invalid, if it is quarantined or calls too
        often, or if its role is not in `roles`."""
        worker = self.identify(request)
        self._seen[worker.name] = time.time()
        if wait_s := self._calls.take(worker.name):
            raise Refusal(
                429, f"worker {worker.name} makes too many calls; wait before the next one", retry_after_s=wait_s
            )
        if worker.state is WorkerState.QUARANTINED:
            raise Refusal(403, f"worker {worker.name} is quarantined: {worker.reason or 'no reason given'}")
        if worker.role not in roles:
            allowed = " or ".join(sorted(role.value for role in roles))
            raise Refusal(403, f"worker {worker.name} joined as {worker.role.value}; this call is only for {allowed}")
        return worker

    def admit_stranger(self, request: Request) -> str:
        """Returns the join token of a newcomer; refuses unknown tokens and too many attempts per second."""
        if wait_s := self._joins.take(address(request)):
            raise Refusal(
                429, "too many attempts to join from this address; wait before the next one", retry_after_s=wait_s
            )
        token = _bearer(request, "a join token")
        with self.reader.naming_damage():
            is_issued = self.reader.is_token(token)
        if not is_issued:
            raise Refusal(401, f"this join token was never issued for this run; {HOW_TO_JOIN}")
        return token

    def identify(self, request: Request) -> WorkerRecord:
        secret = _bearer(request, "the secret that a worker joined with")
        worker = self._worker_of(secret)
        if worker is None:
            raise Refusal(401, "the secret in the Authorization header is unknown; join again with a new join token")
        if worker.state is WorkerState.REVOKED:
            raise Refusal(401, f"worker {worker.name} was revoked: {worker.reason or 'no reason given'}")
        return worker

    def refresh(self) -> None:
        """Makes the next call check the ledger for changed worker states."""
        self._checked_s = -math.inf

    def _worker_of(self, secret: str) -> WorkerRecord | None:
        with self.reader.naming_damage():
            self._forget_moved()
            worker = self._known.get(secret) or self.reader.worker_by_secret(secret)
        if worker is not None and len(self._known) < MAX_KNOWN:
            self._known[secret] = worker
        return worker

    def _forget_moved(self) -> None:
        now_s = self._clock()
        if now_s - self._checked_s < KNOWN_S:
            return
        num_moves, self._checked_s = self.reader.num_worker_moves(), now_s
        if num_moves != self._num_moves:
            self._known.clear()
            self._num_moves = num_moves


def _bearer(request: Request, what: str) -> str:
    """Returns the bearer secret of a request; `what` names the secret in errors."""
    scheme, _, shown = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not shown:
        raise Refusal(401, f"the header must be 'Authorization: Bearer SECRET', where SECRET is {what}")
    if len(shown) > MAX_SECRET_CHARACTERS:
        raise Refusal(
            401, f"the Authorization header is longer than {MAX_SECRET_CHARACTERS} characters; it must hold {what}"
        )
    return shown


def address(request: Request) -> str:
    return request.client.host if request.client else "unknown"
