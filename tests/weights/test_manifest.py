"""A manifest has one form and one digest, and whatever contradicts itself is refused with the reason."""

import json
import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from offbeat.weights.manifest import (
    ITEM_BYTES,
    MAX_PIECE_BYTES,
    Base,
    Coding,
    Kind,
    Manifest,
    ManifestError,
    Part,
    PieceEntry,
    TensorEntry,
    manifest_digest,
    tensors_digest,
)
from offbeat.weights.version import DTYPES, PIECE_BYTES, adapter_digest, whole_digest

DIGESTS = st.binary(min_size=32, max_size=32).map(bytes.hex)
LETTERS = st.characters(categories=["L", "N", "P"])
NAMES = st.text(LETTERS, min_size=1, max_size=12).filter(lambda name: name != "__metadata__")


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Any that is in order; some tensors are of several parts."""
    kind, number = draw(st.sampled_from(Kind)), draw(st.integers(1, 2**53))
    pieces = draw(st.lists(st.builds(PieceEntry, DIGESTS, st.integers(0, MAX_PIECE_BYTES)), min_size=1, max_size=4))
    codings = list(Coding) if kind is Kind.DELTA else [Coding.DENSE]
    tensors = []
    for name in sorted(draw(st.sets(NAMES, max_size=4))):
        dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
        shape = draw(st.lists(st.integers(0, 9), max_size=3) | st.just([3, PIECE_BYTES]))
        num_parts = max(1, math.ceil(ITEM_BYTES[dtype] * math.prod(shape) / PIECE_BYTES))
        parts = [draw(parts_of(codings, pieces)) for _ in range(num_parts)]
        tensors.append(TensorEntry(name, dtype, shape, parts))
    base = None if kind is Kind.FULL else Base(draw(st.integers(0, number - 1)), draw(DIGESTS))
    adapter = draw(st.text(max_size=20)) if kind is Kind.ADAPTER else msgspec.UNSET
    digest = tensors_digest(tensors)
    if base is not None and isinstance(adapter, str):
        base = Base(draw(st.integers(0, number)), base.digest, draw(st.none() | DIGESTS))
        digest = adapter_digest(base.digest, digest, adapter)
    return Manifest(
        number=number,
        step=draw(st.integers(0, 2**53)),
        parent=draw(st.none() | st.integers(0, number - 1)),
        digest=digest,
        kind=kind,
        base=base,
        delta=draw(st.none() | DIGESTS) if kind is Kind.FULL else None,
        tensors=tensors,
        pieces=pieces,
        adapter=adapter,
    )


@st.composite
def parts_of(draw: st.DrawFn, codings: list[Coding], pieces: list[PieceEntry]) -> Part:
    coding, digest = draw(st.sampled_from(codings)), draw(DIGESTS)
    if coding is Coding.SAME:
        return Part(coding, digest)
    piece = draw(st.integers(0, len(pieces) - 1))
    start = draw(st.integers(0, pieces[piece].num_bytes))
    return Part(coding, digest, piece, start, draw(st.integers(0, pieces[piece].num_bytes - start)))


@given(manifests())
def test_a_manifest_is_read_back_as_it_was_written(manifest: Manifest):
    data = manifest.encode()
    assert Manifest.decode(data) == manifest
    assert Manifest.decode(data).encode() == data
    assert b"\n" not in data
    assert manifest_digest(data) == blake3(data).hexdigest()


@given(manifests(), st.integers(0, 3))
def test_the_same_content_in_any_other_form_is_refused(manifest: Manifest, form: int):
    data = manifest.encode()
    tree = json.loads(data)
    others = [
        json.dumps(tree, sort_keys=True, indent=1).encode(),
        json.dumps(dict(reversed(tree.items())), separators=(",", ":"), ensure_ascii=False).encode(),
        data + b" ",
        data.replace(b',"delta":', b',"delta":null,"delta":', 1),
    ]
    assert others[form] != data
    with pytest.raises(ManifestError):
        Manifest.decode(others[form])


@given(manifests(), st.data())
def test_any_change_of_a_byte_gives_another_digest_or_no_manifest(manifest: Manifest, draw: st.DataObject):
    data = bytearray(manifest.encode())
    position = draw.draw(st.integers(0, len(data) - 1))
    data[position] ^= draw.draw(st.integers(1, 255))
    try:
        changed = Manifest.decode(bytes(data))
    except ManifestError:
        return
    assert changed != manifest
    assert manifest_digest(bytes(data)) != manifest_digest(manifest.encode())


@given(st.binary(max_size=300) | manifests().map(lambda manifest: manifest.encode()[:-1]))
def test_what_is_no_manifest_is_refused_on_one_line(data: bytes):
    with pytest.raises(ManifestError, match=r"^the bytes of a manifest cannot be decoded: ") as caught:
        Manifest.decode(data)
    assert "\n" not in str(caught.value)


def test_a_flood_of_brackets_is_refused():
    with pytest.raises(ManifestError):
        Manifest.decode(b'{"tensors":' + b"[" * 1_000_000)


@given(manifests())
def test_sizes_add_up(manifest: Manifest):
    assert manifest.num_bytes == sum(math.prod(each.shape) * ITEM_BYTES[each.dtype] for each in manifest.tensors)
    assert manifest.num_coded_bytes == sum(piece.num_bytes for piece in manifest.pieces)
    for tensor in manifest.tensors:
        sizes = [tensor.part_bytes(index) for index in range(len(tensor.parts))]
        assert sum(sizes) == tensor.num_bytes
        assert all(size == PIECE_BYTES for size in sizes[:-1])


def test_a_tensors_digest_is_the_one_that_its_file_has():
    """By hand: blake3 over the digests of two parts, and a version's over a line for each tensor."""
    parts = [blake3(b"\1" * PIECE_BYTES), blake3(b"\1\1")]
    entry = TensorEntry("w", "U8", [PIECE_BYTES + 2], [Part(Coding.DENSE, part.hexdigest()) for part in parts])
    assert entry.digest == blake3(b"".join(part.digest() for part in parts)).hexdigest()
    line = f"w\0uint8\0[{PIECE_BYTES + 2}]\0{entry.digest}\n"
    assert tensors_digest([entry]) == blake3(line.encode()).hexdigest()
    assert tensors_digest([entry]) == whole_digest({"w": ("uint8", [PIECE_BYTES + 2], entry.digest)})


