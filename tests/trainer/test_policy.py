"""What an optimizer's state is worth after it was saved and taken up again, on every device that is here."""

import numpy as np
import pytest
import torch
from learning_models import tiny_model
from learning_samples import make_samples

from offbeat.model.devices import recording_lock, spare
from offbeat.trainer.checkpoint import Checkpoints
from offbeat.trainer.packing import pack
from offbeat.trainer.policy import AdamSettings, Policy, state_device
from offbeat.trainer.step import StepSettings, train_step

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")),
]


def make_policy(device, dtype=torch.float32):
    return Policy(spare(tiny_model("qwen2").to(device, dtype)), AdamSettings())


def train(policy, steps):
    for seed in steps:
        samples = make_samples(np.random.default_rng(seed), [(3, [4, 5]), (2, [6])])
        train_step(policy, samples, StepSettings(), lr=1e-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_policy_that_is_taken_up_again_learns_on_to_the_same_bits(tmp_path, device, dtype):
    whole, checkpoints = make_policy(device, dtype), Checkpoints(tmp_path)
    train(whole, range(2))
    checkpoints.save(2, 2, whole.state())
    resumed = make_policy(device, dtype)
    resumed.load_state(checkpoints.load(2)[1])
    for policy in (whole, resumed):
        train(policy, range(2, 4))
    expected, found = whole.state(), resumed.state()
    assert found.keys() == expected.keys()
    assert any(key.startswith("step.") for key in found)
    for name, tensor in expected.items():
        assert found[name].device == tensor.device
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("option", "expected"), [({"fused": True}, "meta"), ({"capturable": True}, "meta"), ({}, "cpu")]
)
def test_the_count_of_steps_lies_where_the_optimizers_kernel_reads_it(option, expected):
    group = {"fused": False, "capturable": False} | option
    master = torch.zeros(3, device="meta")  # a device that is not the CPU, on every machine
    assert state_device("step", master, group).type == expected
    assert state_device("exp_avg", master, group).type == "meta"


def test_a_restored_state_shares_no_memory_with_what_it_came_from():
    trained, resumed = make_policy("cpu"), make_policy("cpu")
    train(trained, range(1))
    resumed.load_state(trained.state())
    before = {name: tensor.clone() for name, tensor in trained.state().items()}
    train(resumed, range(1, 2))
    assert all(torch.equal(tensor, before[name]) for name, tensor in trained.state().items())


def test_no_engine_records_a_graph_while_a_pass_runs():
    policy, held = make_policy("cpu"), []

    def loss(found):
        held.append(recording_lock.locked())
        return found.logprobs.sum()

    hook = policy.model.register_forward_hook(lambda *_: held.append(recording_lock.locked()))
    batch = pack(make_samples(np.random.default_rng(0), [(3, [4, 5])]), range(2), policy.device)
    policy.forward_backward(batch, loss)
    policy.logprobs(batch)
    policy.infer(batch)
    hook.remove()
    assert all(held)
    assert not recording_lock.locked()
