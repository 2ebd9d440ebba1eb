"""What a publisher puts on disk and into a store: whole, in order, as little as can be, and never nonsense."""

import pytest
import torch
from publishing import KEY, Run, nudge, same, some

from offbeat.weights.manifest import Anchoring, Coding, Kind, Manifest
from offbeat.weights.piece_store import FolderStore, StoreError
from offbeat.weights.publish import Publisher
from offbeat.weights.signing import open_sealed
from offbeat.weights.version import FILE_NAME, PIECE_BYTES, WeightsError, file_digest, weights_digest


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


# What is published


def test_the_first_version_is_full_and_the_next_ones_say_what_changed(run):
    tensors = some()
    assert run.write(tensors).kind is Kind.FULL
    delta = run.write(nudge(tensors))
    assert delta.kind is Kind.DELTA
    assert (delta.base.number, delta.base.digest) == (0, run.versions[0].digest)
    assert {tensor.name: tensor.parts[0].coding for tensor in delta.tensors} == {
        "bias": Coding.SAME,
        "count": Coding.SAME,
        "embed": Coding.SPARSE,
        "empty": Coding.SAME,
    }
    assert delta.num_coded_bytes < delta.num_bytes / 20


def test_weights_that_did_not_change_cost_no_piece(run):
    run.write(some())
    again = run.write(some())
    assert (again.pieces, again.digest) == ([], run.versions[0].digest)


def test_every_nth_version_is_an_anchor(tmp_path):
    run, tensors = Run(tmp_path, Anchoring(every=3)), some()
    kinds = [run.write(nudge(tensors, seed)).kind for seed in range(7)]
    assert [kind is Kind.FULL for kind in kinds] == [True, False, False, True, False, False, True]


def test_a_chain_that_outgrew_half_a_copy_ends_in_an_anchor(tmp_path):
    run = Run(tmp_path, Anchoring(every=100))
    sizes = [(found.kind, found.num_coded_bytes) for found in (run.write(some(seed)) for seed in range(4))]
    assert [kind for kind, _ in sizes] == [Kind.FULL, Kind.DELTA, Kind.FULL, Kind.DELTA]
    assert sizes[1][1] > sizes[0][1] / 2


def test_without_a_store_there_is_a_whole_file_and_no_manifest(tmp_path):
    version = Publisher(tmp_path).write(3, 2, 1, some())
    assert (version.number, version.step, version.parent, version.manifest) == (3, 2, 1, "")
    assert same(version.path, some())
    assert [path.name for path in tmp_path.iterdir()] == ["00000003"]


def test_a_manifest_says_step_and_parent_and_is_what_the_version_names(run):
    run.write(some())
    run.versions.append(run.publisher.write(1, 7, 0, some()))
    found = run.manifest(run.versions[1])
    assert (found.number, found.step, found.parent, found.digest) == (1, 7, 0, run.versions[1].digest)


def test_tensors_that_are_tied_or_lie_in_memory_with_gaps_are_published_as_they_look(run):
    whole = torch.randn(8, 6).bfloat16()
    tensors = {"w": whole, "tied": whole, "turned": whole.t(), "some": whole[:, ::2]}
    run.write(tensors)
    assert same(run.fetch(0), tensors)


def test_tensors_of_every_dtype_go_round(run):
    bits = torch.arange(64, dtype=torch.uint8)
    dtypes = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64]
    dtypes += [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64]
    tensors = {str(dtype): bits.view(dtype) for dtype in dtypes} | {"bool": bits > 3}
    run.write(tensors)
    moved = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in moved.values():
        tensor.view(torch.uint8)[8] ^= 1
    run.write(moved)
    assert file_digest(run.fetch(1) / FILE_NAME) == weights_digest(moved)


def test_a_delta_may_add_drop_reshape_and_recast_tensors(run):
    tensors = some()
    run.write(tensors)
    run.fetch(0)
    changed = {
        **tensors,
        "new": torch.ones(3),
        "embed": tensors["embed"].reshape(40, 60),
        "bias": torch.ones(30).half(),
    }
    del changed["count"]
    delta = run.write(changed)
    assert delta.kind is Kind.DELTA
    assert {tensor.name for tensor in delta.tensors if tensor.parts[0].coding is Coding.DENSE} == {
        "new",
        "embed",
        "bias",
    }
    assert same(run.fetch(1, have=[0]), changed)


