"""Layouts that the format's own library reads, and headers that lie."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from offbeat.weights.manifest import ITEM_BYTES
from offbeat.weights.safetensor_file import lay_out, read_layout
from offbeat.weights.version import DTYPES

TENSORS = {
    "wide": torch.arange(5, dtype=torch.int64),
    "odd": torch.arange(7, dtype=torch.uint8),
    "b": torch.randn(3, 4).bfloat16(),
    'a\u00e9"': torch.randn(2, 2),
    "scalar": torch.tensor(2.0).half(),
    "empty": torch.zeros(0, 3),
}
NAMES = {torch_name: name for name, torch_name in DTYPES.items()}


def described(tensors):
    for name, tensor in tensors.items():
        dtype = NAMES[str(tensor.dtype).removeprefix("torch.")]
        yield name, dtype, list(tensor.shape), tensor.numel() * tensor.element_size()


def file_of(tensors) -> bytes:
    head, places = lay_out(described(tensors))
    data = bytearray(max([len(head), *(place.stop for place in places.values())]))
    data[: len(head)] = head
    for name, tensor in tensors.items():
        data[places[name].start : places[name].stop] = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return bytes(data)


def as_header(value) -> bytes:
    text = json.dumps(value).encode()
    return len(text).to_bytes(8, "little") + text


def test_the_formats_own_library_reads_what_is_laid_out():
    found = load(file_of(TENSORS))
    assert found.keys() == TENSORS.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in TENSORS.items()
    )


def test_the_layout_does_not_depend_on_the_order_of_the_tensors():
    assert file_of(dict(reversed(TENSORS.items()))) == file_of(TENSORS)


def test_every_tensor_begins_where_its_elements_may_and_the_first_on_a_page():
    head, places = lay_out(described(TENSORS))
    assert all(place.start % ITEM_BYTES[place.dtype] == 0 for place in places.values())
    assert len(head) == min(place.start for place in places.values())
    assert len(head) % 4096 == 0


def test_a_layout_is_read_back_and_so_is_one_that_the_library_wrote():
    assert read_layout(memoryview(file_of(TENSORS))) == lay_out(described(TENSORS))[1]
    data = save(TENSORS)
    assert {name: (place.dtype, place.shape) for name, place in read_layout(memoryview(data)).items()} == {
        name: (dtype, shape) for name, dtype, shape, _ in described(TENSORS)
    }


def test_a_file_of_nothing_is_one():
    assert load(file_of({})) == {}
    assert read_layout(memoryview(file_of({}))) == {}


@pytest.mark.parametrize("offsets", [[0, 9], [-1, 4], [4, 0], [9, 9]])
def test_a_tensor_beyond_the_end_is_refused(offsets):
    text = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": offsets}}).encode()
    with pytest.raises(ValueError, match="tensor w lies beyond the end"):
        read_layout(memoryview(len(text).to_bytes(8, "little") + text + bytes(8)))


@given(st.binary(max_size=50) | st.recursive(st.none() | st.integers(), st.lists).map(as_header))
def test_bytes_that_are_no_such_file_are_refused(data):
    with pytest.raises((ValueError, KeyError, TypeError)):
        read_layout(memoryview(data))
