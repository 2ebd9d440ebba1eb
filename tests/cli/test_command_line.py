"""Bad input through the command line: one line, status 2, no traceback; mostly in this process, to be quick."""

import importlib.metadata
import os
import subprocess
import sys

import pytest

from offbeat.cli.main import main
from offbeat.config import fixed_keys, load
from offbeat.config.keys import known_keys
from offbeat.errors import OffbeatError
from offbeat.launch import engine_choice, preflight
from offbeat.launch.run_folder import RunFolder, has_finished
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import Arrival
from offbeat.weights.version import Version


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def refused(capsys):
    """Runs the command line, which must refuse; returns the line that it says."""

    def run(*words: str) -> str:
        assert main(words) == 2
        told = capsys.readouterr()
        assert told.out == ""
        assert told.err.count("\n") == 1
        return told.err.strip()

    return run


def write(text: str, name: str = "run.toml") -> str:
    with open(name, "w") as file:
        file.write(text)
    return name


def begin(name: str) -> RunFolder:
    folder = RunFolder.create(load(None, [f"--run.name={name}"]))
    folder.metrics({"step": 1, "reward": 0.5})
    with Ledger(folder.ledger) as ledger:
        ledger.record_fixed_keys(fixed_keys(folder.config))
    return folder


def offbeat(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "offbeat", *words], capture_output=True, text=True, timeout=60)


def test_a_wrong_configuration_ends_the_real_command_with_status_2_and_one_line():
    write("[batch]\ngroup_sise = 16\n")
    done = offbeat("train", "run.toml")
    told = "offbeat: run.toml:2: batch.group_sise = 16: unknown key; did you mean group_size?\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", told)


def test_a_second_process_on_the_same_run_is_refused_by_the_real_command():
    with begin("a"):
        done = offbeat("train", "--resume", "--dry-run")
        assert done.returncode == 0  # looking is allowed
        done = offbeat("train", "--resume", "runs/a")
    assert done.returncode == 2
    assert done.stderr.startswith(f"offbeat: runs/a is in use by process {os.getpid()} on ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "text, told",
    [
        ("[optimizer]\nschedule = 'cosin'\n", 'run.toml:2: optimizer.schedule = "cosin": must be "constant"'),
        ("[run]\nsteps = 'many'\n", 'run.toml:2: run.steps = "many": wants a whole number, not text'),
        ("[batch]\ngroup_size = -1\n", "run.toml:2: batch.group_size = -1: must be 2 or more"),
        ("[batch]\nupdates_per_step = 3\n", "run.toml:2: batch.updates_per_step = 3: must divide"),
        ("[run]\nsteps = \n", "run.toml:2: is not TOML near 'steps =': invalid value"),
        ("[[task]]\nsource = 'file'\npath = 'x.jsonl'\n", 'task.path = "x.jsonl": no such file or folder; relative'),
        (
            "[[task]]\nsource = 'arithmetic'\nreward = 'r.py:f'\n",
            'task.reward = "r.py:f": there is no file r.py; relative paths start at ',
        ),
        ("[loss]\nname = 'l.py:f'\n", 'loss.name = "l.py:f": there is no file l.py; relative paths start at '),
        (
            "[loss]\nadvantage = 'a.py:f'\n",
            'loss.advantage = "a.py:f": there is no file a.py; relative paths start at ',
        ),
        ("[model]\npath = 'nowhere'\n", "model.path = 'nowhere': no such folder"),
    ],
)
def test_a_wrong_file_is_refused(refused, text, told):
    assert refused("train", write(text)).startswith(f"offbeat: {told}")


@pytest.mark.parametrize(
    "key, told",
    [
        ("task.path=revv.jsonl", 'task.path = "revv.jsonl": no such file or folder; did you mean rev.jsonl?'),
        ("task.reward=rww.py:score", 'task.reward = "rww.py:score": there is no file rww.py; did you mean rw.py?'),
        ("model.path=offbeat-tinny", "model.path = 'offbeat-tinny': no such folder; did you mean 'offbeat-tiny'?"),
    ],
)
def test_a_misspelt_file_or_model_is_answered_with_the_one_that_is_there(refused, key, told):
    write('{"prompt": "1+1="}', "rev.jsonl")
    write("def score(prompt, answer): return 1.0", "rw.py")
    words = ["task.source=file", "task.path=rev.jsonl", "task.reward=rw.py:score", key]
    assert refused("train", *(f"--{word}" for word in words)) == f"offbeat: {told}"


