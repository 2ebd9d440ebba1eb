from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learning_models import KINDS, tiny_model
from learning_samples import make_samples, one_by_one
from varlen_reference import attend_run_by_run

from offbeat.ledger.records import Batch, BatchGroup, Member
from offbeat.trainer import attention
from offbeat.trainer.packing import pack, plan, samples_of
from offbeat.trainer.policy import AdamSettings, Policy
from offbeat.trajectory import End, Segment, Trajectory

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature, short_tokens", [(1.0, 0), (0.7, 128)])
def test_packed_logprobs_and_gradients_equal_those_of_samples_taken_one_by_one(
    kind, temperature, short_tokens, monkeypatch
):
    monkeypatch.setattr("offbeat.trainer.attention.SHORT_TOKENS", short_tokens)  # both ways to attend
    samples = make_samples(np.random.default_rng(0), [(5, [3, 9, 1]), (2, [30, 4]), (7, [6])])
    policy = Policy(tiny_model(kind), AdamSettings(), temperature)
    batch = pack(samples, range(len(samples)), CPU)
    got = []
    policy.forward_backward(batch, lambda found: got.append(found.logprobs) or found.logprobs.sin().sum())

    plain = tiny_model(kind)
    plain.set_attn_implementation("eager")
    wanted = torch.cat([one_by_one(plain, s, temperature) for s in samples])
    wanted.sin().sum().backward()
    torch.testing.assert_close(got[0], wanted, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(policy.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=2e-3, atol=2e-5)


def windowed_model():
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=4,
    )
    return MistralForCausalLM(config).eval()


@pytest.mark.parametrize("short_tokens", [0, 128])
def test_a_sliding_window_is_kept_to(short_tokens, monkeypatch):
    monkeypatch.setattr("offbeat.trainer.attention.SHORT_TOKENS", short_tokens)
    samples = make_samples(np.random.default_rng(1), [(6, [12, 3])])
    policy, plain = Policy(windowed_model(), AdamSettings()), windowed_model()
    plain.set_attn_implementation("eager")
    got = policy.logprobs(pack(samples, range(2), CPU))
    wanted = torch.cat([one_by_one(plain, s, 1.0) for s in samples])
    torch.testing.assert_close(got, wanted.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [*KINDS, "windowed"])
def test_runs_of_uneven_length_give_what_gathered_sequences_give(kind, monkeypatch):
    samples = make_samples(np.random.default_rng(0), [(5, [3, 9, 1]), (1, [30, 4]), (7, [6]), (2, [1])])
    found = []
    for is_varlen in (False, True):
        monkeypatch.setattr(attention, "takes_varlen", lambda query, value, is_varlen=is_varlen: is_varlen)
        monkeypatch.setattr(attention, "varlen_kernel", lambda: attend_run_by_run)
        policy = Policy(windowed_model() if kind == "windowed" else tiny_model(kind), AdamSettings())
        got = policy.forward_backward(pack(samples, range(len(samples)), CPU), lambda one: one.logprobs.sin().sum())
        found.append([got, *(parameter.grad for parameter in policy.parameters)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_groups_prompt_stands_in_the_row_once():
    samples = make_samples(np.random.default_rng(0), [(10, [4, 4, 4])])
    assert pack(samples, range(3), CPU).num_tokens == 10 + 3 * 3


def test_answers_that_were_claimed_apart_share_their_prompt_all_the_same():
    samples = make_samples(np.random.default_rng(0), [(10, [4, 4, 4])])
    apart = [replace(sample, group=group, siblings=7) for group, sample in zip([9, 2, 5], samples, strict=True)]
    assert pack(apart, range(3), CPU).num_tokens == 10 + 3 * 3
    assert plan(apart, 19) == [[0, 1, 2]]


shapes = st.lists(
    st.tuples(st.integers(1, 8), st.lists(st.integers(1, 12), min_size=1, max_size=5)), min_size=1, max_size=5
)


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(20, 60))
def test_a_plan_holds_every_sample_once_and_keeps_to_its_budget(groups, budget):
    samples = make_samples(np.random.default_rng(0), groups)
    batches = plan(samples, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(samples)))
    for chosen in batches:
        packed = pack(samples, chosen, CPU)
        assert packed.num_tokens <= budget
        assert packed.targets.tolist() == [t for i in chosen for t in samples[i].response.tolist()]


@settings(max_examples=60, deadline=None)
@given(shapes)
def test_a_layout_gathers_each_samples_own_tokens_and_takes_every_result_back(groups):
    samples = make_samples(np.random.default_rng(0), groups)
    packed = pack(samples, range(len(samples)), CPU)
    gathered = torch.cat([packed.tokens[table].reshape(-1) for table in packed.layout.buckets])
    assert torch.equal(gathered[packed.layout.restore], packed.tokens)
    rows = [line for table in packed.layout.buckets for line in packed.tokens[table].tolist()]
    for sample in samples:
        wanted = [*sample.prompt.tolist(), *sample.response[:-1].tolist()]
        assert any(row[: len(wanted)] == wanted for row in rows)


def test_a_sample_is_as_proven_as_its_member():
    """Without it, no token of a newcomer would be audited beyond the share of all others."""

    def member(task: int, *, is_proven: bool) -> Member:
        trajectory = Trajectory(task, np.arange(1, 3), max_new_tokens=2)
        trajectory.append(Segment(0, np.array([5]), logprobs=np.array([-1.0]), version=1, kv_version=1), End.STOP)
        return Member(task, task, trajectory, (), 0.0, np.zeros(1, np.int32), is_proven)

    members = (member(0, is_proven=True), member(1, is_proven=False))
    samples = samples_of(Batch(0, 0, (BatchGroup(0, 0, "sums", members),)))
    assert [sample.is_proven for sample in samples] == [True, False]
