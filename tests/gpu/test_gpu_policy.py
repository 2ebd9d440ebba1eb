"""The policy on a GPU: what is saved and loaded again trains on as if nothing had happened, to the bit."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from learning_models import tiny_model
from learning_samples import make_samples

from offbeat.engines.embedded.graphs import CudaGraphs
from offbeat.model.devices import be_deterministic
from offbeat.trainer import attention, output_head
from offbeat.trainer.checkpoint import Checkpoints
from offbeat.trainer.microbatch_size import MicrobatchSize, measured
from offbeat.trainer.packing import pack
from offbeat.trainer.policy import AdamSettings, Policy
from offbeat.trainer.snapshot import Snapshot
from offbeat.trainer.step import StepSettings, train_step

pytestmark = pytest.mark.gpu
SHAPE = [(5, [3, 9, 1, 4]), (2, [30, 4]), (7, [6, 2, 8]), (3, [5, 5])]


@pytest.fixture
def deterministic():
    be_deterministic(torch.device("cuda"))
    yield
    torch.use_deterministic_algorithms(False)


def policy_of(dtype: torch.dtype, **options) -> Policy:
    return Policy(tiny_model("llama").to("cuda", dtype), AdamSettings(), **options)


def train(policy: Policy, seed: int) -> None:
    train_step(policy, make_samples(np.random.default_rng(seed), SHAPE), StepSettings(), lr=1e-2)


def weights(policy: Policy) -> torch.Tensor:
    return torch.cat([master.detach().reshape(-1) for master in policy.masters])


@pytest.mark.parametrize("options", [{}, {"has_value_head": True}, {"gradient_checkpointing": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_policy_restored_from_a_checkpoint_takes_the_very_step_that_was_to_come(
    tmp_path, deterministic, dtype, options
):
    torch.manual_seed(0)
    policy = policy_of(dtype, **options)
    train(policy, seed=1)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, 1, policy.state())
    train(policy, seed=2)

    again = policy_of(dtype, **options)
    again.load_state(checkpoints.load(1)[1])
    train(again, seed=2)
    assert torch.equal(weights(again), weights(policy))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_step_twice_gives_the_same_bits(deterministic, dtype):
    first, second = policy_of(dtype), policy_of(dtype)
    for policy in (first, second):
        train(policy, seed=1)
    assert torch.equal(weights(first), weights(second))


def test_a_step_on_the_gpu_agrees_with_the_same_step_on_the_cpu():
    on_gpu, on_cpu = policy_of(torch.float32), Policy(tiny_model("llama"), AdamSettings())
    samples = make_samples(np.random.default_rng(1), SHAPE)
    there, here = (train_step(policy, samples, StepSettings(), lr=1e-4) for policy in (on_gpu, on_cpu))
    assert there.loss == pytest.approx(here.loss, abs=1e-4)
    assert there.grad_norm == pytest.approx(here.grad_norm, rel=1e-3)


LONG = [(40, [300, 90, 1, 200]), (1, [500, 4]), (7, [60, 2, 80])]
"""Uneven samples, one prompt of a single token among them."""


def shaped_model(window: int | None = None, **shape):
    """A model whose heads are wide enough for torch's variable-length kernel, with shared KV heads."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    windows = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0} if window else {}
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4} | shape
    config = Qwen2Config(
        vocab_size=1000,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        **sizes,
        **windows,
    )
    return Qwen2ForCausalLM(config).to("cuda", torch.bfloat16).eval()


def passed(**options) -> list[torch.Tensor]:
    """Log-probs and gradients of a micro-batch of uneven samples."""
    window = options.pop("window", None)
    policy = Policy(shaped_model(window), AdamSettings(), 0.9, **options)
    assert policy.is_compiled == options.get("compiles", False)
    samples = make_samples(np.random.default_rng(0), LONG)
    batch = pack(samples, range(len(samples)), policy.device)
    logprobs = policy.forward_backward(batch, lambda found: found.logprobs.sin().sum())
    return [logprobs, *(master.grad for master in policy.masters)]


