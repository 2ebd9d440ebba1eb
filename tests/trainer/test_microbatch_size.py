"""A micro-batch that does not fit is halved and tried again, and the size found is remembered for its GPU alone."""

import pytest
import torch
from learning_models import tiny_model

from offbeat.errors import UserError
from offbeat.trainer import microbatch_size
from offbeat.trainer.microbatch_size import MIN_TOKENS, SAFE_SHARE, MicrobatchSize, SizeFile, measured
from offbeat.trainer.policy import AdamSettings, Policy


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


GB = 10**9


@pytest.fixture
def card(monkeypatch):
    """Lets passes take what they took for a model of 1.5B on a GPU: 2.15 MB a token and 1.3 GB for the output layer,
    but at least the 4.3 GB of a large weight's gradient. Returns a function that sets the free memory."""
    free = [0]

    def peak(policy: Policy, num_tokens: int, longest: int) -> int:
        needed = int(max(1.3 * GB + 2.15e6 * num_tokens, 4.3 * GB))
        if needed > free[0]:
            raise full()
        return needed

    monkeypatch.setattr(microbatch_size, "_peak_bytes", peak)
    monkeypatch.setattr(microbatch_size, "_pass_over", lambda policy, *_: None)
    monkeypatch.setattr(microbatch_size, "memory_bytes", lambda device: (free[0], free[0]))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    return lambda num_bytes: free.__setitem__(0, num_bytes)


@pytest.mark.parametrize("free_gb", [12, 24, 60])
def test_a_measured_size_fits_although_small_passes_take_what_a_large_weight_does(card, free_gb):
    policy = Policy(tiny_model("llama"), AdamSettings())
    card(free_gb * GB)
    tokens = measured(policy, 0, longest=512)
    assert 0.85 * SAFE_SHARE * free_gb * GB <= 1.3 * GB + 2.15e6 * tokens <= SAFE_SHARE * free_gb * GB


@pytest.mark.parametrize("free_gb", [3, 5])
def test_a_card_that_cannot_hold_the_passes_gets_smaller_ones(card, free_gb):
    card(free_gb * GB)
    assert measured(Policy(tiny_model("llama"), AdamSettings()), 0, longest=512) in (MIN_TOKENS, 1024)
