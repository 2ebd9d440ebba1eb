"""Stores of pieces and manifests: a folder, or a URL.

A piece is named by the digest of its bytes and never changes; a manifest by its version's number and its own digest.

Guarantees: a piece or manifest is in the store whole or not at all. Pieces survive a power cut once `sync` returns, and
a manifest once `put_manifest` returns, so a durable manifest never names a piece that is not durable. Reading a whole
piece returns the bytes that were put, or raises. Putting the same content again is harmless, and repairs a copy that
the disk has damaged. A crash leaves at most files that no manifest names.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import random
import re
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from blake3 import blake3

from offbeat.errors import OffbeatError, UserError
from offbeat.extras import import_extra
from offbeat.files import create_atomic, fsync_folder
from offbeat.net import shown
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
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "check who may write there"),
    **dict.fromkeys(
        (errno.EEXIST, errno.ENOTDIR), "a file is in its way: move the file, or choose another folder for the store"
    ),
}
"""Advice to the user, by the error number (errno) of a disk error."""

Entry = tuple[int, str]
"""A manifest's name: the version's number, and the manifest's own digest."""


class PieceMissing(OffbeatError):
    """A piece or a manifest is not in the store."""


class PieceDamaged(OffbeatError):
    """A piece or a manifest in the store does not match its name."""


class StoreError(OffbeatError):
    """A store is full, out of reach, defective or used by another run; the message names it and the remedy."""


class Times(NamedTuple):
    """When each piece and manifest was last put, in seconds since the epoch by the store's clock."""

    pieces: dict[str, float]
    manifests: dict[Entry, float]


class PieceStore(Protocol):
    """A store of pieces and manifests. Thread-safe; every call may wait for a disk or a network."""

    def put(self, digest: str, data: bytes) -> None: ...

    def sync(self) -> None:
        """Makes everything that this process has put durable."""

    def get(self, digest: str, start: int = 0, stop: int | None = None) -> bytes:
        """Returns a whole piece, verified; or its bytes from `start` to `stop`, unverified."""

    def size(self, digest: str) -> int | None:
        """Returns the size of a piece in bytes; None: it is not in the store."""

    def put_manifest(self, number: int, digest: str, sealed: bytes) -> None:
        """Stores a sealed (signed) manifest, durable on return. Changes nothing if the same bytes are there; raises if
        the manifest is there with another key's signature."""

    def get_manifest(self, number: int, digest: str) -> bytes:
        """Returns a sealed (signed) manifest; the caller must check that its signer is trusted."""

    def list_manifests(self) -> list[Entry]: ...

    def list_pieces(self) -> list[str]: ...

    def times(self) -> Times: ...

    def delete(self, pieces: Collection[str], manifests: Collection[Entry]) -> None:
        """Deletes pieces, then manifests, so that an interrupted deletion can be repeated. Ignores missing names."""

    def sweep(self, older_than_s: float) -> None:
        """Removes unfinished files older than `older_than_s` seconds: long enough that their writers must be dead."""


def open_store(location: str | Path) -> PieceStore:
    """Opens the store in a folder or at a URL."""
    text = str(location)
    if isinstance(location, Path) or not URL.match(text):
        return FolderStore(Path(location))
    if local := LOCAL.match(text):  # not through fsspec, which neither flushes nor renames
        return FolderStore(Path(text[local.end() :]))
    return RemoteStore(text)


class FolderStore:
    """A store in a folder, on this machine's disk or on one that several machines mount."""

    def __init__(self, folder: Path):
        self.folder = folder.absolute()
        self._lock = threading.Lock()
        self._unflushed = {self.folder, *self.folder.glob(PIECES), *self.folder.glob(f"{PIECES}/??")}
        """Folders whose entries are not yet durable; at first all, because earlier writers may have died before
        `sync`."""

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
                    with suppress(FileNotFoundError):  # not made yet, or deleted
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
            self.sync()  # pieces must be durable before a manifest names them
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
        """Makes a folder and its parents; they are durable once `sync` returns."""
        missing = [path for path in (folder, *folder.parents) if not path.is_dir()]
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
            with self._lock:
                self._unflushed.add(path.parent)

    def _files(self, pattern: str) -> Iterator[tuple[Path, float]]:
        for folder in self.folder.glob(pattern):
            for path in folder.iterdir():
                with suppress(FileNotFoundError):  # deleted or renamed since it was listed
                    yield path, path.stat().st_mtime


