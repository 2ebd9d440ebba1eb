"""Which machines a name stands for."""

from __future__ import annotations

import ipaddress
import socket


def is_this_machine(host: str) -> bool:
    """Whether every address that the name stands for is a loopback one; an empty name stands for all."""
    try:
        found = {place[4][0] for place in socket.getaddrinfo(host or "0.0.0.0", 0, type=socket.SOCK_STREAM)}
    except OSError:
        return False  # binding will say what is wrong with the name
    return all(ipaddress.ip_address(str(name).partition("%")[0]).is_loopback for name in found)