def test_an_adapter_has_another_digest_on_another_base_and_put_on_it_in_another_way():
    tensors = tensors_digest([TensorEntry("w", "U8", [1], [Part(Coding.DENSE, "0" * 64)])])
    found = {adapter_digest(digit * 64, tensors, config) for digit in "12" for config in ("a", "b")}
    assert len({*found, tensors}) == 5


def test_every_dtype_has_a_size_and_a_name():
    import torch

    assert ITEM_BYTES.keys() == DTYPES.keys()
    for name, num_bytes in ITEM_BYTES.items():
        assert getattr(torch, DTYPES[name]).itemsize == num_bytes


# --- contradictions ---

EMPTY = blake3(b"").hexdigest()


def example(kind: Kind = Kind.DELTA) -> dict[str, Any]:
    """One that is in order, as a tree to spoil."""
    coding = Coding.SPARSE if kind is Kind.DELTA else Coding.DENSE
    tensors = [
        TensorEntry("a", "BF16", [4, 2], [Part(coding, "1" * 64, 0, 0, 7)]),
        TensorEntry("b", "F32", [PIECE_BYTES // 2], [Part(coding, "2" * 64, 0, 7, 3), Part(coding, "3" * 64, 1, 0, 5)]),
    ]
    base, digest = None if kind is Kind.FULL else Base(3, "4" * 64), tensors_digest(tensors)
    manifest = Manifest(
        number=5,
        step=2,
        parent=4,
        digest=adapter_digest("4" * 64, digest, "{}") if kind is Kind.ADAPTER else digest,
        kind=kind,
        base=base,
        tensors=tensors,
        pieces=[PieceEntry("5" * 64, 10), PieceEntry("6" * 64, 5)],
        adapter="{}" if kind is Kind.ADAPTER else msgspec.UNSET,
    )
    return json.loads(manifest.encode())


def data_of(tree: dict[str, Any]) -> bytes:
    """In canonical form, with the digest that its tensors have, as far as they have one."""
    return json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


@pytest.mark.parametrize("kind", Kind)
def test_the_example_is_in_order(kind: Kind):
    Manifest.decode(data_of(example(kind)))


def part(tree: dict[str, Any], tensor: int = 0, index: int = 0) -> dict[str, Any]:
    return tree["tensors"][tensor]["parts"][index]


SAME = {"coding": "same", "digest": "1" * 64}
CONTRADICTIONS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "kind delta must have a base": lambda tree: tree.update(base=None),
    "kind full must not have a base": lambda tree: tree.update(kind="full"),
    "kind delta must not name a delta manifest": lambda tree: tree.update(delta="0" * 64),
    "its base is version 5; a base must be an older version": lambda tree: tree["base"].update(number=5),
    "its parent is version 6; a parent must be an older version": lambda tree: tree.update(parent=6),
    "not sorted by name": lambda tree: tree["tensors"].reverse(),
    "one is listed twice": lambda tree: tree["tensors"].insert(0, tree["tensors"][0]),
    "'a': its dtype is 'F4'; it must be one of F64": lambda tree: tree["tensors"][0].update(dtype="F4"),
    "'a': .* 1 parts; a tensor of 33554432 bytes has 2": lambda tree: tree["tensors"][0].update(shape=[PIECE_BYTES]),
    "'b': .* 2 parts; a tensor of 16777216 bytes has 1": lambda tree: tree["tensors"][1].update(
        shape=[PIECE_BYTES // 4]
    ),
    "'b': .* 2 parts; a tensor of 0 bytes has 1": lambda tree: tree["tensors"][1].update(shape=[0, 2**53]),
    "'b': .* 2 parts; a tensor of [0-9]{70,} bytes": lambda tree: tree["tensors"][1].update(shape=[2**53] * 5),
    "'a': it is listed with 0 parts": lambda tree: tree["tensors"][0].update(parts=[]),
    "lies in piece 2, but there are only 2": lambda tree: part(tree).update(piece=2),
    "lies beyond the end of piece 0": lambda tree: part(tree, 1).update(start=8),
    "lies beyond the end of piece 1": lambda tree: part(tree, 1, 1).update(num_bytes=6),
    "a part with coding same must have piece, start and num_bytes 0": lambda tree: part(tree).update(coding="same"),
    "coding same must have piece": lambda tree: part(tree).update(SAME, piece=1, start=0, num_bytes=0),
    "coding sparse, which needs a base; kind adapter": lambda tree: tree.update(kind="adapter", adapter="{}"),
    "kind adapter must have an adapter's configuration": lambda tree: tree.update(kind="adapter"),
    "kind delta must not have an adapter's configuration": lambda tree: tree.update(adapter="{}"),
    r"it states digest 0000.*, but its content has digest": lambda tree: tree.update(digest="0" * 64),
    "piece 1 has 33554433 bytes; at most 33554432 are": lambda tree: tree["pieces"][1].update(num_bytes=2**25 + 1),
    "'__metadata__': this name is reserved": lambda tree: tree["tensors"][0].update(name="__metadata__"),
    r"'a\\nb': this name": lambda tree: tree["tensors"][0].update(name="a\nb"),
    r"'a\\x00b': this name": lambda tree: tree["tensors"][0].update(name="a\0b"),
    r"\$\.tensors\[0\]\.name": lambda tree: tree["tensors"][0].update(name=""),
    r"\$\.number": lambda tree: tree.update(number=-1),
    r"\$\.step": lambda tree: tree.update(step=2**53 + 1),
    r"Expected `int \| null`": lambda tree: tree.update(parent="4"),
    r"\$\.digest": lambda tree: tree.update(digest=tree["digest"] + "\n"),
    r"\$\.pieces\[0\]\.digest": lambda tree: tree["pieces"][0].update(digest="5" * 63 + "G"),
    r"\$\.kind": lambda tree: tree.update(kind="half"),
    r"\.coding": lambda tree: part(tree).update(coding="zip"),
    r"\$\.format": lambda tree: tree.update(format=2),
    "unknown field `more`": lambda tree: tree.update(more=1),
    "missing required field `pieces`": lambda tree: tree.pop("pieces"),
}


@pytest.mark.parametrize("reason", CONTRADICTIONS)
def test_a_contradiction_is_refused_with_its_reason(reason: str):
    tree = example()
    CONTRADICTIONS[reason](tree)
    with pytest.raises(ManifestError, match=reason) as caught:
        Manifest.decode(data_of(tree))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key, value", [("shape", [2, 4]), ("dtype", "F16"), ("name", "aa")])
def test_a_version_is_its_tensors_names_shapes_and_dtypes(key: str, value: Any):
    tree = example()
    tree["tensors"][0][key] = value
    with pytest.raises(ManifestError, match="but its content has digest"):
        Manifest.decode(data_of(tree))


@pytest.mark.parametrize("spoil", [lambda tree: tree["base"].update(digest="7" * 64), lambda t: t.update(adapter="")])
def test_an_adapter_is_bound_to_its_base_and_to_the_way_it_is_put_there(spoil: Callable[[dict[str, Any]], Any]):
    tree = example(Kind.ADAPTER)
    spoil(tree)
    with pytest.raises(ManifestError, match="but its content has digest"):
        Manifest.decode(data_of(tree))


def test_an_adapters_base_may_lie_beside_it_and_no_later():
    tree = example(Kind.ADAPTER)
    tree["base"].update(number=5, manifest="8" * 64)
    assert Manifest.decode(data_of(tree)).base == Base(5, "4" * 64, "8" * 64)
    tree["base"].update(number=6)
    with pytest.raises(ManifestError, match="its base is version 6; a base must be an older version"):
        Manifest.decode(data_of(tree))


def test_manifests_of_runs_without_adapters_are_read_and_written_as_they_were():
    tree = example(Kind.DELTA)
    assert "adapter" not in tree
    assert tree["base"].keys() == {"number", "digest"}


def test_a_tensor_more_or_fewer_is_another_version():
    fewer, more = example(), example()
    fewer["tensors"].pop()
    more["tensors"].append({"name": "c", "dtype": "U8", "shape": [0], "parts": [{**SAME, "digest": EMPTY}]})
    more["tensors"][-1]["parts"][0].update(piece=0, start=0, num_bytes=0)
    for tree in (fewer, more):
        with pytest.raises(ManifestError, match="but its content has digest"):
            Manifest.decode(data_of(tree))
