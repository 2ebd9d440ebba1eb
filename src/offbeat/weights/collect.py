"""Garbage collection of a piece store.

Keeps the versions in use (by leases, untrained trajectories and checkpoints), the newest version, and all their bases.
Deletes the manifests of all other versions, and the pieces that only those manifests name. A piece is kept for a day if
no manifest names it, or if it was stored after the last manifest that names it. Pieces are stored before their
manifest, so such a piece may belong to a version that is being published.

Guarantees: nothing that a kept version needs is deleted, nor are manifests of untrusted keys and their pieces. Pieces
are deleted before the manifests that name them. So after a crash, the next collection finds the remaining pieces.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from offbeat.weights.manifest import Manifest, ManifestError, manifest_digest
from offbeat.weights.piece_store import Entry, PieceDamaged, PieceMissing, PieceStore, Times

log = logging.getLogger(__name__)

EVERY = 10
"""Number of versions from one collection to the next. Collections are rare because each one reads all manifests."""
SPARED_S = 24 * 3600.0
"""Time for which pieces without a manifest are kept: longer than any publication takes. Half-published versions are
rare, so keeping their pieces for a day costs little."""


def collect(
    store: PieceStore, in_use: Collection[int], decode: Callable[[bytes], Manifest], spared_s: float = SPARED_S
) -> None:
    """Deletes the pieces and manifests that no kept version needs. `in_use` are the numbers of the versions in use;
    `decode` opens a sealed (signed) manifest, or raises `ManifestError` if no trusted key signed it. `spared_s` is how
    long a piece that no manifest names is kept, in seconds."""
    times = store.times()  # first, so that anything put later is left alone
    found = _read(store, times, decode)
    by_number: dict[int, list[Manifest | None]] = {number: [None] for number in found.unreadable}
    for (number, _), manifest in found.ours.items():  # two trainers may have published the same number
        by_number.setdefault(number, []).append(manifest)
    kept = _numbers(by_number, in_use)
    dropped = {entry: manifest for entry, manifest in found.ours.items() if entry[0] not in kept}
    wanted = {
        piece.digest
        for manifest in [*(found.ours[entry] for entry in found.ours.keys() - dropped.keys()), *found.foreign]
        for piece in manifest.pieces
    }
    before_s = -math.inf if found.unreadable else time.time() - spared_s  # an unreadable manifest may name any piece
    unneeded = [piece for piece in _droppable(dropped, times, before_s) if piece not in wanted]
    store.delete(unneeded, dropped.keys())
    store.sweep(spared_s)


class _Manifests(NamedTuple):
    """All manifests of a piece store, read once: trusted (`ours`), untrusted (`foreign`) and unreadable ones."""

    ours: dict[Entry, Manifest]
    foreign: list[Manifest]
    """Manifests of untrusted keys: another run may use the same store by mistake, and need them."""
    unreadable: set[int]
    """Numbers of the versions with a manifest that cannot be read."""


def _read(store: PieceStore, times: Times, decode: Callable[[bytes], Manifest]) -> _Manifests:
    found = _Manifests({}, [], set())
    for entry in sorted(times.manifests):
        try:
            sealed = store.get_manifest(*entry)
            found.ours[entry] = decode(sealed)
        except PieceMissing:
            continue  # deleted by another collection
        except PieceDamaged as error:
            log.warning(
                "version %d and all versions that it may need stay in the store, because its manifest is damaged: %s",
                entry[0],
                error,
            )
            found.unreadable.add(entry[0])
        except ManifestError as error:
            log.warning(
                "version %d and its pieces stay in the store, because its manifest is not trusted: %s", entry[0], error
            )
            try:
                found.foreign.append(Manifest.decode(sealed.partition(b"\n")[0]))
            except ManifestError:
                found.unreadable.add(entry[0])
    return found


def _numbers(manifests: Mapping[int, Sequence[Manifest | None]], in_use: Collection[int]) -> set[int]:
    """Returns the numbers of the versions to keep: those in use, the newest, and all their bases. `manifests` maps a
    version's number to its manifests, with None for an unreadable one."""
    readable = [number for number, found in manifests.items() if any(found)]
    ahead = {*in_use, max(manifests, default=0), max(readable, default=0)}
    kept: set[int] = set()
    while ahead:
        number = ahead.pop()
        if number in kept or number not in manifests:
            continue
        kept.add(number)
        for manifest in manifests[number]:
            if manifest is None:  # its base may be anything older
                ahead.update(older for older in manifests if older < number)
            elif manifest.base is not None and not _is_anchor_delta(manifest, manifests[number]):
                ahead.add(manifest.base.number)
    return kept


def _is_anchor_delta(manifest: Manifest, others: Sequence[Manifest | None]) -> bool:
    """Returns whether `manifest` holds only the changes of an anchor whose full manifest is among `others`. Then its
    base need not be kept, because receivers can use the full manifest."""
    deltas = {other.delta for other in others if other is not None and other.delta is not None}
    return bool(deltas) and manifest_digest(manifest.encode()) in deltas


def _droppable(dropped: Mapping[Entry, Manifest], times: Times, before_s: float) -> list[str]:
    """Returns the digests of the pieces that may be deleted if no kept manifest names them. These are pieces last
    stored before `before_s`, and pieces not stored again after the newest `dropped` manifest that names them."""
    named_s: dict[str, float] = {}
    for entry, manifest in dropped.items():
        for piece in manifest.pieces:
            named_s[piece.digest] = max(named_s.get(piece.digest, -math.inf), times.manifests[entry])
    return sorted(
        digest for digest, put_s in times.pieces.items() if put_s <= named_s.get(digest, -math.inf) or put_s < before_s
    )
