"""A version's file out of a base and a chain: bit for bit what was published, or refused and nothing left behind."""

import os
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from offbeat.weights.assemble import assemble
from offbeat.weights.codec import encode
from offbeat.weights.manifest import Base, Coding, Kind, Manifest, Part, PieceEntry, TensorEntry, tensors_digest
from offbeat.weights.version import FILE_NAME, PIECE_BYTES, WeightsError, file_digest, weights_digest

NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int64: "I64"}


@dataclass
class History:
    """Versions made by hand: a piece for every part."""

    manifests: list[Manifest] = field(default_factory=list)
    pieces: dict[str, bytes] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, tensors, full=False) -> Manifest:
        number, pieces, entries = len(self.manifests), [], []
        base = None if full or not self.manifests else Base(number - 1, self.manifests[-1].digest)
        for name, tensor in sorted(tensors.items()):
            old = None if base is None else self.tensors.get(name)
            if old is not None and (old.dtype, old.shape) != (tensor.dtype, tensor.shape):
                old = None
            parts = list(self._parts(tensor, old, pieces))
            entries.append(TensorEntry(name, NAMES[tensor.dtype], list(tensor.shape), parts))
        kind = Kind.FULL if base is None else Kind.DELTA
        manifest = Manifest(
            number=number,
            step=number,
            parent=number - 1 if number else None,
            digest=tensors_digest(entries),
            kind=kind,
            base=base,
            tensors=entries,
            pieces=pieces,
        )
        self.manifests.append(Manifest.decode(manifest.encode()))
        self.tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        return manifest

    def _parts(self, tensor, old, pieces):
        new_bytes, old_bytes = raw(tensor), None if old is None else raw(old)
        for start in range(0, max(len(new_bytes), 1), PIECE_BYTES):
            new = new_bytes[start : start + PIECE_BYTES]
            before = None if old_bytes is None else old_bytes[start : start + PIECE_BYTES]
            coding, data = encode(new, before, NAMES[tensor.dtype])
            digest = blake3(new.tobytes()).hexdigest()
            if coding is Coding.SAME:
                yield Part(coding, digest)
                continue
            name = blake3(data).hexdigest()
            self.pieces[name] = data
            pieces.append(PieceEntry(name, len(data)))
            yield Part(coding, digest, len(pieces) - 1, 0, len(data))


def raw(tensor) -> np.ndarray:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def some(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(40, 50, generator=generator).bfloat16(),
        "b": torch.randn(30, generator=generator).bfloat16(),
        "c": torch.randn(9, generator=generator),
        "count": torch.tensor(3),
        "empty": torch.zeros(0, 2),
    }


def nudged(tensors, seed=1):
    """The same, with a few elements of one tensor moved."""
    generator = torch.Generator().manual_seed(seed)
    moved = tensors["a"].clone()
    moved.view(-1)[torch.randperm(moved.numel(), generator=generator)[:40]] *= 1.01
    return {**tensors, "a": moved}


@pytest.fixture
def history():
    """A full version and three deltas."""
    made = History()
    made.add(some())
    for seed in range(3):
        made.add(nudged(made.tensors, seed))
    return made


def held(folder):
    return load_file(folder / FILE_NAME)


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_full_version_needs_no_base(history, tmp_path):
    assemble(history.manifests[:1], None, history.pieces.__getitem__, tmp_path / "v")
    assert same(held(tmp_path / "v"), some())
    assert file_digest(tmp_path / "v" / FILE_NAME) == history.manifests[0].digest == weights_digest(some())


def test_a_chain_is_applied_in_one_go_or_one_by_one_to_the_same_bytes(history, tmp_path):
    assemble(history.manifests, None, history.pieces.__getitem__, tmp_path / "whole")
    base = None
    for manifest in history.manifests:
        folder = tmp_path / f"{manifest.number}"
        assemble([manifest], base, history.pieces.__getitem__, folder)
        base = folder
    assert same(held(base), history.tensors)
    assert (base / FILE_NAME).read_bytes() == (tmp_path / "whole" / FILE_NAME).read_bytes()


def test_only_the_pieces_that_matter_are_asked_for(history, tmp_path):
    moved = {**history.tensors, "a": torch.randn(40, 50).bfloat16()}
    history.tensors.pop("a")  # so that it comes densely
    history.add(moved)
    asked = []

    def piece(digest):
        asked.append(digest)
        return history.pieces[digest]

    assemble(history.manifests, None, piece, tmp_path / "v")
    last = {piece.digest for piece in history.manifests[-1].pieces}
    first = {tensor.name: tensor.parts[0].piece for tensor in history.manifests[0].tensors}
    overwritten = history.manifests[0].pieces[first["a"]].digest
    assert last <= set(asked)
    assert overwritten not in asked
    assert len(asked) == len(set(asked))
    assert same(held(tmp_path / "v"), moved)


def test_tensors_come_go_and_change_their_shape_within_a_chain(tmp_path):
    history = History()
    history.add(some())
    history.add({**some(), "d": torch.ones(3), "b": torch.ones(5, 6).bfloat16()})
    history.add({name: tensor for name, tensor in history.tensors.items() if name != "c"})
    history.add({**history.tensors, "c": some()["c"]})
    assemble(history.manifests, None, history.pieces.__getitem__, tmp_path / "v")
    assert same(held(tmp_path / "v"), history.tensors)


