"""What a store no longer needs: deletes it, and nothing else.

Kept are the versions in use (the caller knows them: leases, untrained trajectories, checkpoints), the newest, and
every version that those stand on. Pieces are put before the manifest that names them, so a piece without a manifest
may belong to a version that is just being published. It is known by its time: a piece that a dropped manifest names
was put before that manifest, unless somebody has put it again since; only then, and for a piece that no manifest has
ever named, its age must tell, and it is spared for a day. An age alone would not do: minutes are too short for a slow
store, and a day of every version's pieces too much for a disk.

Guarantees: nothing goes that a kept version needs, nor a manifest that is not ours, nor its pieces; pieces go before
the manifests that name them, so that what a crash leaves is found by the next collection.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from offbeat.weights.manifest import Manifest, ManifestError, manifest_digest
from offbeat.weights.pieces import Entry, PieceDamaged, PieceMissing, PieceStore, Times

log = logging.getLogger(__name__)

EVERY = 10
"""Versions from one collection to the next: to find out what is needed, all manifests are read."""
SPARED_S = 24 * 3600.0
"""Longer than any publication takes; what dies half published is rare, so that its leavings may lie for a day."""


def needed(manifests: Mapping[int, Manifest], in_use: Collection[int]) -> tuple[set[str], set[int]]:
    """The pieces and the versions to keep."""
    numbers = _numbers({number: [manifest] for number, manifest in manifests.items()}, in_use)
    return {piece.digest for number in numbers for piece in manifests[number].pieces}, numbers


def collect(
    store: PieceStore, in_use: Collection[int], decode: Callable[[bytes], Manifest], spared_s: float = SPARED_S
) -> None:
    """Deletes what nothing needs; `decode` opens a sealed manifest, or raises `ManifestError`."""
    times = store.times()  # first of all: what is put from here on is not looked at
    shelf = _read(store, times, decode)
    by_number: dict[int, list[Manifest | None]] = {number: [None] for number in shelf.unreadable}
    for (number, _), manifest in shelf.ours.items():  # a number may be there twice: two trainers published it
        by_number.setdefault(number, []).append(manifest)
    kept = _numbers(by_number, in_use)
    dropped = {entry: manifest for entry, manifest in shelf.ours.items() if entry[0] not in kept}
    wanted = {
        piece.digest
        for manifest in [*(shelf.ours[entry] for entry in shelf.ours.keys() - dropped.keys()), *shelf.foreign]
        for piece in manifest.pieces
    }
    before_s = -math.inf if shelf.unreadable else time.time() - spared_s  # a piece may be one that it names
    unneeded = [piece for piece in _droppable(dropped, times, before_s) if piece not in wanted]
    store.delete(unneeded, dropped.keys())
    store.sweep(spared_s)


class _Shelf(NamedTuple):
    """The manifests in a store."""

    ours: dict[Entry, Manifest]
    foreign: list[Manifest]
    """Which we would not believe; but another run may have been given the same store by mistake, and stands on them."""
    unreadable: set[int]


def _read(store: PieceStore, times: Times, decode: Callable[[bytes], Manifest]) -> _Shelf:
    shelf = _Shelf({}, [], set())
    for entry in sorted(times.manifests):
        try:
            sealed = store.get_manifest(*entry)
            shelf.ours[entry] = decode(sealed)
        except PieceMissing:
            continue  # somebody else collects, too
        except PieceDamaged as error:
            log.warning("version %d cannot be collected, nor anything that it may need: %s", entry[0], error)
            shelf.unreadable.add(entry[0])
        except ManifestError as error:
            log.warning("version %d is left alone, with its pieces: %s", entry[0], error)
            try:
                shelf.foreign.append(Manifest.decode(sealed.partition(b"\n")[0]))
            except ManifestError:
                shelf.unreadable.add(entry[0])
    return shelf


def _numbers(manifests: Mapping[int, Sequence[Manifest | None]], in_use: Collection[int]) -> set[int]:
    """The versions in use, the newest, and all that they stand on. None stands for a manifest that is unreadable."""
    readable = [number for number, found in manifests.items() if any(found)]
    ahead = {*in_use, max(manifests, default=0), max(readable, default=0)}
    kept: set[int] = set()
    while ahead:
        number = ahead.pop()
        if number in kept or number not in manifests:
            continue
        kept.add(number)
        for manifest in manifests[number]:
            if manifest is None:  # it may stand on anything older
                ahead.update(older for older in manifests if older < number)
            elif manifest.base is not None and not _is_twin(manifest, manifests[number]):
                ahead.add(manifest.base.number)
    return kept


def _is_twin(manifest: Manifest, others: Sequence[Manifest | None]) -> bool:
    """Whether it is an anchor as what changed: who has not got its base takes the anchor."""
    twins = {other.delta for other in others if other is not None and other.delta is not None}
    return bool(twins) and manifest_digest(manifest.encode()) in twins


def _droppable(dropped: Mapping[Entry, Manifest], times: Times, before_s: float) -> list[str]:
    """The pieces that nobody has put since the last dropped manifest that names them, or since long ago."""
    named_s: dict[str, float] = {}
    for entry, manifest in dropped.items():
        for piece in manifest.pieces:
            named_s[piece.digest] = max(named_s.get(piece.digest, -math.inf), times.manifests[entry])
    return sorted(
        digest for digest, put_s in times.pieces.items() if put_s <= named_s.get(digest, -math.inf) or put_s < before_s
    )
