"""What the tests of a receiver ask of it."""

import asyncio
from pathlib import Path

from published import Run

from offbeat.weights.manifest import Manifest
from offbeat.weights.receive import Receiver
from offbeat.weights.signing import open_sealed
from offbeat.weights.version import Version


def fetch(receiver: Receiver, version: Version) -> Version:
    return asyncio.run(receiver.fetch(version))


def manifest_of(run: Run, version: Version) -> Manifest:
    return Manifest.decode(open_sealed(run.store.get_manifest(version.number, version.manifest), [run.key.public]))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("[0-9]*"))
