"""Large imports leave the search for garbage as they found it; what is hidden is so for them alone."""

import gc
import subprocess
import sys

import pytest

import offbeat
from offbeat.extras import collecting_later


def test_garbage_is_searched_for_again_after_the_block_even_if_it_fails():
    with collecting_later():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), collecting_later():
        raise KeyError
    assert gc.isenabled()


def test_a_program_that_searches_for_no_garbage_keeps_its_choice():
    gc.disable()
    try:
        with collecting_later():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_the_block_made_is_not_searched_soon_after_it():
    with collecting_later():
        made = [[] for _ in range(100)]
    assert any(one is made[-1] for one in gc.get_objects(generation=2))


def test_what_a_program_has_frozen_stays_frozen():
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with collecting_later():
            pass
        assert gc.get_freeze_count() > 0.9 * frozen
    finally:
        gc.unfreeze()


def python(program: str, *arguments: str) -> str:
    """Runs a program in a process of its own, and returns its output."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


LOADS_AHEAD = """
import sys, threading
from offbeat.extras import load_ahead
load_ahead("torch", sys.argv[1])
for thread in threading.enumerate():
    if thread is not threading.current_thread():
        thread.join()
print("torch" in sys.modules, "libtorch_cpu" in open("/proc/self/maps").read())
import torch
assert torch.ones(2) @ torch.ones(2) == 2
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="shared libraries have other names")
@pytest.mark.parametrize(("library", "found"), [("lib/libtorch_cpu.so", True), ("lib/none.so", False)])
def test_a_library_is_loaded_ahead_of_its_package_if_there_is_one(library, found):
    assert python(LOADS_AHEAD, library).split() == ["False", str(found)]


LOOKS_THEN_TRAINS = """
import offbeat, sys
if "transformers first" in sys.argv:
    import transformers
assert offbeat.Run(sys.argv[1]).trajectories(limit=1)[0]["response"] is not None
from transformers import AutoModelForCausalLM, LlamaConfig
small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
AutoModelForCausalLM.from_config(LlamaConfig(**small))
"""


@pytest.mark.full
@pytest.mark.parametrize("order", ["offbeat first", "transformers first"])
def test_looking_at_a_run_leaves_a_program_able_to_train(tmp_path, order):
    """Transformers would remember that torch is missing, if it were imported while torch is hidden."""
    small = {"batch.groups_per_step": 1, "batch.group_size": 2, "eval.every": 0, "log.console": "quiet"}
    run = offbeat.train(name="a", steps=1, run={"dir": str(tmp_path)}, **small)
    python(LOOKS_THEN_TRAINS, str(run.path), order)
