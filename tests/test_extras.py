"""Large imports run without the search for garbage, and leave it as they found it."""

import gc

import pytest

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
