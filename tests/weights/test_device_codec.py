"""What a device finds is what the processor finds, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from offbeat.weights import codec, encoding

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")),
]
NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.int16: "I16", torch.uint16: "U16"}


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def equal(found: codec.SparseChanges, wanted: codec.SparseChanges) -> bool:
    pairs = zip(found, wanted, strict=True)
    return all(a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("share", [0.0, 0.01, 1.0])
def test_a_device_finds_the_same_changes(device: str, dtype: torch.dtype, share: float):
    torch.manual_seed(0)
    before = torch.randint(-32768, 32768, (300, 70), dtype=torch.int16)
    moved = torch.randint(-32768, 32768, (300, 70), dtype=torch.int16)
    after = torch.where(torch.rand(300, 70) < share, moved, before)
    old, new = before.view(dtype), after.view(dtype)
    found = encoding.find_changes_on_device(new.to(device), old.to(device))
    assert equal(found, codec.find_changes(raw(new), raw(old), NAMES[dtype]))


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_join_without_a_seam(device: str, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(1)
    old = torch.randn(1000).bfloat16().to(device)
    new = (old + (torch.rand(1000, device=device) < 0.5)).bfloat16()
    whole = encoding.find_changes_on_device(new, old)
    for size in (1, 7, 100, 999, 1000):
        monkeypatch.setattr(encoding, "DEVICE_BLOCK_ITEMS", size)
        assert equal(encoding.find_changes_on_device(new, old), whole)


@pytest.mark.parametrize("device", DEVICES)
def test_the_changes_give_the_code_that_the_processor_makes_alone(device: str):
    torch.manual_seed(2)
    old = (0.02 * torch.randn(100_000)).bfloat16()
    new = (old.float() + 1e-5 * torch.randn(100_000)).bfloat16()
    changes = encoding.find_changes_on_device(new.to(device), old.to(device))
    assert codec.encode(raw(new), raw(old), "BF16", changes) == codec.encode(raw(new), raw(old), "BF16")


def test_negative_zero_and_nan_are_compared_by_their_bits():
    old = torch.tensor([0.0, float("nan"), 1.0], dtype=torch.bfloat16)
    new = torch.tensor([-0.0, float("nan"), 1.0], dtype=torch.bfloat16)
    found = encoding.find_changes_on_device(new, old)
    assert found.positions.tolist() == [0]
    assert found.differences.tolist() == [0x8000]


def test_a_transposed_view_is_read_in_its_own_order():
    old = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    new = old.clone()
    new[0, 2] = 9
    assert encoding.find_changes_on_device(new.T, old.T).positions.tolist() == [4]


def test_parameters_that_want_a_gradient_and_empty_tensors_are_taken():
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    assert encoding.find_changes_on_device(parameter, torch.zeros(3, dtype=torch.bfloat16)).positions.tolist() == [
        0,
        1,
        2,
    ]
    empty = torch.empty(0, 5, dtype=torch.bfloat16)
    found = encoding.find_changes_on_device(empty, empty)
    assert equal(found, codec.SparseChanges(np.empty(0, np.int64), np.empty(0, np.uint16)))


@pytest.mark.parametrize(
    "old", [torch.zeros(4, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.float16), torch.zeros(3)]
)
def test_another_shape_or_type_is_refused(old: torch.Tensor):
    new = torch.zeros(3, dtype=torch.bfloat16 if old.dtype != torch.float32 else torch.float32)
    with pytest.raises(AssertionError):
        encoding.find_changes_on_device(new, old)
