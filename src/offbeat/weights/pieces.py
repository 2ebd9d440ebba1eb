"""Where pieces and manifests lie: in a folder, or behind a URL (`offbeat.weights.remote`).

A piece is named by the digest of its bytes and never changes; a manifest is named by its version's number and its own
digest. Guarantees: a name has its whole content or is not there; what was put before `sync` survives a power cut after
it, and so does a manifest once `put_manifest` returns, so that nothing durable names what is not; a whole read returns
the very bytes that were put, or says what is wrong. Putting the same again is harmless, and makes good what a disk has
spoiled. A crash leaves at most files that nothing names.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from blake3 import blake3

from offbeat.errors import OffbeatError
from offbeat.files import create_atomic, fsync_folder
from offbeat.weights.manifest import ManifestError, manifest_digest
from offbeat.weights.signing import signer

PIECES, MANIFESTS = "pieces", "manifests"
UNFINISHED = ".new"
DIGEST = re.compile(r"[0-9a-f]{64}")
MANIFEST_NAME = re.compile(r"(\d{8,})-([0-9a-f]{64})\.json")
LOCAL = re.compile(r"(?:file|local)://")
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free space there"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "see who may write there"),
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "a file is in its way: move that, or give another folder"),
}
"""By what a disk says."""

Entry = tuple[int, str]
"""A manifest's name: the version's number, and the manifest's own digest."""


class PieceMissing(OffbeatError):
    """A piece or a manifest is not in the store."""


class PieceDamaged(OffbeatError):
    """A piece or a manifest is in the store, but is not what its name says."""


class StoreError(OffbeatError):
    """A store that is full, out of reach or out of order; the message names it and the remedy."""


class Times(NamedTuple):
    """When everything in a store was put there last, in seconds since the epoch, by the store's own clock."""

    pieces: dict[str, float]
    manifests: dict[Entry, float]


class PieceStore(Protocol):
    """Pieces and manifests. Any thread may call it; every call may wait for a disk or a network."""

    def put(self, digest: str, data: bytes) -> None: ...

    def sync(self) -> None:
        """Everything that this process has put before is durable after it."""

    def get(self, digest: str, start: int = 0, stop: int | None = None) -> bytes:
        """A piece, verified; or some of its bytes, as they lie there."""

    def size(self, digest: str) -> int | None:
        """In bytes; None: it is not there."""

    def put_manifest(self, number: int, digest: str, sealed: bytes) -> None:
        """Durable when it returns. The same again changes nothing; other bytes under the same name raise."""

    def get_manifest(self, number: int, digest: str) -> bytes:
        """The sealed manifest; whether its signature is good is the reader's to find out."""

    def list_manifests(self) -> list[Entry]: ...

    def list_pieces(self) -> list[str]: ...

    def times(self) -> Times: ...

    def delete(self, pieces: Collection[str], manifests: Collection[Entry]) -> None:
        """In this order, so that a deletion cut short can be taken up again; what is not there is no mistake."""

    def sweep(self, older_than_s: float) -> None:
        """Removes what writers left unfinished so long ago that they must be dead."""


def open_store(place: str | Path) -> PieceStore:
    """A store in a folder, or behind a URL."""
    text = str(place)
    if isinstance(place, Path) or not URL.match(text):
        return FolderStore(Path(place))
    if local := LOCAL.match(text):  # a folder knows how to flush and rename; fsspec does neither
        return FolderStore(Path(text[local.end() :]))
    from offbeat.weights.remote import RemoteStore

    return RemoteStore(text)


