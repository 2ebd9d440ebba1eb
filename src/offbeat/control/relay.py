"""Who fetches weights from whom: a tree in which a version crosses each slow link once.

Duty: of every site, one receiver fetches from the root (the coordinator, or its store); the others fetch from receivers
of their own site. A relay feeds only as many others as its uplink carries at the pace at which pieces come in over the
slow link: two where nothing was measured. Each receiver is told its line of ancestors, so that a parent that died costs
one failed attempt until somebody notices.

Guarantees: every receiver reaches the root; nobody feeds more than its share while the site's relays have room for
all of it (where they have not, they are overloaded evenly rather than the slow link crossed twice); who joins moves
nobody, unless it relieves a relay that has too many; who leaves, or falls silent, is replaced by the one at the far
end, so that few move and the tree stays flat. Where nobody of a site can serve, each fetches from the root.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

ROOT = ""
"""The name of the root; no receiver has it."""
FAN_OUT = 2
"""Where no bandwidths are known. Links within a site are hardly ever less than twice as fast as those between sites."""
MAX_FAN_OUT = 8
"""However fast it is: a relay also generates."""
MUCH_FASTER = 2.0
"""What another must get from the root, over what the head of a site gets, to take its place."""
WORTH_LEVELS = 2
"""By how many levels someone must come nearer to the root to be moved: each costs about a piece's time."""


@dataclass(frozen=True, slots=True)
class Receiver:
    name: str
    site: str
    serves: bool = True
    """Whether others can fetch from it."""
    up_bytes_per_s: float | None = None
    """What it can send within its site, in all; None: not measured."""
    root_bytes_per_s: float | None = None
    """What came to it from the root; None: not measured."""


class RelayTree:
    """The receivers of a run; the caller says who is there, and how fast."""

    def __init__(self, fan_out: int = FAN_OUT):
        assert fan_out >= 1, fan_out
        self._fan_out = fan_out
        self._sites: dict[str, SiteTree] = {}
        self._site_of: dict[str, str] = {}

    def put(self, receiver: Receiver) -> None:
        """A receiver is there, or more is known of it."""
        assert receiver.name != ROOT
        if self._site_of.get(receiver.name, receiver.site) != receiver.site:
            self.remove(receiver.name)
        self._site_of[receiver.name] = receiver.site
        self._sites.setdefault(receiver.site, SiteTree(self._fan_out)).put(receiver)

    def remove(self, name: str) -> None:
        """A receiver left, or fell silent; one that nobody knows did so before."""
        site = self._site_of.pop(name, None)
        if site is not None:
            self._sites[site].remove(name)
            if not self._sites[site].members:
                del self._sites[site]

    def sources(self, name: str) -> list[str]:
        """Whom a receiver asks, in this order: its parent, its parent's parent, and so on; the root last."""
        parents, line = self._sites[self._site_of[name]].parents, []
        while name != ROOT:
            name = parents[name]
            line.append(name)
        return line

    def fan_out(self, name: str) -> int:
        """How many others it should feed at most."""
        return self._sites[self._site_of[name]].fan_outs()[name]

    @property
    def parents(self) -> dict[str, str]:
        return {name: parent for site in self._sites.values() for name, parent in site.parents.items()}


class SiteTree:
    """The receivers of one site. Below the root is one that serves, the head; or all of them, where none does."""

    def __init__(self, fan_out: int):
        self.members: dict[str, Receiver] = {}
        self.parents: dict[str, str] = {}
        self._fan_out = fan_out

    def put(self, receiver: Receiver) -> None:
        is_new = receiver.name not in self.members
        self.members[receiver.name] = receiver
        if is_new:
            self._attach(receiver.name)
        elif not receiver.serves:
            self._step_down(receiver.name)
        self._mend()

    def remove(self, name: str) -> None:
        self.members[name] = replace(self.members[name], serves=False)
        self._step_down(name)
        del self.members[name], self.parents[name]
        self._mend()

    def fan_outs(self) -> dict[str, int]:
        """How many others each should feed at most."""
        known = [member.root_bytes_per_s for member in self.members.values() if member.root_bytes_per_s]
        slow_bytes_per_s = max(known, default=None)  # what the link to the root was seen to carry

        def of(member: Receiver) -> int:
            if not member.serves:
                return 0
            if member.up_bytes_per_s is None or slow_bytes_per_s is None:
                return self._fan_out
            return int(min(max(member.up_bytes_per_s / slow_bytes_per_s, 1.0), MAX_FAN_OUT))

        return {name: of(member) for name, member in self.members.items()}

    def _look(self) -> _Look:
        return _Look(self.parents, self.fan_outs())

    def _attach(self, name: str) -> None:
        """Gives a receiver, with all that hang on it, a place as near to the root as there is room."""
        self.parents.pop(name, None)
        look = self._look()  # without those that hang on it: they are not to be reached now
        servers = [other for other in look.depths if look.fan_outs[other]]
        self.parents[name] = min(servers, key=lambda other: (look.excess(other), *look.nearness(other)), default=ROOT)

    def _step_down(self, name: str) -> None:
        """Takes all from a receiver that it feeds: the one at the far end takes its place."""
        look = self._look()
        others = [other for other in look.depths if look.fan_outs[other] and other != name]
        if not look.children[name] or not others:
            heir = None
        elif self.parents[name] == ROOT:
            heir = max(others, key=lambda other: (self._from_root(other), look.depths[other], look.fan_outs[other]))
        else:
            heir = max(others, key=lambda other: (look.depths[other], look.fan_outs[other]))
        if heir is not None:
            self._exchange(name, heir)
        for child in self._look().children[name]:
            self._attach(child)

    def _from_root(self, name: str) -> float:
        """What it would get from the root; one that never tried counts as good as any."""
        found = self.members[name].root_bytes_per_s
        return math.inf if found is None else found

    def _exchange(self, one: str, other: str) -> None:
        names = {one: other, other: one}
        self.parents = {names.get(child, child): names.get(parent, parent) for child, parent in self.parents.items()}

    def _mend(self) -> None:
        """Puts right what a change has left, in as few moves as will do."""
        self._one_head()
        while move := self._look().relief():
            self.parents.update([move])
        if move := self._look().shortcut():
            self.parents.update([move])

    def _one_head(self) -> None:
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


