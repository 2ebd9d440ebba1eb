"""Clients in one process with the coordinator pass on all that they are given, under their name and generation."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offbeat.client.in_process import InProcessTrainer, InProcessWorker
from offbeat.client.protocol import TrainerClient, WorkerClient
from offbeat.coordinator.coordinator import Coordinator
from offbeat.ledger.records import Reconciled


class Recorder:
    """Takes every call of a coordinator, if it has such a method and these arguments fit it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.rounds = SimpleNamespace(is_over=self._is_over)

    def __getattr__(self, name: str) -> Any:
        signature = inspect.signature(getattr(Coordinator, name))

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(self, *args, **kwargs)
            self.calls.append(tuple(bound.arguments.values())[1:])
            return None if name == "timed" else self._answer(name)

        return call

    async def _answer(self, name: str) -> Any:
        return Reconciled(step=0, parent=None, replays_batch=False, generation=7) if name == "reconcile" else name

    async def _is_over(self, *args: Any) -> bool:
        self.calls.append(args)
        return True


def words(method: Any) -> list[str]:
    """An argument for each parameter of a method, told apart by its name."""
    return [f"the {name}" for name in list(inspect.signature(method).parameters)[1:]]


def methods(protocol: type) -> list[str]:
    return [name for name, value in vars(protocol).items() if inspect.isfunction(value) and not name.startswith("_")]


@pytest.mark.parametrize("name", [name for name in methods(WorkerClient) if name != "fetch"])
def test_a_worker_passes_on_every_argument(name: str):
    recorder = Recorder()
    given = words(getattr(WorkerClient, name))
    asyncio.run(getattr(InProcessWorker(recorder, "w"), name)(*given))
    (call,) = recorder.calls
    assert [value for value in call if value != "w"] == given
    assert ("w" in call) == (name not in ("newer", "round_over"))


@pytest.mark.parametrize("name", [name for name in methods(TrainerClient) if name != "reconcile"])
def test_a_trainer_passes_on_every_argument_and_its_generation(name: str):
    recorder = Recorder()

    async def run() -> None:
        trainer = InProcessTrainer(recorder, "t")
        await trainer.reconcile(3, 4, home=str(Path("/home")))
        await getattr(trainer, name)(*words(getattr(TrainerClient, name)))

    asyncio.run(run())
    (arrived, call) = recorder.calls
    assert arrived[:2] == (3, 4)
    assert list(call) == [*words(getattr(TrainerClient, name)), 7]
