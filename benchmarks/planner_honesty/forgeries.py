"""Changes saved plans at one or two places, so that a checker of plans can be tried."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

Place = tuple[Any, ...]
PROOF = ("certificate", "prices")
SOLVER = ("certificate", "solver")
"""Parts of a plan that state nothing about it: another proof of the same claim is as good, and so is another release of
the solver."""


def places(value: Any, path: Place = ()) -> Iterator[Place]:
    """Yields the path of every value in a JSON document, containers included."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, each in value.items():
            yield from places(each, (*path, key))
    elif isinstance(value, list):
        for i, each in enumerate(value):
            yield from places(each, (*path, i))


def forged(document: Any, draw: random.Random) -> tuple[str, Any]:
    """Returns a changed copy of a plan as text, and the paths that were changed."""
    changed = copy.deepcopy(document)
    paths = []
    for _ in range(draw.choice([1, 1, 2])):
        path = draw.choice(list(places(changed)))
        paths.append(path)
        _change(changed, path, draw)
    return json.dumps(changed), paths


def _change(document: Any, path: Place, draw: random.Random) -> None:
    *way, last = path
    for key in way:
        document = document[key]
    value = document[last]
    if isinstance(value, bool):
        document[last] = not value
    elif isinstance(value, int | float):
        near = [value + draw.choice([-1, 1]), value * 2, value / 2, value * (1 + 1e-4), value * 0.8, value * 1.25]
        document[last] = draw.choice(
            [*near, value * 10, 0, -value, 1e300, 10**30, float("nan"), float("inf"), None, "7", [value]]
        )
    elif isinstance(value, str):
        document[last] = draw.choice([value + "x", "", value[:-1], None, 7, value.replace("c0", "c1")])
    elif isinstance(value, list):
        document[last] = draw.choice([[], value[:-1], value + value, value[::-1], None, {}])
    elif isinstance(value, dict):
        key = draw.choice(list(value)) if value else "new"
        left = {name: each for name, each in value.items() if name != key}
        document[last] = draw.choice([{}, left, {**left, f"{key}x": value.get(key, 1)}, None, []])
    else:
        document[last] = draw.choice([0, 1.0, 80.0, "x", []])


def canonical(document: Any) -> Any:
    """Returns what a plan states: the document without the material of its proof."""
    stated = copy.deepcopy(document)
    for where, key in (PROOF, SOLVER):
        stated[where].pop(key, None)
    for branch in stated["certificate"]["branches"]:
        del branch["prices"]
    return stated
