"""How trainer and engine divide a card, by closed forms, and how they take turns to take memory."""

import subprocess
import sys
import threading

import pytest

from offbeat.config import Config, from_dict
from offbeat.launch import gpu_memory
from offbeat.launch.gpu_memory import (
    OUTSIDE_BYTES,
    server_share,
    servers_bytes,
    taking_turns,
    trainer_bytes,
    training_bytes,
)

B = 10**9
WEIGHTS = 2 * 1.5 * B
FULL = 18 * 1.5 * B


@pytest.fixture(autouse=True)
def a_model_of_1_5b(monkeypatch):
    monkeypatch.setattr(gpu_memory, "num_parameters", lambda path: 1_500_000_000)


def configured(**sections) -> Config:
    return from_dict({"rollout": {"engine": "vllm", "workers": 1}, **sections})


def test_a_server_gets_half_of_what_the_training_state_leaves():
    assert server_share(configured(), 80 * B) == pytest.approx((0.92 * 80 * B - FULL) / 2 / (80 * B), abs=1e-3)
    adapters = configured(model={"lora_rank": 16})
    assert server_share(adapters, 24 * B) == pytest.approx((0.92 * 24 * B - WEIGHTS) / 2 / (24 * B), abs=1e-3)


def test_a_server_gets_its_weights_and_a_little_more_even_where_the_state_leaves_nothing():
    assert server_share(configured(), 24 * B) == pytest.approx((WEIGHTS + 2.5 * B) / (24 * B), abs=1e-3)
    assert server_share(configured(engine={"tensor_parallel": 2}), 24 * B) == pytest.approx(
        (WEIGHTS / 2 + 2.5 * B) / (24 * B), abs=1e-3
    )


def test_several_servers_divide_one_half():
    one, two = (configured(rollout={"engine": "vllm", "workers": n}) for n in (1, 2))
    assert server_share(two, 80 * B) == pytest.approx(server_share(one, 80 * B) / 2, abs=1e-3)
    assert servers_bytes(two, 80 * B) == pytest.approx(servers_bytes(one, 80 * B), rel=0.01)


def test_the_trainer_may_take_what_servers_leave_and_all_without_them():
    shared = configured(engine={"memory_share": 0.3})
    assert trainer_bytes(shared, 80 * B) == 56 * B - OUTSIDE_BYTES
    assert trainer_bytes(configured(engine={"memory_share": 0.95}), 20 * B) == 0
    assert trainer_bytes(from_dict({}), 80 * B) == 80 * B


def test_a_share_that_is_set_is_taken():
    set_share = configured(engine={"memory_share": 0.3})
    assert server_share(set_share, 80 * B) == 0.3
    assert servers_bytes(set_share, 80 * B) == 24 * B


@pytest.mark.parametrize(
    "sections",
    [
        {"rollout": {"engine": "embedded", "workers": 1}},
        {"rollout": {"engine": "vllm", "workers": 0}},
        {"engine": {"url": "http://127.0.0.1:8000"}},
    ],
)
def test_where_a_run_starts_no_server_nothing_is_kept_for_one(sections):
    assert servers_bytes(configured(**sections), 80 * B) == 0


def test_what_training_takes_is_counted_by_purpose():
    assert training_bytes(configured(), 10, on_gpu=True) == {"weights": 60, "optimizer": 80, "gradients": 40}
    assert training_bytes(configured(model={"lora_rank": 4}), 10, on_gpu=True) == {"weights": 20}
    with_reference = training_bytes(configured(loss={"kl_coef": 0.1}), 10, on_gpu=False)
    assert with_reference == {"weights": 40, "optimizer": 80, "gradients": 40, "reference": 40}


def test_whoever_takes_memory_waits_for_the_other_to_end_its_turn_or_its_life(tmp_path):
    lock, events = tmp_path / "gpu.lock", []
    held = "import sys; from pathlib import Path; from offbeat.launch.gpu_memory import taking_turns\n"
    held += "with taking_turns(Path(sys.argv[1])): print(flush=True); sys.stdin.read()"
    other = subprocess.Popen(
        [sys.executable, "-c", held, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "\n"

    def take() -> None:
        with taking_turns(lock):
            events.append("taken")

    waiting = threading.Thread(target=take)
    waiting.start()
    waiting.join(0.2)
    events.append("killed")
    other.kill()
    waiting.join(10)
    other.communicate()
    assert events == ["killed", "taken"]
    with taking_turns(None), taking_turns(None):  # alone on its GPU, it waits for nobody
        pass
