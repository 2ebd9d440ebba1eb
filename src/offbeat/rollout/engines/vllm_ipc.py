"""New weights for a vLLM server on the same GPU, by the server's own CUDA IPC transfer.

The files are read into this process's share of the GPU while generation goes on; the server, paused, then copies from
there. That takes one more copy of the weights in GPU memory while a version is on its way. The server must have been
started for it (`--weight-transfer-config '{"backend": "ipc"}'`), be on this GPU alone, and trust whoever reaches its
port: what tells it where the memory lies is a pickle.
"""

from __future__ import annotations

import asyncio
import base64
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.multiprocessing.reductions import reduce_tensor

from offbeat.rollout.engine import EngineError
from offbeat.rollout.engines.served.http import Server
from offbeat.weights.version import Version

UPDATE_WITHIN_S = 120.0


class FromGpu:
    """Implements `offbeat.rollout.engines.vllm_files.Transfer`."""

    def __init__(self, device: torch.device):
        self.device = device
        self._staged: tuple[int, dict[str, torch.Tensor]] | None = None
        self._greeted: Server | None = None

    async def stage(self, version: Version) -> None:
        self._staged = None
        tensors = await asyncio.to_thread(_read, version.path, self.device)
        self._staged = (version.number, tensors)

    async def load(self, server: Server, version: Version) -> None:
        if self._staged is None or self._staged[0] != version.number:
            raise EngineError(f"{server.url}: version {version.number} is not in GPU memory; it was not staged")
        _, tensors = self._staged
        if self._greeted is not server:
            await server.post("/init_weight_transfer_engine", {"init_info": {}}, within_s=UPDATE_WITHIN_S)
            self._greeted = server
        await server.post("/start_weight_update", within_s=UPDATE_WITHIN_S)
        body = {"update_info": _described(tensors, self.device)}
        await server.post("/update_weights", body, within_s=UPDATE_WITHIN_S)
        await server.post("/finish_weight_update", {}, within_s=UPDATE_WITHIN_S)
        self._staged = None  # not before: the server read it until now
        del tensors, body
        await asyncio.to_thread(_give_back)


def _read(folder: Path, device: torch.device) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file, device=str(device)))
    torch.cuda.synchronize(device)
    return tensors


def _described(tensors: dict[str, torch.Tensor], device: torch.device) -> dict[str, Any]:
    """Names, shapes and, for this GPU, where the memory lies."""
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    handles = [{gpu: reduce_tensor(tensor)[1]} for tensor in tensors.values()]
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
    }


def _give_back() -> None:
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
