"""A sealed manifest opens for those who trust its signer, and for nobody else if a single bit differs."""

import os
import stat
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import UserError
from offbeat.weights.manifest import ManifestError
from offbeat.weights.signing import SigningKey, open_sealed, seal, signer, verify

MANIFEST = b'{"number":12,"step":3}'


def test_a_sealed_manifest_opens_for_who_trusts_its_signer():
    key, other = SigningKey.generate(), SigningKey.generate()
    sealed = seal(MANIFEST, key)
    assert open_sealed(sealed, {other.public, key.public}) == MANIFEST
    assert signer(sealed) == key.public
    assert sealed.count(b"\n") == 2


def test_a_manifest_that_another_key_signed_is_refused_by_name():
    ours, theirs = SigningKey.generate(), SigningKey.generate()
    with pytest.raises(ManifestError, match=f"key {theirs.public[:12]}, which is not trusted.*{ours.public[:12]}"):
        open_sealed(seal(MANIFEST, theirs), [ours.public])
    with pytest.raises(ManifestError, match="trusted keys: none"):
        open_sealed(seal(MANIFEST, theirs), [])


def test_a_foreign_signature_under_a_trusted_name_is_refused():
    ours, theirs = SigningKey.generate(), SigningKey.generate()
    forged = seal(MANIFEST, theirs).replace(theirs.public.encode(), ours.public.encode())
    with pytest.raises(ManifestError, match="was changed after key"):
        open_sealed(forged, [ours.public])


KEY = SigningKey(bytes(range(32)))
SEALED = seal(MANIFEST, KEY)


@given(st.integers(0, 8 * len(SEALED) - 1))
def test_any_flipped_bit_is_refused(bit: int):
    changed = bytearray(SEALED)
    changed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ManifestError):
        open_sealed(bytes(changed), [KEY.public])


@given(st.integers(0, len(SEALED) - 1), st.binary(min_size=1, max_size=200))
def test_whatever_is_cut_short_or_goes_on_is_refused(length: int, more: bytes):
    for changed in (SEALED[:length], SEALED + more, more + SEALED, more):
        with pytest.raises(ManifestError):
            open_sealed(changed, [KEY.public])


@pytest.mark.parametrize("change", [lambda line: line.replace(b":", b": "), lambda line: line.replace(b'"}', b'\\n"}')])
def test_a_seal_can_be_written_in_one_way_only(change):
    manifest, line, _ = SEALED.split(b"\n")
    assert change(line) != line
    with pytest.raises(ManifestError, match="the signature line of the manifest"):
        open_sealed(b"%s\n%s\n" % (manifest, change(line)), [KEY.public])


@pytest.mark.parametrize("public, signature", [("", ""), ("zz" * 32, "00" * 64), ("00" * 31, "00" * 64), ("é", "1")])
def test_what_is_no_key_or_signature_verifies_nothing(public: str, signature: str):
    assert not verify(public, b"", signature)
    assert not verify(KEY.public, b"", signature)


def test_a_known_key_signs_as_the_standard_says():
    """The second test vector of RFC 8032."""
    key = SigningKey(bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb"))
    assert key.public == "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c"
    assert key.sign(b"\x72") == (
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )


def test_a_key_is_made_once_and_its_owner_alone_can_read_it(tmp_path):
    path = tmp_path / "keys" / "trainer.key"
    old_mask = os.umask(0)
    try:
        key = SigningKey.load_or_create(path)
    finally:
        os.umask(old_mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert SigningKey.load_or_create(path).public == key.public
    assert [entry.name for entry in path.parent.iterdir()] == ["trainer.key"]


def test_a_key_that_others_could_read_is_hidden_from_them(tmp_path, caplog):
    path = tmp_path / "trainer.key"
    key = SigningKey.load_or_create(path)
    path.chmod(0o644)
    assert SigningKey.load_or_create(path).public == key.public
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "other users could read this signing key" in caplog.text


def test_a_key_shows_only_its_public_half(tmp_path):
    path = tmp_path / "trainer.key"
    key = SigningKey.load_or_create(path)
    assert path.read_text().strip() not in f"{key!r} {key} {vars(key)}"


@pytest.mark.parametrize("content", [b"", b"secret-ish", b"ab" * 31, b"ab" * 33, b"\xff" * 64])
def test_a_file_that_holds_no_key_is_named_and_not_quoted(tmp_path, content: bytes):
    path = tmp_path / "trainer.key"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"trainer\.key: this file holds no signing key; restore it") as caught:
        SigningKey.load_or_create(path)
    assert not content or content.decode("latin-1") not in str(caught.value)
    assert path.read_bytes() == content


def test_a_place_where_no_key_can_lie_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"the signing key cannot be read or written"):
        SigningKey.load_or_create(tmp_path / "file" / "trainer.key")
    with pytest.raises(UserError, match=r"Is a directory"):
        SigningKey.load_or_create(tmp_path)


CREATE = """
import sys
from pathlib import Path
from offbeat.weights.signing import SigningKey
print("ready", flush=True)
sys.stdin.readline()
print(SigningKey.load_or_create(Path(sys.argv[1])).public, flush=True)
"""


def test_processes_that_create_a_key_at_the_same_time_agree(tmp_path):
    path = tmp_path / "trainer.key"
    command = [sys.executable, "-c", CREATE, str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    processes = [subprocess.Popen(command, env=environment, **pipes) for _ in range(4)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    said = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert said == {SigningKey.load_or_create(path).public}
    assert [entry.name for entry in tmp_path.iterdir()] == ["trainer.key"]
