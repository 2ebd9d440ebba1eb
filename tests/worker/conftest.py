"""What the tests of a worker share."""

from __future__ import annotations

import pytest

from offbeat.weights.version import Version


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Version]:
    """Versions 0 to 5, on disk."""
    import torch  # here, because most tests beside these do without it

    from offbeat.weights.publish import Publisher

    store = Publisher(tmp_path_factory.mktemp("weights"))
    return [store.write(n, n, n - 1 if n else None, {"w": torch.full((2,), float(n))}) for n in range(6)]
