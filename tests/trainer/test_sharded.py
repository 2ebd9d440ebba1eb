"""A policy divided among ranks learns what one rank learns; with `exact`, to the bit, for any number of ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from gangs import run_gang
from learning_models import tiny_model
from learning_samples import make_samples

from offbeat.errors import OffbeatError
from offbeat.model.devices import spare
from offbeat.model.lora import AdapterDisabled, Lora, attach
from offbeat.trainer import output_head, policy
from offbeat.trainer.advantages import GaeSettings
from offbeat.trainer.attention import use_packed_attention
from offbeat.trainer.losses import clip
from offbeat.trainer.not_finite import NotFinite
from offbeat.trainer.policy import AdamSettings, Policy
from offbeat.trainer.sharded import ShardedPolicy, _units, shard
from offbeat.trainer.step import StepSettings, train_step

GROUPS = [(5, [3, 9, 1, 4]), (2, [20, 4]), (7, [6, 2, 8]), (3, [5, 5])]
CASES = {
    "full": {},
    "lora": {"lora": True, "kl": True},
    "value head": {"gae": True},
    "two updates": {"updates": 2, "kl": True},
    "chunked": {"chunked": True, "kind": "qwen2"},
    "chunked and tied": {"chunked": True},
}


def train(
    gang,
    exact=True,
    kind="llama",
    dtype=torch.float32,
    lora=False,
    gae=False,
    kl=False,
    updates=1,
    chunked=False,
    steps=2,
    tokens=24,
    groups=GROUPS,
):
    """Trains a tiny model, on these ranks or alone; returns everything that could differ."""
    if chunked:  # a chunk is a few tokens
        policy.exceeds_chunk = lambda num, vocabulary: True
        output_head.CHUNK_BYTES = 8 * 40 * 4
    model = spare(tiny_model(kind).to(dtype))
    reference = None
    if lora:
        attach(model, Lora(4, 8.0), seed=1)
    elif kl:
        reference = spare(tiny_model(kind, 1).to(dtype)).requires_grad_(False)
        if gang is not None:
            shard(reference, gang, trains=False)
        use_packed_attention(reference)
    options = {"has_value_head": gae, "exact": exact}
    made = (
        Policy(model, AdamSettings(), **options)
        if gang is None
        else ShardedPolicy(model, AdamSettings(), **options, gang=gang)
    )
    settings = StepSettings(
        updates_per_step=updates,
        tokens_per_microbatch=tokens,
        gae=GaeSettings() if gae else None,
        kl_coef=0.1 if kl else 0.0,
    )
    reference = AdapterDisabled(made.model) if lora and kl else reference
    rows = []
    for seed in range(steps):
        samples = make_samples(np.random.default_rng(seed), groups)
        rows.append(train_step(made, samples, settings, 1e-2, reference).row())
    published = {name: tensor.clone() for name, tensor in made.published.items()}
    return published, rows


def gap(one, other):
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_number_of_ranks_ends_in_the_bits_of_one(case, dtype):
    wanted, wanted_rows = run_gang(1, train, dtype=dtype, **CASES[case], alone=True)[0]
    for size in (1, 2, 3, 4):
        results = run_gang(size, train, dtype=dtype, **CASES[case])
        found, _ = results[0]
        assert found.keys() == wanted.keys()
        different = [name for name in wanted if not torch.equal(found[name], wanted[name])]
        assert not different, f"{size} ranks: {different}"
        for _, rows in results:
            assert str(rows) == str(wanted_rows), f"{size} ranks"


@pytest.mark.full
def test_without_exact_two_ranks_learn_nearly_the_same_and_always_the_same():
    wanted, wanted_rows = run_gang(1, train, exact=False, steps=1, alone=True)[0]
    first, rows = run_gang(2, train, exact=False, steps=1)[0]
    again, _ = run_gang(2, train, exact=False, steps=1)[0]
    assert gap(first, wanted) < 1e-5
    assert rows[0]["grad_norm"] == pytest.approx(wanted_rows[0]["grad_norm"], rel=1e-6)
    assert all(torch.equal(again[name], first[name]) for name in first)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["qwen2", "gpt_neox"])
def test_other_models_end_in_the_same_bits_too(kind):
    wanted, _ = run_gang(1, train, kind=kind, alone=True)[0]
    found, _ = run_gang(3, train, kind=kind)[0]
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.full
def test_one_sample_on_four_ranks_is_trained_as_on_one():
    one = {"groups": [(3, [5])], "gae": True, "steps": 1}
    wanted, wanted_rows = run_gang(1, train, **one, alone=True)[0]
    found, rows = run_gang(4, train, **one)[0]
    assert str(rows) == str(wanted_rows)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def raise_on_one_rank(gang):
    """The loss fails at the longest sample; returns the error of each rank, and whether training goes on."""
    made = ShardedPolicy(tiny_model("llama"), AdamSettings(), exact=True, gang=gang)
    samples = make_samples(np.random.default_rng(0), GROUPS)
    failed: list[str] = []

    def loss(tokens, settings):
        if not failed and len(tokens.mask) >= 20:
            failed.append("here")
            raise ValueError("a loss of its own")
        return clip(tokens, settings)

    settings = StepSettings(tokens_per_microbatch=24, policy_loss=loss)
    try:
        train_step(made, samples, settings, 1e-2)
    except (ValueError, OffbeatError) as error:
        told = f"{type(error).__name__}: {error}"
    made.drop_gradients()
    return told, bool(failed), train_step(made, samples, replace(settings, policy_loss=clip), 1e-2).loss


def test_an_error_in_one_ranks_loss_is_raised_by_all_and_leaves_them_in_step():
    results = run_gang(3, raise_on_one_rank)
    met = [told for told, failed, _ in results if failed]
    others = [told for told, failed, _ in results if not failed]
    assert met == ["ValueError: a loss of its own"]
    assert len(others) == 2
    assert all("ValueError: a loss of its own" in told and told.startswith("OffbeatError: rank ") for told in others)
    assert len({loss for *_, loss in results}) == 1


def find_nan(gang):
    made = ShardedPolicy(tiny_model("llama"), AdamSettings(), exact=True, gang=gang)
    samples = make_samples(np.random.default_rng(0), GROUPS)
    samples[4].logprobs[2] = np.nan
    try:
        train_step(made, samples, StepSettings(tokens_per_microbatch=24), 1e-2)
    except NotFinite as error:
        return str(error), error.sample, error.token, made.num_updates
    return None


@pytest.mark.full
def test_what_is_not_finite_on_one_rank_is_told_alike_by_all():
    assert run_gang(3, find_nan) == [("the engine's log-prob is not finite", 4, 2, 0)] * 3


def look_at_units(gang):
    made = ShardedPolicy(tiny_model("llama"), AdamSettings(), has_value_head=True, gang=gang)
    train_step(made, make_samples(np.random.default_rng(0), GROUPS), StepSettings(gae=GaeSettings()), 1e-2)
    groups = [group for unit in _units(made.model) for group in unit._get_fsdp_state()._fsdp_param_groups]
    local = sum(master.numel() for master in made.masters)
    return [(group.gradient_divide_factor, group.force_sum_reduction_for_comms) for group in groups], local


def test_every_unit_sums_and_a_rank_holds_its_share():
    whole = sum(parameter.numel() for parameter in tiny_model("llama").parameters())
    for units, local in run_gang(2, look_at_units):
        assert units == [(1.0, True)] * 3
        assert local < 0.51 * whole + 40
