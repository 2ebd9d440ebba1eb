"""A store as a source: asked for a version by its number alone, it gives the manifest that stands for it."""

import asyncio

import pytest
from published import Run

from offbeat.weights.download import StoreSources
from offbeat.weights.manifest import Kind, Manifest, manifest_digest
from offbeat.weights.signing import SigningKey, seal


def kind_of(sealed: bytes) -> Kind:
    return Manifest.decode(sealed.partition(b"\n")[0]).kind


def test_of_an_anchor_the_manifest_that_is_whole_comes_before_its_twin(tmp_path):
    run = Run(tmp_path, every=2)
    versions = [run.publish() for _ in range(13)]
    for version in versions[2::2]:
        sources = StoreSources(run.store)
        kinds = [kind_of(asyncio.run(sources.manifest(version.number, ""))) for _ in range(3)]
        assert kinds == [Kind.FULL, Kind.DELTA, Kind.FULL]


@pytest.mark.parametrize("num_versions", range(4, 12))
def test_who_joins_late_is_led_to_the_newest_anchor_and_no_further(num_versions, tmp_path):
    run = Run(tmp_path, every=3)
    versions = [run.publish(seed=num_versions) for _ in range(num_versions)]
    newest_anchor = (num_versions - 1) // 3 * 3
    run.store.delete([], [entry for entry in run.store.list_manifests() if entry[0] < newest_anchor])  # collected
    fetched = asyncio.run(run.receiver().fetch(versions[-1]))
    run.check(fetched, versions[-1])


def test_what_is_no_manifest_is_given_in_its_turn_for_the_caller_to_refuse(tmp_path):
    run = Run(tmp_path)
    version = run.publish()
    run.publish()
    run.store.put_manifest(version.number, manifest_digest(b"{}"), seal(b"{}", SigningKey.generate()))
    fetched = asyncio.run(run.receiver().fetch(run.versions[-1]))  # which asks for its base by number
    run.check(fetched, run.versions[-1])
