"""A store behind a URL, such as s3://bucket/run: whatever fsspec can reach.

Guarantees: a call ends by its deadline, with the answer or with a `StoreError` that names the URL and the remedy; what
may pass is tried again, a few times and less and less often; nothing that this module logs or raises contains the
credentials of its URL. A store in the cloud has taken an object whole and for good once it says so, so that there is
nothing to flush. Every put is sent, whatever is there, which tells `offbeat.weights.collect` that it is wanted again.
"""

from __future__ import annotations

import errno
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from datetime import datetime
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from offbeat.errors import UserError
from offbeat.extras import import_extra
from offbeat.redact import shown
from offbeat.weights.pieces import (
    DIGEST,
    MANIFESTS,
    PIECES,
    Entry,
    PieceMissing,
    StoreError,
    Times,
    check_new,
    checked,
    checked_manifest,
    entry_of,
    manifest_path,
    piece_path,
)

log = logging.getLogger(__name__)

WITHIN_S = 300.0
"""Enough for the largest piece over a line of one Mbit/s."""
MAX_ATTEMPTS = 5
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 10.0
CONNECT_WITHIN_S, SILENT_WITHIN_S = 10, 30
"""How long S3 may take to accept a connection, and to send the next bytes: then it is asked anew, not waited for."""
WITHOUT_FOLDERS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "adl", "memory"}
"""Where a folder is but a part of names; making one could make a bucket instead."""
PUT_AT = ("LastModified", "last_modified", "mtime", "updated", "created")
"""What stores call the moment at which an object was put."""
FULL = ("insufficientstorage", "insufficient storage", "storagefull", "quotaexceeded", "(507)")
"""By which a store that is full can be told, in what it says."""
PAST_END = "it is shorter"
UNKNOWN_CALLER = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "TokenRetrievalError"}

T = TypeVar("T")


class PastEnd(StoreError):
    """Bytes were asked for that are not there, which some stores call an error."""


