"""Bodies as bytes on the line: their digests, and zstd that cannot blow us up."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any

import zstandard
from blake3 import blake3

ZSTD = "zstd"
CONTENT_DIGEST = "Content-Digest"
"""Of the bytes sent, as they are sent."""
DAMAGED = "Damaged"
"""The kind of a refusal that says no more than that a body changed on its way: it is worth sending again."""
WHOLE_DIGEST = "Repr-Digest"
"""Of a whole file, also where a part of it is sent."""
GENERATION = "Offbeat-Generation"
"""Of the trainer that calls; see `offbeat.ledger.trainers`."""
MAX_WINDOW_BYTES = 32 * 1024 * 1024
"""What a compressed body may make us keep beside its content."""
SIP_BYTES = 256
"""Four bytes of zstd can stand for 128 KiB."""


DIGEST = re.compile(r"(?:^|,)\s*blake3=:([A-Za-z0-9+/]{43}=):")


class Malformed(ValueError):
    """Bytes that are not what they should be."""


def digest_header(digest: bytes) -> str:
    return f"blake3=:{base64.b64encode(digest).decode()}:"


def content_digest(data: bytes) -> str:
    return digest_header(blake3(data).digest())


def read_digest(headers: Mapping[str, str], name: str) -> bytes | None:
    """The blake3 digest in a header; None where there is none that we can read."""
    found = DIGEST.search(headers.get(name) or "")
    return None if found is None else base64.b64decode(found.group(1))


def compress(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(data)


def decompressed_size(data: bytes) -> int | None:
    """What a compressed body says it will become; None where it does not say."""
    try:
        size = zstandard.get_frame_parameters(data).content_size
    except zstandard.ZstdError as error:
        raise Malformed(f"not zstd: {error}") from error
    return None if size in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR) else size


def decompress(data: bytes, limit_bytes: int) -> bytes | None:
    """What was compressed; None as soon as that is more than the limit, with hardly more than it in memory."""
    size = decompressed_size(data)
    if size is not None and size > limit_bytes:
        return None
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    try:
        if size is not None:
            return decompressor.decompress(data, max_output_size=max(size, 1), allow_extra_data=False)
        return _decompress_slowly(decompressor.decompressobj(), data, limit_bytes)
    except zstandard.ZstdError as error:
        raise Malformed(f"damaged zstd: {error}") from error


def _decompress_slowly(stream: Any, data: bytes, limit_bytes: int) -> bytes | None:
    """For bodies that do not say how large they will be: sip by sip, because one sip can become megabytes."""
    parts, size = [], 0
    for start in range(0, len(data), SIP_BYTES):
        if stream.eof:
            raise Malformed("damaged zstd: something follows its frame")
        part = stream.decompress(data[start : start + SIP_BYTES])
        size += len(part)
        if size > limit_bytes:
            return None
        parts.append(part)
    if not stream.eof or stream.unused_data:
        raise Malformed("damaged zstd: it must be one whole frame")
    return b"".join(parts)
