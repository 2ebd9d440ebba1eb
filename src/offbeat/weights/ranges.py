"""Reads the `Range` header of HTTP, for everyone who sends files or pieces in parts."""

from __future__ import annotations

import re

from offbeat.errors import OffbeatError

RANGE = re.compile(r"bytes=([0-9]*)-([0-9]*)")
MAX_DIGITS = 18
"""No file has more bytes than that; and Python refuses to read a number of thousands of digits."""


class RangeError(OffbeatError, ValueError):
    """A range that cannot be sent; `status` is the HTTP status that says why."""

    def __init__(self, status: int, why: str):
        super().__init__(f"Range: {why}")
        self.status = status


def byte_range(header: str | None, num_bytes: int) -> tuple[int, int] | None:
    """First byte and one past the last that `header` asks of `num_bytes`; None: all of them.

    Raises `RangeError`: 416 where no byte is left to send, 400 where a number is too long to be a place in a file. A
    header in any other form is ignored, as the standard allows.
    """
    found = RANGE.fullmatch(header or "")
    if found is None or found.group(0) == "bytes=-":
        return None
    first, last = found.groups()
    if max(len(first), len(last)) > MAX_DIGITS:
        raise RangeError(400, f"a number of more than {MAX_DIGITS} digits")
    if not first:
        start, stop = max(num_bytes - int(last), 0), num_bytes
    else:
        start, stop = int(first), min(int(last) + 1, num_bytes) if last else num_bytes
    if start >= stop:
        raise RangeError(416, f"{found.group(0)}: there are {num_bytes} bytes")
    return start, stop
