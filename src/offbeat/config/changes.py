"""Compares a run's stored configuration with a new one: which changes `--resume` allows, and which it refuses.

A run of an older Offbeat can be resumed: a key that its configuration lacks counts as having its default, and a removed
key is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from offbeat.config.keys import MISSING, Path, dotted, field_at, is_free, leaves, value_at
from offbeat.config.load import resolved
from offbeat.config.migrations import migrated
from offbeat.config.schema import Config

FIXED_IF_EXACT: tuple[Path, ...] = (
    ("run", "threads"),
    ("rollout", "slots"),
    ("batch", "tokens_per_microbatch"),
    ("model", "device"),
    ("model", "gradient_checkpointing"),
)
"""Keys that may change at a resume, except in an exact run: they decide how sums are split into parts, and thus the
last bits of the sums."""


class Change(NamedTuple):
    key: str
    old: Any
    new: Any


def fixed_changes(old: Mapping[str, Any], new: Config) -> list[Change]:
    """Returns the changes in `new`, compared with a run's stored configuration `old`, of keys that are fixed for the
    life of a run. A run cannot be resumed with such a change. A change of `rollout.engine` from "auto" is left out,
    because with "auto" each worker chooses its own engine."""
    changes = [change for place, change in _changes(old, new) if not _may_change(place, new)]
    return [change for change in changes if (change.key, change.old) != ("rollout.engine", "auto")]


def free_changes(old: Mapping[str, Any], new: Config) -> list[Change]:
    """Returns the changes in `new`, compared with a run's stored configuration `old`, of keys that may change when the
    run is resumed."""
    return [change for place, change in _changes(old, new) if _may_change(place, new)]


def fixed_keys(config: Config) -> dict[str, Any]:
    """Returns a configuration (as a dict of sections) with only the keys that are fixed for the life of a run. The
    result can be passed to `fixed_changes` as `old`."""
    data = resolved(config)
    for place, _ in list(leaves(data)):
        if _may_change(place, config):
            del value_at(data, place[:-1])[place[-1]]
    return data


def _may_change(place: Path, new: Config) -> bool:
    return is_free(place) and not (new.run.exact and place in FIXED_IF_EXACT)


def _changes(old: Mapping[str, Any], new: Config) -> list[tuple[Path, Change]]:
    old, data = migrated(old), resolved(new)
    if data["run"]["name"] is None:  # not given, so the run keeps its name
        data["run"]["name"] = value_at(old, ("run", "name"))
    places = dict.fromkeys([place for place, _ in leaves(data)] + [place for place, _ in leaves(old)])
    found = []
    for place in places:
        before, after = _value(old, place), _value(data, place)
        if before != after:
            found.append((place, Change(dotted(place, data), before, after)))
    return found


def _value(data: Mapping[str, Any], place: Path) -> Any:
    value = value_at(data, place)
    if value is not MISSING:
        return value
    known = field_at(place, data)
    return known.get_default(call_default_factory=True, validated_data={}) if known else None
