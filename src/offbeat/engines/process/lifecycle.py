"""Opens a worker's engine on a vLLM or SGLang server, and opens a new engine after the server restarts.

The worker restarts a server of its own at growing intervals and gives up after too many deaths
(`offbeat.rules.restarts`). For a server that the user runs (engine.url) it waits without limit. After a restart the
server's weights are unknown, so each restart needs a new engine, which generates nothing before its first load.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from offbeat.config.schema import Config
from offbeat.engines.dialect import Dialect
from offbeat.engines.http_calls import Server, ServerAway
from offbeat.engines.process import commands
from offbeat.engines.process.endpoints import HEALTH, new_endpoint
from offbeat.engines.process.server import FAILED, EngineServer, ServerEnded
from offbeat.engines.protocol import EngineDied, EngineError, KvMode
from offbeat.engines.server_engine import ServerEngine
from offbeat.engines.vllm.weights import Transfer
from offbeat.errors import UserError
from offbeat.model.loading import resolve
from offbeat.rules.restarts import Restarts, RestartVerdict

KEY_VARIABLE = "OFFBEAT_ENGINE_KEY"
"""Environment variable with the key of the server at engine.url, if that server needs one."""
LOG, LOCK, ADAPTERS = "engine.log", "engine.lock", "adapters"
CHECK_EVERY_S = 1.0
CHECK_WITHIN_S = 10.0
LOG_EVERY_S = 60.0


class ServerEngines:
    """Implements `offbeat.launch.engine_parts.Engines` (opens a worker's engines) for vLLM and SGLang."""

    has_next = True

    def __init__(
        self,
        config: Config,
        name: str,
        folder: Path,
        log: Path | None = None,
        share_of: Callable[[int], float] | None = None,
        memory_lock: Path | None = None,
    ):
        """`name` is the worker's name, and `folder` belongs to this worker alone. The server's output goes to `log`;
        None: to a file in `folder`. `share_of` takes the bytes of a GPU's memory and returns the share that the server
        may take. vLLM locks the file `memory_lock` while it takes its memory."""
        self.config, self.name, self.url = config, name, config.engine.url or ""
        self._folder, self._log_file, self._share_of = folder, log or folder / LOG, share_of
        self._memory_lock = memory_lock
        self._server: EngineServer | None = None
        self._uses_ipc = config.engine.weights == "ipc"
        self._restarts = Restarts(time.monotonic)
        self._has_lived = False

    async def open(self) -> ServerEngine:
        self._refuse_early()
        while True:
            await (self._start() if self.config.engine.url is None else self._find())
            dialect = self._dialect()
            try:
                engine = await ServerEngine.attach(dialect, worker=self.name, num_slots=self.config.rollout.slots)
            except BaseException as error:
                await dialect.close()
                if isinstance(error, ServerAway):
                    await self.dispose(error)
                    continue
                if isinstance(error, EngineError):  # names the remedy
                    raise UserError(str(error)) from error
                raise
            await self._refuse_kv(engine)
            return engine

    async def wait_exited(self) -> EngineDied:
        """Waits until the worker's own server has ended, and returns an error that says why. Never returns for a server
        that the user runs (engine.url)."""
        if self._server is None:
            await asyncio.Event().wait()
        assert self._server is not None
        return EngineDied(str(await self._server.ended()))

    async def dispose(self, error: EngineError) -> None:
        self.log(f"dead: {error}")
        if self._server is not None:
            status = self._server.status or FAILED  # a process that runs but does not work has failed
            await self._server.stop()
            await self._pause(error, status)

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop()

    def log(self, text: str) -> None:
        print(f"worker {self.name}: engine {self.url or self.config.rollout.engine}: {text}", flush=True)

    async def _start(self) -> None:
        server = self._server = self._server or await self._make_server()
        while True:
            self.url, start_s = "", time.monotonic()
            self.log(f"starting; its output is in {self._log_file}")
            try:
                await server.start()
            except ServerEnded as error:
                await server.stop()
                if error.status > 0 and not self._has_lived:  # another start would fail in the same way
                    raise UserError(f'{error}; to do without {server.name}, set rollout.engine = "embedded"') from error
                self.log(f"dead: {error}")
                self._restarts.started()  # it never answered, so its lifetime counts as 0
                await self._pause(error, error.status)
            else:
                self._restarts.started()
                self._has_lived, self.url = True, server.url
                self.log(f"up after {time.monotonic() - start_s:.0f} s")
                return

    async def _pause(self, error: EngineError, status: int) -> None:
        verdict, pause_s = self._restarts.ended(status)
        if verdict is RestartVerdict.GIVE_UP:
            raise UserError(
                f"the engine died too often and is not restarted: {error}; mend the cause, then start the worker again"
            ) from error
        await asyncio.sleep(pause_s)

    async def _make_server(self) -> EngineServer:
        config = self.config
        environment = commands.environment(config, os.environ)
        machine = await commands.probe_interpreter(config, environment, share_of=self._share_of)
        self._uses_ipc = commands.uses_ipc(config, machine, sees_gpu=machine.num_gpus > 0 and _sees_gpu())
        return EngineServer(
            config.rollout.engine,
            partial(commands.command, config, machine, ipc=self._uses_ipc, memory_lock=self._memory_lock),
            commands.suited(config, environment, machine),
            new_endpoint=partial(new_endpoint, config.rollout.engine),
            log=self._log_file,
            lock=self._folder / LOCK,
            start_within_s=config.engine.start_within_s,
        )

    async def _find(self) -> None:
        """Waits until the server at engine.url answers; logs every minute that it is still waiting."""
        server, logged_s = Server(self.url, api_key=os.environ.get(KEY_VARIABLE)), -LOG_EVERY_S
        try:
            while True:
                try:
                    await server.text(HEALTH, within_s=CHECK_WITHIN_S)
                    return
                except EngineError as error:
                    if time.monotonic() - logged_s >= LOG_EVERY_S:
                        logged_s = time.monotonic()
                        self.log(f"waiting for the server to answer: {error}")
                await asyncio.sleep(CHECK_EVERY_S)
        finally:
            await server.close()

    def _refuse_early(self) -> None:
        """Raises a `UserError` for a configuration that no server supports, before a server is started."""
        rank, kv = self.config.model.lora_rank, self.config.rollout.kv
        if rank and self.config.engine.weights == "ipc":
            raise UserError(
                f'engine.weights = "ipc" cannot be used with model.lora_rank = {rank}, because adapters are read from '
                'files; set engine.weights to "auto" or "path"'
            )
        if rank and kv == "stale":
            raise UserError(
                f'rollout.kv = "stale" cannot be used with model.lora_rank = {rank} on an engine server, because a '
                "request that continues with a new adapter computes its keys and values again; set rollout.kv to "
                '"same" or "refill"'
            )

    def _dialect(self) -> Dialect:
        """Returns the dialect of the server at `url`. A vLLM process that this worker started is reached without HTTP,
        any other server by HTTP."""
        config = self.config
        if config.rollout.engine == "vllm" and self._server is not None:
            from offbeat.engines.vllm.direct import Channel, DirectDialect, DirectLoraDialect

            channel = Channel(self.url)
            if config.model.lora_rank:
                return DirectLoraDialect(channel, self._folder / ADAPTERS)
            return DirectDialect(channel, self._transfer())
        key = os.environ.get(KEY_VARIABLE) if self._server is None else self._server.key
        server = Server(self.url, api_key=key)
        if config.rollout.engine == "sglang":
            from offbeat.engines.sglang.api import SglangDialect

            return SglangDialect(server)
        if rank := config.model.lora_rank:
            from offbeat.engines.vllm.lora import LoraDialect

            model = config.model.path
            return LoraDialect(server, rank=rank, model=model, base=resolve(model), folder=self._folder / ADAPTERS)
        from offbeat.engines.vllm.api import VllmDialect

        return VllmDialect(server, self._transfer())

    def _transfer(self) -> Transfer:
        from offbeat.engines.vllm.weights import FromGpu, FromPath

        if not self._uses_ipc:
            return FromPath()
        from offbeat.model.devices import pick_device

        return FromGpu(pick_device(self.config.model.device))

    async def _refuse_kv(self, engine: ServerEngine) -> None:
        kv, can = KvMode(self.config.rollout.kv), engine.capabilities.kv_modes
        if kv not in can:
            await engine.close()
            allowed = ", ".join(f'"{mode}"' for mode in sorted(can))
            raise UserError(
                f'rollout.kv = "{kv}": {engine.capabilities.fingerprint} supports only {allowed}; choose one of them'
            )


def _sees_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