@pytest.mark.parametrize(
    "words, told",
    [
        (["trian"], "trian: unknown command; did you mean train?"),
        (["frobnicate"], "frobnicate: unknown command; see offbeat --help"),
        (["train", "nowhere.toml"], "nowhere.toml: no such file"),
        (["train", "--group-size", "16"], "--group-size: unknown option; did you mean --batch.group_size?"),
        (["eval", "--temperature", "0"], "--temperature: unknown option; did you mean --eval.temperature?"),
        (["train", "--temperature", "0"], "--temperature: unknown option; TRL's temperature is --rollout.temperature"),
        (["train", "--resum"], "--resum: unknown option; did you mean --resume?"),
        (["train", "a.toml", "b.toml"], "b.toml: offbeat train takes no further argument"),
        (["train", "--name", "a/b"], '--run.name = "a/b": must consist of letters'),
        (["train", "--resume"], "runs: holds no run yet; offbeat train starts one"),
        (["train", "--resume", "runs/a"], "runs/a: there is no such run"),
        (["train", "--from-scratch"], "--from-scratch goes only with --resume"),
        (["eval"], "runs: holds no run yet; offbeat train starts one"),
        (["export"], "the following arguments are required: DIR; see offbeat export --help"),
        (["eval", "nowhere"], "model.path = 'nowhere': no such folder"),
        (
            ["eval", "a.toml"],
            "a.toml: is a configuration, not a run or a model; give the model, then the configuration",
        ),
        (["eval", "offbeat-tiny", "--prompts", "0"], "--eval.prompts = 0: must be 1 or more"),
        (["export", "runs/a", "out"], "runs/a: there is no such run"),
        (["export", "runs/a", "--adapter", "out"], "runs/a: there is no such run"),
        (
            ["ledger", "verify", "--json", "runs/a"],
            "--json goes with offbeat ledger show, not with offbeat ledger verify",
        ),
        (["model", "smollm", "out"], "unknown model smollm; did you mean 'smollm2'?"),
        (["ledger", "verify", "runs/a"], "runs/a holds no ledger"),
    ],
)
def test_wrong_words_are_refused(refused, words, told):
    assert refused(*words).startswith(f"offbeat: {told}")


def test_resuming_with_a_changed_fixed_key_is_refused(refused):
    begin("a").close()
    told = "offbeat: batch.group_size = 16: the run runs/a has 8, and this key is fixed for the life of a run; leave"
    assert refused("train", "--resume", "runs/a", "--batch.group-size", "16").startswith(told)
    assert refused("train", write("[batch]\ngroup_size = 16\n"), "--resume").startswith(told)


def test_a_run_whose_trainer_joined_it_is_not_resumed_without_that_trainer_and_stays_as_it_is(refused):
    with begin("a") as folder, Ledger(folder.ledger) as ledger:
        ledger.publish(Version(0, 0, None, "digest", folder.weights))
        ledger.reconcile(0, 0, Arrival("trainer", "box-1", "elsewhere"))
        folder.event("end", step=1, finished=True)
    told = refused("train", "--resume", "runs/a")
    assert "its checkpoints are with the trainer that joined it (trainer on box-1, since " in told
    assert "continue with offbeat serve --resume runs/a, and start that trainer again with the same --dir" in told
    assert has_finished(folder.path)


def test_a_name_in_use_is_refused(refused):
    begin("a").close()
    assert "this run exists; continue it with --resume runs/a" in refused("train", "--name", "a")


def test_a_resumed_run_brings_its_own_configuration(capsys):
    begin("a").close()
    begin("b").close()
    for words in (["--resume", "a"], ["--resume", "runs/a"], ["--resume", "--name", "a"]):
        assert main(["train", "--dry-run", "--run.steps", "7", *words]) == 0
        told = capsys.readouterr().out
        assert "would resume runs/a" in told
        assert "7 steps" in told
    assert main(["train", "--dry-run", "--resume"]) == 0
    assert "would resume runs/b" in capsys.readouterr().out
    assert main(["train", "--dry-run", "--resume", write("[run]\nname = 'a'\n[optimizer]\nlr = 3e-4\n")]) == 0
    assert "would resume runs/a" in capsys.readouterr().out