class RemoteStore:
    """Pieces and manifests as objects below a URL."""

    def __init__(self, url: str, within_s: float = WITHIN_S):
        self._secrets = _secrets(url)
        self.url, self._within_s = shown(url), within_s
        fsspec = import_extra("fsspec", "remote", f"a store at {self.url}")
        try:
            self._files, root = fsspec.core.url_to_fs(url, **_options(fsspec, url))
        except (ImportError, ValueError, TypeError) as error:
            raise UserError(f"{self.url}: cannot be used as a store: {self._told(error)}") from None
        except Exception as error:  # noqa: BLE001 - some connect at once, and every one has errors of its own
            raise StoreError(f"{self.url}: cannot be opened: {self._told(error)}; {_remedy(error)[0]}") from None
        self._root = root.rstrip("/")
        protocol = self._files.protocol
        self._has_folders = WITHOUT_FOLDERS.isdisjoint([protocol] if isinstance(protocol, str) else protocol)

    def put(self, digest: str, data: bytes) -> None:
        self._write(piece_path(digest), bytes(data))

    def sync(self) -> None:
        """Nothing to do: a put returns once the store answers for it."""

    def get(self, digest: str, start: int = 0, stop: int | None = None) -> bytes:
        path = piece_path(digest)
        try:
            data = self._read(path, start, stop)
        except PastEnd:
            data = b""
        return checked(self._place(path), digest, data, start, stop)

    def size(self, digest: str) -> int | None:
        path = piece_path(digest)
        try:
            return int(self._call(path, "looked up", lambda at: self._files.info(at)["size"]))
        except FileNotFoundError:
            return None

    def put_manifest(self, number: int, digest: str, sealed: bytes) -> None:
        path = manifest_path(number, digest)
        check_new(self._place(path), digest, sealed)
        with suppress(PieceMissing):
            if (found := self._read(path)) == sealed:
                return
            check_new(self._place(path), digest, sealed, found)
        self._write(path, sealed)
        check_new(self._place(path), digest, sealed, self._read(path))  # another may have come between

    def get_manifest(self, number: int, digest: str) -> bytes:
        path = manifest_path(number, digest)
        return checked_manifest(self._place(path), digest, self._read(path))

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
        """Nothing to do: what was not sent whole is not there."""

    def _place(self, path: str) -> str:
        return f"{self.url.rstrip('/')}/{path}"

    def _write(self, path: str, data: bytes) -> None:
        def send(at: str) -> None:
            if self._has_folders:
                self._files.makedirs(at.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(at, data)

        try:
            self._call(path, "written", send)
        except FileNotFoundError:
            raise StoreError(f"{self._place(path)}: cannot be written: no such bucket or folder; make it") from None

    def _read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        end = stop if stop is None else max(stop, start + 1)  # no store can be asked for no bytes
        try:
            found = self._call(path, "read", lambda at: self._files.cat_file(at, start=start or None, end=end))
            return bytes(found) if end == stop else b""
        except FileNotFoundError:
            raise PieceMissing(f"{self._place(path)}: not there") from None

    def _find(self, folder: str) -> dict[str, dict[str, Any]]:
        """The objects in a folder, by the last part of their names."""

        def find(at: str) -> dict[str, dict[str, Any]]:
            self._files.invalidate_cache()
            return dict(self._files.find(at, detail=True))

        try:
            found = self._call(folder, "listed", find)
        except FileNotFoundError:
            return {}
        return {path.rpartition("/")[2]: info for path, info in found.items()}

    def _call(self, path: str, done: str, work: Callable[[str], T]) -> T:
        """Does something with an object, again where that may help; lets only FileNotFoundError and ours through."""
        deadline_s = time.monotonic() + self._within_s
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                return _within(deadline_s - time.monotonic(), lambda: work(f"{self._root}/{path}"))
            except FileNotFoundError:
                raise
            except Exception as error:  # noqa: BLE001 - every store has errors of its own
                told, (remedy, is_final) = self._told(error), _remedy(error)
            pause_s = min(FIRST_PAUSE_S * 2 ** (attempt - 1), MAX_PAUSE_S) * random.uniform(0.5, 1.0)
            if is_final or attempt == MAX_ATTEMPTS or time.monotonic() + pause_s >= deadline_s:
                break
            log.warning("%s: could not be %s (%s), tried again in %.1f s", self._place(path), done, told, pause_s)
            time.sleep(pause_s)
        kind = PastEnd if remedy is PAST_END else StoreError
        raise kind(f"{self._place(path)}: cannot be {done}: {told}; {remedy}")

    def _told(self, error: BaseException) -> str:
        """What an error says, on one line and without secrets."""
        text = " ".join(f"{type(error).__name__}: {error}".split())
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text if len(text) <= 300 else f"{text[:300]}..."


def _within(limit_s: float, work: Callable[[], T]) -> T:
    """Does it in a thread of its own, which is left behind if it does not come back in time: few stores have limits."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:  # noqa: BLE001 - whoever waits shall have it
            answer.set_exception(error)

    threading.Thread(target=run, name="remote-store", daemon=True).start()
    try:
        return answer.result(max(limit_s, 0.0))
    except TimeoutError:
        if answer.done():  # the store's own
            raise
        raise TimeoutError(f"no answer within {limit_s:.0f} s") from None


def _remedy(error: BaseException) -> tuple[str, bool]:
    """What a user can do, and whether nothing else helps."""
    said = f"{error} {error.__cause__}".lower()
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or any(word in said for word in FULL):
        return "make room there", True
    if isinstance(error, PermissionError) or type(error).__name__ in UNKNOWN_CALLER:
        return "see to its credentials, and what they allow", True
    if "(invalidrange)" in said or "(416)" in said:
        return PAST_END, True
    return "see that it can be reached", False


def _options(fsspec: Any, url: str) -> dict[str, Any]:
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if url.startswith(("s3://", "s3a://")):
        limits = {"connect_timeout": CONNECT_WITHIN_S, "read_timeout": SILENT_WITHIN_S, "retries": {"max_attempts": 1}}
        options["config_kwargs"] = {**limits, **fsspec.config.conf.get("s3", {}).get("config_kwargs", {})}
    return options


def _secrets(url: str) -> list[str]:
    """The parts of a URL that nobody else may read, the longest first."""
    parts = urlsplit(url)
    login = parts.netloc.rpartition("@")[0]
    found = [login, parts.password or "", parts.query]
    return sorted(filter(None, {*found, *map(unquote, found)}), key=len, reverse=True)


def _put_s(info: dict[str, Any]) -> float:
    """When an object was put; where the store does not say, never: then no object is old."""
    found = next((info[key] for key in PUT_AT if info.get(key)), math.inf)
    if isinstance(found, str):
        found = datetime.fromisoformat(found)
    return found.timestamp() if isinstance(found, datetime) else float(found)
