"""What an algorithm's name stands for, and every refusal that keys which do not go together meet, in its own line."""

import dataclasses

import pytest

from offbeat.config import from_dict, load
from offbeat.config.schema import HAVE_LEAST, HAVE_MOST, IMPORTANCE, PRESETS, ResolvedLoss, resolve_loss
from offbeat.errors import UserError

DEFAULT = ResolvedLoss(
    policy="clip",
    advantage="group",
    aggregate="sequence_mean",
    aggregate_tokens=32,
    clip_low=0.2,
    clip_high=0.2,
    correction="off",
    min_importance=0.0,
    max_importance=1.0,
    drop_no_signal=False,
)
RECIPES = {
    "grpo": {},
    "dr_grpo": {"advantage": "mean", "aggregate": "constant"},
    "dapo": {"aggregate": "token_mean", "clip_high": 0.28, "drop_no_signal": True},
    "gspo": {"policy": "sequence_clip", "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"policy": "cispo", "aggregate": "token_mean"},
    "rloo": {"advantage": "leave_one_out", "aggregate": "constant"},
    "reinforce": {"policy": "reinforce", "advantage": "batch", "aggregate": "token_mean"},
    "reinforce++": {"advantage": "batch", "aggregate": "token_mean"},
    "ppo": {"advantage": "gae", "aggregate": "token_mean"},
}
OVERLAP = {"schedule.mode": "overlap"}


def chosen(**keys) -> ResolvedLoss:
    keys = {"rollout__engine": "embedded", **keys}
    return resolve_loss(from_dict({}, {name.replace("__", "."): value for name, value in keys.items()}))


def test_without_a_word_a_run_learns_by_grpo():
    assert chosen() == DEFAULT


@pytest.mark.parametrize("name", PRESETS)
def test_a_name_stands_for_what_was_published_under_it(name):
    assert chosen(loss__name=name) == dataclasses.replace(DEFAULT, **RECIPES[name])


@pytest.mark.parametrize(
    "key, value, field",
    [
        ("loss.advantage", "leave_one_out", "advantage"),
        ("loss.advantage", "mine.py:advantage", "advantage"),
        ("loss.aggregate", "constant", "aggregate"),
        ("loss.aggregate_tokens", 7, "aggregate_tokens"),
        ("loss.clip_low", 0.3, "clip_low"),
        ("loss.clip_high", 0.4, "clip_high"),
        ("loss.correction", "icepop", "correction"),
        ("batch.drop_no_signal", False, "drop_no_signal"),
    ],
)
def test_a_key_that_is_given_replaces_the_presets(key, value, field):
    before, after = chosen(loss__name="dapo"), chosen(loss__name="dapo", **{key: value})
    assert getattr(after, field) == value
    changed = {f.name for f in dataclasses.fields(ResolvedLoss) if getattr(before, f.name) != getattr(after, f.name)}
    bounds = {"min_importance", "max_importance"} if field == "correction" else set()
    assert changed == {field} | bounds


def test_the_constant_of_an_aggregate_is_the_longest_answer_unless_it_is_given():
    assert chosen(loss__name="dr_grpo", rollout__max_new_tokens=100).aggregate_tokens == 100


@pytest.mark.parametrize("correction", IMPORTANCE)
def test_every_correction_has_bounds_of_its_own(correction):
    found = chosen(loss__correction=correction)
    assert (found.correction, (found.min_importance, found.max_importance)) == (correction, IMPORTANCE[correction])


@pytest.mark.parametrize("correction", IMPORTANCE)
@pytest.mark.parametrize("key, value", [("min_importance", 0.25), ("max_importance", 3.0)])
def test_a_limit_is_a_corrections_own_and_refused_where_it_has_none(key, value, correction):
    keys = {"schedule.mode": "overlap", "loss.correction": correction, f"loss.{key}": value}
    if correction == "off":
        keys["schedule.mode"] = "alternate"
    if correction in {"min_importance": HAVE_LEAST, "max_importance": HAVE_MOST}[key]:
        assert getattr(resolve_loss(from_dict({}, keys)), key) == value
    else:
        assert f'loss.{key} = {value:g}: loss.correction = "{correction}" has no such limit' in refusal(keys)


def test_a_bound_of_0_is_a_bound_that_was_given():
    assert chosen(loss__correction="icepop", loss__min_importance=0.0).min_importance == 0


def test_a_correction_is_on_wherever_data_may_be_of_other_weights_or_another_engine():
    assert chosen().correction == "off"
    assert chosen(schedule__mode="overlap").correction == "tis"
    assert chosen(schedule__mode="overlap", loss__name="gspo").correction == "sequence_tis"
    assert chosen(rollout__engine="vllm").correction == "tis"
    assert chosen(rollout__engine="auto").correction == "tis"
    assert chosen(rollout__engine="auto", run__exact=True).correction == "off"
    assert chosen(rollout__engine="vllm", loss__name="gspo").correction == "sequence_tis"


def test_a_loss_of_ones_own_has_a_recipe_too():
    found = chosen(loss__name="mine.py:loss", loss__advantage="mean")
    assert (found.policy, found.advantage, found.aggregate) == ("own", "mean", "token_mean")


def refusal(keys: dict) -> str:
    with pytest.raises(UserError) as caught:
        from_dict({}, keys)
    text = str(caught.value)
    assert "\n" not in text
    return text


REFUSALS = {
    "group": (
        {"batch.min_group": 9},
        "batch.min_group = 9: must be 2 to batch.group_size = 8",
    ),
    "updates": (
        {"batch.updates_per_step": 5},
        "batch.updates_per_step = 5: must divide batch.groups_per_step = 32, because each update trains whole groups",
    ),
    "warmup": (
        {"optimizer.warmup_steps": 301},
        "optimizer.warmup_steps = 301: must be 0 to run.steps = 300",
    ),
    "over-provision without staleness": (
        {"schedule.over_provision": 1.5},
        "schedule.over_provision = 1.5: must be 1 with schedule.max_staleness = 0, because surplus groups "
        "would be too old to train; raise schedule.max_staleness",
    ),
    "over-provision beyond the bound": (
        {"schedule.max_staleness": 1, "schedule.over_provision": 2.5},
        "schedule.over_provision = 2.5: must be 1 to 2 with schedule.max_staleness = 1, because surplus "
        "groups would be too old to train; raise schedule.max_staleness",
    ),
    "under-provision": (
        {"schedule.over_provision": 0.5},
        'schedule.over_provision = 0.5: must be 1 or more, or "auto"',
    ),
    "misspelt factor": (
        {"schedule.over_provision": "outo"},
        'schedule.over_provision = "outo": must be 1 or more, or "auto"',
    ),
    "finish, alternate": (
        {"schedule.new_version": "finish"},
        'schedule.new_version = "finish": works only with schedule.mode = "overlap", because with "alternate" no '
        'request is running when weights are loaded; set schedule.mode = "overlap"',
    ),
    "overlap": (
        {**OVERLAP, "schedule.max_staleness": 0},
        'schedule.max_staleness = 0: must be 1 or more with schedule.mode = "overlap", because tokens are '
        "generated while an earlier step trains",
    ),
    "exact overlap": (
        {**OVERLAP, "run.exact": True},
        'schedule.mode = "overlap": must be "alternate" with run.exact = true, because otherwise the '
        "order of training would depend on which worker was faster",
    ),
    "exact staleness": (
        {"schedule.max_staleness": 1, "run.exact": True},
        "schedule.max_staleness = 1: must be 0 with run.exact = true, because otherwise the order of training "
        "would depend on which worker was faster",
    ),
    "exact slots": (
        {"rollout.slots": 15, "run.exact": True},
        "rollout.slots = 15: must be 16 or more with run.exact = true, because with fewer slots the last "
        "bits of a result depend on how many are in use",
    ),
    "exact server": (
        {"rollout.engine": "vllm", "run.exact": True},
        'rollout.engine = "vllm": must be "embedded" with run.exact = true, because a server\'s answers depend '
        "on the other requests that it computes at the same time",
    ),
    "stale keys": (
        {**OVERLAP, "rollout.kv": "stale", "rollout.engine": "paced"},
        'rollout.kv = "stale": cannot be used with rollout.engine = "paced", which drops its KV cache when weights are '
        'loaded; set rollout.kv = "same"',
    ),
    "stale keys, no staleness": (
        {"rollout.kv": "stale"},
        'rollout.kv = "stale": cannot be used with schedule.max_staleness = 0, because no answer then continues with '
        'new weights; raise schedule.max_staleness, or set schedule.mode = "overlap"',
    ),
    "stale keys, exact": (
        {"rollout.kv": "stale", "run.exact": True},
        'rollout.kv = "stale": cannot be used with run.exact = true, because an answer must then depend on weights, '
        'task and seed alone; set rollout.kv = "same"',
    ),
    "no server": (
        {"engine.url": "localhost:1"},
        'engine.url = "localhost:1": cannot be used with rollout.engine = "auto"; set rollout.engine to "vllm" '
        'or "sglang", the program that serves this URL',
    ),
    "name": (
        {"loss.name": "grpp"},
        "loss.name = \"grpp\": no such loss; did you mean 'grpo'? there are grpo, dr_grpo, dapo, gspo, cispo, rloo, "
        "reinforce, reinforce++, ppo (your own: module:function or file.py:function)",
    ),
    "advantage": (
        {"loss.advantage": "grop"},
        "loss.advantage = \"grop\": no such advantage; did you mean 'group'? there are group, mean, leave_one_out, "
        "siblings, batch, gae (your own: module:function or file.py:function)",
    ),
    "sequence ratio": (
        {"loss.name": "gspo", "loss.aggregate": "token_mean"},
        'loss.aggregate = "token_mean": must be "sequence_mean" with loss.name = "gspo", because this loss '
        "has one ratio per answer, and any other aggregate would weight answers by their length",
    ),
    "overlong": (
        {"reward.overlong_tokens": 32},
        "reward.overlong_tokens = 32: must be less than rollout.max_new_tokens = 32",
    ),
    "no signal": (
        {"loss.name": "reinforce", "batch.drop_no_signal": True},
        'batch.drop_no_signal = true: must be false with loss.advantage = "batch", because groups whose rewards are '
        "all equal can then be trained on, too",
    ),
    "no signal, gae": (
        {"loss.name": "dapo", "loss.advantage": "gae"},
        'batch.drop_no_signal = true: must be false with loss.advantage = "gae", because groups whose rewards are all '
        "equal can then be trained on, too",
    ),
    "released before its signal is known": (
        {"batch.gate": "release", "loss.name": "dapo"},
        'batch.drop_no_signal = true: must be false with batch.gate = "release", because answers are then trained '
        "before it is known whether their group's rewards are all equal",
    ),
    "released from a group that must remain": (
        {"batch.gate": "batch", "batch.min_group": 3},
        'batch.min_group = 3: leave it out with batch.gate = "batch", because each answer is then trained on its own',
    ),
    "released for nothing": (
        {"batch.gate": "release", "loss.name": "ppo"},
        'batch.gate = "release": cannot be used with loss.advantage = "gae", which does not compare the answers '
        'to one prompt; set batch.gate = "batch"',
    ),
    "siblings within a batch": (
        {"batch.gate": "batch", "loss.advantage": "mean"},
        'loss.advantage = "mean": must be batch or gae with batch.gate = "batch", because it compares answers to one '
        'prompt; leave it out, or set batch.gate = "release"',
    ),
    "uncorrected": (
        {**OVERLAP, "loss.correction": "off"},
        'loss.correction = "off": cannot be used with schedule.max_staleness = 4, because tokens of older weights '
        "would be trained on without a correction; set another loss.correction",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_keys_that_do_not_go_together_are_refused_in_one_line(case):
    keys, line = REFUSALS[case]
    assert refusal(keys) == line


@pytest.mark.parametrize(
    "keys",
    [
        {"batch.min_group": 8},
        {"batch.updates_per_step": 4},
        {"batch.tokens_per_microbatch": 96},
        {"optimizer.warmup_steps": 300},
        {**OVERLAP, "schedule.max_staleness": 1},
        {"schedule.max_staleness": 1, "schedule.over_provision": 2.0},
        {"schedule.over_provision": "auto"},
        {**OVERLAP, "schedule.over_provision": 5.0, "schedule.new_version": "finish"},
        {"rollout.slots": 16, "run.exact": True},
        {**OVERLAP, "rollout.kv": "stale", "rollout.engine": "sglang"},
        {**OVERLAP, "rollout.kv": "stale", "rollout.engine": "embedded"},
        {"engine.url": "localhost:1", "rollout.engine": "sglang"},
        {"reward.overlong_tokens": 31},
        {"loss.correction": "off"},
        {"loss.name": "gspo", "loss.aggregate": "sequence_mean"},
        {"loss.name": "dapo", "loss.advantage": "gae", "batch.drop_no_signal": False},
        {"batch.gate": "release", "loss.name": "dapo", "batch.drop_no_signal": False},
        {"batch.gate": "release", "loss.advantage": "group"},
        {"batch.gate": "release", "run.exact": True},
        {"batch.gate": "batch", "loss.advantage": "mine.py:advantage"},
    ],
)
def test_what_stands_at_the_border_is_allowed(keys):
    from_dict({}, keys)


@pytest.mark.parametrize(
    "gate, name, advantage",
    [
        ("strict", "grpo", "group"),
        ("release", "grpo", "siblings"),
        ("release", "dr_grpo", "leave_one_out"),
        ("release", "rloo", "leave_one_out"),
        ("batch", "grpo", "batch"),
        ("batch", "rloo", "batch"),
        ("batch", "reinforce++", "batch"),
        ("batch", "ppo", "gae"),
    ],
)
def test_a_gate_that_does_not_wait_for_siblings_brings_a_baseline_that_does_without_them(gate, name, advantage):
    assert chosen(batch__gate=gate, loss__name=name).advantage == advantage


@pytest.mark.parametrize("gate, members, siblings", [("strict", 8, 1), ("release", 1, 8), ("batch", 1, 8)])
def test_a_step_trains_as_many_answers_with_every_gate(gate, members, siblings):
    batch = from_dict({}, {"batch.gate": gate, "batch.groups_per_step": 6}).batch
    assert (batch.members, batch.siblings) == (members, siblings)
    assert batch.claims_per_step * batch.members == 48


@pytest.mark.parametrize("value", [0.28, 0.999, 0])
def test_a_cap_of_cispo_cannot_be_misread_as_a_distance_from_1(value):
    text = refusal({"loss.name": "cispo", "loss.ratio_max": float(value)})
    assert "loss.ratio_max" in text
    assert "1" in text


@pytest.mark.parametrize(
    "key, value",
    [
        ("loss.clip_low", 1.0),
        ("loss.clip_low", 0.0),
        ("loss.clip_high", 0.0),
        ("loss.dual_clip", 1.0),
        ("loss.kl_coef", -0.1),
        ("loss.min_importance", 1.1),
        ("loss.max_importance", 0.9),
        ("loss.max_importance", float("inf")),
        ("loss.gamma", 0.0),
        ("loss.gamma", 1.1),
        ("loss.gae_lambda", 1.1),
        ("loss.value_coef", 0.0),
        ("loss.aggregate_tokens", 0),
        ("loss.correction", "some"),
        ("loss.kl", "k4"),
        ("loss.aggregate", "mean"),
    ],
)
def test_a_number_or_word_out_of_its_range_is_refused_by_name(key, value):
    assert key in refusal({key: value})


def test_a_correction_is_turned_off_from_the_command_line_by_its_name_and_left_to_the_run_by_none():
    assert resolve_loss(load(None, ["--loss.correction", "off"])).correction == "off"
    overlap = ["--schedule.mode", "overlap"]
    assert resolve_loss(load(None, [*overlap, "--loss.correction", "none"])).correction == "tis"
    with pytest.raises(UserError, match="without a correction; set another loss"):
        load(None, [*overlap, "--loss.correction", "off"])
