"""Signatures of manifests with a trainer's Ed25519 key.

A sealed manifest is two lines: the canonical manifest, and the public key with its signature of the first line.

Guarantees: `open_sealed` returns bytes that a trusted key has signed, or raises. A key file is readable only by its
owner, and is either complete or missing; processes that create it at the same time get the same key.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import Meta

from offbeat.errors import UserError
from offbeat.files import create_atomic
from offbeat.weights.manifest import ManifestError

log = logging.getLogger(__name__)

OTHERS = 0o077
"""Permission bits of everyone but a file's owner."""


class SigningKey:
    """A private key; `public` is its public key in hex."""

    def __init__(self, secret: bytes):
        self._secret = Ed25519PrivateKey.from_private_bytes(secret)
        self.public = self._secret.public_key().public_bytes_raw().hex()

    def __repr__(self) -> str:
        return f"SigningKey(public={self.public!r})"

    @staticmethod
    def generate() -> SigningKey:
        return SigningKey(_new_secret())

    @staticmethod
    def load_or_create(path: Path) -> SigningKey:
        """Reads the key from a file; creates the file with a new key if it is missing."""
        try:
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                create_atomic(path, _new_secret().hex().encode() + b"\n", mode=0o600)
            _hide(path)
            return SigningKey(bytes.fromhex(path.read_text(encoding="ascii").strip()))
        except OSError as error:
            raise UserError(
                f"{path}: the signing key cannot be read or written: {error.strerror}; check owner and permissions"
            ) from error
        except ValueError:  # not chained: its message could quote the key
            raise UserError(
                f"{path}: this file holds no signing key; restore it from a backup, or delete it to get a new key, "
                "which every worker must trust"
            ) from None

    def sign(self, data: bytes) -> str:
        return self._secret.sign(data).hex()


def verify(public: str, data: bytes, signature: str) -> bool:
    """Returns whether `signature` is the key `public`'s signature of `data`; False if key or signature is malformed."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(bytes.fromhex(signature), data)
    except (InvalidSignature, ValueError):  # ValueError: not a key or a signature at all
        return False
    return True


class Seal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: Annotated[str, Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
    signature: Annotated[str, Meta(pattern="^[0-9a-f]{128}$", max_length=128)]


def seal(manifest_bytes: bytes, key: SigningKey) -> bytes:
    assert b"\n" not in manifest_bytes, "this is a bug: a canonical manifest must be one line"
    return b"%s\n%s\n" % (manifest_bytes, msgspec.json.encode(Seal(key.public, key.sign(manifest_bytes))))


def open_sealed(data: bytes, trusted: Collection[str]) -> bytes:
    """Returns the manifest's bytes, without the seal; raises `ManifestError` if no `trusted` key signed them."""
    assert not isinstance(trusted, str), "this is a bug: `trusted` is one key instead of a collection of keys"
    key = signer(data)
    if key not in trusted:
        known = ", ".join(each[:12] for each in sorted(trusted)) or "none"
        raise ManifestError(f"the manifest is signed by key {key[:12]}, which is not trusted; trusted keys: {known}")
    return bytes(data).partition(b"\n")[0]


def signer(data: bytes) -> str:
    """Returns the public key that signed a manifest, trusted or not; raises `ManifestError` if none did."""
    lines = bytes(data).split(b"\n")
    if len(lines) != 3 or lines[2]:
        raise ManifestError("a sealed manifest must be two whole lines; this one may have been cut short")
    try:
        found = msgspec.json.decode(lines[1], type=Seal)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(f"the signature line of the manifest cannot be read: {error}") from error
    if msgspec.json.encode(found) != lines[1]:
        raise ManifestError("the signature line of the manifest is not in canonical form")
    if not verify(found.key, lines[0], found.signature):
        raise ManifestError(f"the manifest was changed after key {found.key[:12]} signed it")
    return found.key


def _new_secret() -> bytes:
    return Ed25519PrivateKey.generate().private_bytes_raw()


def _hide(path: Path) -> None:
    """Makes a key file readable only by its owner: copying a folder may have changed its mode."""
    mode = path.stat().st_mode
    if mode & OTHERS:
        log.warning("%s: other users could read this signing key; now only its owner can", path)
        os.chmod(path, mode & 0o700)
