"""Looks at everything at once: each probe is a process of its own with the same deadline."""

from __future__ import annotations

import asyncio
import json
import sys

from offbeat.config import resolved
from offbeat.launch.doctor.asking import ask
from offbeat.launch.doctor.needs import Needs
from offbeat.launch.doctor.seen import (
    EngineServer,
    Interpreter,
    Machine,
    Mistakes,
    Model,
    Offbeat,
    Packages,
    Place,
    Ports,
    Seen,
    Torch,
)


async def look(needs: Needs, within_s: float) -> Seen:
    """All that there is to see; what cannot be seen is `Failed`, and takes nothing along."""
    async with asyncio.TaskGroup() as group:
        torch = group.create_task(ask(Torch, "torch", needs.device, within_s=within_s))
        offbeat = group.create_task(ask(Offbeat, "offbeat", within_s=within_s))
        packages = group.create_task(ask(Packages, "packages", within_s=within_s))
        machine = group.create_task(ask(Machine, "machine", within_s=within_s))
        python = needs.engine_python or sys.executable
        interpreter = group.create_task(ask(Interpreter, "interpreter", python, within_s=within_s))
        place = group.create_task(ask(Place, "place", needs.config.run.dir, within_s=within_s))
        ports = group.create_task(ask(Ports, "ports", needs.host, str(needs.port), within_s=within_s))
        model = group.create_task(ask(Model, "model", needs.model, within_s=within_s))
        config = json.dumps(resolved(needs.config))  # not a word of the command line, which all on the machine can read
        mistakes = group.create_task(ask(Mistakes, "mistakes", within_s=within_s, heard=config))
        url = needs.engine_url
        server = group.create_task(ask(EngineServer, "server", url, within_s=within_s)) if url else None
    return Seen(
        offbeat=offbeat.result(),
        packages=packages.result(),
        machine=machine.result(),
        torch=torch.result(),
        interpreter=interpreter.result(),
        place=place.result(),
        ports=ports.result(),
        model=model.result(),
        server=server.result() if server else None,
        mistakes=mistakes.result(),
    )
