"""Published weights for those who hold tensors: what a `Publisher` wrote, read back verified.

`read` recomputes the digest: weights that do not match what was published are refused.
"""

from __future__ import annotations

from safetensors.torch import load_file
from torch import Tensor

from offbeat.weights.folder import weights_file
from offbeat.weights.verify import verify
from offbeat.weights.version import Version


def read(version: Version) -> dict[str, Tensor]:
    """A version's tensors, of an adapter its own, or `WeightsError` if their digest is not the published one."""
    verify(version)
    return load_file(weights_file(version.path))