def assert_like(found: list[torch.Tensor], wanted: list[torch.Tensor], share: float) -> None:
    """Holds each tensor's distance against its size: bfloat16 rounds single entries by more."""
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() <= share * other.norm()


@pytest.mark.parametrize("window", [None, 64])
def test_the_kernel_for_uneven_lengths_agrees_with_gathered_sequences(window, monkeypatch):
    assert attention.varlen_kernel() is not None
    found = passed(window=window)
    monkeypatch.setattr(attention, "takes_varlen", lambda query, value: False)
    assert_like(found, passed(window=window), 0.03)


def test_repeated_keys_add_up_to_the_same_bits_each_time(deterministic):
    for one, other in zip(passed(), passed(), strict=True):
        assert torch.equal(one, other)


def test_log_probs_in_chunks_have_the_bits_of_those_at_once(monkeypatch):
    wanted = passed()
    monkeypatch.setattr(output_head, "CHUNK_BYTES", 128 * 1000 * 4)
    found = passed()
    assert torch.equal(found[0], wanted[0])
    assert_like(found, wanted, 0.01)


@pytest.mark.parametrize("checkpointing", [False, True, 0.5])
def test_compiled_layers_agree_with_plain_ones(checkpointing, monkeypatch):
    wanted = passed()
    monkeypatch.setattr(output_head, "CHUNK_BYTES", 128 * 1000 * 4)
    # It takes half a minute of every start, and nothing is compiled for the CPU.
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.VecISA.check_build", lambda *_: pytest.fail("a test was built"))
    assert_like(passed(compiles=True, gradient_checkpointing=checkpointing), wanted, 0.05)


def test_moments_in_host_memory_give_the_bits_of_moments_on_the_gpu(tmp_path, monkeypatch, deterministic):
    monkeypatch.setattr("offbeat.trainer.host_adamw.CHUNK_NUMBERS", 1000)  # several chunks a parameter
    monkeypatch.setattr("offbeat.trainer.host_adamw._room_bytes", lambda device: 0)
    here, away = policy_of(torch.bfloat16), policy_of(torch.bfloat16, moments_on_host=True)
    for seed in (1, 2, 3):
        train(here, seed)
        train(away, seed)
    assert torch.equal(weights(away), weights(here))
    assert all(away.optimizer.state[master]["exp_avg"].is_pinned() for master in away.masters)

    Checkpoints(tmp_path).save(3, 3, away.state())
    again = policy_of(torch.bfloat16, moments_on_host=True)
    again.load_state(Checkpoints(tmp_path).load(3)[1])
    train(again, seed=4)
    train(here, seed=4)
    assert torch.equal(weights(again), weights(here))


@pytest.mark.parametrize("room_bytes", [0, 20_000, 10**12])
def test_moments_that_find_room_on_the_gpu_move_there_and_back_without_changing_bits(
    room_bytes, monkeypatch, deterministic
):
    monkeypatch.setattr("offbeat.trainer.host_adamw.CHUNK_NUMBERS", 1000)
    monkeypatch.setattr("offbeat.trainer.host_adamw._room_bytes", lambda device: room_bytes)
    here, away = policy_of(torch.bfloat16), policy_of(torch.bfloat16, moments_on_host=True)

    def shares_on_gpu():
        moments = [away.optimizer.state[master]["exp_avg"] for master in away.masters]
        return sum(one.nbytes for one in moments if one.is_cuda) / sum(one.nbytes for one in moments)

    for seed in (1, 2):
        train(here, seed)
        train(away, seed)
    assert shares_on_gpu() == 0, "not before an update has shown what it takes"
    for seed in (3, 4):
        train(here, seed)
        train(away, seed)
    assert torch.equal(weights(away), weights(here))
    if room_bytes == 20_000:
        assert 0 < shares_on_gpu() < 1
    else:
        assert shares_on_gpu() == (1 if room_bytes else 0)
    assert away.make_room() == bool(room_bytes)
    assert shares_on_gpu() == 0
    monkeypatch.setattr("offbeat.trainer.host_adamw._room_bytes", lambda device: 0)
    train(here, 5)
    train(away, 5)
    assert torch.equal(weights(away), weights(here))


