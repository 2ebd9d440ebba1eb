"""LoRA adapters on a vLLM server: a version is an adapter, and the weights below it are those the server started with.

Every load brings an adapter of its own name, and every call names the one that is to answer it. So a call's version is
certain, whatever comes while it runs, and no two versions share keys and values, even where their numbers do. A running
call keeps its adapter; it therefore leaves for a load and is carried on under the next name, and its keys and values
cannot be kept.

vLLM can also load an adapter in place of another, by the same name. It then reads its files again at every step, and
running calls go over to it with the keys and values of the one before.

A server wants `--enable-lora` and `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`, beside what `vllm` names.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from offbeat.rollout.engine import EngineDied, EngineError, KvMode
from offbeat.rollout.engines.served.dialect import Call, Chunk, Facts
from offbeat.rollout.engines.served.http import Server, ServerRefused
from offbeat.rollout.engines.vllm import GENERATE, LOOK_WITHIN_S, VllmDialect
from offbeat.rollout.engines.vllm_files import LOAD_WITHIN_S
from offbeat.weights.folder import ADAPTER_CONFIG, ADAPTER_FILE
from offbeat.weights.version import Version

FILES = (ADAPTER_CONFIG, ADAPTER_FILE)
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ALLOW = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What a server can be started for."""
NUM_KEPT = 2
"""Adapters that a server keeps in memory: the one that answers, and the one that is about to."""
OURS = "offbeat-adapter-"
"""How the names of our adapters begin. A worker that was killed leaves its last one behind."""
LEAVE_WITHIN_S = 2.0


def server_rank(rank: int) -> int | None:
    """What a server is to be started for so that it takes adapters of a rank; None: it takes none so large."""
    return next((known for known in RANKS if known >= rank), None)


@dataclass
class Adapter:
    """A version as the server has it."""

    name: str
    folder: Path
    label: str = ""


class LoraDialect(VllmDialect):
    """Implements `offbeat.rollout.engines.served.dialect.Dialect` for a run that trains adapters."""

    def __init__(self, server: Server, *, rank: int, model: str, base: Path, folder: Path):
        """`base` is where the weights of `model` lie, on which adapters stand; `folder` is for this dialect alone."""
        super().__init__(server)
        self.rank, self.model, self.base, self.folder = rank, model, base, folder.absolute()
        self._staged: Adapter | None = None
        self._served: Adapter | None = None

    async def probe(self) -> Facts:
        facts = await super().probe()
        await self._forget()
        # It may well tell spans, but of weights that never change.
        return replace(facts, has_spans=False, kv_modes=frozenset({KvMode.SAME, KvMode.REFILL}))

    async def _refuse_weights(self, told: Mapping[str, Any]) -> None:
        lora = told.get("lora_config")
        wanted = f"start it with --enable-lora --max-lora-rank {server_rank(self.rank)} --max-cpu-loras {NUM_KEPT}"
        if not isinstance(lora, dict):
            raise EngineError(f"{self.server.url}: vLLM without LoRA; {wanted} and {ALLOW}=1 in its environment")
        if int(lora.get("max_lora_rank", 0)) < self.rank:
            raise EngineError(
                f"{self.server.url}: takes adapters up to rank {lora.get('max_lora_rank')}, and model.lora_rank = "
                f"{self.rank}; {wanted}"
            )
        if lora.get("target_modules"):
            raise EngineError(
                f"{self.server.url}: leaves out what of an adapter is not in {lora['target_modules']}; start it "
                "without --lora-target-modules"
            )
        if "float32" in str(lora.get("lora_dtype")) and "cpu" not in str(told.get("device_config")):
            raise EngineError(
                f"{self.server.url}: vLLM has no adapters in float32 on a GPU; start it with --dtype bfloat16"
            )
        if not self._stands_on_base():
            raise EngineError(
                f"{self.server.url}: serves {self._root}, and adapters stand on model.path = {self.model!r}; start it "
                f"with {self.base}"
            )
        await self._refuse_fixed()

    def _stands_on_base(self) -> bool:
        root = Path(self._root)
        return root.samefile(self.base) if root.exists() else self._root == self.model

    async def _refuse_fixed(self) -> None:
        """Refuses one that takes no adapters while it runs: it does not know the call."""
        try:
            await self.server.tell(LOAD, {"lora_name": "", "lora_path": ""})
        except ServerRefused as error:
            if error.status == 404:
                raise EngineError(
                    f"{self.server.url}: vLLM that takes no adapters while it runs; start it with {ALLOW}=1 in its "
                    "environment, where nobody else can reach it"
                ) from error
            if error.status != 400:  # which is the answer to a call without a name
                raise

    async def _forget(self) -> None:
        """What an earlier worker left: its adapters in the server, and its files."""
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)
        for model in (await self.server.get("/v1/models"))["data"]:
            if str(model["id"]).startswith(OURS):
                await self._unload(str(model["id"]))

    async def generate(self, call: Call) -> AsyncIterator[Chunk]:
        try:
            async with aclosing(super().generate(call)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    yield chunk
        except ServerRefused as error:
            if error.status != 404:
                raise
            raise EngineDied(f"{self.server.url}{GENERATE}: the adapter that was loaded is gone: {error}") from error

    def _name_of(self, call: Call) -> str:
        assert self._served is not None, "nothing was loaded"
        assert self._served.label == call.label, "a call made before a load and sent after it"
        return self._served.name

    async def stage(self, version: Version) -> None:
        """Has the server read the adapter, which takes it about a step; nobody asks for it yet."""
        await self._drop(self._staged)
        self._staged = None
        name = f"{OURS}{version.number}-{uuid4().hex[:12]}"
        adapter = Adapter(name, self.folder / name)
        try:
            await asyncio.to_thread(_bring, version, adapter.folder)
            body = {"lora_name": adapter.name, "lora_path": str(adapter.folder)}
            await self.server.tell(LOAD, body, within_s=LOAD_WITHIN_S)
        except BaseException:
            shutil.rmtree(adapter.folder, ignore_errors=True)
            raise
        self._staged = adapter

    async def _replace(self, version: Version, label: str) -> None:
        assert self._staged is not None, "stage it first"
        before, self._served, self._staged = self._served, self._staged, None
        self._served.label = label
        await self._drop(before)

    async def _drop(self, adapter: Adapter | None) -> None:
        """Files go last: a server that had no room to keep an adapter reads them again while it is asked for."""
        if adapter is not None:
            await self._unload(adapter.name)
            await asyncio.to_thread(shutil.rmtree, adapter.folder, ignore_errors=True)

    async def _unload(self, name: str, within_s: float = LOOK_WITHIN_S) -> None:
        with suppress(ServerRefused):  # it does not know it any more
            await self.server.tell(UNLOAD, {"lora_name": name}, within_s=within_s)

    async def close(self) -> None:
        for adapter in (self._served, self._staged):
            if adapter is not None:
                with suppress(EngineError):
                    await self._unload(adapter.name, LEAVE_WITHIN_S)
        shutil.rmtree(self.folder, ignore_errors=True)
        await super().close()


def _bring(version: Version, folder: Path) -> None:
    """Gives an adapter's files names of our own: the version may be deleted at any moment."""
    folder.mkdir(parents=True)
    for name in FILES:
        try:
            _link_or_copy(version.path.absolute() / name, folder / name)
        except OSError as error:
            raise EngineError(
                f"version {version.number}: no adapter can be read from {version.path}: {name}: {error.strerror}"
            ) from error


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
            raise
        shutil.copyfile(source, target)
