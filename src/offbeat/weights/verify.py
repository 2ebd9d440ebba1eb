"""Whether the weights on this disk are the ones that were published."""

from __future__ import annotations

from offbeat.errors import OffbeatError
from offbeat.weights.adapter import folder_digest
from offbeat.weights.folder import weights_file
from offbeat.weights.version import Version


class WeightsError(OffbeatError):
    """Published weights are missing or are not what was published."""


def verify(version: Version) -> None:
    """Raises `WeightsError` unless the version on disk is the one that was published."""
    file = weights_file(version.path)
    if not file.is_file():
        raise WeightsError(f"version {version.number}: {file} is missing")
    try:
        digest = folder_digest(version.path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(
            f"version {version.number}: {file} cannot be read: {' '.join(str(error).split())}"
        ) from error
    if digest != version.digest:
        raise WeightsError(f"version {version.number}: digest {digest[:12]} is not the published {version.digest[:12]}")
