"""Two ways to load weights into vLLM: from files that it reads, or from GPU memory by CUDA IPC.

`stage` runs while vLLM generates, `load` while it is paused.
"""

from __future__ import annotations

import asyncio
import base64
import pickle
import shutil
import tempfile
from collections.abc import Awaitable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from offbeat.engines.protocol import EngineError
from offbeat.files import link_folder
from offbeat.weights.version import Version

if TYPE_CHECKING:
    import torch  # imported by `FromGpu` alone: a worker beside vLLM needs no torch

LOAD_WITHIN_S = 600.0


class WorkerCall(Protocol):
    """Calls a method of vLLM's workers, the processes that hold the weights, with keyword arguments."""

    def __call__(self, method: str, /, **arguments: Any) -> Awaitable[None]: ...


class Transfer(Protocol):
    """A way to load weights."""

    async def stage(self, version: Version) -> None:
        """Prepares the load of a version."""
        ...

    async def load(self, call: WorkerCall, version: Version) -> None:
        """Loads the version that was staged last."""
        ...


class FromPath:
    """Loads a version by making vLLM read its files.

    vLLM reads hard links to the files. The version itself may be deleted at any moment, and a reload with missing files
    would leave vLLM without weights.
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

    async def load(self, call: WorkerCall, version: Version) -> None:
        assert self._linked is not None, f"version {version.number}: call stage before load"
        try:
            await call("reload_weights", weights_path=str(self._linked))
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


class FromGpu:
    """Loads a version by making vLLM copy it from GPU memory of this process, with vLLM's CUDA IPC transfer.

    `stage` reads the files into GPU memory, which needs room for a second copy of the weights. vLLM must be started
    with `--weight-transfer-config '{"backend": "ipc"}'`, use only this GPU, and trust its callers, because it
    unpickles the memory handles.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._staged: dict[str, torch.Tensor] | None = None
        self._is_initialised = False

    async def stage(self, version: Version) -> None:
        self._staged = None
        self._staged = await asyncio.to_thread(_read, version.path, self.device)

    async def load(self, call: WorkerCall, version: Version) -> None:
        assert self._staged is not None, f"version {version.number}: call stage before load"
        tensors = self._staged
        if not self._is_initialised:
            await call("init_weight_transfer_engine", init_info={})
            self._is_initialised = True
        await call("start_weight_update")
        described = _described(tensors, self.device)
        await call("update_weights", update_info=described)
        await call("finish_weight_update")
        self._staged = None  # vLLM has copied the tensors now
        del tensors, described
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
