import datetime
import json
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from offbeat.config import DEMO, from_dict, load, resolved
from offbeat.config.explain import ValueOrigin, describe, explain
from offbeat.config.keys import accepts, field_at, known_keys
from offbeat.config.load import split
from offbeat.config.schema import Section
from offbeat.errors import UserError


@pytest.fixture
def toml(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        (tmp_path / "run.toml").write_text(text)
        return "run.toml"

    return write


def refusal(*arguments) -> str:
    with pytest.raises(UserError) as caught:
        load(*arguments)
    text = str(caught.value)
    assert "\n" not in text
    assert "pydantic" not in text
    assert "http" not in text
    return text


def test_no_file_means_the_demo():
    assert load(None) == from_dict(DEMO)


def test_the_demo_of_a_later_call_is_untouched_by_an_earlier_override():
    load(None, ["--run.steps", "3"])
    assert load(None).run.steps == DEMO["run"]["steps"]


def test_a_file_is_read_and_overrides_win(toml):
    file = toml('[batch]\ngroup_size = 4\ngroups_per_step = 6\n[[task]]\nsource = "arithmetic"\nlevel = 1\n')
    config = load(file, ["--batch.group-size", "16", "--task.level=3", "--run.exact", "--run.name", "7"])
    assert (config.batch.group_size, config.batch.groups_per_step) == (16, 6)
    assert (config.task[0].level, config.run.exact, config.run.name) == (3, True, "7")


def test_an_only_task_may_be_one_table(toml):
    assert load(toml('[task]\nsource = "arithmetic"\nlevel = 1\n')).task[0].level == 1


def test_tasks_are_overridden_and_added_by_index(toml):
    file = toml('[[task]]\nsource = "arithmetic"\n')
    config = load(file, ["--task.1.path=x.jsonl", "--task.1.source=file", "--task.0.level=5"])
    assert (config.task[0].level, config.task[1].path) == (5, "x.jsonl")


def test_a_table_of_options_takes_any_key():
    config = load(None, ["--task.source", "reasoning-gym", "--task.name=chain_sum", "--task.options.max_terms", "3"])
    assert config.task[0].options == {"max_terms": 3}


def test_none_stands_for_nothing_where_a_key_may_be_absent(toml):
    config = load(toml('[[task]]\nsource = "file"\npath = "none"\nanswer = "none"\n'), ["--run.max-hours", "none"])
    assert (config.task[0].path, config.task[0].answer, config.run.max_hours) == ("none", None, None)


def test_a_list_may_be_given_as_words():
    assert load(None, ["--log.sinks", "wandb, tensorboard"]).log.sinks == ["wandb", "tensorboard"]


def test_a_resolved_configuration_survives_json(tmp_path):
    config = load(None, ["--task.level", "3", "--run.max_hours=1.5"])
    file = tmp_path / "config.json"
    file.write_text(json.dumps(resolved(config)))
    assert load(file) == config


@pytest.mark.parametrize(
    "text, told",
    [
        ("[batch]\ngroup_sise = 16\n", "run.toml:2: batch.group_sise = 16: unknown key; did you mean group_size?"),
        ("\n[optimiser]\nlr = 1.0\n", "run.toml:2: [optimiser]: unknown section; did you mean optimizer?"),
        ("lr = 1e-5\n", "run.toml:1: lr = 1e-05: unknown key; did you mean optimizer.lr?"),
        (
            "[eval]\nzzz = 1\n",
            "run.toml:2: eval.zzz = 1: unknown key; the section has every, prompts, samples, temperature, top_p",
        ),
        (
            '[optimizer]\nschedule = "cosin"\n',
            'run.toml:2: optimizer.schedule = "cosin": must be "constant", "linear" or "cosine"; '
            'did you mean "cosine"?',
        ),
        (
            '[[task]]\nsource = "arithmetik"\n',
            'run.toml:2: task.source = "arithmetik": must be "arithmetic", "reasoning-gym", "file", "dataset", '
            '"function" or "environment"; did you mean "arithmetic"?',
        ),
        ("[batch]\ngroup_size = 0\n", "run.toml:2: batch.group_size = 0: must be 2 or more"),
        ("[task]\nsource='arithmetic'\nlevel = 9\n", "run.toml:3: task.level = 9: must be 1 to 5"),
        ("[loss]\nclip_low = 1.0\n", "run.toml:2: loss.clip_low = 1.0: must be more than 0 and less than 1"),
        ("[optimizer]\nlr = nan\n", "run.toml:2: optimizer.lr = NaN: must be a finite number"),
        (
            '[batch]\ngroup_size = "16"\n',
            'run.toml:2: batch.group_size = "16": wants a whole number, not text; write it without quotes',
        ),
        ("[run]\nname = 7\n", "run.toml:2: run.name = 7: wants text, not a whole number; put it in quotes"),
        ("[run]\nsteps = 1.5\n", "run.toml:2: run.steps = 1.5: wants a whole number, not a number with a fraction"),
        ("batch = 3\n", "run.toml:1: batch = 3: wants a table, not a whole number"),
        (
            "[run]\nname = 'a/b'\n",
            "run.toml:2: run.name = \"a/b\": must consist of letters, digits, '.', '_' and '-', with",
        ),
        ("[[task]]\nsource = 'file'\n", "run.toml:1: task.path: is missing; give it a value"),
        ("[[task]]\nlevel = 3\n", "run.toml:1: [[task]]: source is missing; it must be"),
        ("[[task]]\nsorce = 'file'\n", "run.toml:1: [[task]]: source is missing; is sorce a misspelling of it?"),
        ("task = []\n", "run.toml:1: task = []: must have 1 or more entries"),
        (
            "[log]\nsinks = ['wandbb']\n",
            'run.toml:2: log.sinks.0 = "wandbb": must be "tensorboard", "wandb" or "trackio"',
        ),
        ("[run]\nsteps = 3\n[loss\n", "run.toml:3: is not TOML near '[loss': expected ']'"),
        ("[run]\nname = '''", "run.toml:2: is not TOML near"),
    ],
)
def test_a_wrong_file_is_told_in_one_line_with_its_place(toml, text, told):
    assert refusal(toml(text)).startswith(told)


@pytest.mark.parametrize(
    "text, told",
    [
        ("[batch]\nmin_group = 9\n", "run.toml:2: batch.min_group = 9: must be 2 to batch.group_size = 8"),
        ("[batch]\nupdates_per_step = 5\n", "run.toml:2: batch.updates_per_step = 5: must divide"),
        ("[optimizer]\nwarmup_steps = 301\n", "run.toml:2: optimizer.warmup_steps = 301: must be 0 to run.steps = 300"),
    ],
)
def test_batch_arithmetic_that_cannot_hold_is_refused_by_name(toml, text, told):
    assert refusal(toml(text)).startswith(told)


@pytest.mark.parametrize(
    "text, told",
    [
        (
            '[run]\nexact = true\n[rollout]\nengine = "vllm"\n',
            'run.toml:4: rollout.engine = "vllm": must be "embedded" with run.exact = true, because',
        ),
        (
            '[rollout]\nkv = "stale"\nengine = "paced"\n[schedule]\nmode = "overlap"\n',
            'run.toml:2: rollout.kv = "stale": cannot be used with rollout.engine = "paced", which',
        ),
        (
            '[rollout]\nengine = "sglang"\nkv = "stale"\n',
            'run.toml:3: rollout.kv = "stale": cannot be used with schedule.max_staleness = 0, because',
        ),
        (
            '[engine]\nurl = "http://there:8000"\n',
            'run.toml:2: engine.url = "http://there:8000": cannot be used with rollout.engine = "auto"; set '
            'rollout.engine to "vllm" or "sglang", the program that serves this URL',
        ),
        ("[rollout]\nkv_lag = 0\n", "run.toml:2: rollout.kv_lag = 0: must be 1 or more"),
        ("[engine]\nmemory_share = 1.0\n", "run.toml:2: engine.memory_share = 1.0: must be more than 0 and less"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_by_name(toml, text, told):
    with pytest.raises(UserError) as caught:
        load(toml(text))
    assert str(caught.value).startswith(told)


def test_a_server_may_be_handed_more_words_for_its_command_line():
    words = ["--rollout.engine", "vllm", "--engine.arguments=--enforce-eager,--swap-space,4"]
    assert load(None, words).engine.arguments == ["--enforce-eager", "--swap-space", "4"]


def test_of_several_mistakes_the_first_is_told_and_the_others_are_named(toml):
    text = refusal(toml("[optimizer]\nlr = 0\n[batch]\ngroup_size = 0\ngroups = 3\n"))
    others = "batch.group_size in line 4, batch.groups in line 5"
    assert text == f"run.toml:2: optimizer.lr = 0: must be more than 0 (and 2 more: {others})"


def test_a_misspelt_key_is_told_before_the_key_that_it_leaves_missing(toml):
    assert "task.pth" in refusal(toml("[[task]]\nsource = 'file'\npth = 'x'\n"))


def test_a_missing_file_is_told_with_its_neighbours(toml):
    toml("")
    assert refusal("rum.toml") == "rum.toml: no such file; its folder has run.toml"
    for name in ("alpha.toml", "beta.toml", "delta.toml", "gamma.toml"):
        Path(name).touch()
    assert "; its folder has run.toml, " in refusal("rum.toml")


@pytest.mark.parametrize(
    "name, told",
    [
        ("rows.jsonl", 'is data, not a configuration; name it in a configuration: [[task]] source = "file", path = '),
        ("rows.parquet", "is data, not a configuration"),
        ("rw.py", "is Python, not a configuration; name its function in a configuration: [[task]] reward = "),
    ],
)
def test_data_and_rewards_in_place_of_a_configuration_are_told_where_they_belong(toml, name, told):
    Path(toml("")).with_name(name).write_bytes(b"PAR1\xff")
    assert refusal(name).startswith(f"{name}: {told}")
    assert name in refusal(name).partition("[[task]]")[2]


@pytest.mark.parametrize(
    "overrides, told",
    [
        (["--batch.group-sise", "16"], "--batch.group_sise = 16: unknown key; did you mean group_size?"),
        (["--bacth.group-size=16"], "--bacth.group_size = 16: unknown section; did you mean batch?"),
        (["--batch.group-size"], "--batch.group-size needs a value, as in --batch.group-size VALUE"),
        (["--run.steps", "many"], '--run.steps = "many": wants a whole number, not text'),
        (
            ["--task.source=file", "--task.path=x.jsonl", "--task.reward=exact", "--task.level=3"],
            '--task.level = 3: unknown key; source = "file" has no key level, only weight, ',
        ),
        (["--loss.name=gpro"], "--loss.name = \"gpro\": no such loss; did you mean 'grpo'? there are grpo, dr_grpo, "),
        (["--task.2.level", "1"], "--task.2.level: there is no task.1 yet; give the next task that number"),
        (["--task.1.source=arithmetic", "--task.level=3"], "--task.level: there are 2 tasks; name one, as in --task.0"),
        (["--run.steps.x=1"], "--run.steps.x: run.steps is a single value"),
    ],
)
def test_a_wrong_override_is_told_as_it_was_typed(overrides, told):
    assert refusal(None, overrides).startswith(told)


def test_overrides_are_told_apart_from_the_rest_of_a_command_line():
    words = ["--run.exact", "a.toml", "--batch.group-size", "-3", "--resume", "runs/x", "--task.level=3", "--dry-run"]
    rest, overrides = split(words)
    assert rest == ["a.toml", "--resume", "runs/x", "--dry-run"]
    assert overrides == ["--run.exact", "--batch.group-size", "-3", "--task.level=3"]


UNIONS = {
    "batch.tokens_per_microbatch": (4096, "auto"),
    "schedule.over_provision": (1.0, "auto", "none"),
    "engine.memory_share": (0.5, "auto"),
    "model.gradient_checkpointing": (0.5, True, False),
}
"""Keys that take values of several kinds, with a value of each kind."""


def test_every_key_of_several_kinds_is_tried_below():
    fields = {key: field_at(tuple(key.split(".")), {}) for key in known_keys()}
    kinds = {key: [kind for kind in (bool, float, int, str) if accepts(known, kind)] for key, known in fields.items()}
    assert {key for key, found in kinds.items() if len(found) > 1} == UNIONS.keys()


@pytest.mark.parametrize("key, value", [(key, value) for key, values in UNIONS.items() for value in values])
def test_a_key_of_several_kinds_takes_each_of_them_on_a_command_line(key, value):
    section, name = key.split(".")
    option, text = f"--{key.replace('_', '-')}", str(value).lower()
    for words in ([option, text], [f"{option}={text}"]):
        rest, overrides = split([*words, "run.toml"])
        assert rest == ["run.toml"]
        assert getattr(getattr(load(None, overrides), section), name) == (None if value == "none" else value)


def test_python_users_override_by_section_or_dotted_key():
    config = from_dict({"task": {"source": "arithmetic"}}, {"batch": {"group_size": 4}, "task.level": 1})
    assert (config.batch.group_size, config.task[0].level) == (4, 1)
    with pytest.raises(UserError, match=r"^batch.group_sise = 4: unknown key; did you mean group_size"):
        from_dict({}, {"batch": {"group_sise": 4}})


def test_every_key_is_described():
    for section, rows in describe():
        assert rows, section
    meanings = {name: meaning for _, rows in describe() for name, _, meaning in rows}
    assert meanings["group_size"] == "Answers per prompt, which are compared with each other."


def test_reading_a_configuration_imports_nothing_heavy():
    heavy = "torch", "transformers", "numpy", "rich", "asyncio", "sqlite3"
    code = f"import sys, offbeat.config, offbeat.cli.main; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "words, factor, stops",
    [
        ([], 1.0, False),
        (["--schedule.over-provision=auto"], 1.0, False),
        (["--schedule.max-staleness=2"], "auto", True),
        (["--schedule.max-staleness=2", "--schedule.over-provision=1.5"], 1.5, True),
        (["--schedule.max-staleness=2", "--schedule.over-provision=3"], 3.0, True),
        (["--schedule.mode=overlap"], "auto", False),
        (["--schedule.mode=overlap", "--schedule.over-provision=2"], 2.0, False),
    ],
)
def test_over_provision_is_a_number_or_left_to_the_run(words, factor, stops):
    schedule = load(None, words).schedule
    assert (schedule.factor, schedule.stops) == (factor, stops)


def test_a_word_that_is_like_no_other_is_told_without_a_guess(toml):
    text = refusal(toml('[optimizer]\nschedule = "xyz"\n'))
    assert text == 'run.toml:2: optimizer.schedule = "xyz": must be "constant", "linear" or "cosine"'


def test_a_mistake_of_a_kind_that_has_no_words_of_its_own_is_named_by_its_kind():
    class Dated(Section):
        day: datetime.date

    data = {"day": "soon"}
    with pytest.raises(ValidationError) as caught:
        Dated.model_validate(data)
    told = explain(caught.value, data, ValueOrigin(root=Dated))
    assert str(told) == 'day = "soon": cannot be understood (date type)'
