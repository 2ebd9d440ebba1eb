"""Removes secrets from URLs, finds the addresses of this machine, and parses the `Range` header of HTTP."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import re
import socket
import struct

from offbeat.errors import OffbeatError

LOGIN = re.compile(r"""(?<=://)(?:[^\s/?#"'<>]*|[^\s/?#"'<>:]*:(?!\d+[/\s])[^\s"'<>]*)@""")
"""Matches a login in a URL, even if the password has an unescaped slash; a port is not taken for a password."""
QUERY = re.compile(r"""(://[^\s?#"'<>]*)[?#][^\s"'<>]*""")


def shown(text: str) -> str:
    """Returns the text with login, query and fragment removed from its URLs, because these may contain secrets."""
    return QUERY.sub(r"\1", LOGIN.sub("", text)) if "://" in text else text


def is_loopback(host: str) -> bool:
    """Whether `host` is "localhost" or a loopback address. Does not resolve other names."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def is_this_machine(host: str) -> bool:
    """Whether `host` resolves only to loopback addresses. False for an empty `host`, which means all addresses."""
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host or "0.0.0.0", 0, type=socket.SOCK_STREAM)}
    except OSError:
        return False  # binding to this host will raise the error
    return all(is_loopback(str(address)) for address in found)


SIOCGIFADDR = 0x8915
"""Number of Linux's `ioctl` request for the IPv4 address of a network interface."""


def own_addresses() -> list[str]:
    """Returns this machine's IPv4 addresses except loopback. The address used to reach other machines comes first."""
    found = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outward:
        outward.connect(("192.0.2.1", 9))  # sends nothing: only asks for the route
        found.append(outward.getsockname()[0])
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()))
                found.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in dict.fromkeys(found) if not is_loopback(address)]


RANGE = re.compile(r"bytes=([0-9]*)-([0-9]*)")
MAX_DIGITS = 18
"""Largest number of digits of a position in a file. Python refuses to parse numbers of thousands of digits."""


class RangeError(OffbeatError, ValueError):
    """The requested range cannot be sent; `status` is the HTTP status to answer with."""

    def __init__(self, status: int, why: str):
        super().__init__(f"the Range header {why}")
        self.status = status


def byte_range(header: str | None, num_bytes: int) -> tuple[int, int] | None:
    """Returns the range of bytes that `header` requests from a file of `num_bytes`, as start and exclusive end; None:
    the whole file.

    Raises `RangeError` with status 416 if the range is empty, and 400 if a number is too long to be a position in a
    file. A header in any other form is ignored, as the standard allows.
    """
    found = RANGE.fullmatch(header or "")
    if found is None or found.group(0) == "bytes=-":
        return None
    first, last = found.groups()
    if max(len(first), len(last)) > MAX_DIGITS:
        raise RangeError(400, f"has a number of more than {MAX_DIGITS} digits")
    if not first:
        start, stop = max(num_bytes - int(last), 0), num_bytes
    else:
        start, stop = int(first), min(int(last) + 1, num_bytes) if last else num_bytes
    if start >= stop:
        raise RangeError(416, f"asks for {found.group(0)}, but the file has {num_bytes} bytes")
    return start, stop
