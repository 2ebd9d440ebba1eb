"""The tree by which weights spread from worker to worker, so that a version crosses each slow link once.

At every site one receiver, the head, fetches from the root (the coordinator, or its store). The others fetch from
receivers of their own site; a receiver that feeds others is a relay. Guarantees: every receiver reaches the root. No
relay feeds more than `fan_out` receivers while the site's relays have room for all. If they have not, each feeds about
equally many too many; that is better than a second receiver of the site that fetches over the slow link. When a
receiver joins, those already in the tree keep their places, except to give the site a head or a much faster head, to
relieve an overloaded relay, or to shorten a long path. A relay that leaves or falls silent is replaced by the receiver
farthest from the root, so that few receivers move and the tree stays flat. A head is replaced by the receiver with the
best rate from the root.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

ROOT = ""
"""Name of the root (the coordinator or its store), which no receiver may have."""
FAN_OUT = 2
"""Most receivers that a relay should feed. Links within a site are nearly always at least twice as fast as links
between sites."""
MUCH_FASTER = 2.0
"""A receiver replaces its site's head if its rate from the root is more than this many times the head's."""
WORTH_LEVELS = 2
"""A receiver is moved to shorten its path to the root only if the path becomes shorter by at least this many levels.
Each level delays a receiver by about the time of one piece."""


@dataclass(frozen=True, slots=True)
class RelayNode:
    name: str
    site: str
    serves: bool = True
    """Whether other receivers can fetch from this one."""
    root_bytes_per_s: float | None = None
    """Rate at which this receiver fetched pieces from the root; None: not measured."""


class RelayTree:
    """Records from which receiver (worker) each receiver fetches weights; the caller adds and removes receivers."""

    def __init__(self, fan_out: int = FAN_OUT):
        assert fan_out >= 1, f"fan_out = {fan_out}: must be 1 or more"
        self._fan_out = fan_out
        self._sites: dict[str, SiteTree] = {}
        self._site_of: dict[str, str] = {}

    def put(self, receiver: RelayNode) -> None:
        """Adds a receiver, or updates the one of the same name."""
        assert receiver.name != ROOT
        if self._site_of.get(receiver.name, receiver.site) != receiver.site:
            self.remove(receiver.name)
        self._site_of[receiver.name] = receiver.site
        self._sites.setdefault(receiver.site, SiteTree(self._fan_out)).put(receiver)

    def remove(self, name: str) -> None:
        """Removes a receiver; an unknown one is ignored."""
        site = self._site_of.pop(name, None)
        if site is not None:
            self._sites[site].remove(name)
            if not self._sites[site].members:
                del self._sites[site]

    def sources(self, name: str) -> list[str]:
        """Returns the sources of receiver `name` in the order to ask them: its parent, its grandparent, …, the root."""
        parents, line = self._sites[self._site_of[name]].parents, []
        while name != ROOT:
            name = parents[name]
            line.append(name)
        return line


class SiteTree:
    """Tree over the receivers of one site. Only the head, a receiver that can serve others, fetches from the root. If
    no receiver can serve, all fetch from the root."""

    def __init__(self, fan_out: int):
        self.members: dict[str, RelayNode] = {}
        self.parents: dict[str, str] = {}
        self._fan_out = fan_out

    def put(self, receiver: RelayNode) -> None:
        is_new = receiver.name not in self.members
        self.members[receiver.name] = receiver
        if is_new:
            self._attach(receiver.name)
        elif not receiver.serves:
            self._step_down(receiver.name)
        self._rebalance()

    def remove(self, name: str) -> None:
        self.members[name] = replace(self.members[name], serves=False)
        self._step_down(name)
        del self.members[name], self.parents[name]
        self._rebalance()

    def _snapshot(self) -> _Snapshot:
        fan_outs = {name: self._fan_out if member.serves else 0 for name, member in self.members.items()}
        return _Snapshot(self.parents, fan_outs)

    def _attach(self, name: str) -> None:
        """Attaches a receiver, with the receivers below it, as near to the root as there is room."""
        self.parents.pop(name, None)
        tree = self._snapshot()  # without its subtree, which is unreachable now
        servers = [other for other in tree.depths if tree.fan_outs[other]]
        self.parents[name] = min(servers, key=lambda other: (tree.excess(other), *tree.nearness(other)), default=ROOT)

    def _step_down(self, name: str) -> None:
        """Makes a receiver feed no others. If it has children, it first swaps places with a receiver that can serve: a
        head with the one that has the best rate from the root, any other receiver with the one farthest from the root.
        Children that it has after the swap are attached elsewhere."""
        tree = self._snapshot()
        others = [other for other in tree.depths if tree.fan_outs[other] and other != name]
        if not tree.children[name] or not others:
            heir = None
        elif self.parents[name] == ROOT:
            heir = max(others, key=lambda other: (self._from_root(other), tree.depths[other], tree.fan_outs[other]))
        else:
            heir = max(others, key=lambda other: (tree.depths[other], tree.fan_outs[other]))
        if heir is not None:
            self._exchange(name, heir)
        for child in self._snapshot().children[name]:
            self._attach(child)

    def _from_root(self, name: str) -> float:
        """Returns a receiver's rate from the root in bytes per second; infinity if it was not measured, which favours
        it."""
        found = self.members[name].root_bytes_per_s
        return math.inf if found is None else found

    def _exchange(self, one: str, other: str) -> None:
        names = {one: other, other: one}
        self.parents = {names.get(child, child): names.get(parent, parent) for child, parent in self.parents.items()}

    def _rebalance(self) -> None:
        """Makes one receiver the head, relieves overloaded relays and shortens a needlessly long path, in few moves."""
        self._ensure_one_head()
        while move := self._snapshot().relief():
            self.parents.update([move])
        if move := self._snapshot().shortcut():
            self.parents.update([move])

    def _ensure_one_head(self) -> None:
        below_root = [name for name, parent in self.parents.items() if parent == ROOT]
        head = next((name for name in below_root if self.members[name].serves), None)
        if head is None:
            return
        for name in below_root:
            if name != head:
                self._attach(name)
        known = [name for name, member in self.members.items() if member.serves and member.root_bytes_per_s]
        best = max(known, key=self._from_root, default=head)
        if self._from_root(best) > MUCH_FASTER * self._from_root(head):
            self._exchange(head, best)


class _Snapshot:
    """A site's tree at one moment; `fan_outs` holds the largest number of children that each receiver should feed."""

    def __init__(self, parents: Mapping[str, str], fan_outs: Mapping[str, int]):
        self.fan_outs = fan_outs
        self.children: dict[str, list[str]] = {name: [] for name in (ROOT, *fan_outs)}
        for name, parent in parents.items():
            self.children[parent].append(name)
        self.depths: dict[str, int] = {}
        """Number of levels from the root to each receiver that reaches the root, nearest first."""
        waiting = deque((name, 1) for name in self.children[ROOT])
        while waiting:
            name, depth = waiting.popleft()
            self.depths[name] = depth
            waiting.extend((child, depth + 1) for child in self.children[name])

    def excess(self, name: str) -> float:
        """Returns how far one more child would take a receiver beyond its fan-out, as a share of the fan-out; 0 if it
        has room."""
        return max(len(self.children[name]) + 1 - self.fan_outs[name], 0) / self.fan_outs[name]

    def nearness(self, name: str) -> tuple[int, float]:
        return self.depths[name], len(self.children[name]) / self.fan_outs[name]

    def rooms(self) -> list[str]:
        """Returns the relays that can feed one more child, nearest to the root first."""
        found = [name for name in self.depths if len(self.children[name]) < self.fan_outs[name]]
        return sorted(found, key=self.nearness)

    def relief(self) -> tuple[str, str] | None:
        """Returns a move that relieves an overloaded relay, as (child of that relay, relay with room for the child).
        Returns None if no relay is overloaded or none has room."""
        crowded = [name for name in self.depths if len(self.children[name]) > self.fan_outs[name]]
        rooms = self.rooms()
        if not crowded or not rooms:
            return None
        children = sorted(reversed(self.children[crowded[0]]), key=lambda child: self.fan_outs[child] > 0)
        return next(child for child in children if not self.is_below(rooms[0], child)), rooms[0]  # one of at least two

    def shortcut(self) -> tuple[str, str] | None:
        """Returns a move that shortens the longest path, as (receiver farthest from the root, nearer relay with room);
        None if no move saves `WORTH_LEVELS` levels."""
        rooms, leaves = self.rooms(), [name for name in self.depths if not self.children[name]]
        if not rooms or not leaves:
            return None
        farthest = max(leaves, key=lambda name: self.depths[name])
        if self.depths[farthest] - (self.depths[rooms[0]] + 1) < WORTH_LEVELS:
            return None
        return farthest, rooms[0]

    def is_below(self, name: str, other: str) -> bool:
        waiting = [other]
        while waiting:
            found = waiting.pop()
            if found == name:
                return True
            waiting += self.children[found]
        return False
