"""The engines that a worker gets from a server, one after the other: the server may die, and comes back.

A server of the worker's own is started again, at growing intervals and not for ever (`offbeat.control.restarts`); one
that someone else runs is waited for, as long as it takes. Whoever comes back is another engine, which serves nothing
until it was given a version: what it holds after a restart nobody knows.
"""

from __future__ import annotations

import asyncio
import os
import time
from functools import partial
from pathlib import Path

from offbeat.config.models import Config
from offbeat.control.restarts import Restarts, Verdict
from offbeat.errors import UserError
from offbeat.launch import engine_commands
from offbeat.launch.engine_doors import door_of
from offbeat.launch.engine_server import FAILED, HEALTH, EngineServer, ServerEnded
from offbeat.model.loading import resolve
from offbeat.rollout.engine import EngineDied, EngineError, KvMode
from offbeat.rollout.engines.served.dialect import Dialect
from offbeat.rollout.engines.served.engine import ServedEngine
from offbeat.rollout.engines.served.http import Server, ServerAway

KEY_VARIABLE = "OFFBEAT_ENGINE_KEY"
"""For a server that wants a key."""
LOG, LOCK, ADAPTERS = "engine.log", "engine.lock", "adapters"
LOOK_EVERY_S = 1.0
LOOK_WITHIN_S = 10.0
TELL_EVERY_S = 60.0


class ServedEngines:
    """See the module; implements `offbeat.launch.engines.Engines`."""

    has_next = True

    def __init__(self, config: Config, name: str, folder: Path, log: Path | None = None):
        """`folder` is the worker's own; what its server prints goes to `log`, or to a file in there."""
        self.config, self.name, self.url = config, name, config.engine.url or ""
        self._folder, self._log = folder, log or folder / LOG
        self._server: EngineServer | None = None
        self._uses_ipc = config.engine.weights == "ipc"
        self._restarts = Restarts(time.monotonic)
        self._has_lived = False

    async def open(self) -> ServedEngine:
        self._refuse_early()
        while True:
            await (self._start() if self.config.engine.url is None else self._find())
            dialect = self._dialect()
            try:
                engine = await ServedEngine.attach(dialect, worker=self.name, num_slots=self.config.rollout.slots)
            except ServerAway as error:
                await dialect.close()
                await self.bury(error)
            except EngineError as error:  # it says how the server is to be started instead
                await dialect.close()
                raise UserError(str(error)) from error
            except BaseException:
                await dialect.close()
                raise
            else:
                await self._refuse_kv(engine)
                return engine

    async def gone(self) -> EngineDied:
        """Waits for the end of our own server's process; another's shows only in what it answers."""
        if self._server is None:
            await asyncio.Event().wait()
        assert self._server is not None
        return EngineDied(str(await self._server.ended()))

    async def bury(self, error: EngineError) -> None:
        self.say(f"dead: {error}")
        if self._server is not None:
            status = self._server.status or FAILED  # one that lives, and does nothing for us, has failed
            await self._server.stop()
            await self._pause(error, status)

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop()

    def say(self, text: str) -> None:
        print(f"worker {self.name}: engine {self.url or self.config.rollout.engine}: {text}", flush=True)

    async def _start(self) -> None:
        server = self._server = self._server or await self._make_server()
        while True:
            self.url, start_s = "", time.monotonic()
            self.say(f"starting, see {self._log}")
            try:
                await server.start()
            except ServerEnded as error:
                await server.stop()
                if error.status > 0 and not self._has_lived:  # it would say the same again
                    raise UserError(str(error)) from error
                self.say(f"dead: {error}")
                self._restarts.started()  # a server lives from its first answer on, and this one never did
                await self._pause(error, error.status)
            else:
                self._restarts.started()
                self._has_lived, self.url = True, server.url
                self.say(f"up after {time.monotonic() - start_s:.0f} s")
                return

    async def _pause(self, error: EngineError, status: int) -> None:
        verdict, pause_s = self._restarts.ended(status)
        if verdict is Verdict.GIVE_UP:
            raise UserError(f"given up, after it died again and again: {error}") from error
        await asyncio.sleep(pause_s)

    async def _make_server(self) -> EngineServer:
        config = self.config
        environment = engine_commands.environment(config, os.environ)
        machine = await engine_commands.look_around(config, environment)
        self._uses_ipc = engine_commands.uses_ipc(config, machine, sees_gpu=machine.num_gpus > 0 and _sees_gpu())
        return EngineServer(
            config.rollout.engine,
            partial(engine_commands.command, config, machine, ipc=self._uses_ipc),
            engine_commands.suited(environment, machine),
            door=partial(door_of, config.rollout.engine),
            log=self._log,
            lock=self._folder / LOCK,
            start_within_s=config.engine.start_within_s,
        )

    async def _find(self) -> None:
        """Waits for a server that someone else runs, and tells so now and then."""
        server, told_s = Server(self.url, api_key=os.environ.get(KEY_VARIABLE)), -TELL_EVERY_S
        try:
            while True:
                try:
                    await server.text(HEALTH, within_s=LOOK_WITHIN_S)
                    return
                except EngineError as error:
                    if time.monotonic() - told_s >= TELL_EVERY_S:
                        told_s = time.monotonic()
                        self.say(f"waiting for it to answer: {error}")
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            await server.close()

    def _refuse_early(self) -> None:
        """What starting a server could not mend."""
        rank, kv = self.config.model.lora_rank, self.config.rollout.kv
        if rank and self.config.engine.weights == "ipc":
            raise UserError(
                f'engine.weights = "ipc": allowed "auto", "path" with model.lora_rank = {rank}, because adapters are '
                "read from files"
            )
        if rank and kv == "stale":
            raise UserError(
                f'rollout.kv = "stale": allowed "same", "refill" with model.lora_rank = {rank} on a server, where a '
                "request that goes on under the next adapter begins with keys and values of its own"
            )

    def _dialect(self) -> Dialect:
        key = os.environ.get(KEY_VARIABLE) if self._server is None else self._server.key
        server = Server(self.url, api_key=key)
        if self.config.rollout.engine == "sglang":
            from offbeat.rollout.engines.sglang import SglangDialect

            return SglangDialect(server)
        if rank := self.config.model.lora_rank:
            from offbeat.rollout.engines.vllm_lora import LoraDialect

            model = self.config.model.path
            return LoraDialect(server, rank=rank, model=model, base=resolve(model), folder=self._folder / ADAPTERS)
        from offbeat.rollout.engines.vllm import VllmDialect

        if not self._uses_ipc:
            return VllmDialect(server)
        from offbeat.model.devices import pick_device
        from offbeat.rollout.engines.vllm_ipc import FromGpu

        return VllmDialect(server, FromGpu(pick_device(self.config.model.device)))

    async def _refuse_kv(self, engine: ServedEngine) -> None:
        kv, can = KvMode(self.config.rollout.kv), engine.capabilities.kv_modes
        if kv not in can:
            await engine.close()
            allowed = ", ".join(f'"{mode}"' for mode in sorted(can))
            raise UserError(f'rollout.kv = "{kv}": allowed {allowed} with {engine.capabilities.fingerprint}')


def _sees_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
