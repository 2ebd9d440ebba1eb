"""Machine-local keys: programs that a machine starts, code that it loads, its folders and addresses.

A role that joins receives the run's configuration from the coordinator. These keys are not taken from there unless the
machine's owner trusts the coordinator (`--trust-coordinator`), which could otherwise start programs here. A key that
the role needs has to be given on its own command line; the others get their defaults.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from offbeat.config.explain import show
from offbeat.config.keys import MISSING, field_at, value_at
from offbeat.config.schema import SERVED, Config
from offbeat.errors import UserError

ROLLOUT, TRAINER = "rollout", "trainer"
"""Values of `offbeat.ledger.workers.Role`; a judge uses none of these keys."""
MODEL_NAME = re.compile(r"offbeat-tiny|[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""The built-in model, or a name on the Hugging Face hub."""
FAR_STORE = re.compile(r"(?!file:|local:)[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True)
class LocalKey:
    place: tuple[str, str]
    what: str
    """The kind of thing that the coordinator would choose for this machine."""
    is_needed: Callable[[str, Config], bool]
    """Whether a role with a configuration uses the key."""
    is_harmless: Callable[[Any], bool] = lambda value: False
    """Whether a value refers to nothing on this machine."""

    @property
    def key(self) -> str:
        return ".".join(self.place)


def _unused(role: str, config: Config) -> bool:
    return False


def _serves(role: str, config: Config) -> bool:
    return role == ROLLOUT and config.rollout.engine in SERVED


def _starts_server(role: str, config: Config) -> bool:
    return _serves(role, config) and config.engine.url is None


def _trains(role: str, config: Config) -> bool:
    return role == TRAINER


def _has_model(role: str, config: Config) -> bool:
    return role in (ROLLOUT, TRAINER)


def _is_no_code(spec: str) -> bool:
    return ":" not in spec


LOCAL_KEYS = (
    LocalKey(("engine", "python"), "a program", _starts_server),
    LocalKey(("engine", "arguments"), "a program's arguments", _starts_server),
    LocalKey(("engine", "url"), "a server", _serves),
    LocalKey(("model", "path"), "a folder", _has_model, lambda path: MODEL_NAME.fullmatch(path) is not None),
    LocalKey(("model", "tokenizer"), "a folder", _unused),
    LocalKey(("model", "chat_template"), "a file", _unused),
    LocalKey(("weights", "store"), "a folder", _has_model, lambda store: FAR_STORE.match(store) is not None),
    LocalKey(("loss", "name"), "code", _trains, _is_no_code),
    LocalKey(("loss", "advantage"), "code", _trains, _is_no_code),
    LocalKey(("run", "dir"), "a folder", _unused),
    LocalKey(("run", "access"), "who may read files", _unused),
    LocalKey(("ledger", "backup"), "a folder", _unused),
    LocalKey(("serve", "certificate"), "a file", _unused),
    LocalKey(("serve", "key"), "a file", _unused),
)
"""Tasks are not here: only the coordinator opens their files. Judges receive the names of rewards alone."""


def with_local_keys(
    received: Mapping[str, Any], typed: Collection[str], role: str, load: Callable[[Mapping[str, Any]], Config]
) -> Config:
    """The configuration that a coordinator sent, with this machine's own values for its local keys.

    `typed` are the keys of this machine's command line, which `load` applies. `UserError` where one is missing.
    """
    config, kept = load(received), copy.deepcopy(dict(received))
    for local in LOCAL_KEYS:
        value = value_at(received, local.place)
        default = _default(local)
        if local.key in typed or value in (MISSING, None, default) or local.is_harmless(value):
            continue
        if local.is_needed(role, config):
            raise UserError(
                f"{local.key} = {show(value)}: comes from the coordinator, which may not choose {local.what} for this "
                f"machine; give --{local.key} here, or allow it with --trust-coordinator"
            )
        kept[local.place[0]][local.place[1]] = default
    return load(kept)


def _default(local: LocalKey) -> Any:
    field = field_at(local.place, {})
    assert field is not None, f"{local.key} does not exist"
    return field.get_default(call_default_factory=True, validated_data={})
