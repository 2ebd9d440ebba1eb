"""Assigns each worker the peers that it fetches weights from, so that a version crosses a slow link once.

Workers that serve pieces name their port and site; each gets the addresses of its line of relays
(`offbeat.weights.relay_tree`), nearest first. The coordinator or the run's store is always the last resort and is not
named. A worker that falls silent relays no more.

A worker's address is the one that it calls from. One behind NAT may name its own, if that lies in a network listed in
`serve.peer_networks`: otherwise a worker could send all others of its site to any machine.

Each pair of workers of a site has its own key, for one to fetch from the other. It is made of two random numbers, drawn
at a worker's first call, dropped when it leaves, and never written down; so the keys of a worker that has gone, or was
set aside, are worthless.
"""

from __future__ import annotations

import ipaddress
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from blake3 import blake3

from offbeat.ledger.errors import Refused
from offbeat.weights.relay_tree import ROOT, RelayNode, RelayTree

SILENT_S = 60.0
"""A relay asks for a version every few steps; one silent for longer may be gone."""
NUMBER_BYTES = 32
ON_THIS_MACHINE = " on the coordinator's machine"
"""Added to the site of workers with a loopback address, which means another machine everywhere else."""

Address = tuple[str, int]


@dataclass(frozen=True)
class WorkerSite:
    """Site and address of a worker."""

    site: str
    """Shared by machines that reach each other fast; "": none."""
    address: Address | None = None
    """Address at which it serves pieces; None: it does not."""
    root_bytes_per_s: float | None = None


@dataclass(frozen=True)
class PieceSource:
    """Address of a worker to fetch from, and the key to show there."""

    address: Address
    key: str = field(repr=False)


@dataclass(frozen=True)
class _Present:
    heard_s: float
    site: WorkerSite
    number: bytes = field(default_factory=lambda: secrets.token_bytes(NUMBER_BYTES), repr=False)


def site_of(
    site: str, seen: str, host: str, port: int, networks: Sequence[str], *, behind_proxy: bool = False
) -> WorkerSite:
    """Site of a worker that calls from the address `seen` and serves at `port` (0: it does not).

    `host` is the address that it names for itself; "": the one that it calls from. Raises `Refused` if it may not.
    """
    calls_from = _address(seen)
    own = calls_from if not host else _address(host)
    if own is None and host:
        raise Refused(f"peer address {host!r}: not an IP address")
    if own is not None and own != calls_from and not any(own in ipaddress.ip_network(net) for net in networks):
        raise Refused(
            f"peer address {host}: this worker calls from {seen}; allow such addresses with serve.peer_networks, "
            f"or serve at an address that the coordinator sees"
        )
    is_local = own is not None and own.is_loopback
    name = site + ON_THIS_MACHINE * is_local if site else ""
    if own is None or not port or (behind_proxy and is_local):  # a local address is then the proxy's
        return WorkerSite(name)
    return WorkerSite(name, (str(own), port))


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


class RelayAssignment:
    def __init__(self, clock: Callable[[], float] = time.monotonic, silent_s: float = SILENT_S):
        self._clock, self._silent_s = clock, silent_s
        self._tree = RelayTree()
        self._heard: dict[str, _Present] = {}

    def sources(self, worker: str, site: WorkerSite) -> list[PieceSource]:
        """The peers that a worker asks, in this order, before the root."""
        self._forget_silent()
        if not site.site:
            self.leave(worker)
            return []
        known = self._heard.get(worker)
        now_s = self._clock()
        ours = replace(known, heard_s=now_s, site=site) if known else _Present(now_s, site)
        self._heard[worker] = ours
        self._tree.put(RelayNode(worker, site.site, site.address is not None, site.root_bytes_per_s))
        line = [self._heard[name] for name in self._tree.sources(worker) if name != ROOT]
        return [PieceSource(other.site.address, _key(ours, other)) for other in line if other.site.address is not None]

    def guests(self, worker: str) -> list[str]:
        """Hashes of the keys with which others of its site may fetch from a worker."""
        self._forget_silent()
        ours = self._heard.get(worker)
        if ours is None or ours.site.address is None:
            return []
        others = [other for other in self._heard.values() if other is not ours and other.site.site == ours.site.site]
        return [key_hash(_key(other, ours)) for other in others]

    def keep(self, members: Collection[str]) -> None:
        """Forgets workers that are no longer members of the run."""
        for worker in [worker for worker in self._heard if worker not in members]:
            self.leave(worker)

    def hear(self, worker: str) -> None:
        """Notes that a worker is alive."""
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
    """Hash of a key, by which a server recognises it and cannot use it."""
    return blake3(key.encode()).hexdigest()