@contextmanager
def _naming(path: Path, done: str) -> Iterator[None]:
    """Turns an OSError of the block into `PieceMissing`, if a file to read is missing, or a `StoreError` that names
    file and remedy. `done` completes the message "cannot be …", for example "read"."""
    try:
        yield
    except OSError as error:
        if done == "read" and isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise PieceMissing(f"{path}: no such file in the store of weights") from error
        remedy = REMEDIES.get(error.errno or 0, "check that the disk works")
        raise StoreError(f"{path}: cannot be {done}: {error.strerror or error}; {remedy}") from error


def piece_path(digest: str) -> str:
    """Returns the path of a piece below a store's root."""
    if not DIGEST.fullmatch(digest):
        raise PieceMissing(f"{digest[:80]!r}: not the name of a piece, which is 64 hex digits")
    return f"{PIECES}/{digest[:2]}/{digest}"


def manifest_path(number: int, digest: str) -> str:
    if number < 0 or not DIGEST.fullmatch(digest):
        raise PieceMissing(
            f"version {number}, digest {digest[:80]!r}: no manifest can have this name; a number is 0 or more, "
            "a digest has 64 hex digits"
        )
    return f"{MANIFESTS}/{number:08d}-{digest}.json"


def entry_of(name: str) -> Entry | None:
    found = MANIFEST_NAME.fullmatch(name)
    return (int(found[1]), found[2]) if found else None


def checked(path: str, digest: str, data: bytes, start: int, stop: int | None) -> bytes:
    """Returns `data`, bytes `start` to `stop` (None: to the end) of the piece `digest`. Raises `PieceDamaged` if bytes
    are missing or, for a whole piece, if the digest differs. `path` is for messages."""
    if stop is not None and len(data) < stop - start:
        raise PieceDamaged(f"{path}: the piece is cut short: it ends at byte {start + len(data)}, before byte {stop}")
    if start == 0 and stop is None and blake3(data, max_threads=blake3.AUTO).hexdigest() != digest:
        raise PieceDamaged(f"{path}: its {len(data)} bytes do not match its name; fetch or publish the piece again")
    return data


def checked_manifest(path: str, digest: str, sealed: bytes) -> bytes:
    if not is_intact(digest, sealed):
        raise PieceDamaged(f"{path}: the manifest does not match its name or its signature; fetch or publish it again")
    return sealed


def check_new(path: str, digest: str, sealed: bytes, found: bytes | None = None) -> None:
    """Checks a sealed (signed) manifest before it is stored. `found` is the manifest already stored under the same
    name, if any. Raises if `sealed` does not match `digest`, or if `found` is intact but signed with another key."""
    if not is_intact(digest, sealed):
        raise ManifestError(f"{path}: the manifest to store there does not match this name or its own signature")
    if found is not None and found != sealed and is_intact(digest, found):
        raise StoreError(f"{path}: this manifest exists, signed with another key; give each run its own store")


def is_intact(digest: str, sealed: bytes) -> bool:
    """Returns whether a sealed manifest has this digest and a correct signature, by any key."""
    try:
        signer(sealed)
    except ManifestError:
        return False
    return manifest_digest(sealed.partition(b"\n")[0]) == digest


log = logging.getLogger(__name__)

WITHIN_S = 300.0
"""Default deadline of a call: enough for the largest piece at 1 Mbit/s."""
MAX_ATTEMPTS = 5
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 10.0
CONNECT_WITHIN_S, SILENT_WITHIN_S = 10, 30
"""Time limits for S3 to connect, and to send the next bytes; after that the call is retried."""
WITHOUT_FOLDERS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "adl", "memory"}
"""Protocols whose folders are only prefixes of names: creating one could create a bucket instead."""
PUT_AT = ("LastModified", "last_modified", "mtime", "updated", "created")
"""Names under which stores report when an object was put, in fsspec's information about it."""
FULL = ("insufficientstorage", "insufficient storage", "storagefull", "quotaexceeded", "(507)")
"""Words in the error messages of a full store."""
PAST_END = "the object is shorter than the requested range"
UNKNOWN_CALLER = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "TokenRetrievalError"}

T = TypeVar("T")


class PastEnd(StoreError):
    """A read began past the end of an object, which some stores report as an error."""