class _Look:
    """A site's tree as it is at one moment."""

    def __init__(self, parents: Mapping[str, str], fan_outs: Mapping[str, int]):
        self.fan_outs = fan_outs
        self.children: dict[str, list[str]] = {name: [] for name in (ROOT, *fan_outs)}
        for name, parent in parents.items():
            self.children[parent].append(name)
        self.depths: dict[str, int] = {}
        """Of those that reach the root, the nearest first."""
        waiting = deque((name, 1) for name in self.children[ROOT])
        while waiting:
            name, depth = waiting.popleft()
            self.depths[name] = depth
            waiting.extend((child, depth + 1) for child in self.children[name])

    def excess(self, name: str) -> float:
        """By how much one more child would be too many, as a share of what a relay can feed."""
        return max(len(self.children[name]) + 1 - self.fan_outs[name], 0) / self.fan_outs[name]

    def nearness(self, name: str) -> tuple[int, float]:
        return self.depths[name], len(self.children[name]) / self.fan_outs[name]

    def rooms(self) -> list[str]:
        """Who can feed one more, the nearest first."""
        found = [name for name in self.depths if len(self.children[name]) < self.fan_outs[name]]
        return sorted(found, key=self.nearness)

    def relief(self) -> tuple[str, str] | None:
        """Whom to move where, because its parent has too many, and another has room."""
        crowded = [name for name in self.depths if len(self.children[name]) > self.fan_outs[name]]
        rooms = self.rooms()
        if not crowded or not rooms:
            return None
        children = sorted(reversed(self.children[crowded[0]]), key=lambda child: self.fan_outs[child] > 0)
        return next(child for child in children if not self.is_below(rooms[0], child)), rooms[0]  # there are two

    def shortcut(self) -> tuple[str, str] | None:
        """Whom to move where, because it is farther from the root than it must be."""
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


# --- how fast it could be ---


def least_seconds(
    num_bytes: float, links: Mapping[tuple[str, str], float], receivers: Collection[str], root: str = ROOT
) -> float:
    """What no way of sending can beat: all that is sent must reach each receiver, and to the one that is hardest to
    reach no more can flow than the narrowest cut lets through. (Edmonds: packing trees reaches it.)"""
    return num_bytes / min(max_flow(links, root, receiver) for receiver in receivers)


def max_flow(links: Mapping[tuple[str, str], float], start: str, end: str) -> float:
    """The most that can flow over directed links, which may lead through nodes that are nobody's."""
    left: dict[str, dict[str, float]] = {start: {}, end: {}}
    for (tail, head), capacity in links.items():
        left.setdefault(tail, {})[head] = left.get(tail, {}).get(head, 0.0) + capacity
        left.setdefault(head, {}).setdefault(tail, 0.0)
    total = 0.0
    while path := _shortest_path(left, start, end):
        amount = min(left[tail][head] for tail, head in path)
        for tail, head in path:
            left[tail][head] -= amount
            left[head][tail] += amount
        total += amount
    return total


def _shortest_path(left: Mapping[str, Mapping[str, float]], start: str, end: str) -> list[tuple[str, str]]:
    came_from = {start: start}
    waiting = deque([start])
    while waiting and end not in came_from:
        tail = waiting.popleft()
        for head, capacity in left[tail].items():
            if capacity > 0 and head not in came_from:
                came_from[head] = tail
                waiting.append(head)
    if end not in came_from:
        return []
    path, head = [], end
    while head != start:
        path.append((came_from[head], head))
        head = came_from[head]
    return path
