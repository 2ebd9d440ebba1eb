from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat import files
from offbeat.errors import OffbeatError
from offbeat.files import Appender, cut_half_line


def test_a_line_is_on_file_when_the_call_returns(tmp_path):
    file = Appender(tmp_path / "a.jsonl")
    file.line("one")
    assert (tmp_path / "a.jsonl").read_text() == "one\n"
    file.close()


def test_what_a_killed_writer_left_half_is_cut_off(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("one\ntwo\nthr")
    file = Appender(path)
    file.line("three")
    file.close()
    assert path.read_text() == "one\ntwo\nthree\n"


@given(st.lists(st.sampled_from([b"\n", b"a", b"bc"]), max_size=30), st.integers(1, 4))
def test_cutting_keeps_exactly_the_whole_lines(tmp_path_factory, parts, tail_bytes):
    path = tmp_path_factory.mktemp("cut") / "file"
    content = b"".join(parts)
    path.write_bytes(content)
    before, files.TAIL_BYTES = files.TAIL_BYTES, tail_bytes
    try:
        cut_half_line(path)
    finally:
        files.TAIL_BYTES = before
    assert path.read_bytes() == content[: content.rfind(b"\n") + 1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_clear_line():
    file = Appender(Path("/dev/full"))
    with pytest.raises(
        OffbeatError, match=r"^/dev/full: cannot be written: No space left on device; .*then resume the run"
    ):
        file.line("one")
    with pytest.raises(OffbeatError):
        file.close()
