"""A receiver that dies by kill -9 leaves whole versions alone, and its successor ends where it would have.

At every named place, and at moments drawn at random, while it fetches, builds and forgets: what has a version's name
afterwards has its digest, and the next process brings every version bit by bit.
"""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support_files import SUPPORT

from offbeat.testing import crash_points
from offbeat.weights.manifest import Anchoring
from offbeat.weights.piece_store import FolderStore
from offbeat.weights.publish import Publisher
from offbeat.weights.receive import VersionCache
from offbeat.weights.signing import SigningKey
from offbeat.weights.version import FILE_NAME, Version, file_digest

NUM_VERSIONS = 6
NUM_KILLS = 12
WITHIN_S = 120.0
CHILD = str(SUPPORT / "killable_receiver.py")


class Published:
    """Versions in a store: two anchors and the deltas behind them."""

    def __init__(self, folder: Path):
        self.store, self.key = folder / "store", SigningKey.generate()
        publisher = Publisher(folder / "published", FolderStore(self.store), self.key, Anchoring(every=3))
        tensors = {name: torch.randn(600, 1000).bfloat16() for name in ("a", "b", "c")}
        self.versions: list[Version] = []
        for number in range(NUM_VERSIONS):
            tensors["a"].view(-1)[torch.randint(600_000, (5000,))] += 1
            self.versions.append(publisher.write(number, number, number - 1 if number else None, tensors))

    def start(self, folder: Path, **environment: str) -> subprocess.Popen[str]:
        """A process that fetches every version in turn."""
        rows = [[v.number, v.step, v.parent, v.digest, str(v.path), v.manifest] for v in self.versions]
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
        return subprocess.Popen(
            [sys.executable, CHILD, str(self.store), str(folder), self.key.public, json.dumps(rows)],
            env={**os.environ, "PYTHONPATH": path, **environment},
            stdout=subprocess.PIPE,
            text=True,
        )

    def check_whole(self, folder: Path) -> set[int]:
        """That everything with a version's name is that version; says which there are."""
        shelf, found = VersionCache(folder, NUM_VERSIONS), set()
        for version in self.versions:
            place = shelf.path_of(version.number, version.digest)
            if place.exists():
                assert file_digest(place / FILE_NAME) == version.digest
                found.add(version.number)
        assert len(found) == len(list(folder.glob("[0-9]*")))
        return found

    def check_end(self, folder: Path) -> None:
        """That a process which is left alone brings all of them, and leaves the last few and nothing besides."""
        child = self.start(folder)
        told, _ = child.communicate(timeout=WITHIN_S)
        assert child.returncode == 0
        assert len(told.split()) == 1 + NUM_VERSIONS
        assert self.check_whole(folder) == {NUM_VERSIONS - 3, NUM_VERSIONS - 2, NUM_VERSIONS - 1}
        assert list(folder.glob(".*.draft")) == []


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Published:
    return Published(tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize("time", [1, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("point", crash_points.POINTS["receiver"])
def test_a_receiver_killed_at_a_named_place_leaves_whole_versions_and_its_successor_ends_well(
    point, time, published, tmp_path
):
    child = published.start(tmp_path, **{crash_points.AT: f"{point}:{time}"})
    child.communicate(timeout=WITHIN_S)
    assert child.returncode == -signal.SIGKILL
    published.check_whole(tmp_path)
    published.check_end(tmp_path)


@pytest.mark.full
def test_a_receiver_killed_at_any_moment_leaves_whole_versions_and_its_successor_ends_well(published, tmp_path):
    draw, seen = random.Random(7), set()
    for _ in range(NUM_KILLS):
        child = published.start(tmp_path)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        try:
            child.wait(draw.uniform(0.0, 0.5))  # any moment will do; it may even be too late
        except subprocess.TimeoutExpired:
            child.kill()
        child.communicate(timeout=WITHIN_S)
        seen.add(child.returncode)
        published.check_whole(tmp_path)
    assert -signal.SIGKILL in seen
    published.check_end(tmp_path)
