"""The shortest time in which weights can reach every receiver of a network."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

from offbeat.weights.relay_tree import ROOT


def least_seconds(
    num_bytes: float, links: Mapping[tuple[str, str], float], receivers: Collection[str], root: str = ROOT
) -> float:
    """Lower bound on the time to send `num_bytes` to every receiver: the maximum flow to the one that is hardest to
    reach. (Edmonds: packing trees reaches it.)"""
    return num_bytes / min(max_flow(links, root, receiver) for receiver in receivers)


def max_flow(links: Mapping[tuple[str, str], float], start: str, end: str) -> float:
    """Returns the maximum flow over directed links, which may lead through nodes that are not receivers."""
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
