import pytest

from offbeat import host_memory as module
from offbeat.host_memory import host_memory

GIB = 1 << 30


def test_free_memory_is_a_part_of_the_total():
    free, total = host_memory()
    assert 0 < free <= total


@pytest.mark.parametrize(("cached", "free"), [(0, GIB // 4), (GIB // 2, 3 * GIB // 4)])
def test_a_container_has_what_its_limit_leaves_and_cached_files_do_not_count(tmp_path, monkeypatch, cached, free):
    monkeypatch.setattr(module, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text(f"{GIB}\n")
    (tmp_path / "memory.current").write_text(f"{3 * GIB // 4}\n")
    (tmp_path / "memory.stat").write_text(f"active_file 5\ninactive_file {cached}\nkernel 3\n")
    assert host_memory() == (free, GIB)


def test_a_container_without_a_limit_has_the_memory_of_its_machine(tmp_path, monkeypatch):
    whole = host_memory()[1]
    monkeypatch.setattr(module, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory()[1] >= whole
