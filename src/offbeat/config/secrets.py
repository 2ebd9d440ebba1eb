"""Passwords and tokens in URLs: kept in a separate file and never shown.

A URL such as s3://KEY:SECRET@bucket/run may stand anywhere in a configuration. It is written, printed and sent to other
roles without its login and its query. The complete URL is in `secrets.json`, beside the run's config.json and readable
only by its owner. Loading config.json puts the complete URL back.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offbeat.config.keys import leaves, value_at
from offbeat.errors import UserError
from offbeat.files import write_atomic
from offbeat.net import shown

SECRETS = "secrets.json"
PRIVATE = 0o600


def shown_value(value: Any) -> Any:
    """Returns a JSON value with login and query removed from every URL."""
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, Mapping):
        return {key: shown_value(inner) for key, inner in value.items()}
    return [shown_value(inner) for inner in value] if isinstance(value, list) else value


def secrets_in(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values in a configuration that hold a secret, by dotted key."""
    return {".".join(map(str, place)): value for place, value in leaves(data) if shown_value(value) != value}


def restored(data: Mapping[str, Any], secrets: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of `data` with `secrets` (values by dotted key) put back. If the value of a key in `data` was
    changed after its secret was saved, the changed value stays."""
    whole = copy.deepcopy(dict(data))
    for key, value in secrets.items():
        *parents, name = (int(part) if part.isdecimal() else part for part in key.split("."))
        if value_at(whole, (*parents, name)) == shown_value(value):
            value_at(whole, tuple(parents))[name] = value
    return whole


def save(file: Path, data: Mapping[str, Any]) -> None:
    """Writes the secrets of a configuration to `file`, or removes the file if there are none."""
    if found := secrets_in(data):
        write_atomic(file, (json.dumps(found, indent=2) + "\n").encode(), PRIVATE)
    else:
        file.unlink(missing_ok=True)


def load(file: Path) -> dict[str, Any]:
    """Reads the secrets in `file`, by dotted key; empty if there is no file."""
    try:
        found = json.loads(file.read_text())
        is_open = bool(file.stat().st_mode & 0o077)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read: {error}; give a readable JSON file with URLs by key") from error
    if is_open:
        raise UserError(f"{file} holds secrets and is open to other users; run chmod 600 {file}")
    if not isinstance(found, dict):
        raise UserError(f'{file} must hold URLs by key, such as {{"weights.store": "s3://KEY:SECRET@bucket/run"}}')
    return found
