"""Whom each worker fetches weights from, so that a version crosses a slow link once.

Workers that can serve pieces say at which port, and at which site they are; whoever asks is told the addresses of its
line of relays (`offbeat.control.relay`), nearest first. The coordinator itself, or the run's store, is always the last
resort and is not named. A worker that is not heard of for a while relays to nobody any more.

A worker's address is the one that it calls from. One behind another's (NAT) may name its own, if that lies in a network
that the coordinator was told to believe in (`serve.peer_networks`): otherwise a worker could send all others of its
site to whatever machine it likes.

Every two workers of a site have a key of their own, for one of them to fetch from the other. It is made of two random
numbers, which are drawn when a worker is first heard of, forgotten when it leaves, and never written down; so a worker
that is gone, or was set aside, has keys that nobody honours.
"""

from __future__ import annotations

import ipaddress
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from blake3 import blake3

from offbeat.control.relay import ROOT, Receiver, RelayTree
from offbeat.ledger.errors import Refused

SILENT_S = 60.0
"""A relay asks for a version every few steps; one that was silent for longer may be gone."""
NUMBER_BYTES = 32
ON_THIS_MACHINE = " on the coordinator's machine"
"""Added to the site of those whose address is a loopback one, which means another machine everywhere else."""

Address = tuple[str, int]


@dataclass(frozen=True)
class Place:
    """Where a worker is, in the relay's eyes."""

    site: str
    """Machines that reach each other fast have the same; "" is nobody's."""
    address: Address | None = None
    """Where it serves pieces; None: nowhere."""
    up_bytes_per_s: float | None = None
    root_bytes_per_s: float | None = None


@dataclass(frozen=True)
class Source:
    """A worker that another may fetch from, and what to show there."""

    address: Address
    key: str = field(repr=False)


@dataclass(frozen=True)
class _Present:
    heard_s: float
    place: Place
    number: bytes = field(default_factory=lambda: secrets.token_bytes(NUMBER_BYTES), repr=False)


def place_of(
    site: str, seen: str, host: str, port: int, networks: Sequence[str], *, behind_proxy: bool = False
) -> Place:
    """Where a worker is that calls from the address `seen`, and that serves at `port`, or nowhere if that is 0.

    `host` is the address that it names for itself; "": the one that it calls from. `Refused` where it may not.
    """
    calls_from = _address(seen)
    own = calls_from if not host else _address(host)
    if own is None and host:
        raise Refused(f"peer address {host!r}: not an IP address")
    if own is not None and own != calls_from and not any(own in ipaddress.ip_network(net) for net in networks):
        raise Refused(
            f"peer address {host}: this worker calls from {seen}; let the coordinator believe in such addresses with "
            f"serve.peer_networks, or serve at an address that it sees"
        )
    is_local = own is not None and own.is_loopback
    if own is None or not port or (behind_proxy and is_local):  # then it is the proxy's
        return Place(site + ON_THIS_MACHINE * is_local if site else "")
    return Place(site + ON_THIS_MACHINE * is_local if site else "", (str(own), port))


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


class Relaying:
    def __init__(self, clock: Callable[[], float] = time.monotonic, silent_s: float = SILENT_S):
        self._clock, self._silent_s = clock, silent_s
        self._tree = RelayTree()
        self._heard: dict[str, _Present] = {}

    def sources(self, worker: str, place: Place) -> list[Source]:
        """Whom a worker is to ask, in this order, before it asks us."""
        self._forget_silent()
        if not place.site:  # nobody is near it
            self.leave(worker)
            return []
        known = self._heard.get(worker)
        now_s = self._clock()
        ours = replace(known, heard_s=now_s, place=place) if known else _Present(now_s, place)
        self._heard[worker] = ours
        self._tree.put(
            Receiver(worker, place.site, place.address is not None, place.up_bytes_per_s, place.root_bytes_per_s),
        )
        line = [self._heard[name] for name in self._tree.sources(worker) if name != ROOT]
        return [Source(other.place.address, _key(ours, other)) for other in line if other.place.address is not None]

    def guests(self, worker: str) -> list[str]:
        """The hashes of the keys with which others of its site may fetch from a worker."""
        self._forget_silent()
        ours = self._heard.get(worker)
        if ours is None or ours.place.address is None:
            return []
        others = [other for other in self._heard.values() if other is not ours and other.place.site == ours.place.site]
        return [key_hash(_key(other, ours)) for other in others]

    def keep(self, members: Collection[str]) -> None:
        """Forgets whoever is not among the members of the run any more."""
        for worker in [worker for worker in self._heard if worker not in members]:
            self.leave(worker)

    def hear(self, worker: str) -> None:
        """It is alive."""
        if worker in self._heard:
            self._heard[worker] = replace(self._heard[worker], heard_s=self._clock())

    def leave(self, worker: str) -> None:
        if self._heard.pop(worker, None) is not None:
            self._tree.remove(worker)

    def _forget_silent(self) -> None:
        since_s = self._clock() - self._silent_s
        for worker in [worker for worker, present in self._heard.items() if present.heard_s < since_s]:
            self.leave(worker)


def _key(asker: _Present, server: _Present) -> str:
    return blake3(asker.number + server.number).hexdigest()


def key_hash(key: str) -> str:
    """What a server is told of a key: enough to know it again, too little to use it."""
    return blake3(key.encode()).hexdigest()