class RemoteStore:
    """Pieces and manifests as objects below a URL, such as s3://bucket/run, through fsspec.

    Guarantees: a call ends by its deadline, with the result or with a `StoreError` that names the URL and the remedy.
    Temporary errors are retried a few times, with growing pauses. Nothing logged or raised here contains the
    credentials of the URL. A cloud store answers only when an object is whole and durable, so there is nothing to
    flush. Every put is sent, even if the object exists: its new time tells `offbeat.weights.collect` that it is in use.
    """

    def __init__(self, url: str, within_s: float = WITHIN_S):
        self._secrets = _secrets(url)
        self.url, self._within_s = shown(url), within_s
        fsspec = import_extra("fsspec", "remote", f"a store at {self.url}")
        try:
            self._files, root = fsspec.core.url_to_fs(url, **_options(fsspec, url))
        except (ImportError, ValueError, TypeError) as error:
            raise UserError(
                f"{self.url}: cannot be used as a store: {self._describe(error)}; correct the URL, or install fsspec's "
                "package for its protocol"
            ) from None
        except Exception as error:  # noqa: BLE001 - some connect at once, and every store has its own errors
            raise StoreError(f"{self.url}: cannot be opened: {self._describe(error)}; {_remedy(error)[0]}") from None
        self._root = root.rstrip("/")
        protocol = self._files.protocol
        self._has_folders = WITHOUT_FOLDERS.isdisjoint([protocol] if isinstance(protocol, str) else protocol)

    def put(self, digest: str, data: bytes) -> None:
        self._write(piece_path(digest), bytes(data))

    def sync(self) -> None:
        """Does nothing: an object is durable once its put returns."""

    def get(self, digest: str, start: int = 0, stop: int | None = None) -> bytes:
        path = piece_path(digest)
        try:
            data = self._read(path, start, stop)
        except PastEnd:
            data = b""
        return checked(self._url_of(path), digest, data, start, stop)

    def size(self, digest: str) -> int | None:
        path = piece_path(digest)
        try:
            return int(self._call(path, "looked up", lambda at: self._files.info(at)["size"]))
        except FileNotFoundError:
            return None

    def put_manifest(self, number: int, digest: str, sealed: bytes) -> None:
        path = manifest_path(number, digest)
        check_new(self._url_of(path), digest, sealed)
        with suppress(PieceMissing):
            if (found := self._read(path)) == sealed:
                return
            check_new(self._url_of(path), digest, sealed, found)
        self._write(path, sealed)
        check_new(self._url_of(path), digest, sealed, self._read(path))  # another writer may have come between

    def get_manifest(self, number: int, digest: str) -> bytes:
        path = manifest_path(number, digest)
        return checked_manifest(self._url_of(path), digest, self._read(path))

    def list_manifests(self) -> list[Entry]:
        return sorted(entry for name in self._find(MANIFESTS) if (entry := entry_of(name)))

    def list_pieces(self) -> list[str]:
        return sorted(name for name in self._find(PIECES) if DIGEST.fullmatch(name))

    def times(self) -> Times:
        pieces = {name: _put_s(info) for name, info in self._find(PIECES).items() if DIGEST.fullmatch(name)}
        found = {entry_of(name): _put_s(info) for name, info in self._find(MANIFESTS).items()}
        return Times(pieces, {entry: put_s for entry, put_s in found.items() if entry})

    def delete(self, pieces: Collection[str], manifests: Collection[Entry]) -> None:
        for path in [*map(piece_path, pieces), *(manifest_path(*entry) for entry in manifests)]:
            with suppress(FileNotFoundError):
                self._call(path, "deleted", self._files.rm_file)

    def sweep(self, older_than_s: float) -> None:
        """Does nothing: an object that was not sent whole does not exist."""

    def _url_of(self, path: str) -> str:
        return f"{self.url.rstrip('/')}/{path}"

    def _write(self, path: str, data: bytes) -> None:
        def send(at: str) -> None:
            if self._has_folders:
                self._files.makedirs(at.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(at, data)

        try:
            self._call(path, "written", send)
        except FileNotFoundError:
            raise StoreError(f"{self._url_of(path)}: cannot be written: no such bucket or folder; create it") from None

    def _read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        end = stop if stop is None else max(stop, start + 1)  # stores do not serve empty ranges
        try:
            found = self._call(path, "read", lambda at: self._files.cat_file(at, start=start or None, end=end))
            return bytes(found) if end == stop else b""
        except FileNotFoundError:
            raise PieceMissing(f"{self._url_of(path)}: no such object in the store of weights") from None

    def _find(self, folder: str) -> dict[str, dict[str, Any]]:
        """Returns fsspec's information about the objects in a folder, by the last part of their names."""

        def find(at: str) -> dict[str, dict[str, Any]]:
            self._files.invalidate_cache()
            return dict(self._files.find(at, detail=True))

        try:
            found = self._call(folder, "listed", find)
        except FileNotFoundError:
            return {}
        return {path.rpartition("/")[2]: info for path, info in found.items()}

    def _call(self, path: str, done: str, work: Callable[[str], T]) -> T:
        """Returns `work(full path of the object)`, with retries; raises only FileNotFoundError and `StoreError`."""
        deadline_s = time.monotonic() + self._within_s
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                return _within(deadline_s - time.monotonic(), lambda: work(f"{self._root}/{path}"))
            except FileNotFoundError:
                raise
            except Exception as error:  # noqa: BLE001 - every store has its own errors
                reason, (remedy, is_final) = self._describe(error), _remedy(error)
            pause_s = min(FIRST_PAUSE_S * 2 ** (attempt - 1), MAX_PAUSE_S) * random.uniform(0.5, 1.0)
            if is_final or attempt == MAX_ATTEMPTS or time.monotonic() + pause_s >= deadline_s:
                break
            log.warning("%s: could not be %s (%s); trying again in %.1f s", self._url_of(path), done, reason, pause_s)
            time.sleep(pause_s)
        kind = PastEnd if remedy is PAST_END else StoreError
        raise kind(f"{self._url_of(path)}: cannot be {done}: {reason}; {remedy}")

    def _describe(self, error: BaseException) -> str:
        """Returns the text of an error, on one line and without secrets."""
        text = " ".join(f"{type(error).__name__}: {error}".split())
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text if len(text) <= 300 else f"{text[:300]}..."


def _within(limit_s: float, work: Callable[[], T]) -> T:
    """Returns `work()`, or raises TimeoutError after `limit_s` seconds. `work` runs in a thread, which is left behind
    after a timeout, because few stores have time limits themselves."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised at the waiter
            answer.set_exception(error)

    threading.Thread(target=run, name="remote-store", daemon=True).start()
    try:
        return answer.result(max(limit_s, 0.0))
    except TimeoutError:
        if answer.done():  # the store's own timeout
            raise
        raise TimeoutError(f"the store did not answer within {limit_s:.0f} s") from None


def _remedy(error: BaseException) -> tuple[str, bool]:
    """Returns advice to the user about a store's error, and whether retrying is pointless."""
    text = f"{error} {error.__cause__}".lower()
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or any(word in text for word in FULL):
        return "free space in the store", True
    if isinstance(error, PermissionError) or type(error).__name__ in UNKNOWN_CALLER:
        return "check the store's credentials and what they allow", True
    if "(invalidrange)" in text or "(416)" in text:
        return PAST_END, True
    return "check that the store can be reached", False


def _options(fsspec: Any, url: str) -> dict[str, Any]:
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if url.startswith(("s3://", "s3a://")):
        limits = {"connect_timeout": CONNECT_WITHIN_S, "read_timeout": SILENT_WITHIN_S, "retries": {"max_attempts": 1}}
        options["config_kwargs"] = {**limits, **fsspec.config.conf.get("s3", {}).get("config_kwargs", {})}
    return options


def _secrets(url: str) -> list[str]:
    """Returns the secret parts of a URL, longest first."""
    parts = urlsplit(url)
    login = parts.netloc.rpartition("@")[0]
    found = [login, parts.password or "", parts.query]
    return sorted(filter(None, {*found, *map(unquote, found)}), key=len, reverse=True)


def _put_s(info: dict[str, Any]) -> float:
    """Returns the time at which an object was put into the store, in seconds since the epoch. If it is unknown, returns
    infinity, so that the object never counts as old."""
    found = next((info[key] for key in PUT_AT if info.get(key)), math.inf)
    if isinstance(found, str):
        found = datetime.fromisoformat(found)
    return found.timestamp() if isinstance(found, datetime) else float(found)
