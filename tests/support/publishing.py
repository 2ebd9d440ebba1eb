"""A trainer that publishes small versions into a store, and a worker that follows."""

import torch
from safetensors.torch import load_file

from offbeat.weights.assemble import assemble
from offbeat.weights.manifest import Manifest
from offbeat.weights.piece_store import FolderStore
from offbeat.weights.publish import Publisher
from offbeat.weights.signing import SigningKey, open_sealed
from offbeat.weights.version import FILE_NAME, file_digest, weights_digest

KEY = SigningKey.generate()


def some(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(60, 40, generator=generator).bfloat16(),
        "bias": torch.randn(30, generator=generator),
        "count": torch.tensor(3),
        "empty": torch.zeros(0, 2),
    }


def nudge(tensors, seed=0, share=0.02):
    """Moves some bf16 elements to the next value, as training does."""
    generator = torch.Generator().manual_seed(seed)
    moved = tensors["embed"].clone()
    bits = moved.view(torch.int16).reshape(-1)
    bits[torch.randperm(bits.numel(), generator=generator)[: max(1, int(share * bits.numel()))]] += 1
    return {**tensors, "embed": moved}


class Run:
    """A trainer's folder and store, and a worker that follows."""

    def __init__(self, folder, anchoring=None, key=KEY):
        self.folder, self.anchoring, self.key = folder, anchoring, key
        self.store = FolderStore(folder / "weights")
        self.versions = []
        self._manifests = {}
        self.restart()

    def restart(self):
        self.publisher = Publisher(self.folder / "weights", self.store, self.key, self.anchoring)

    def write(self, tensors, parent="last"):
        number = len(self.versions)
        parent = (number - 1 if number else None) if parent == "last" else parent
        version = self.publisher.write(number, number, parent, tensors)
        assert version.digest == weights_digest(tensors)
        assert file_digest(version.path / FILE_NAME) == version.digest
        self.versions.append(version)
        return self.manifest(version)

    def manifest(self, version) -> Manifest:
        if version.manifest not in self._manifests:
            sealed = self.store.get_manifest(version.number, version.manifest)
            self._manifests[version.manifest] = Manifest.decode(open_sealed(sealed, {KEY.public}))
        return self._manifests[version.manifest]

    def fetch(self, target, have=()):
        """The folder of a version that a worker, who holds some, makes of what is in the store."""
        manifests = {version.number: self.manifest(version) for version in self.versions}
        chain = [manifests[target]]
        while (stands_on := chain[0].base) and stands_on.number not in have:
            chain.insert(0, manifests[stands_on.number])
        base = chain[0].base and self.place(chain[0].base.number)
        assemble(chain, base, self.store.get, self.place(target))
        return self.place(target)

    def place(self, number):
        return self.folder / "worker" / f"{number}"


def same(folder, tensors) -> bool:
    found = load_file(folder / FILE_NAME)
    return found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in found)
