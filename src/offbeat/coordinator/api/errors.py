"""Turns errors into HTTP responses: one status per kind of error, and one line of text.

An unexpected exception becomes a 500 without details, and its traceback goes to the coordinator's log.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from offbeat.errors import DeadlineError, OffbeatError, RunInterrupted, RunOver, RunStopped, UserError
from offbeat.ledger.errors import Conflict, Fenced, Forbidden, LedgerError, Refused, Unknown
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
    RunInterrupted: 410,
    RunOver: 410,
    RunStopped: 410,
    DeadlineError: 504,
    LedgerError: 500,
    OffbeatError: 500,
}
"""HTTP status of each error, found by the nearest base class. A ledger that cannot write, for example on a full disk,
gives a 500: callers retry until there is space and the coordinator has been restarted."""
JSON = "application/json"


class Refusal(OffbeatError):
    """Error with which a call is refused, including the HTTP status to send. `close` closes the connection after the
    answer; `kind` is sent with the text, so that the client knows how to react (`wire.DAMAGED`: send again)."""

    def __init__(
        self, status: int, why: str, *, retry_after_s: float | None = None, close: bool = False, kind: str | None = None
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


def answer(error: Exception) -> Response:
    if isinstance(error, Refusal):
        return refuse(error.status, str(error), kind=error.kind, headers=error.headers())
    for kind in type(error).__mro__:
        if kind in STATUS:
            return refuse(STATUS[kind], str(error), kind=kind.__name__)
    log.error("an API call failed unexpectedly; this is a bug", exc_info=error)
    return refuse(500, "the coordinator failed unexpectedly; see its log")


def refuse(status: int, why: str, *, kind: str | None = None, headers: Mapping[str, str] | None = None) -> Response:
    body = {"error": " ".join(why.split())}
    if kind is not None:
        body["kind"] = kind
    return Response(msgspec.json.encode(body), status, headers, JSON)
