"""Assigns each worker the peers (other workers) from which it fetches weights, so that a version crosses a slow link
once.

Each worker names its site (machines with a fast network between them), and the port at which it serves pieces, if any.
In return, the worker gets the addresses of its relays (`offbeat.weights.relay_tree`): the peers that it asks for
pieces, nearest first. Only after them does it ask the root, which is the coordinator or the run's store. A worker that
falls silent is no longer used as a relay. A worker may name an address other than the one it calls from only within
`serve.peer_networks`: otherwise it could direct its whole site to any machine.

Each pair of workers of a site has its own key: the hash of two random numbers, one of each worker. A worker's number is
drawn at its first call, dropped when it leaves, and never written to disk. The keys of a worker that has left or was
quarantined are therefore worthless.
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
"""Silence after which a worker is no longer used as a relay, because it may be gone."""
NUMBER_BYTES = 32
ON_THIS_MACHINE = " on the coordinator's machine"
"""Suffix for the site name of workers with a loopback address: only workers on this machine can reach that address."""

Address = tuple[str, int]


@dataclass(frozen=True)
class WorkerSite:
    """Site and address of a worker."""

    site: str
    """Name shared by machines with a fast network between them; "": the worker uses no peers."""
    address: Address | None = None
    """Address at which the worker serves pieces; None: it serves none."""
    root_bytes_per_s: float | None = None
    """Rate at which the worker receives from the root; None: not measured."""


@dataclass(frozen=True)
class PieceSource:
    """Address of a worker from which to fetch pieces, and the key to send to it."""

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
    """Returns site and address of a worker that names its site `site` and calls from IP address `seen`.

    The worker serves pieces at `port` of `host`, or of `seen` if `host` is empty. Its address is None if `port` is 0,
    or if `behind_proxy` and only the proxy's loopback address is known. Raises `Refused` if `host` is not an IP
    address, or is neither `seen` nor in one of `networks`.
    """
    calls_from = _address(seen)
    own = calls_from if not host else _address(host)
    if own is None and host:
        raise Refused(f"peer address {host!r} is not an IP address; give one, as in --peer-address {seen}:{port}")
    if own is not None and own != calls_from and not any(own in ipaddress.ip_network(net) for net in networks):
        raise Refused(
            f"this worker calls from {seen}, but gives {host} as its peer address; add the network of {host} to "
            f"serve.peer_networks, or start the worker with --peer-address {seen}:{port}"
        )
    is_local = own is not None and own.is_loopback
    name = site + ON_THIS_MACHINE * is_local if site else ""
    if own is None or not port or (behind_proxy and is_local):  # behind a proxy, a loopback address is the proxy's
        return WorkerSite(name)
    return WorkerSite(name, (str(own), port))


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


class RelayAssignment:
    """Assigns workers their peers. Knows, of each worker that is not silent, its site, its address, and the random
    number from which its keys are made."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, silent_s: float = SILENT_S):
        self._clock, self._silent_s = clock, silent_s
        self._tree = RelayTree()
        self._heard: dict[str, _Present] = {}

    def sources(self, worker: str, site: WorkerSite) -> list[PieceSource]:
        """Records the site of `worker`. Returns the peers, in order, that it asks for pieces before it asks the
        coordinator or the store."""
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
        """Returns the hashes of the keys with which other workers at the site of `worker` may fetch pieces from it."""
        self._forget_silent()
        ours = self._heard.get(worker)
        if ours is None or ours.site.address is None:
            return []
        others = [other for other in self._heard.values() if other is not ours and other.site.site == ours.site.site]
        return [key_hash(_key(other, ours)) for other in others]

    def keep(self, members: Collection[str]) -> None:
        """Forgets workers that are not in `members`, the active workers of the run."""
        for worker in [worker for worker in self._heard if worker not in members]:
            self.leave(worker)

    def hear(self, worker: str) -> None:
        """Records that `worker` is alive."""
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
    """Returns the hash by which a serving worker recognises `key` without being able to use the key itself."""
    return blake3(key.encode()).hexdigest()
