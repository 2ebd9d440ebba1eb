"""Fetches versions in turn: `killable_receiver.py STORE FOLDER KEY VERSIONS`, the last as rows in JSON."""

import asyncio
import json
import sys
from pathlib import Path

from offbeat.weights.download import StoreSources
from offbeat.weights.piece_store import FolderStore
from offbeat.weights.receive import Receiver
from offbeat.weights.version import Version


def main(store: str, folder: str, key: str, rows: str) -> None:
    receiver = Receiver(Path(folder), StoreSources(FolderStore(Path(store))), [key])
    print("ready", flush=True)
    for number, step, parent, digest, path, manifest in json.loads(rows):
        here = asyncio.run(receiver.fetch(Version(number, step, parent, digest, Path(path), manifest)))
        print(here.path, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
