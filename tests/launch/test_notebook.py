"""`offbeat.train` as a notebook calls it: inside an event loop that runs already, and more than once in a process."""

import asyncio
import json
import os
import signal
import threading
from pathlib import Path

import pytest
import torch

import offbeat
from offbeat.config import from_dict
from offbeat.errors import UserError
from offbeat.launch import model_parts
from offbeat.launch.stopping import SIGNALS
from offbeat.ledger.ledger import Ledger
from offbeat.observability import console


def tiny(folder: Path, name: str, **sections) -> dict:
    config = {
        "run": {"dir": str(folder), "name": name, "steps": 2, "threads": 1},
        "batch": {"groups_per_step": 2, "group_size": 2},
        "rollout": {"max_new_tokens": 8, "slots": 4},
        "eval": {"every": 0},
        "log": {"console": "quiet"},
    }
    for section, values in sections.items():
        config[section] = {**config.get(section, {}), **values}
    return config


def in_a_notebook(*args, **kwargs):
    """A cell: a plain call of `offbeat.train` by a coroutine."""

    async def cell():
        return offbeat.train(*args, **kwargs)

    return asyncio.run(cell())


def digest_of(run: Path) -> str:
    with Ledger(run / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.verify().violations == ()
        return ledger.latest_version().digest


def test_a_mistake_is_told_in_the_same_words_as_outside_a_running_loop(tmp_path):
    told = []
    for train in (offbeat.train, in_a_notebook):
        with pytest.raises(UserError) as caught:
            train(tiny(tmp_path, "wrong"), reward=lambda solution: 1.0)
        told.append(str(caught.value))
    assert told[0] == told[1]
    assert "solution" in told[0]


@pytest.mark.parametrize("train", [in_a_notebook, pytest.param(offbeat.train, marks=pytest.mark.full)])
def test_ctrl_c_stops_a_run_with_a_checkpoint_and_the_handlers_are_given_back(tmp_path, train):
    before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    mine = {number: signal.getsignal(number) for number in SIGNALS}
    main = os.getpid()

    def interrupts(response):
        """Stops the run while it is under way, as a person would."""
        if not Path(tmp_path, "asked").exists() and Path(tmp_path, "a", "metrics.jsonl").stat().st_size:
            Path(tmp_path, "asked").touch()
            os.kill(main, signal.SIGINT)
        return 1.0

    try:
        summary = train(tiny(tmp_path, "a", run={"steps": 500}), reward=interrupts).summary
        assert {number: signal.getsignal(number) for number in SIGNALS} == mine
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert (summary["finished"], summary["stopped_by"]) == (False, "SIGINT")
    assert 0 < summary["steps"] < 500
    assert (tmp_path / "a" / "checkpoints" / f"{summary['steps']:08d}").is_dir()
    events = [json.loads(line)["event"] for line in (tmp_path / "a" / "events.jsonl").read_text().splitlines()]
    assert events[-1] == "end"


@pytest.fixture
def shown(monkeypatch) -> list[tuple[str, str]]:
    """Outputs and updates of a notebook's cells, each as (thread, text)."""
    display = pytest.importorskip("IPython.display")
    found: list[tuple[str, str]] = []

    class Handle:
        def update(self, data, *, raw):
            found.append((threading.current_thread().name, data["text/plain"]))

    def show(data, *, raw, display_id):
        Handle().update(data, raw=raw)
        return Handle()

    monkeypatch.setattr(display, "display", show)
    monkeypatch.setattr(console, "in_notebook", lambda: True)
    return found


def test_a_cell_that_waits_shows_the_steps_of_a_run_in_the_background(tmp_path, shown):
    run = offbeat.train(tiny(tmp_path, "a", log={"console": "auto"}), wait=False)
    run.wait()
    here = [text for thread, text in shown if thread == threading.current_thread().name]
    assert here
    assert "2/2" in here[-1]
    assert "run.export" in here[-1]
    num_outputs = len(here)
    run.wait()  # another cell: it shows how the run ended
    assert [text for thread, text in shown if thread == threading.current_thread().name][num_outputs:] == here[-1:]


def test_a_cell_that_has_trained_does_not_show_the_run_again_when_it_waits(tmp_path, shown):
    run = offbeat.train(tiny(tmp_path, "a", log={"console": "auto"}))
    num_outputs = len(shown)
    run.wait()
    assert len(shown) == num_outputs


@pytest.mark.full
def test_two_runs_at_the_same_time_end_as_each_would_alone(tmp_path):
    def config(name: str, seed: int) -> dict:
        return tiny(tmp_path, name, run={"exact": True, "seed": seed, "steps": 4}, rollout={"slots": 16})

    for seed in (1, 2):
        offbeat.train(config(f"alone-{seed}", seed))
    found: dict[int, object] = {}

    def train(seed: int) -> None:
        try:
            found[seed] = offbeat.train(config(f"beside-{seed}", seed)).summary["finished"]
        except BaseException as error:  # noqa: BLE001 - the test shows it
            found[seed] = error

    threads = [threading.Thread(target=train, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == {1: True, 2: True}
    for seed in (1, 2):
        assert digest_of(tmp_path / f"beside-{seed}") == digest_of(tmp_path / f"alone-{seed}")
    assert digest_of(tmp_path / "alone-1") != digest_of(tmp_path / "alone-2")


def test_a_run_has_the_threads_that_it_asks_for_whatever_another_has_set_before_it(monkeypatch):
    monkeypatch.setattr(model_parts, "NUM_THREADS", 2)
    before, found = torch.get_num_threads(), []

    def begin(threads: int | None) -> None:
        model_parts.prepare_torch(from_dict({"run": {"threads": threads}} if threads else {}))
        found.append(torch.get_num_threads())

    try:
        for threads in (1, None):
            one = threading.Thread(target=begin, args=(threads,))
            one.start()
            one.join()
    finally:
        torch.set_num_threads(before)
    assert found == [1, 2]