def test_a_tensor_of_several_parts_changes_in_one_of_them(tmp_path):
    history, tensor = History(), torch.randint(0, 9999, (PIECE_BYTES + 5,), dtype=torch.int16).view(torch.bfloat16)
    history.add({"small": torch.ones(3), "w": tensor})
    assemble(history.manifests, None, history.pieces.__getitem__, tmp_path / "0")
    tensor[-1] = 1
    delta = history.add({"small": torch.ones(3), "w": tensor})
    assert [part.coding for part in delta.tensors[1].parts[:2]] == [Coding.SAME, Coding.SAME]
    assemble([delta], tmp_path / "0", history.pieces.__getitem__, tmp_path / "1")
    assert same(held(tmp_path / "1"), history.tensors)


def test_the_same_again_replaces_what_is_there(history, tmp_path):
    (tmp_path / "v").mkdir()
    (tmp_path / "v" / "left").touch()
    (tmp_path / ".v.draft").mkdir()
    (tmp_path / ".v.draft" / FILE_NAME).write_bytes(b"half")
    for _ in range(2):
        assemble(history.manifests, None, history.pieces.__getitem__, tmp_path / "v")
        assert [path.name for path in tmp_path.iterdir()] == ["v"]
        assert [path.name for path in (tmp_path / "v").iterdir()] == [FILE_NAME]


def test_a_file_system_that_cannot_copy_leaves_it_to_us(history, tmp_path, monkeypatch):
    assemble(history.manifests[:1], None, history.pieces.__getitem__, tmp_path / "0")

    def refuse(*_):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    assemble(history.manifests[1:], tmp_path / "0", history.pieces.__getitem__, tmp_path / "3")
    assert same(held(tmp_path / "3"), history.tensors)


# What is not as it was published


def refused(folder, match, chain, base, piece, error=WeightsError):
    before = sorted(folder.rglob("*"))
    with pytest.raises(error, match=match):
        assemble(chain, base, piece, folder / "new")
    assert sorted(folder.rglob("*")) == before


@given(data=st.data())
def test_a_flipped_bit_or_a_cut_is_told_or_changes_nothing(data, tmp_path_factory):
    history, folder = History(), tmp_path_factory.mktemp("flipped")
    history.add(some())
    history.add(nudged(some()))
    digest = data.draw(st.sampled_from(sorted(history.pieces)))
    bad = bytearray(history.pieces[digest])
    at = data.draw(st.integers(0, len(bad) - 1))
    if data.draw(st.booleans()):
        bad[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del bad[at:]
    try:
        assemble(history.manifests, None, {**history.pieces, digest: bytes(bad)}.__getitem__, folder / "v")
    except WeightsError:
        assert list(folder.iterdir()) == []
    else:
        assert same(held(folder / "v"), history.tensors)


def test_a_missing_piece_is_the_callers_error(history, tmp_path):
    refused(tmp_path, r"\w{64}", history.manifests, None, {}.__getitem__, KeyError)


def test_a_wrong_base_is_told_with_the_tensors_name(history, tmp_path):
    assemble(history.manifests[:1], None, history.pieces.__getitem__, tmp_path / "0")
    told = r"version 2: tensor a: part 0 has digest \w{12}, not the published"
    refused(tmp_path, told, history.manifests[2:3], tmp_path / "0", history.pieces.__getitem__)


def test_a_base_of_another_model_is_told(history, tmp_path):
    other = History()
    other.add({"a": torch.ones(40, 50)})
    assemble(other.manifests, None, other.pieces.__getitem__, tmp_path / "0")
    told = r"tensor a needs a base tensor of dtype BF16 and shape \[40, 50\], which the base's file does not have"
    refused(tmp_path, told, history.manifests[1:], tmp_path / "0", history.pieces.__getitem__)


@pytest.mark.parametrize("num_bytes", [0, 5, 200, 4100])
def test_a_base_that_is_cut_short_is_told(history, tmp_path, num_bytes):
    assemble(history.manifests[:1], None, history.pieces.__getitem__, tmp_path / "0")
    file = tmp_path / "0" / FILE_NAME
    file.write_bytes(file.read_bytes()[:num_bytes])
    refused(tmp_path, "its base .* cannot be read", history.manifests[1:], tmp_path / "0", history.pieces.__getitem__)


def test_a_chain_with_a_gap_is_refused(history, tmp_path):
    chain = [history.manifests[0], history.manifests[2]]
    refused(tmp_path, "version 2 consists of changes to version 1", chain, None, history.pieces.__getitem__)


def test_a_chain_of_another_history_is_refused(history, tmp_path):
    other = History()
    other.add(nudged(some(), seed=9))
    other.add(some())
    chain = [history.manifests[0], other.manifests[1]]
    refused(
        tmp_path, r"version 1 consists of changes to version 0 \(digest \w{12}\), but", chain, None, other.pieces.get
    )


def test_a_delta_without_a_base_and_a_full_version_with_one_are_refused(history, tmp_path):
    refused(tmp_path, "is delta, .* without a base", history.manifests[1:], None, history.pieces.get)
    refused(tmp_path, "is full, .* with a base", history.manifests[:1], tmp_path, history.pieces.get)
