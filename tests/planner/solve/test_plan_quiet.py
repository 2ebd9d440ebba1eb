import subprocess
import sys

from offbeat.planner.solve import program

PROGRAM = """
import ctypes, os
from offbeat.planner.solve.program import quiet_stdout
libc = ctypes.CDLL(None)
print("before")
with quiet_stdout():
    libc.puts(b"from a library")
    os.write(1, b"straight to the descriptor")
print("after")
"""


def test_what_a_library_prints_does_not_reach_the_answer():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout == "before\nafter\n"


def test_standard_output_is_back_after_an_error(capfd):
    try:
        with program.quiet_stdout():
            raise RuntimeError
    except RuntimeError:
        print("told")
    assert capfd.readouterr().out == "told\n"