def test_tiny_tensors_share_a_piece_and_large_ones_have_several(run):
    tensors = {f"norm.{index}": torch.randn(32).bfloat16() for index in range(50)}
    full = run.write({**tensors, "zeros": torch.zeros(3 * PIECE_BYTES // 2 + 1, dtype=torch.bfloat16)})
    assert len(full.tensors[-1].parts) == 4
    assert len(full.pieces) == 1  # zeros weigh nothing
    noise = {"noise": torch.randint(0, 256, (2 * PIECE_BYTES + 9,), dtype=torch.uint8)}
    big = run.write({**tensors, **noise})
    assert len(big.pieces) == 3
    assert all(piece.num_bytes <= 2 * PIECE_BYTES for piece in big.pieces)
    assert same(run.fetch(1, have=[]), {**tensors, **noise})


def test_of_a_tensor_of_several_parts_only_those_that_changed_travel(run):
    weight = torch.randint(0, 9999, (5 * PIECE_BYTES // 4,), dtype=torch.int16)
    run.write({"w": weight})
    run.fetch(0)
    weight[PIECE_BYTES // 2 + 7] += 1
    delta = run.write({"w": weight})
    assert [part.coding for part in delta.tensors[0].parts] == [Coding.SAME, Coding.SPARSE, Coding.SAME]
    assert same(run.fetch(1, have=[0]), {"w": weight})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_what_is_published_does_not_depend_on_where_the_weights_are(tmp_path):
    here, there = Run(tmp_path / "here"), Run(tmp_path / "there")
    for seed in range(3):
        tensors = nudge(some(), seed)
        one = here.write(tensors)
        other = there.write({name: tensor.cuda() for name, tensor in tensors.items()})
        assert one == other


# Figures


def test_figures_tell_bytes_by_coding_and_density(run):
    tensors = some()
    full = run.write(tensors)
    figures = run.publisher.figures
    assert (figures.number, figures.kind, figures.num_bytes, figures.density) == (0, Kind.FULL, full.num_bytes, None)
    assert sum(figures.coded_bytes.values()) == figures.coded_bytes[Coding.DENSE] == full.num_coded_bytes
    delta = run.write(nudge({**tensors, "bias": tensors["bias"] + 1}, share=0.01))
    figures = run.publisher.figures
    assert figures.density == (24 + 30) / (2400 + 30 + 1)
    assert sum(figures.coded_bytes.values()) == delta.num_coded_bytes
    assert min(figures.coded_bytes[Coding.SPARSE], figures.encode_s, figures.flush_s) > 0


# What is refused


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e5m2])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("is_first", [True, False])
def test_what_is_no_number_is_refused_with_the_tensors_name_before_anything_is_named(run, dtype, value, is_first):
    good = {"a": torch.ones(5), "wrong": torch.full((70_000,), 2.0).to(dtype)}
    if not is_first:
        run.write(good)
    before, manifests = sorted((run.folder / "weights").glob("0*")), run.store.list_manifests()
    bad = {**good, "wrong": good["wrong"].clone()}
    bad["wrong"][66_000] = value
    with pytest.raises(WeightsError, match=r"cannot write the weights of step \d: tensor wrong holds NaN or infinity"):
        run.write(bad)
    assert sorted((run.folder / "weights").glob("0*")) == before
    assert list((run.folder / "weights").glob(".*")) == []
    assert run.store.list_manifests() == manifests
    assert run.write(good).kind is (Kind.FULL if is_first else Kind.DELTA)
    assert same(run.fetch(len(run.versions) - 1), good)


def test_the_largest_numbers_are_numbers(run):
    dtypes = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e5m2, torch.float8_e4m3fn]
    run.write(
        {
            str(dtype): torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min], dtype=torch.float64).to(dtype)
            for dtype in dtypes
        }
    )


def test_nan_of_the_narrowest_type_is_found(run):
    with pytest.raises(WeightsError, match="tensor w holds NaN"):
        run.write({"w": torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn)})


def test_a_dtype_that_no_file_can_hold_is_refused(run):
    with pytest.raises(
        WeightsError, match="step 0: tensor w has dtype complex64, which cannot be published; it must be one of"
    ):
        run.write({"w": torch.ones(2, dtype=torch.complex64)})


class FullStore(FolderStore):
    """A store that takes a number of pieces and no more."""

    num_free = 0

    def put(self, digest, data):
        if not self.num_free:
            raise StoreError(f"{self.folder}: cannot be written: No space left on device; free space there")
        self.num_free -= 1
        super().put(digest, data)


def test_a_store_that_is_full_costs_the_version_and_nothing_else(tmp_path):
    run = Run(tmp_path)
    run.store = FullStore(tmp_path / "weights")
    run.store.num_free = 1
    run.restart()
    run.write(some())
    with pytest.raises(WeightsError, match=r"cannot write the weights of step 1: .*No space left.*free space"):
        run.write(nudge(some()))
    assert [number for number, _ in run.store.list_manifests()] == [0]
    assert not run.publisher.path(1).exists()
    run.store.num_free = 1
    assert run.write(nudge(some())).kind is Kind.DELTA
    assert same(run.fetch(1), nudge(some()))


class Witness(FolderStore):
    """Writes down what is done to it, and looks around when a manifest is put."""

    def __init__(self, folder):
        super().__init__(folder)
        self.done = []

    def put(self, digest, data):
        super().put(digest, data)
        self.done.append("put")

    def sync(self):
        super().sync()
        self.done.append("sync")

    def put_manifest(self, number, digest, sealed):
        manifest = Manifest.decode(open_sealed(sealed, {KEY.public}))
        assert not self._unflushed
        assert all(self.size(piece.digest) == piece.num_bytes for piece in manifest.pieces)
        assert file_digest(self.folder / f"{number:08d}" / FILE_NAME) == manifest.digest
        self.done.append("manifest")
        super().put_manifest(number, digest, sealed)


def test_pieces_come_before_the_flush_and_the_flush_before_the_manifest(tmp_path):
    run = Run(tmp_path)
    run.store = Witness(tmp_path / "weights")
    run.restart()
    run.write({"noise": torch.randint(0, 256, (PIECE_BYTES + 9,), dtype=torch.uint8)})
    assert run.store.done[:4] == ["put", "put", "sync", "manifest"]
