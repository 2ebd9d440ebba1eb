"""A whole run in one process: opens its folder, its tasks and its rewards, then lets `loop` train.

torch is imported last, so a wrong task or reward is told within a second or two. A run ends by its last step, by
Ctrl-C, SIGTERM or `run.max_hours`, always with a checkpoint; or by an error, which leaves the ledger and the last
checkpoint to resume from.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from offbeat.config.models import Config
from offbeat.errors import OffbeatError
from offbeat.files import disk_trouble
from offbeat.launch import sources, stopping
from offbeat.launch.engines import check_engine
from offbeat.launch.folder import RunFolder
from offbeat.watch.sinks import check_sinks


def train(
    config: Config,
    *,
    reward: Callable[..., Any] | None = None,
    resume: Path | None = None,
    from_scratch: bool = False,
) -> dict[str, Any]:
    """Runs a configuration to its end and returns the summary that is also in the run's folder. With `from_scratch` a
    run to `resume` whose checkpoints are lost begins again."""
    check_sinks(config.log.sinks)
    check_engine(config, num_workers=None)
    sources.need_processes(config, "nobody can join a run of one process; set rollout.workers, or use offbeat serve")
    with RunFolder.open(resume, config) if resume else RunFolder.create(config) as folder:
        try:
            return stopping.run(_run(folder, reward, from_scratch=from_scratch))
        except BaseException as error:
            cause = _cause(error)
            cause = disk_trouble(cause) or cause
            with suppress(OffbeatError):  # on a full disk, what ended the run matters more than its last line
                folder.event("error", error=f"{type(cause).__name__}: {cause}")
            if cause is error:
                raise
            raise cause from (error if isinstance(error, OSError) else None)


async def _run(folder: RunFolder, reward: Callable[..., Any] | None, *, from_scratch: bool) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        mixture = sources.make_mixture(folder.config, reward)
        pool = await sources.open_pool(folder.config, mixture, folder.logs / "rewards.log")
        stack.push_async_callback(pool.close)
        if folder.config.log.console != "quiet":
            print(f"run {folder.path}: {folder.config.model.path}; loading", flush=True)
        with stopping.interruptible():
            from offbeat.launch import loop
        return await loop.run(folder, mixture, pool, from_scratch=from_scratch)


def _cause(error: BaseException) -> BaseException:
    """Of several errors, the first, which explains the others."""
    return _cause(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