def test_a_dry_run_adds_up_and_leaves_nothing_behind(tmp_path, capsys):
    assert main(["train", "--dry-run", "--batch.groups-per-step", "4"]) == 0
    told = capsys.readouterr().out
    assert "batch.groups_per_step    4" in told
    assert "4 groups × 8 = 32 samples, one update" in told
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_lists_only_what_differs_from_the_defaults_of_the_tasks_source(tmp_path, capsys):
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": "3"}\n')
    words = ["--task.source=file", "--task.path=sums.jsonl", "--task.reward=number", "--eval.every=50"]
    assert main(["train", "--dry-run", *words]) == 0
    listed, _, _ = capsys.readouterr().out.partition("\n\n")
    keys = [line.split()[0] for line in listed.splitlines()[1:]]
    assert keys == ["run.steps", "task.reward", "task.source", "task.path", "optimizer.lr", "eval.every"]


@pytest.mark.parametrize("judge", ["1", "'good'"])
def test_a_dry_run_tells_all_that_is_missing_and_adds_up_if_the_rows_and_rewards_are_fine(
    tmp_path, capsys, monkeypatch, judge
):
    monkeypatch.setattr(preflight, "PICK_DEVICE", "print('model.device: not here')")
    (tmp_path / f"r{len(judge)}.py").write_text(f"def f(response): return {judge}")
    words = ["--model.device=cuda", f"--task.reward=r{len(judge)}.py:f"]
    assert main(["train", "--dry-run", *words, "--rollout.engine=sglang", "--rollout.workers=1"]) == 2
    told = capsys.readouterr()
    device, engine, *reward = told.err.splitlines()
    assert device == "offbeat: model.device: not here"
    assert engine.startswith('offbeat: rollout.engine = "sglang": ')
    if judge == "1":
        assert ("32 groups × 8 = 256 samples" in told.out, reward) == (True, [])
    else:
        assert told.out == ""
        assert reward[0].startswith(f"offbeat: reward r{len(judge)}.py:f: its trial failed: the reward returned ")


def test_a_run_looks_for_its_gpu_before_it_reads_rows_where_no_driver_is_loaded(capsys, monkeypatch):
    monkeypatch.setattr(engine_choice, "GPU_DRIVERS", ())
    monkeypatch.setattr(preflight.sys, "platform", "linux")
    monkeypatch.setattr(preflight, "PICK_DEVICE", "print('model.device: not here')")
    assert main(["train", "--model.device=cuda", "--rollout.max-prompt-tokens=1"]) == 2
    assert capsys.readouterr().err == "offbeat: model.device: not here\n"
    assert main(["train", "--model.device=cpu", "--rollout.max-prompt-tokens=1"]) == 2
    assert "rollout.max_prompt_tokens = 1" in capsys.readouterr().err


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("train", "eval", "export", "model", "ledger"))


def test_keys_lists_the_common_keys_or_all_with_a_line_each(capsys):
    assert main(["train", "--keys"]) == 0
    *common, _, last = capsys.readouterr().out.splitlines()
    assert main(["train", "--keys", "all"]) == 0
    *every, _, _ = capsys.readouterr().out.splitlines()
    assert main(["train", "--keys", "--count"]) == 0
    count = int(capsys.readouterr().out)
    assert [line.split()[0] for line in every] == known_keys()
    assert set(common) < set(every)
    assert (len(common), count) == (40, len(every))
    assert count <= 131
    assert max(map(len, every)) <= 120
    assert last == f"40 of {count} keys; all of them: offbeat train --keys all"
    assert not any("paced" in line for line in every)


@pytest.mark.parametrize(
    "error, status, told",
    [
        (OffbeatError("the disk\nis full"), 1, "offbeat: the disk is full\n"),
        (KeyboardInterrupt(), 130, "offbeat: interrupted\n"),
    ],
)
def test_other_ends_have_statuses_of_their_own(monkeypatch, capsys, error, status, told):
    def fail(*_):
        raise error

    monkeypatch.setattr("offbeat.cli.main._run", fail)
    assert main([]) == status
    assert capsys.readouterr().err == told


@pytest.mark.full
def test_answers_that_need_no_torch_do_not_import_it():
    code = (
        "import sys; from offbeat.cli.main import main; main(['train', '--keys']); "
        "print(*{'torch', 'transformers', 'numpy'} & set(sys.modules)); "
        "sys.argv[1:] = ['train', '--dry-run']; main(); print('torch' in sys.modules)"  # it has tokenised prompts
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    keys, _, dry_run = done.stdout.partition("would start")
    assert (keys.splitlines()[-1], dry_run.splitlines()[-1], done.stderr) == ("", "False", "")


def test_a_checkout_that_is_not_installed_says_so_instead_of_a_version(monkeypatch, capsys):
    def not_there(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", not_there)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "offbeat from a folder, not installed\n"
