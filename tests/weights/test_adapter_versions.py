"""Versions that are adapters: what a folder, a store and a worker hold of them, and what binds them to their base."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from published import Faulty, Unreachable, flip
from safetensors.torch import load_file

from offbeat.tools.export import read
from offbeat.weights.download import StoreSources
from offbeat.weights.manifest import Kind, Manifest
from offbeat.weights.piece_store import FolderStore
from offbeat.weights.publish import Publisher, RemotePublisher
from offbeat.weights.receive import ReceiveFigures, Receiver
from offbeat.weights.signing import SigningKey, open_sealed
from offbeat.weights.version import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    Adapter,
    Version,
    WeightsError,
    adapter_digest,
    base_digest,
    folder_digest,
    verify,
    weights_digest,
)

BASE = {"embed": torch.randn(200, 96).bfloat16(), "norm": torch.randn(96)}
CONFIG = json.dumps({"r": 2, "lora_alpha": 4, "target_modules": ["embed"]})


def tensors_of(number: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(number)
    return {f"embed.lora_{half}.weight": torch.randn(2, 9, generator=random).bfloat16() for half in "AB"}


class Run:
    """Publishes adapters on one base into a folder and a store."""

    def __init__(self, folder: Path):
        self.folder, self.key, self.store = folder, SigningKey.generate(), FolderStore(folder / "store")
        self.adapter = Adapter(weights_digest(BASE), CONFIG, lambda: BASE)
        self.num_versions = 0
        self.restart()

    def restart(self) -> None:
        self.publisher = Publisher(self.folder / "weights", self.store, self.key, adapter=self.adapter)

    def publish(self) -> Version:
        number, self.num_versions = self.num_versions, self.num_versions + 1
        return self.publisher.write(number, number, number - 1 if number else None, tensors_of(number))

    def manifests(self) -> list[Manifest]:
        found = [self.store.get_manifest(*entry) for entry in sorted(self.store.list_manifests())]
        return [Manifest.decode(open_sealed(sealed, {self.key.public})) for sealed in found]

    def receiver(self, name: str = "worker", sources: object = None, **options) -> Receiver:
        return Receiver(self.folder / name, sources or StoreSources(self.store), [self.key.public], **options)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def fetch(receiver: Receiver, version: Version) -> Version:
    return asyncio.run(receiver.fetch(version))


def is_version(here: Version, number: int) -> bool:
    verify(here)
    found, published = load_file(here.path / ADAPTER_FILE), tensors_of(number)
    return found.keys() == published.keys() and all(torch.equal(found[name], published[name]) for name in found)


def test_a_folder_holds_what_peft_reads_and_its_digest_says_base_tensors_and_configuration(tmp_path):
    adapter = Adapter(weights_digest(BASE), CONFIG, lambda: BASE)
    version = Publisher(tmp_path, adapter=adapter).write(0, 0, None, tensors_of(0))
    assert sorted(path.name for path in version.path.iterdir()) == [ADAPTER_CONFIG, ADAPTER_FILE]
    assert (version.path / ADAPTER_CONFIG).read_text() == CONFIG
    assert version.digest == adapter_digest(adapter.base, weights_digest(tensors_of(0)), CONFIG)
    assert folder_digest(version.path) == version.digest
    assert base_digest(version.path) == adapter.base
    assert read(version).keys() == tensors_of(0).keys()
    assert not list(tmp_path.rglob("model.safetensors")), "the base belongs to no version"


@pytest.mark.parametrize("name", [ADAPTER_CONFIG, ADAPTER_FILE])
def test_a_folder_that_is_not_what_was_published_is_refused(tmp_path, name):
    adapter = Adapter(weights_digest(BASE), CONFIG, lambda: BASE)
    version = Publisher(tmp_path, adapter=adapter).write(0, 0, None, tensors_of(0))
    file = version.path / name
    file.write_bytes(file.read_bytes().replace(b'"lora_alpha": 4', b'"lora_alpha": 8').replace(b"base", b"case"))
    if name == ADAPTER_FILE:
        flip(file)
    with pytest.raises(WeightsError, match="version 0"):
        verify(version)


def test_an_adapter_that_claims_another_base_is_refused(tmp_path):
    adapter = Adapter(weights_digest(BASE), CONFIG, lambda: BASE)
    version = Publisher(tmp_path, adapter=adapter).write(0, 0, None, tensors_of(0))
    file = version.path / ADAPTER_FILE
    file.write_bytes(file.read_bytes().replace(adapter.base.encode(), b"0" * 64))
    with pytest.raises(WeightsError, match="not the published"):
        verify(version)


def test_the_base_goes_into_the_store_once_and_adapters_are_whole_and_small(run):
    versions = [run.publish() for _ in range(3)]
    run.restart()  # whoever comes back finds the base there
    versions.append(run.publish())
    manifests = run.manifests()
    (base,) = [manifest for manifest in manifests if manifest.kind is Kind.FULL]
    adapters = [manifest for manifest in manifests if manifest.kind is Kind.ADAPTER]
    assert base.digest == run.adapter.base
    assert [manifest.number for manifest in adapters] == [0, 1, 2, 3]
    assert {manifest.base.number for manifest in adapters} == {base.number} == {0}
    assert {manifest.digest for manifest in adapters} == {version.digest for version in versions}
    assert all(manifest.num_coded_bytes < 0.05 * base.num_coded_bytes for manifest in adapters)
    assert run.publisher.figures.kind is Kind.ADAPTER
    assert sum(run.publisher.figures.coded_bytes.values()) == adapters[-1].num_coded_bytes


def test_a_base_whose_pieces_are_gone_is_published_again(run):
    run.publish()
    (base,) = [manifest for manifest in run.manifests() if manifest.kind is Kind.FULL]
    run.store.delete([base.pieces[0].digest], [])
    run.restart()
    version = run.publish()
    here = fetch(run.receiver(), version)
    assert is_version(here, 1)
    assert folder_digest(here.base) == run.adapter.base


def test_a_worker_fetches_the_base_once_and_then_adapters_alone(run):
    told: list[ReceiveFigures] = []
    receiver = run.receiver(report=told.append)
    here = [fetch(receiver, run.publish()) for _ in range(5)]
    assert all(is_version(version, number) for number, version in enumerate(here) if version.path.exists())
    assert {version.base for version in here} == {here[0].base}
    assert load_file(here[0].base / "model.safetensors").keys() == BASE.keys(), "it outlives the versions on it"
    assert [set(figures.num_bytes) for figures in told] == [{"full"}, *[{"adapter"}] * 5]
    assert fetch(run.receiver(sources=Unreachable()), replace(here[-1], path=Path("elsewhere"))) == here[-1]


def test_a_worker_that_has_the_base_does_not_fetch_it(run):
    version, asked = run.publish(), []
    sources = Faulty(run.store)
    receiver = run.receiver(sources=sources, has_base=lambda digest: bool(asked.append(digest)) or True)
    here = fetch(receiver, version)
    assert is_version(here, 0)
    assert here.base is None
    assert asked == [run.adapter.base]
    (base,) = [manifest for manifest in run.manifests() if manifest.kind is Kind.FULL]
    assert not {piece.digest for piece in base.pieces} & {name for name, _ in sources.asked}


def test_an_adapter_that_is_damaged_on_a_workers_disk_is_fetched_again(run):
    version = run.publish()
    here = fetch(run.receiver(), version)
    for name in (ADAPTER_CONFIG, ADAPTER_FILE):
        flip(here.path / name)
        assert is_version(fetch(run.receiver(), version), 0)


def test_a_trainer_elsewhere_keeps_the_base_in_its_store(tmp_path):
    run = Run(tmp_path)
    run.publisher = RemotePublisher(
        tmp_path / "weights", run.store, run.key, run.publisher.anchoring, run.adapter, clears_store=True
    )
    for _ in range(12):
        version = run.publish()
    assert min(manifest.number for manifest in run.manifests() if manifest.kind is Kind.ADAPTER) <= 10
    here = fetch(run.receiver(), version)
    assert is_version(here, 11)
    assert folder_digest(here.base) == run.adapter.base
