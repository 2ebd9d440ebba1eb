"""The whole versions in a folder of this machine, and which of them may be believed.

A version's folder takes its name once it is written, flushed and verified: what is there is whole. Folders are named by
number and digest, so that another run's versions are never mistaken for ours. What an earlier process left is read
once before it is believed, and so is a file that has changed since: nothing is built on, or served from, bytes that
this process has not seen to be right.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from blake3 import blake3

from offbeat.weights.adapter import folder_digest
from offbeat.weights.folder import weights_file

log = logging.getLogger(__name__)

FOLDER = re.compile(r"\d{8,}-[0-9a-f]{16}")


class Shelf:
    """Versions on this machine. All but `place` touch the disk: call them in a thread."""

    def __init__(self, folder: Path, num_kept: int):
        self.folder, self._num_kept = folder.absolute(), num_kept
        self._proven: dict[Path, list[tuple[int, int, int]]] = {}
        """What the files of each looked like when they were known to be right; who was asked for last comes last."""

    def place(self, number: int, digest: str) -> Path:
        return self.folder / f"{number:08d}-{blake3(digest.encode()).hexdigest()[:16]}"

    def numbers(self) -> list[int]:
        """Of the versions that are here, as far as their names tell."""
        return [int(path.name.partition("-")[0]) for path in self.folder.glob("[0-9]*") if FOLDER.fullmatch(path.name)]

    def holds(self, place: Path, digest: str) -> bool:
        """Whether a version is there and is the one that was published; one that is not is deleted."""
        if not place.exists():
            return False
        try:
            look = _look(place)
            if self._proven.pop(place, None) != look and folder_digest(place) != digest:
                raise ValueError("its digest is not the published one")
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s: damaged on this disk, deleted: %s", weights_file(place), " ".join(str(error).split()))
            self.discard(place)
            return False
        self._proven[place] = look
        return True

    def admit(self, place: Path) -> None:
        """A version was put there by this process, which verified it."""
        self._proven.pop(place, None)
        self._proven[place] = _look(place)

    def doubt(self, place: Path) -> None:
        """It will be read again before it is believed."""
        self._proven.pop(place, None)

    def discard(self, place: Path) -> None:
        self._proven.pop(place, None)
        doomed = place.with_name(f".{place.name}.old.draft")  # who dies while deleting leaves no half with its name
        shutil.rmtree(doomed, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            os.replace(place, doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def forget(self, needs: Mapping[Path, Path]) -> set[Path]:
        """Keeps the versions asked for last, then an earlier process's newest, and what those need; says which."""
        asked = {place: rank for rank, place in enumerate(self._proven, start=1)}
        found = [path for path in self.folder.iterdir() if FOLDER.fullmatch(path.name)]
        found.sort(key=lambda path: (asked.get(path, 0), path.name), reverse=True)
        kept = set(found[: self._num_kept])
        kept |= {needs[place] for place in kept if place in needs}
        for path in found:
            if path not in kept:
                self.discard(path)
        for draft in self.folder.glob(".*.draft"):  # of versions that were given up
            shutil.rmtree(draft, ignore_errors=True)
        return kept


def _look(place: Path) -> list[tuple[int, int, int]]:
    found = [os.stat(file) for file in sorted(place.iterdir())]
    return [(file.st_ino, file.st_size, file.st_mtime_ns) for file in found]
