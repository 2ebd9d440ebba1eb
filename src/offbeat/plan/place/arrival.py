"""When each node has a version that is relayed in chunks, and what every hop gets of ports and links.

A node gets a version from one sender, or from several, each of which sends every so manieth chunk: then each path
carries that share of the bytes, and a node that passes one share on to two others fills its port once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter

from offbeat.plan.cost.sync import CHUNK_BYTES
from offbeat.plan.place.nodes import Fabric

Senders = Mapping[str, tuple[str, ...]]
"""By receiver: who sends to it; of several the n-th sends the n-th share of all chunks, on which its own receivers
depend for that share."""


def hops_of(senders: Senders) -> Iterator[tuple[str, str]]:
    """All pairs of sender and receiver."""
    return ((sender, receiver) for receiver, several in senders.items() for sender in several)


def hop_rates(fabric: Fabric, senders: Senders) -> dict[tuple[str, str], float]:
    """Bytes a second from sender to receiver, after shared links and ports are divided."""
    hops = list(hops_of(senders))
    crossings = Counter(_offers(fabric, *hop) for hop in hops)
    ports: dict[tuple[str, bool], dict[str, float]] = {}
    for sender, receiver in hops:
        users = crossings[_offers(fabric, sender, receiver)] if fabric.is_shared(sender, receiver) else 1
        port = ports.setdefault((sender, fabric.is_near(sender, receiver)), {})
        port[receiver] = fabric.bytes_per_s(sender, receiver) / users
    rates: dict[tuple[str, str], float] = {}
    for (sender, is_near), limits in ports.items():
        divided = _divided(limits, fabric.port_bytes_per_s(sender, is_near))
        rates |= {(sender, receiver): rate for receiver, rate in divided.items()}
    return rates


def _divided(limits: Mapping[str, float], total: float) -> dict[str, float]:
    """A port's rate among its hops, evenly, except that none gets more than its own limit."""
    shares, left = {}, total
    for i, (name, limit) in enumerate(sorted(limits.items(), key=lambda item: (item[1], item[0]))):
        shares[name] = min(limit, left / (len(limits) - i))
        left -= shares[name]
    return shares


def arrival_s(fabric: Fabric, senders: Senders, num_bytes: float, chunk_bytes: float = CHUNK_BYTES) -> dict[str, float]:
    """When each node has everything: all bytes at the least rate of its way, and one chunk more per hop."""
    rates = hop_rates(fabric, senders)
    least: dict[tuple[str, int], float] = {}
    """By node and share: the rate at which the whole version would come as that share does."""
    delay_s: dict[tuple[str, int], float] = {}
    for name, part in shares_in_order(senders):
        several = senders[name]
        before, rate = _held(senders, name, part), rates[several[part], name]
        least[name, part] = min([rate * len(several), *(least[each] for each in before if each in least)])
        delay_s[name, part] = max((delay_s.get(each, 0.0) for each in before), default=0.0)
        delay_s[name, part] += chunk_bytes / rate + fabric.latency_s(several[part], name)
    arrived_s = dict.fromkeys(senders, 0.0)
    for (name, part), rate in least.items():
        # The hop that first brings the bytes has its first chunk counted in them.
        rest = max(num_bytes - len(senders[name]) * chunk_bytes, 0.0)
        arrived_s[name] = max(arrived_s[name], rest / rate + delay_s[name, part])
    return arrived_s


def shares_in_order(senders: Senders) -> list[tuple[str, int]]:
    """Every receiver with every share that it gets, after what its sender must have for it."""
    needs = {
        (name, part): _held(senders, name, part) for name, several in senders.items() for part in range(len(several))
    }
    return [share for share in TopologicalSorter(needs).static_order() if share in needs]


def _held(senders: Senders, name: str, part: int) -> list[tuple[str, int]]:
    """What the sender of a share must have to pass it on: that share, or all of its own where nobody takes turns with
    it or where it got all from one."""
    sender = senders[name][part]
    num_parts = len(senders.get(sender, ())) or 1
    is_same = len(senders[name]) == num_parts > 1
    return [(sender, part)] if is_same else [(sender, each) for each in range(num_parts)]


def _offers(fabric: Fabric, sender: str, receiver: str) -> tuple[str, str]:
    return fabric.nodes[sender].offer, fabric.nodes[receiver].offer
