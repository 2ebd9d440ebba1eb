import pytest
import torch
from blake3 import blake3

from offbeat.tools.export import read
from offbeat.weights.piece_store import PieceMissing, manifest_path
from offbeat.weights.publish import Publisher
from offbeat.weights.version import FILE_NAME, PIECE_BYTES, WeightsError, file_digest, tensor_digest, weights_digest


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "b": torch.randn(3, 4, generator=generator),
        "a": torch.randn(5, generator=generator).to(torch.bfloat16),
        "scalar": torch.tensor(2.0),
    }


def test_a_version_is_read_back_as_it_was_written(tmp_path):
    store = Publisher(tmp_path)
    version = store.write(4, 2, 3, tensors())
    again = read(version)
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors().items())


def test_one_flipped_bit_is_refused(tmp_path):
    store = Publisher(tmp_path)
    version = store.write(4, 2, 3, tensors())
    file = version.path / FILE_NAME
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(WeightsError, match=r"version 4: .* has digest"):
        read(version)


def test_a_missing_version_is_named(tmp_path):
    store = Publisher(tmp_path)
    version = store.write(4, 2, 3, tensors())
    store.keep([5])
    with pytest.raises(WeightsError, match=r"version 4: .* is missing"):
        read(version)


def test_the_digest_depends_on_names_dtypes_shapes_and_values_but_not_on_order():
    one = tensors()
    assert weights_digest(one) == weights_digest(dict(reversed(one.items())))
    assert weights_digest(one) != weights_digest(tensors(seed=1))
    assert weights_digest(one) != weights_digest({**one, "b": one["b"].reshape(4, 3)})
    assert weights_digest(one) != weights_digest({**one, "scalar": one["scalar"].view(torch.int32)})


def test_a_tensors_digest_is_made_of_its_pieces():
    tensor = torch.arange(PIECE_BYTES // 4 + 10, dtype=torch.int32)
    data = tensor.numpy().tobytes()
    pieces = [blake3(data[:PIECE_BYTES]).digest(), blake3(data[PIECE_BYTES:]).digest()]
    assert tensor_digest(tensor) == blake3(b"".join(pieces)).hexdigest()


def test_the_digest_of_a_file_is_that_of_its_tensors(tmp_path):
    store = Publisher(tmp_path)
    some = {**tensors(), "empty": torch.zeros(0, 3), "half": torch.ones(2).half(), "many": torch.arange(9)}
    assert file_digest(store.write(0, 0, None, some).path / FILE_NAME) == weights_digest(some)


@pytest.mark.parametrize("num_bytes", [0, 7, 8, 40, -1])
def test_a_file_that_is_cut_short_is_refused(tmp_path, num_bytes):
    version = Publisher(tmp_path).write(4, 2, 3, tensors())
    file = version.path / FILE_NAME
    file.write_bytes(file.read_bytes()[:num_bytes])
    with pytest.raises(WeightsError, match="version 4"):
        read(version)


@pytest.mark.parametrize(("number", "digest"), [(-1, "0" * 64), (0, "0" * 63), (0, "../" + "0" * 61), (0, "g" * 64)])
def test_what_is_not_the_name_of_a_manifest_is_no_path(number: int, digest: str):
    with pytest.raises(PieceMissing, match="no manifest can have this name"):
        manifest_path(number, digest)