class FolderStore:
    """A store on this machine's disk, or on one that several machines mount."""

    def __init__(self, folder: Path):
        self.folder = folder.absolute()
        self._lock = threading.Lock()
        self._unflushed = {self.folder, *self.folder.glob(PIECES), *self.folder.glob(f"{PIECES}/??")}
        """Folders with names that a power cut could still take; at first all, because of those who put and died."""

    def put(self, digest: str, data: bytes) -> None:
        path = self._piece(digest)
        unfinished = path.with_name(f"{digest}.{secrets.token_hex(4)}{UNFINISHED}")
        with _naming(path, "written"):
            self._make(path.parent)
            try:
                with open(unfinished, "xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(unfinished, path)
            except BaseException:
                with suppress(OSError):
                    unfinished.unlink()
                raise
        with self._lock:
            self._unflushed.add(path.parent)

    def sync(self) -> None:
        with self._lock:
            folders, self._unflushed = self._unflushed, set()
        try:
            with _naming(self.folder, "flushed"):
                for folder in sorted(folders):
                    with suppress(FileNotFoundError):  # not made yet, or deleted with all that was in it
                        fsync_folder(folder)
        except BaseException:
            with self._lock:
                self._unflushed |= folders
            raise

    def get(self, digest: str, start: int = 0, stop: int | None = None) -> bytes:
        path = self._piece(digest)
        with _naming(path, "read"), open(path, "rb") as file:
            file.seek(start)
            data = file.read() if stop is None else file.read(max(stop - start, 0))
        return checked(str(path), digest, data, start, stop)

    def size(self, digest: str) -> int | None:
        path = self._piece(digest)
        try:
            with _naming(path, "read"):
                return path.stat().st_size
        except PieceMissing:
            return None

    def put_manifest(self, number: int, digest: str, sealed: bytes) -> None:
        path = self._manifest(number, digest)
        check_new(str(path), digest, sealed)
        with _naming(path, "written"):
            self._make(path.parent)
            self.sync()  # nothing durable may name what is not
            while not create_atomic(path, sealed):
                found = path.read_bytes()
                if found == sealed:
                    return
                check_new(str(path), digest, sealed, found)
                path.unlink(missing_ok=True)  # damaged on the disk

    def get_manifest(self, number: int, digest: str) -> bytes:
        path = self._manifest(number, digest)
        with _naming(path, "read"):
            sealed = path.read_bytes()
        return checked_manifest(str(path), digest, sealed)

    def list_manifests(self) -> list[Entry]:
        return sorted(self.times().manifests)

    def list_pieces(self) -> list[str]:
        return sorted(self.times().pieces)

    def times(self) -> Times:
        found = Times({}, {})
        for path, put_s in self._files(f"{PIECES}/??"):
            if DIGEST.fullmatch(path.name):
                found.pieces[path.name] = put_s
        for path, put_s in self._files(MANIFESTS):
            if entry := entry_of(path.name):
                found.manifests[entry] = put_s
        return found

    def delete(self, pieces: Collection[str], manifests: Collection[Entry]) -> None:
        for path in [*map(self._piece, pieces), *(self._manifest(*entry) for entry in manifests)]:
            with _naming(path, "deleted"):
                path.unlink(missing_ok=True)

    def sweep(self, older_than_s: float) -> None:
        before_s = time.time() - older_than_s
        for path, put_s in [*self._files(f"{PIECES}/??"), *self._files(MANIFESTS)]:
            if put_s < before_s and path.suffix in (UNFINISHED, ".draft"):
                with _naming(path, "deleted"):
                    path.unlink(missing_ok=True)

    def _piece(self, digest: str) -> Path:
        return self.folder / piece_path(digest)

    def _manifest(self, number: int, digest: str) -> Path:
        return self.folder / manifest_path(number, digest)

    def _make(self, folder: Path) -> None:
        """A folder that is there after a power cut, too, once `sync` returns."""
        missing = [path for path in (folder, *folder.parents) if not path.is_dir()]
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
            with self._lock:
                self._unflushed.add(path.parent)

    def _files(self, pattern: str) -> Iterator[tuple[Path, float]]:
        for folder in self.folder.glob(pattern):
            for path in folder.iterdir():
                with suppress(FileNotFoundError):  # deleted, or given its name, since it was listed
                    yield path, path.stat().st_mtime


@contextmanager
def _naming(path: Path, done: str) -> Iterator[None]:
    """Says of a disk's errors what they mean for a file, and what is to be done."""
    try:
        yield
    except OSError as error:
        if done == "read" and isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise PieceMissing(f"{path}: not there") from error
        remedy = REMEDIES.get(error.errno or 0, "see that the disk works")
        raise StoreError(f"{path}: cannot be {done}: {error.strerror or error}; {remedy}") from error


def piece_path(digest: str) -> str:
    """Where a piece lies below a store's root."""
    if not DIGEST.fullmatch(digest):
        raise PieceMissing(f"{digest[:80]!r}: not the name of a piece")
    return f"{PIECES}/{digest[:2]}/{digest}"


def manifest_path(number: int, digest: str) -> str:
    if number < 0 or not DIGEST.fullmatch(digest):
        raise PieceMissing(f"{number}, {digest[:80]!r}: not the name of a manifest")
    return f"{MANIFESTS}/{number:08d}-{digest}.json"


def entry_of(name: str) -> Entry | None:
    found = MANIFEST_NAME.fullmatch(name)
    return (int(found[1]), found[2]) if found else None


def checked(place: str, digest: str, data: bytes, start: int, stop: int | None) -> bytes:
    """What was read of a piece, unless it is not what its name says or ends too soon."""
    if stop is not None and len(data) < stop - start:
        raise PieceDamaged(f"{place}: cut short: it ends at byte {start + len(data)}, before byte {stop}")
    if start == 0 and stop is None and blake3(data, max_threads=blake3.AUTO).hexdigest() != digest:
        raise PieceDamaged(f"{place}: damaged: its {len(data)} bytes have another digest; fetch or publish it again")
    return data


def checked_manifest(place: str, digest: str, sealed: bytes) -> bytes:
    if not is_intact(digest, sealed):
        raise PieceDamaged(f"{place}: damaged: its {len(sealed)} bytes have another digest; fetch or publish it again")
    return sealed


def check_new(place: str, digest: str, sealed: bytes, found: bytes | None = None) -> None:
    """Refuses a manifest that does not fit its name, or whose name has been taken by another one that is in order."""
    if not is_intact(digest, sealed):
        raise ManifestError(f"{place}: the manifest is not the one that this name says, or its seal is broken")
    if found is not None and found != sealed and is_intact(digest, found):
        raise StoreError(f"{place}: sealed by somebody else before; give each run a store of its own")


def is_intact(digest: str, sealed: bytes) -> bool:
    """Whether this is the manifest that a name says, in the state in which somebody sealed it."""
    try:
        signer(sealed)
    except ManifestError:
        return False
    return manifest_digest(sealed.partition(b"\n")[0]) == digest
