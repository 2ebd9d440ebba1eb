import subprocess
import sys

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


def test_a_freed_block_goes_back_to_the_system_once_that_is_asked_for():
    held = """
import ctypes, sys
from pathlib import Path
from offbeat.host_memory import return_freed_blocks

libc = ctypes.CDLL(None)
libc.memalign.restype = ctypes.c_void_p
libc.memalign.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
if sys.argv[1] == "returned" and not return_freed_blocks(4 << 20):
    sys.exit("this libc cannot do it")
kept = []
for _ in range(16):
    block = libc.memalign(64, 20 << 20)
    ctypes.memset(block, 1, 20 << 20)
    kept.append(libc.memalign(64, 1000))
    libc.free(block)
print(next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line))
"""
    told = [
        subprocess.run([sys.executable, "-c", held, how], capture_output=True, text=True) for how in ("", "returned")
    ]
    if "cannot do it" in told[1].stderr:
        pytest.skip("this system's malloc is not glibc's")
    plain, returned = (int(one.stdout) for one in told)
    assert 2 * returned < plain
