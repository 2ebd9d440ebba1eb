"""Machine-local keys: the programs that a machine starts, the code that it loads, its folders and addresses.

A role (worker or trainer) that joins a run receives the configuration from the coordinator. With such keys, the
coordinator could start programs on this machine. The coordinator's values of these keys are therefore used only with
`--trust-coordinator`. Otherwise, a machine-local key that the role needs must be given on the role's own command line,
and all other machine-local keys get their defaults.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from offbeat.config.explain import show
from offbeat.config.keys import MISSING, field_at, value_at
from offbeat.config.schema import SERVED, Config, is_episode
from offbeat.errors import UserError

ROLLOUT, TRAINER = "rollout", "trainer"
"""Values of `offbeat.ledger.workers.Role`. The third role, a judge (it computes rewards), uses no machine-local key."""
MODEL_NAME = re.compile(r"offbeat-tiny(-tools)?|[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""The built-in model, or the name of a model on the Hugging Face hub."""
FAR_STORE = re.compile(r"(?!file:|local:)[A-Za-z][A-Za-z0-9+.-]*://")
"""URL of a store on another machine."""


@dataclass(frozen=True)
class LocalKey:
    place: tuple[str, str]
    what: str
    """The thing on this machine that the key chooses, such as "a program", in the words of an error."""
    is_needed: Callable[[str, Config], bool]
    """Whether a role (rollout or trainer) with this configuration uses the key."""
    is_harmless: Callable[[Any], bool] = lambda value: False
    """Whether a value from the coordinator may be used, because it refers to nothing on this machine."""

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
"""All machine-local keys. Keys of tasks are not among them: only the coordinator opens their files, and judges receive
only the names of rewards. Tools and environments, which workers load, are looked at by `_refuse_tools`."""


def with_local_keys(
    received: Mapping[str, Any], typed: Collection[str], role: str, load: Callable[[Mapping[str, Any]], Config]
) -> Config:
    """Returns the configuration that a coordinator sent, with its machine-local keys replaced: by the values on this
    machine's command line, or else by defaults. The coordinator's value stays if it refers to nothing on this machine.

    `typed` are the keys on the command line, which `load` applies. Raises `UserError` if the role needs a local key
    that the coordinator has set and `typed` lacks.
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
    if role == ROLLOUT:
        _refuse_tools(config)
    return load(kept)


def _refuse_tools(config: Config) -> None:
    """Raises `UserError` if the coordinator's tasks have tools or environments: a worker would load their code."""
    for task in filter(is_episode, config.task):
        key, value = ("task.tools", task.tools) if task.tools else ("task.path", getattr(task, "path", ""))
        raise UserError(
            f"{key} = {show(value)}: comes from the coordinator, which may not choose code for this machine; put the "
            "file here, and allow it with --trust-coordinator"
        )


def _default(local: LocalKey) -> Any:
    field = field_at(local.place, {})
    assert field is not None, f"bug: LOCAL_KEYS has {local.key}, which is not a key of the configuration"
    return field.get_default(call_default_factory=True, validated_data={})
