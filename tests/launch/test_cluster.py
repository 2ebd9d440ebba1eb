"""Without a plan, one node trains and every other GPU rolls out; what a cluster lacks is refused with counts."""

from __future__ import annotations

import pytest

from offbeat.config import load
from offbeat.errors import UserError
from offbeat.launch import cluster
from offbeat.launch.cluster import Machine, Placement, place, refuse_network_folder, wanted_machines

H800 = [Machine(f"h800-{number}", "h800", 2, 8) for number in (1, 2)]
H20 = [Machine(f"h20-{number}", "h20", 1, 8) for number in (1, 2)]
CPU = [Machine(f"cpu-{number}", "cpu", 0, 4) for number in (1, 2, 3)]


def config(*words: str):
    return load(None, words)


def by_name(placed: Placement) -> dict[str, int]:
    return {machine.name: placed.workers_on(machine) for machine in placed.machines}


def test_the_node_with_the_most_gpus_trains_and_every_other_gpu_rolls_out():
    placed = place([*H20, *H800], config())
    assert placed.trains == H800[0]
    assert by_name(placed) == {"h800-1": 1, "h800-2": 2, "h20-1": 1, "h20-2": 1}


def test_a_class_can_be_chosen_to_train():
    placed = place([*H20, *H800], config(), "h20")
    assert by_name(placed) == {"h20-1": 0, "h20-2": 1, "h800-1": 2, "h800-2": 2}


def test_ranks_take_gpus_of_the_training_node_from_the_workers():
    assert by_name(place(H800, config("--trainer.ranks=2", "--rollout.workers=1"))) == {"h800-1": 0, "h800-2": 2}


def test_a_worker_takes_as_many_gpus_as_its_engine_is_parallel():
    placed = place([*H800, *H20], config("--rollout.engine=vllm", "--engine.tensor-parallel=2"))
    assert by_name(placed) == {"h800-1": 0, "h800-2": 1, "h20-1": 0, "h20-2": 0}


def test_without_gpus_every_other_node_is_a_worker():
    assert by_name(place(CPU, config())) == {"cpu-1": 0, "cpu-2": 1, "cpu-3": 1}
    assert by_name(place(CPU, config("--rollout.workers=3"))) == {"cpu-1": 0, "cpu-2": 3, "cpu-3": 3}


@pytest.mark.parametrize("machine", [CPU[0], H20[0]])
def test_a_machine_alone_trains_and_generates(machine: Machine):
    assert by_name(place([machine], config())) == {machine.name: 1}


def test_two_lines_say_what_stands_where():
    placed = place([*H800, *H20], config())
    assert placed.lines(with_names=False) == [
        "trains       1 node of h800: coordinator and 1 trainer rank, on 1 of 2 GPUs",
        "rolls out    5 workers: 3 on 2 nodes of h800, 2 on 2 nodes of h20",
    ]
    assert placed.lines(with_names=True)[1] == (
        "rolls out    5 workers: h800-1 (h800) 1, h800-2 (h800) 2, h20-1 (h20) 1, h20-2 (h20) 1"
    )


@pytest.mark.parametrize(
    "words, train_on, why",
    [
        (
            ["--trainer.ranks=3", "--rollout.workers=1"],
            None,
            "trainer.ranks = 3: needs as many GPUs on one node, and the largest has 2",
        ),
        ([], "h80", r"--train-on h80: .*2 of h800 with 2 GPUs; did you mean h800\?"),
    ],
)
def test_what_no_node_can_do_is_refused(words, train_on, why):
    with pytest.raises(UserError, match=why):
        place(H800, config(*words), train_on)


def test_a_cluster_without_gpus_for_a_worker_is_refused():
    with pytest.raises(UserError, match="no GPU is left to generate: 1 of 1 train, and a worker takes 2"):
        place(H20, config("--rollout.engine=vllm", "--engine.tensor-parallel=2"))


def test_idle_nodes_are_taken_first_and_counts_are_kept():
    everyone = [*H800, *H20]
    assert wanted_machines(everyone, ["h800:1"], ["h800-2"]) == [H800[1]]
    assert wanted_machines(everyone, ["h20:2", "h800:1"], []) == [*H20, H800[0]]
    assert wanted_machines(everyone, [], ["h20-2"]) == [H20[1]]


@pytest.mark.parametrize(
    "wanted, why",
    [
        (["h20:3"], "--nodes h20:3: the cluster has 2 nodes of h20; it has 2 of h800 with 2 GPUs, 2 of h20 with 1 GPU"),
        (["h2:1"], r"--nodes h2:1: the cluster has 0 nodes of h2; .* did you mean h20\?"),
        (["h20"], "--nodes h20: write CLASS:NODES, such as h800:1"),
        (["h20:0"], "--nodes h20:0: write CLASS:NODES"),
        ([], "no node is idle; .*--nodes h800:1"),
    ],
)
def test_nodes_that_are_not_there_are_refused_with_counts(wanted, why):
    with pytest.raises(UserError, match=why):
        wanted_machines([*H800, *H20], wanted, [])


def test_a_run_folder_on_a_network_file_system_is_refused_before_anything_is_started(monkeypatch):
    refuse_network_folder(config("--run.dir=/tmp"))
    monkeypatch.setattr(cluster, "network_file_system", lambda path: "nfs4")
    with pytest.raises(UserError, match=r'run.dir = "/home/me/runs": .* network file system \(nfs4\).*local disk'):
        refuse_network_folder(config("--run.dir=/home/me/runs"))
