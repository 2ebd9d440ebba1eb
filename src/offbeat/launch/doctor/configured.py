"""Findings about what one configuration asks for: its model, the memory to train it, its files and stores. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from offbeat.config.arithmetic import size
from offbeat.launch.doctor.finding import Finding, Level
from offbeat.launch.doctor.needs import Needs
from offbeat.launch.doctor.seen import Failed, Seen, Torch


def configuration(seen: Seen, needs: Needs) -> Iterator[Finding]:
    told = seen.model
    if isinstance(told, Failed) and needs.is_on_hub:
        yield Finding("model", f"{needs.model}: not here yet", Level.WARNS, f"hf download {needs.model}")
    elif isinstance(told, Failed):
        yield Finding("model", told.failed, Level.STOPS)
    else:
        window = f", {told.context_tokens:,} tokens of context" if told.context_tokens else ""
        yield Finding("model", f"{needs.model}: {told.architecture}, {told.num_parameters:,} parameters{window}")
        yield from _memory(told.num_parameters, seen, needs)
    if isinstance(seen.mistakes, Failed):
        yield Finding("config", seen.mistakes.failed, Level.WARNS)
    else:
        for mistake in seen.mistakes.mistakes:
            yield Finding("config", mistake, Level.STOPS)
    gpus = [] if isinstance(seen.torch, Failed) else [d for d in seen.torch.devices if d.name.startswith("cuda")]
    if needs.is_served and not needs.engine_url and needs.num_engine_devices > max(len(gpus), 1):
        told_number = f"engine.tensor_parallel = {needs.num_engine_devices}"
        yield Finding(
            "engine",
            f"{told_number}, and here are {len(gpus)} GPUs",
            Level.STOPS,
            f"--engine.tensor-parallel {max(len(gpus), 1)}",
        )


def _memory(num_parameters: int, seen: Seen, needs: Needs) -> Iterator[Finding]:
    """What training holds, beside what is free where it would run."""
    room = _picked_room(seen.torch, seen)
    if room is None:
        return
    name, free, total = room
    wanted = needs.memory_bytes(num_parameters, on_gpu=name != "cpu")
    shares = needs.is_served and not needs.engine_url and name.startswith("cuda")
    left = int(total * (1 - needs.engine_memory_share)) if shares else total
    told = f"at least {size(wanted)} on {name}, besides activations and KV"
    if wanted > left and shares:
        remedy = f"--engine.memory-share {max(0.1, 1 - 1.5 * wanted / total):.2f}, or a device of its own"
        yield Finding("training", f"{told}; the engine leaves {size(left)}", Level.WARNS, remedy)
    elif wanted > free:
        level = Level.STOPS if wanted > total and name != "cpu" else Level.WARNS
        yield Finding("training", f"{told}; {size(free)} is free", level, "a smaller model, or a larger device")
    else:
        yield Finding("training", told)


def _picked_room(torch: Torch | Failed, seen: Seen) -> tuple[str, int, int] | None:
    """Name, free and total memory of the device that trains."""
    if isinstance(torch, Failed) or not torch.picked:
        return None
    device = next((device for device in torch.devices if device.name == torch.picked), None)
    if device is not None and device.total_bytes is not None and device.free_bytes is not None:
        return device.name, device.free_bytes, device.total_bytes
    machine = seen.machine
    if isinstance(machine, Failed) or machine.free_bytes is None or machine.total_bytes is None:
        return None
    return torch.picked, machine.free_bytes, machine.total_bytes
