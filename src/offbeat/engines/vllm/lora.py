"""LoRA adapters on a vLLM server: a version is an adapter on the weights that the server started with.

Every load adds an adapter under a new name, and every call names its adapter. So a call's version is certain, and no
two loads share keys and values. A running call cannot change its adapter, so it is aborted for a load, and a new call
continues the request. An adapter is never replaced under the same name. Otherwise vLLM would read the files at every
decode step, and running calls would use the new adapter with the keys and values of the old one.

A server needs `--enable-lora` and `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1` in addition to the options in `vllm.api`.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from offbeat.engines.dialect import Call, Chunk, Facts
from offbeat.engines.http_calls import Server, ServerRefused
from offbeat.engines.protocol import EngineDied, EngineError, KvMode
from offbeat.engines.vllm.api import CHECK_WITHIN_S, GENERATE, VllmDialect
from offbeat.engines.vllm.weights import LOAD_WITHIN_S
from offbeat.files import link_folder
from offbeat.weights.version import ADAPTER_CONFIG, ADAPTER_FILE, Version

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ALLOW = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM allows for --max-lora-rank."""
NUM_KEPT = 2
"""Number of adapters in the server's memory: the one in use, and the next one."""
OURS = "offbeat-adapter-"
"""Prefix of our adapters' names. By it, adapters that a killed worker left behind are found and removed."""
LEAVE_WITHIN_S = 2.0


def server_rank(rank: int) -> int | None:
    """Returns the smallest --max-lora-rank that admits adapters of `rank`; None if `rank` is too large."""
    return next((known for known in RANKS if known >= rank), None)


@dataclass
class LoadedAdapter:
    """An adapter that vLLM has loaded, and the folder with its files."""

    name: str
    folder: Path
    label: str = ""


class Adapters:
    """The adapter that vLLM uses and the one that it will use next, with their files. `add` makes vLLM load the adapter
    in a folder under a name; `remove` makes vLLM unload the adapter of a name."""

    def __init__(
        self, folder: Path, add: Callable[[str, Path], Awaitable[None]], remove: Callable[[str], Awaitable[None]]
    ):
        """`folder` is for the files and must belong to this object alone."""
        self.folder, self._add, self._remove = folder.absolute(), add, remove
        self._staged: LoadedAdapter | None = None
        self._served: LoadedAdapter | None = None

    async def clean_up(self) -> None:
        """Deletes the files that an earlier worker left."""
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)

    async def stage(self, version: Version) -> None:
        """Makes vLLM read the version's adapter, which takes about one decode step; no call uses it yet."""
        await self._drop(self._staged)
        self._staged = None
        name = f"{OURS}{version.number}-{uuid4().hex[:12]}"
        adapter = LoadedAdapter(name, self.folder / name)
        try:
            await asyncio.to_thread(_link_adapter, version, adapter.folder)
            await self._add(adapter.name, adapter.folder)
        except BaseException:
            shutil.rmtree(adapter.folder, ignore_errors=True)
            raise
        self._staged = adapter

    async def swap(self, version: Version, label: str) -> None:
        """Serves the adapter staged last, under `label`, and drops the one served before."""
        assert self._staged is not None, f"version {version.number}: call stage before load"
        before, self._served, self._staged = self._served, self._staged, None
        self._served.label = label
        await self._drop(before)

    def name_for(self, call: Call) -> str:
        """Returns the name of the adapter that samples the call's answer."""
        assert self._served is not None, "a call was sent before the first load; call load first"
        assert self._served.label == call.label, (
            f"a call for {call.label} was sent while {self._served.label} is served"
        )
        return self._served.name

    async def _drop(self, adapter: LoadedAdapter | None) -> None:
        """Removes an adapter and then deletes its files; does nothing for None. The files are deleted last: where vLLM
        has no room to keep an adapter in memory, it reads the files again while calls use it."""
        if adapter is not None:
            await self._remove(adapter.name)
            await asyncio.to_thread(shutil.rmtree, adapter.folder, ignore_errors=True)

    async def close(self) -> None:
        for adapter in (self._served, self._staged):
            if adapter is not None:
                with suppress(EngineError, TimeoutError):
                    async with asyncio.timeout(LEAVE_WITHIN_S):
                        await self._remove(adapter.name)
        shutil.rmtree(self.folder, ignore_errors=True)


