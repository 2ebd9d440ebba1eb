"""A micro-batch that does not fit is halved and tried again, and the size found is remembered for its GPU alone."""

import pytest
import torch

from offbeat.errors import UserError
from offbeat.trainer.microbatch_size import MIN_TOKENS, MicrobatchSize, SizeFile


def full() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ...")


def work_that_fits(size: MicrobatchSize, most: int):
    def work() -> int:
        if size.tokens > most:
            raise full()
        return size.tokens

    return work


def test_what_does_not_fit_is_undone_and_tried_again_with_half_the_tokens(caplog):
    told, undone = [], []
    size = MicrobatchSize(8192, shrinks=True, on_change=told.append)
    assert size.fitting(work_that_fits(size, 3000), lambda: undone.append(size.tokens)) == 2048
    assert (told, undone) == ([4096, 2048], [8192, 4096])
    assert "micro-batches have 2048 tokens from now on" in caplog.text
    assert size.fitting(work_that_fits(size, 3000), lambda: None) == 2048
    assert len(told) == 2


@pytest.mark.parametrize("shrinks", [True, False])
def test_a_size_stays_as_long_as_room_can_be_made_in_another_way(shrinks):
    size, passes = MicrobatchSize(8192, shrinks=shrinks), iter([full(), None])

    def work() -> int:
        if error := next(passes):
            raise error
        return size.tokens

    assert size.fitting(work, lambda: True) == 8192


@pytest.mark.parametrize("size", [MicrobatchSize(8192), MicrobatchSize(MIN_TOKENS, shrinks=True)])
def test_a_size_that_may_not_shrink_ends_with_what_to_change(size):
    undone = []
    with pytest.raises(UserError, match=rf"^batch.tokens_per_microbatch = {size.tokens}: .*out of memory.*; set a"):
        size.fitting(work_that_fits(size, 100), lambda: undone.append(True))
    assert undone


def test_a_stored_size_is_read_again_on_the_same_gpu_alone(tmp_path):
    file = SizeFile(tmp_path / "microbatch.json", "NVIDIA A")
    assert file.read() is None
    file.write(6144)
    assert file.read() == 6144
    assert SizeFile(file.path, "NVIDIA B").read() is None
    file.path.write_text("{")
    assert file.read() is None
