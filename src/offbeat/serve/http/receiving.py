"""A worker's weights, where the coordinator is on another machine: pieces where there is a manifest, whole files where
there is none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from offbeat.serve.client import verified
from offbeat.serve.http.connection import Connection
from offbeat.serve.http.fetching import CoordinatorSources, WeightCache
from offbeat.weights.pieces import PieceStore
from offbeat.weights.receive import Figures, Receiver
from offbeat.weights.sources import Sources
from offbeat.weights.version import Version


async def _nothing() -> None:
    pass


class Receiving:
    """Versions in a folder that belongs to one worker."""

    def __init__(
        self,
        connection: Connection,
        folder: Path,
        *,
        sources: Sources | None = None,
        before: Callable[[], Awaitable[object]] = _nothing,
        has_base: Callable[[str], bool] = lambda digest: False,
        report: Callable[[Figures], None] = lambda figures: None,
        arrived: Callable[[], None] = lambda: None,
    ):
        """Pieces come from `sources`; without any, from the coordinator. `before` is called before each version,
        `arrived` after each piece. The base of an adapter is fetched unless `has_base` says, by its digest, that this
        worker has it."""
        self.coordinator = CoordinatorSources(connection)
        self._before, self._signers = before, set[str]()
        self._whole = WeightCache(folder, connection)
        self._receiver = Receiver(
            folder,
            sources or self.coordinator,
            self._signers,
            copy=self.coordinator.copy,
            has_base=has_base,
            report=report,
            arrived=arrived,
        )

    @property
    def store(self) -> PieceStore:
        """The pieces that are here, each verified."""
        return self._receiver.incoming.store

    def expects(self, digest: str) -> bool:
        """Whether a piece is on its way here."""
        return digest in self._receiver.incoming.expected

    def num_bytes_arrived(self) -> int:
        """Of what is on its way here."""
        return self._receiver.incoming.num_bytes_arrived()

    async def fetch(self, version: Version) -> Version:
        """The same version, verified, with its files here."""
        if not version.manifest:
            return await verified(await self._whole.fetch(version))
        self._signers.update(await self.coordinator.signers())
        await self._before()
        return await self._receiver.fetch(version)
