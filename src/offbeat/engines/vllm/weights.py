"""Two ways to load weights into a vLLM server: from files that it reads, or from GPU memory by CUDA IPC.

`stage` runs while the server generates, `load` while it is paused.
"""

from __future__ import annotations

import asyncio
import base64
import pickle
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.engines.http_calls import Server
from offbeat.engines.protocol import EngineError
from offbeat.files import link_folder
from offbeat.weights.version import Version

if TYPE_CHECKING:
    import torch  # imported by `FromGpu` alone: a worker of a vLLM server needs no torch

LOAD_WITHIN_S = 600.0


class FromPath:
    """Loads a version by making the server read its files.

    The server reads hard links to the files. The version itself may be deleted at any moment, and a reload with missing
    files would leave the server without weights.
    """

    def __init__(self) -> None:
        self._linked: Path | None = None

    async def stage(self, version: Version) -> None:
        self._drop()
        try:
            self._linked = await asyncio.to_thread(_link, version.path.absolute())
        except OSError as error:
            raise EngineError(
                f"version {version.number}: its files cannot be read from {version.path}: {error.strerror}"
            ) from error

    async def load(self, server: Server, version: Version) -> None:
        assert self._linked is not None, f"version {version.number} is loaded without being staged"
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(self._linked)}}
        try:
            await server.post("/collective_rpc", body, within_s=LOAD_WITHIN_S)
        finally:
            self._drop()

    def _drop(self) -> None:
        if self._linked is not None:
            shutil.rmtree(self._linked, ignore_errors=True)
            self._linked = None


def _link(folder: Path) -> Path:
    """Makes hard links to a version's files in a new folder beside it; returns the new folder."""
    linked = Path(tempfile.mkdtemp(prefix=f".{folder.name}.served-", dir=folder.parent))
    try:
        link_folder(folder, linked)
    except OSError:
        shutil.rmtree(linked, ignore_errors=True)
        raise
    return linked


UPDATE_WITHIN_S = 120.0


class FromGpu:
    """Loads a version by making the server copy it from GPU memory of this process, with vLLM's CUDA IPC transfer.

    `stage` reads the files into GPU memory, which needs room for a second copy of the weights. The server must be
    started with `--weight-transfer-config '{"backend": "ipc"}'`, use only this GPU, and trust its callers, because it
    unpickles the memory handles.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._staged: tuple[int, dict[str, torch.Tensor]] | None = None
        self._initialised: Server | None = None

    async def stage(self, version: Version) -> None:
        self._staged = None
        tensors = await asyncio.to_thread(_read, version.path, self.device)
        self._staged = (version.number, tensors)

    async def load(self, server: Server, version: Version) -> None:
        if self._staged is None or self._staged[0] != version.number:
            raise EngineError(f"{server.url}: version {version.number} was not staged in GPU memory; this is a bug")
        _, tensors = self._staged
        if self._initialised is not server:
            await server.post("/init_weight_transfer_engine", {"init_info": {}}, within_s=UPDATE_WITHIN_S)
            self._initialised = server
        await server.post("/start_weight_update", within_s=UPDATE_WITHIN_S)
        body = {"update_info": _described(tensors, self.device)}
        await server.post("/update_weights", body, within_s=UPDATE_WITHIN_S)
        await server.post("/finish_weight_update", {}, within_s=UPDATE_WITHIN_S)
        self._staged = None  # the server has read the tensors now
        del tensors, body
        await asyncio.to_thread(_free_memory)


def _read(folder: Path, device: torch.device) -> dict[str, torch.Tensor]:
    import torch
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file, device=str(device)))
    torch.cuda.synchronize(device)
    return tensors


def _described(tensors: dict[str, torch.Tensor], device: torch.device) -> dict[str, Any]:
    """Returns the names, dtypes, shapes and memory handles of the tensors, in the form that vLLM takes."""
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    gpu = str(torch.cuda.get_device_properties(device).uuid)
    handles = [{gpu: reduce_tensor(tensor)[1]} for tensor in tensors.values()]
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
    }


def _free_memory() -> None:
    import torch

    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
