"""URLs without their secrets, addresses of this machine, and the `Range` header of HTTP."""

from __future__ import annotations

import ipaddress
import re
import socket

from offbeat.errors import OffbeatError

LOGIN = re.compile(r"""(?<=://)(?:[^\s/?#"'<>]*|[^\s/?#"'<>:]*:(?!\d+[/\s])[^\s"'<>]*)@""")
"""A login in a URL, also with an unescaped slash in the password; a port is no password."""
QUERY = re.compile(r"""(://[^\s?#"'<>]*)[?#][^\s"'<>]*""")


def shown(text: str) -> str:
    """A text whose URLs have no login, query or fragment, where passwords and tokens are."""
    return QUERY.sub(r"\1", LOGIN.sub("", text)) if "://" in text else text


def is_loopback(host: str) -> bool:
    """Whether `host` is localhost or a loopback address. Resolves no names."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def is_this_machine(host: str) -> bool:
    """Whether `host` resolves to loopback addresses alone; an empty name is every address of the machine."""
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host or "0.0.0.0", 0, type=socket.SOCK_STREAM)}
    except OSError:
        return False  # binding to it raises the error
    return all(is_loopback(str(address)) for address in found)


RANGE = re.compile(r"bytes=([0-9]*)-([0-9]*)")
MAX_DIGITS = 18
"""Longer numbers are no position in a file; Python refuses to parse thousands of digits."""


class RangeError(OffbeatError, ValueError):
    """A range that cannot be sent; `status` is the HTTP status of the refusal."""

    def __init__(self, status: int, why: str):
        super().__init__(f"Range: {why}")
        self.status = status


def byte_range(header: str | None, num_bytes: int) -> tuple[int, int] | None:
    """First byte and one past the last that `header` asks for out of `num_bytes`; None: all of them.

    Raises `RangeError`: 416 where no byte is left to send, 400 where a number is too long to be a position in a file.
    A header in any other form is ignored, as the standard allows.
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
