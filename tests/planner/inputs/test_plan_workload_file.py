from pathlib import Path

import pytest

from offbeat.errors import UserError
from offbeat.planner.inputs import model_shapes
from offbeat.planner.inputs import workload as lengths
from offbeat.planner.inputs.inventory import load_inventory
from offbeat.planner.inputs.workload import KvPolicy, RewardMachines
from offbeat.planner.inputs.workload_file import load_workload

EXAMPLES = Path(__file__).parents[3] / "examples" / "planning"
PLAIN = """[model]
name = "Qwen/Qwen2.5-7B"

[batch]
groups_per_step = 64
group_size = 8

[prompt]
tokens = 500

[answer]
median = 3000
sigma = 0.8
longest = 16384
"""


@pytest.fixture
def workload(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        (tmp_path / "w.toml").write_text(text)
        return "w.toml"

    return write


def test_a_short_file_has_sane_defaults(workload):
    found = load_workload(workload(PLAIN))
    assert found.model == model_shapes.known_model("Qwen/Qwen2.5-7B")
    assert (found.trajectories_per_step, found.bound, found.kv) == (512, 4, KvPolicy.REFILL)
    assert found.prompt == lengths.constant(500)
    assert found.answer == lengths.log_normal(3000, 0.8, 16384)
    assert found.reward is None


def test_cards_take_turns_unless_a_file_says_otherwise(workload):
    rules = "[rules]\nmax_staleness = 0\n"
    assert load_workload(workload(PLAIN + rules)).may_share
    assert load_workload(workload(PLAIN + rules + "colocate = true\n")).may_share
    assert not load_workload(workload(PLAIN + rules + "colocate = false\n")).may_share
    assert not load_workload(workload(PLAIN)).may_share


@pytest.mark.parametrize(
    "rules, told",
    [
        ("colocate = true", "rules.colocate = true: works only if generation waits for training; set rules.max"),
        ('colocate = "no"', 'rules.colocate = "no": wants true or false'),
    ],
)
def test_a_wrong_word_on_taking_turns_is_one_line(workload, rules, told):
    with pytest.raises(UserError) as error:
        load_workload(workload(f"{PLAIN}[rules]\n{rules}\n"))
    assert str(error.value).startswith(f"w.toml:16: {told}")
    assert "\n" not in str(error.value)


def test_every_section_reaches_the_workload(workload):
    more = """[algorithm]
reference = true
critic = true
updates_per_step = 4
recompute_logprobs = false
lora_rank = 16
[rules]
max_staleness = 2
kv = "stale"
waste = 0.1
headroom = 0.2
delta_density = 0.05
[reward]
seconds = 2.5
slots = 64
price = 0.02
"""
    found = load_workload(workload(PLAIN + more))
    assert (found.has_reference, found.has_critic, found.updates_per_step, found.lora_rank) == (True, True, 4, 16)
    assert (found.recomputes_logprobs, found.bound, found.kv) == (False, 2, KvPolicy.STALE)
    assert (found.waste_share, found.headroom, found.delta_density) == (0.1, 0.2, 0.05)
    assert found.reward == RewardMachines(2.5, 64, 0.02)


def test_a_model_may_be_told_in_numbers(workload):
    numbers = "num_layers = 28\nhidden = 3584\nnum_heads = 28\nnum_kv_heads = 4\nffn = 18944\nvocab = 152064"
    found = load_workload(workload(PLAIN.replace('name = "Qwen/Qwen2.5-7B"', numbers))).model
    assert model_shapes.num_parameters(found) == model_shapes.num_parameters(model_shapes.known_model("qwen2.5-7b"))


def test_a_run_is_read_by_whoever_can(workload):
    text = PLAIN.replace("median = 3000\nsigma = 0.8\nlongest = 16384", 'run = "runs/x"')
    asked = []

    def read(run, what):
        asked.append((run, what))
        return [10, 20, 30]

    found = load_workload(workload(text), read)
    assert asked == [("runs/x", "answer")]
    assert found.answer == lengths.from_samples([10, 20, 30])
    assert found.assumptions == ("answer: lengths of the run runs/x",)
    with pytest.raises(UserError, match=r"w\.toml:11: \[answer\]: run = \"runs/x\": runs cannot be read here"):
        load_workload("w.toml")


@pytest.mark.parametrize(
    "before, after, said",
    [
        ("group_size", "group_sise", "w.toml:6: batch.group_sise = 8: unknown key; did you mean group_size?"),
        ("= 64", "= 0", "w.toml:5: batch.groups_per_step = 0: must be 1 or more"),
        ("Qwen/Qwen2.5-7B", "Qwen2.5-8B", "w.toml:2: model.name = 'Qwen2.5-8B': unknown model; did you mean"),
        ('name = "Qwen/Qwen2.5-7B"', "", "[model]: give name, config, or num_layers"),
        (
            'name = "Qwen/Qwen2.5-7B"',
            "hidden = 64",
            "[model]: missing num_layers, num_heads, num_kv_heads, ffn, vocab; give each a value",
        ),
        ('name = "Qwen/Qwen2.5-7B"', 'config = "no.json"', "no.json cannot be read"),
        ("sigma = 0.8\n", "", "w.toml:11: [answer]: has longest + median; give tokens, or median + sigma + longest"),
        ("tokens = 500", "edges = [0, 5]\ncounts = [1, 2]", "[prompt]: there are 2 edges and 2 counts"),
        ("[prompt]\ntokens = 500", "[rules]\nwaste = 1.0", "rules.waste = 1.0: must be 0 or more and less than 1"),
        ("[prompt]\ntokens = 500", '[rules]\nkv = "stail"', 'did you mean "stale"?'),
    ],
)
def test_a_mistake_is_one_line_with_its_place_and_remedy(workload, before, after, said):
    with pytest.raises(UserError) as caught:
        load_workload(workload(PLAIN.replace(before, after)))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("workload_*.toml")), ids=lambda file: file.stem)
def test_every_example_of_a_workload_loads(file):
    assert load_workload(file).generated_tokens_per_step > 0


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("cluster_*.toml")), ids=lambda file: file.stem)
def test_every_example_of_a_cluster_loads(file):
    assert load_inventory(file).classes


@pytest.mark.parametrize("size, price", [(24, 126.72), (32, 86.64), (40, 101.44), (56, 131.04)])
def test_the_clusters_of_the_paper_cost_what_it_says(size, price):
    classes = load_inventory(EXAMPLES / f"cluster_hex_{size}.toml").classes.values()
    assert sum(machines.num_accelerators for machines in classes) == size
    assert sum(machines.num_nodes * machines.node_price_per_h for machines in classes) == pytest.approx(price)


@pytest.mark.parametrize("size", ["1.5b", "7b", "14b"])
def test_the_workloads_of_the_paper_have_answers_of_five_thousand_tokens(size):
    found = load_workload(EXAMPLES / f"workload_hex_{size}.toml")
    assert found.trajectories_per_step == 512
    assert found.answer.mean == pytest.approx(5000, rel=0.01)


def test_the_large_mix_has_a_thousand_accelerators_in_eight_classes():
    classes = load_inventory(EXAMPLES / "cluster_mix_1024.toml").classes.values()
    assert (len(classes), sum(machines.num_accelerators for machines in classes)) == (8, 1024)
