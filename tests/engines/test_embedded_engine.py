"""The embedded engine's thread, its loads and its refusals."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import ask, tiny_model, tokens

from offbeat.engines.embedded import EmbeddedEngine
from offbeat.engines.embedded.weights import stage
from offbeat.engines.protocol import EngineError, Finish, Version

torch.set_num_threads(1)
Result = TypeVar("Result")
LONG = 110


def with_engine(scenario: Callable[[EmbeddedEngine], Awaitable[Result]], model=None, **options) -> Result:
    async def run() -> Result:
        engine = EmbeddedEngine(
            model or tiny_model(),
            **{"num_slots": 2, "max_context_tokens": 120, "version": 0, "worker": "w7", **options},
        )
        try:
            return await asyncio.wait_for(scenario(engine), timeout=60)
        finally:
            await engine.close()

    return asyncio.run(run())


def version_in(path: Path, number: int = 1) -> Version:
    return Version(number, step=number, parent=None, digest="", path=path)


def fail_on_forward_pass(engine: EmbeddedEngine, error: Exception) -> None:
    def hook(*args: object) -> None:
        raise error

    engine._stepper.model.register_forward_pre_hook(hook)


def test_a_failure_in_the_thread_reaches_everybody_and_names_the_engine():
    async def scenario(engine: EmbeddedEngine) -> None:
        fail_on_forward_pass(engine, RuntimeError("the device is on fire"))
        results = await asyncio.gather(*(engine.generate(ask(tokens(i, 3))) for i in range(5)), return_exceptions=True)
        assert [type(r.__cause__) for r in results] == [RuntimeError] * 5
        for call in (engine.generate(ask(tokens(1, 3))), engine.abort(), engine.load(version_in(Path("/nowhere")))):
            with pytest.raises(EngineError, match=r"engine w7 failed: RuntimeError: the device is on fire"):
                await call

    with_engine(scenario)


def test_a_failure_while_loading_reaches_the_loader_and_those_who_run(tmp_path):
    tiny_model(seed=3).save_pretrained(tmp_path)

    async def scenario(engine: EmbeddedEngine) -> None:
        task = asyncio.create_task(engine.generate(ask(tokens(1, 4), max_new_tokens=LONG)))
        await asyncio.sleep(0.01)
        engine._stepper._refill = lambda slots: 1 / 0
        results = await asyncio.gather(engine.load(version_in(tmp_path)), task, return_exceptions=True)
        assert [str(r) for r in results] == ["engine w7 failed: ZeroDivisionError: division by zero"] * 2

    with_engine(scenario)


def test_generation_goes_on_while_the_files_of_a_version_are_read(tmp_path, monkeypatch):
    tiny_model(seed=3).save_pretrained(tmp_path)
    may_go_on = threading.Event()

    def slowly(*args: object) -> object:
        assert may_go_on.wait(30)
        return stage(*args)

    monkeypatch.setattr("offbeat.engines.embedded.engine.stage", slowly)

    async def scenario(engine: EmbeddedEngine) -> None:
        loading = asyncio.create_task(engine.load(version_in(tmp_path, 5)))
        generation = await engine.generate(ask(tokens(1, 4), max_new_tokens=8))
        assert {segment.version for segment in generation.segments} == {0}
        assert (engine.version, engine.seconds_still, loading.done()) == (0, 0.0, False)
        may_go_on.set()
        await loading
        assert (engine.version, engine.seconds_still > 0.0) == (5, True)

    with_engine(scenario)


def test_close_aborts_what_runs_and_refuses_what_comes():
    async def scenario(engine: EmbeddedEngine) -> None:
        tasks = [asyncio.create_task(engine.generate(ask(tokens(i, 3), max_new_tokens=LONG))) for i in range(4)]
        await asyncio.sleep(0.05)
        await engine.close()
        generations = await asyncio.gather(*tasks)
        assert {g.finish for g in generations} == {Finish.ABORT}
        with pytest.raises(EngineError, match="engine w7 is closed"):
            await engine.generate(ask(tokens(1, 3)))
        await engine.close()

    with_engine(scenario)


def test_a_cancelled_request_frees_its_slot():
    async def scenario(engine: EmbeddedEngine) -> None:
        task = asyncio.create_task(engine.generate(ask(tokens(1, 3), max_new_tokens=LONG)))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        await engine.abort(["nobody"])  # commands are taken in order, so the cancelled request is gone after this
        assert engine._stepper.is_idle

    with_engine(scenario, num_slots=1)


def test_an_idle_engine_does_no_work():
    async def scenario(engine: EmbeddedEngine) -> float:
        await engine.generate(ask(tokens(1, 3)))
        before_s = time.process_time()
        await asyncio.sleep(0.5)
        return time.process_time() - before_s

    assert with_engine(scenario) < 0.1


def test_one_engine_serves_several_event_loops_in_turn():
    engine = EmbeddedEngine(tiny_model(), num_slots=2, max_context_tokens=64, version=0)
    results = [asyncio.run(engine.generate(ask(tokens(1, 3), seed=4))) for _ in range(2)]
    asyncio.run(engine.close())
    assert results[0].segments[0].tokens.tolist() == results[1].segments[0].tokens.tolist()


def test_segments_carry_worker_and_fingerprint():
    async def scenario(engine: EmbeddedEngine):
        generation = await engine.generate(ask(tokens(1, 3)))
        return engine.capabilities.fingerprint, generation.segments[0]

    fingerprint, segment = with_engine(scenario)
    assert (segment.worker, segment.engine) == ("w7", fingerprint)
    assert "float32 cpu" in fingerprint


@pytest.mark.parametrize(
    "request_, why",
    [
        (ask(tokens(1, 3), max_new_tokens=0), "max_new_tokens = 0"),
        (ask([1, 2, 96]), "token ids range from 1 to 96; they must be 0 to 95"),
        (ask([-1, 2]), "token ids range from -1 to 2"),
        (ask([1], temperature=-1.0), "temperature >= 0"),
        (ask([1], top_p=0.0), "0 < top_p <= 1"),
    ],
)
def test_what_cannot_run_is_refused_and_the_engine_goes_on(request_, why):
    async def scenario(engine: EmbeddedEngine) -> None:
        with pytest.raises(EngineError, match=why):
            await engine.generate(request_)
        assert (await engine.generate(ask(tokens(1, 3)))).finish is Finish.LENGTH

    with_engine(scenario)


def test_two_running_requests_cannot_share_an_id():
    async def scenario(engine: EmbeddedEngine) -> None:
        request = ask(tokens(1, 3), max_new_tokens=LONG)
        task = asyncio.create_task(engine.generate(request))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="already running"):
            await engine.generate(request)
        assert len((await task).segments[0].tokens) == LONG

    with_engine(scenario)


def test_nothing_is_generated_before_a_version_is_loaded(tmp_path):
    tiny_model(seed=3).save_pretrained(tmp_path)

    async def scenario(engine: EmbeddedEngine) -> int | None:
        with pytest.raises(EngineError, match="no version"):
            await engine.generate(ask(tokens(1, 3)))
        await engine.load(version_in(tmp_path, 5))
        return (await engine.generate(ask(tokens(1, 3)))).segments[0].version

    assert with_engine(scenario, version=None) == 5


def test_exact_needs_sixteen_slots():
    with pytest.raises(EngineError, match=r"rollout\.slots = 8: must be 16 or more"):
        EmbeddedEngine(tiny_model(), num_slots=8, max_context_tokens=64, exact=True)


@pytest.mark.parametrize("tied", [False, True])
def test_a_load_puts_every_tensor_in_place(tied, tmp_path):
    published = tiny_model(seed=3, tie_word_embeddings=tied)
    published.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = tiny_model(tie_word_embeddings=tied)
    with_engine(lambda engine: engine.load(version_in(tmp_path)), model)
    for name, tensor in published.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def _without_norm(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def _with_another(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.adapter.weight"] = torch.zeros(1)


def _with_a_wide_norm(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.zeros(33)


def _with_a_finer_norm(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].double()


@pytest.mark.parametrize(
    "spoil, why",
    [
        (_without_norm, r"version 1: .* has no tensor model\.norm\.weight \(missing tensors: 1\)"),
        (_with_another, r"version 1: .* has the tensor model\.adapter\.weight, which .* \(unknown tensors: 1\)"),
        (_with_a_wide_norm, r"version 1: model\.norm\.weight has shape \(33,\), but in this worker's model \(32,\)"),
        (
            _with_a_finer_norm,
            r"version 1: model\.norm\.weight is F64, which does not fit into the model's torch\.float32",
        ),
    ],
)
def test_a_version_that_does_not_fit_is_refused_and_changes_nothing(spoil, why, tmp_path):
    tiny_model(seed=3).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    model = tiny_model()

    async def scenario(engine: EmbeddedEngine) -> int | None:
        running = asyncio.create_task(engine.generate(ask(tokens(1, 4), max_new_tokens=LONG)))
        with pytest.raises(EngineError, match=why):
            await engine.load(version_in(tmp_path))
        (segment,) = (await running).segments
        assert (segment.version, engine.version) == (0, 0)
        return engine.version

    with_engine(scenario, model)
    for name, tensor in tiny_model().state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


@pytest.mark.parametrize("broken", ["absent", "empty", "cut short"])
def test_a_version_that_cannot_be_read_is_refused(broken, tmp_path):
    tiny_model(seed=3).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    if broken == "absent":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: 0 if broken == "empty" else 1000])

    async def scenario(engine: EmbeddedEngine) -> None:
        with pytest.raises(EngineError, match="version 1: "):
            await engine.load(version_in(tmp_path))
        assert (await engine.generate(ask(tokens(1, 3)))).finish is Finish.LENGTH

    with_engine(scenario)


def test_a_budget_used_up_step_by_step_is_never_exceeded():
    """A partial cut at any place and carried on with what is left has exactly the tokens that were asked for."""
    request = ask(tokens(2, 5), seed=9, max_new_tokens=12)

    async def scenario(engine: EmbeddedEngine) -> list[list[int]]:
        results = []
        for cut in range(1, 12):
            first = await engine.generate(ask(request.tokens, seed=9, max_new_tokens=cut))
            prefix = first.segments[0].tokens
            rest = ask(np.concatenate([request.tokens, prefix]), seed=9, position=cut, max_new_tokens=12 - cut)
            (segment,) = (await engine.generate(rest)).segments
            results.append([*prefix.tolist(), *segment.tokens.tolist()])
        whole = await engine.generate(request)
        return [whole.segments[0].tokens.tolist(), *results]

    whole, *pieced = with_engine(scenario)
    assert len(whole) == 12
    assert pieced == [whole] * 11