class LoraDialect(VllmDialect):
    """Implements `offbeat.engines.dialect.Dialect` for a run that trains adapters."""

    def __init__(self, server: Server, *, rank: int, model: str, base: Path, folder: Path):
        """The adapters have rank `rank` and belong to the model named `model` (model.path), whose folder is `base`.
        `folder` is for adapter files and must belong to this dialect alone."""
        super().__init__(server)
        self.rank, self.model, self.base = rank, model, base
        self.adapters = Adapters(folder, self._add, self._remove)

    async def probe(self) -> Facts:
        facts = await super().probe()
        await self._clean_up()
        # Its spans, if any, name the base weights, which never change.
        return replace(facts, has_spans=False, kv_modes=frozenset({KvMode.SAME, KvMode.REFILL}))

    async def _refuse_weights(self, config: Mapping[str, Any]) -> None:
        lora = config.get("lora_config")
        wanted = f"start it with --enable-lora --max-lora-rank {server_rank(self.rank)} --max-cpu-loras {NUM_KEPT}"
        if not isinstance(lora, dict):
            raise EngineError(f"{self.server.url}: this vLLM has no LoRA; {wanted} and {ALLOW}=1 in its environment")
        if int(lora.get("max_lora_rank", 0)) < self.rank:
            raise EngineError(
                f"{self.server.url}: this vLLM takes adapters up to rank {lora.get('max_lora_rank')}, but "
                f"model.lora_rank = {self.rank}; {wanted}"
            )
        if lora.get("target_modules"):
            raise EngineError(
                f"{self.server.url}: this vLLM ignores the parts of an adapter outside {lora['target_modules']}; "
                "start it without --lora-target-modules"
            )
        if "float32" in str(lora.get("lora_dtype")) and "cpu" not in str(config.get("device_config")):
            raise EngineError(
                f"{self.server.url}: vLLM on a GPU cannot run adapters in float32; start it with --dtype bfloat16"
            )
        if not self._has_base():
            raise EngineError(
                f"{self.server.url}: this vLLM serves {self._root}, but the adapters' base is model.path = "
                f"{self.model!r}; start it with the model {self.base}"
            )
        await self._refuse_fixed()

    def _has_base(self) -> bool:
        root = Path(self._root)
        return root.samefile(self.base) if root.exists() else self._root == self.model

    async def _refuse_fixed(self) -> None:
        """Raises an `EngineError` if the server cannot load adapters while it runs. Such a server answers a load call
        that names no adapter with status 404; a server that can load adapters answers with 400."""
        try:
            await self.server.send(LOAD, {"lora_name": "", "lora_path": ""})
        except ServerRefused as error:
            if error.status == 404:
                raise EngineError(
                    f"{self.server.url}: this vLLM server loads no adapters while it runs; start it with {ALLOW}=1 in "
                    "its environment; any caller can load adapters then, so let nobody but the worker reach its port"
                ) from error
            if error.status != 400:  # the expected answer to a call without a name
                raise

    async def _clean_up(self) -> None:
        """Removes the adapters and files that an earlier worker left."""
        await self.adapters.clean_up()
        for model in (await self.server.get("/v1/models"))["data"]:
            if str(model["id"]).startswith(OURS):
                await self._remove(str(model["id"]))

    async def generate(self, call: Call) -> AsyncIterator[Chunk]:
        try:
            async with aclosing(super().generate(call)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    yield chunk
        except ServerRefused as error:
            if error.status != 404:
                raise
            raise EngineDied(f"{self.server.url}{GENERATE}: the server has lost its loaded adapter: {error}") from error

    def _name_of(self, call: Call) -> str:
        return self.adapters.name_for(call)

    async def stage(self, version: Version) -> None:
        await self.adapters.stage(version)

    async def _replace(self, version: Version, label: str) -> None:
        await self.adapters.swap(version, label)

    async def _add(self, name: str, folder: Path) -> None:
        await self.server.send(LOAD, {"lora_name": name, "lora_path": str(folder)}, within_s=LOAD_WITHIN_S)

    async def _remove(self, name: str) -> None:
        with suppress(ServerRefused):  # already unloaded
            await self.server.send(UNLOAD, {"lora_name": name}, within_s=CHECK_WITHIN_S)

    async def close(self) -> None:
        await self.adapters.close()
        await super().close()


def _link_adapter(version: Version, folder: Path) -> None:
    """Makes hard links to an adapter's files in `folder`, because the version may be deleted at any moment."""
    try:
        for name in (ADAPTER_CONFIG, ADAPTER_FILE):
            (version.path / name).stat()
        link_folder(version.path.absolute(), folder)
    except OSError as error:
        name = Path(error.filename or "").name
        raise EngineError(
            f"version {version.number}: its adapter cannot be read from {version.path}: {name}: {error.strerror}"
        ) from error
