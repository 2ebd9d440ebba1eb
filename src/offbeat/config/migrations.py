"""Keys that no longer exist, and how runs that were started with them are resumed.

A run's config.json may hold a removed key. The key is dropped: silently if it has its old default, else with a warning.
In a TOML file or on a command line, a removed key is an error. A key stays in `REMOVED` as long as runs with this key
may be resumed.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)
Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Removed:
    default: Any
    instead: str
    """The behaviour without the key, and the key that replaces it, if there is one."""
    since: str = "November 2026"


REMOVED: dict[tuple[str, str], Removed] = {
    ("task", "tail_cap"): Removed(40, "the longest answer has 40 lines"),
    ("rollout", "top_p"): Removed(1.0, "training samples from the whole distribution; for evaluation set eval.top_p"),
    ("optimizer", "beta1"): Removed(0.9, "its value is always 0.9 now"),
    ("optimizer", "eps"): Removed(1e-8, "its value is always 1e-8 now"),
    ("loss", "allow_uncorrected"): Removed(False, "older tokens are always corrected; see loss.correction"),
    ("loss", "value_clip"): Removed(0.2, "its value is always 0.2 now"),
    ("loss", "stop_logprob_gap"): Removed(None, "the gap raises an alarm at loss.max_logprob_gap"),
    ("loss", "max_sample_gap"): Removed(1.0, "its value is always 1.0 now"),
    ("reward", "overlong_penalty"): Removed(1.0, "it is the weight of the part overlong: set reward.weights.overlong"),
    ("eval", "top_k"): Removed(0, "evaluation draws from all tokens; narrow it with eval.top_p"),
    ("weights", "anchor_every"): Removed(10, "every tenth version is complete"),
}


def removed_at(place: Path) -> Removed | None:
    """Returns the record of the removed key at `place`, such as ("optimizer", "eps"); None if there was no such key."""
    names = [name for name in place if isinstance(name, str)]
    return REMOVED.get((names[0], names[1])) if len(names) == 2 else None


def migrated(stored: Mapping[str, Any], file: str | None = None) -> dict[str, Any]:
    """Returns a stored configuration without removed keys. If `file`, the configuration's file name, is given, logs a
    warning for each dropped value that was not the default."""
    data = copy.deepcopy(dict(stored))
    _penalty_to_weight(data.get("reward"))
    for (section, key), removed in REMOVED.items():
        found = data.get(section)
        for table in found if isinstance(found, list) else [found]:
            if not isinstance(table, dict) or key not in table:
                continue
            value = table.pop(key)
            if file is not None and value != removed.default:
                log.warning(
                    "%s: the key %s.%s = %r is ignored, because it was removed in %s; %s",
                    *(file, section, key, value, removed.since, removed.instead),
                )
    return data


def _penalty_to_weight(reward: Any) -> None:
    """Replaces the removed key `overlong_penalty` in a stored section `reward` by the weight with the same effect."""
    if isinstance(reward, dict) and reward.get("overlong_tokens") and reward.get("overlong_penalty", 1.0) != 1.0:
        reward["weights"] = {**(reward.get("weights") or {}), "overlong": reward.pop("overlong_penalty")}
