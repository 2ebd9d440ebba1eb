"""A coordinator with a real ledger, a real reward pool and the shipped tokenizer, for whatever stands around it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from offbeat.config.schema import Config
from offbeat.coordinator.coordinator import Coordinator
from offbeat.coordinator.maintenance import WeightGarbageCollector
from offbeat.launch import wiring
from offbeat.launch.wiring import TokenLimits
from offbeat.weights.version import WeightFolder


@asynccontextmanager
async def opened(
    config: Config, folder: Path, *, reward: Callable[..., Any] | None = None, keep_leases: bool = False
) -> AsyncIterator[tuple[Coordinator, TokenLimits]]:
    """Keeps everything below `folder`; `reward` is a function handed in from Python."""
    tokens, mixture = wiring.load_tokens(config), wiring.make_mixture(config, reward)
    clearing = WeightGarbageCollector(WeightFolder(folder / "weights"))
    async with AsyncExitStack() as stack:
        ledger = stack.enter_context(wiring.open_ledger(config, folder / "ledger.sqlite"))
        pool = await wiring.open_pool(config, mixture, folder / "rewards.log")
        stack.push_async_callback(pool.close)
        issuer = wiring.make_issuer(config, mixture, tokens)
        made = wiring.make_coordinator(config, ledger, issuer, pool, tokens, clearing)
        stack.push_async_callback(made.close)
        await made.start(keep_leases=keep_leases)
        yield made, tokens