def test_a_pass_that_does_not_fit_is_halved_until_it_does():
    policy = Policy(shaped_model(), AdamSettings())
    samples = make_samples(np.random.default_rng(0), [(40, [3000] * 8)])
    wanted = train_step(policy, samples, StepSettings(), lr=0.0)
    taken = torch.cuda.max_memory_allocated()
    told = []
    size = MicrobatchSize(32768, shrinks=True, on_change=told.append)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.7 * taken / total)
    try:
        found = train_step(policy, samples, StepSettings(), lr=0.0, size=size)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert told == [16384, 8192, 4096][: len(told)]
    assert told
    assert found.num_trained_tokens == wanted.num_trained_tokens
    assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-2)


WIDE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 16}
"""A shape whose gradients take as much memory as the activations of a thousand tokens."""


@pytest.mark.parametrize(("shape", "room_bytes"), [({}, 600_000_000), (WIDE, 8_000_000_000)], ids=["narrow", "wide"])
def test_a_measured_micro_batch_fits_and_uses_the_room(shape, room_bytes):
    policy = Policy(shaped_model(**shape), AdamSettings())
    total = torch.cuda.get_device_properties(0).total_memory
    tokens = measured(policy, total - torch.cuda.memory_allocated() - room_bytes, longest=500)
    assert 512 <= tokens < 32768
    samples = make_samples(np.random.default_rng(0), [(40, [460] * (tokens // 500))])
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(2):  # the second one with moments
        train_step(policy, samples, StepSettings(tokens_per_microbatch=tokens), lr=0.0)
    assert 0.6 * room_bytes <= torch.cuda.max_memory_allocated() - before <= room_bytes


def test_a_snapshot_holds_the_bits_of_tensors_that_change_right_after():
    tensors = {"large": torch.randn(3, 700_000, device="cuda"), "small": torch.ones(3, device="cuda")}
    tensors["half"] = tensors["large"].bfloat16()
    before, kept = {name: tensor.cpu() for name, tensor in tensors.items()}, Snapshot("a test")
    for _ in range(2):  # into new memory, and into memory used before
        taken = kept.take(tensors)
        for name, tensor in tensors.items():
            tensor.add_(1)
            assert torch.equal(taken[name], before[name])
            tensor.copy_(before[name])
    assert taken["half"].is_pinned()


def test_checkpoints_are_copied_and_steps_trained_while_an_engine_records_graphs():
    graphs, failures, num_keys = CudaGraphs(), [], 40
    tensors = {"weight": torch.randn(700_000, device="cuda")}

    def slowly() -> torch.Tensor:
        found = tensors["weight"] * 2
        time.sleep(0.02)
        return found + 1

    def record() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for key in range(num_keys):
                    while key not in graphs._recorded:
                        graphs.run(key, slowly)
                        assert graphs._is_possible
        except BaseException as error:  # noqa: BLE001 - raised again by the test's own thread
            failures.append(error)

    policy, kept = Policy(tiny_model("llama").cuda(), AdamSettings(), compiles=True), Snapshot("a test")
    engine = threading.Thread(target=record)
    engine.start()
    step = 0
    while engine.is_alive():
        samples = make_samples(np.random.default_rng(step), [(5, [3, 9, 1, 4]), (7, [6 + step, 2, 8])])
        train_step(policy, samples, StepSettings(tokens_per_microbatch=24), 1e-3)
        kept.take(tensors)
        step += 1
    for failure in failures:
        raise failure
    assert len(graphs._recorded) == num_keys
    assert step > 0
