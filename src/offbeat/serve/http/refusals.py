"""How the coordinator says no over HTTP: one status for each reason, and one line that tells it.

Whatever a call raises becomes a response here, and nowhere else; what nobody foresaw becomes a 500 without details, and
a traceback in our own log.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import msgspec
from fastapi import Response

from offbeat.errors import DeadlineError, OffbeatError, RunOver, RunStopped, UserError
from offbeat.ledger.errors import Conflict, Fenced, Forbidden, LedgerError, Refused, Unknown
from offbeat.serve.http.coding import CONTENT_DIGEST, DAMAGED
from offbeat.trajectory import SegmentError

log = logging.getLogger(__name__)

STATUS: dict[type[OffbeatError], int] = {
    Unknown: 404,
    Forbidden: 403,
    Refused: 422,
    SegmentError: 422,
    UserError: 422,
    Conflict: 409,
    Fenced: 410,
    RunOver: 410,
    RunStopped: 410,
    DeadlineError: 504,
    LedgerError: 500,
    OffbeatError: 500,
}
"""By the nearest class. A ledger that cannot write, as on a full disk, is a 500: callers try again until it can, or
whoever started the coordinator again has made space."""
JSON = "application/json"


class Refusal(OffbeatError):
    """A call that was not let through, with the status that says so."""

    def __init__(
        self,
        status: int,
        why: str,
        *,
        retry_after_s: float | None = None,
        close: bool = False,
        kind: str | None = None,
    ):
        super().__init__(why)
        self.status, self.retry_after_s, self.close, self.kind = status, retry_after_s, close, kind

    def headers(self) -> dict[str, str]:
        found: dict[str, str] = {}
        if self.retry_after_s is not None:
            found["Retry-After"] = str(max(math.ceil(self.retry_after_s), 1))
        if self.status == 401:
            found["WWW-Authenticate"] = "Bearer"
        if self.close:
            found["Connection"] = "close"
        return found


def damaged(what: str = "body") -> Refusal:
    """The refusal of what changed on its way here; the caller sends it again."""
    return Refusal(400, f"{CONTENT_DIGEST}: the {what} is not what was sent", kind=DAMAGED)


def answer(error: Exception) -> Response:
    if isinstance(error, Refusal):
        return told(error.status, str(error), kind=error.kind, headers=error.headers())
    for kind in type(error).__mro__:
        if kind in STATUS:
            return told(STATUS[kind], str(error), kind=kind.__name__)
    log.error("a call failed", exc_info=error)
    return told(500, "internal error; the coordinator's log tells more")


def told(status: int, why: str, *, kind: str | None = None, headers: Mapping[str, str] | None = None) -> Response:
    body = {"error": " ".join(why.split())}
    if kind is not None:
        body["kind"] = kind
    return Response(msgspec.json.encode(body), status, headers, JSON)
