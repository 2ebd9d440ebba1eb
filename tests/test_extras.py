"""Large imports leave the search for garbage as they found it; what is hidden is hidden from them alone."""

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
    command = [sys.executable, "-c", LOOKS_THEN_TRAINS, str(run.path), order]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
