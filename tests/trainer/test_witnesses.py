"""Older versions stay at hand for audits as long as a batch may hold tokens of them, and no longer."""

from offbeat.trainer.audit import Witnesses
from offbeat.weights.version import Version


def published(folder, number: int) -> Version:
    path = folder / "weights" / f"{number:08d}"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_text(f"weights of {number}")
    return Version(number, number, number - 1 if number else None, "digest", path)


def test_the_latest_versions_are_kept_when_their_files_are_cleared_away(tmp_path):
    witnesses = Witnesses(tmp_path / "weights" / "witnesses", 3)
    for number in range(5):
        version = published(tmp_path, number)
        witnesses.add(version)
        (version.path / "model.safetensors").unlink()
    assert [witnesses.file(number) is not None for number in range(6)] == [False, False, True, True, True, False]
    assert witnesses.file(4).read_text() == "weights of 4"
    assert Witnesses(tmp_path / "weights" / "witnesses", 3).file(3).read_text() == "weights of 3", "after a restart too"


def test_a_witness_takes_no_room_of_its_own(tmp_path):
    witnesses, version = Witnesses(tmp_path / "weights" / "witnesses", 2), published(tmp_path, 0)
    witnesses.add(version)
    assert witnesses.file(0).samefile(version.path / "model.safetensors")


def test_a_version_that_cannot_be_kept_is_no_reason_to_stop(tmp_path):
    witnesses = Witnesses(tmp_path / "weights" / "witnesses", 2)
    witnesses.add(Version(0, 0, None, "digest", tmp_path / "nowhere"))
    assert witnesses.file(0) is None
