import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.config.schema import ArithmeticTask, FileTask, FunctionTask, GymTask
from offbeat.data.arithmetic import Arithmetic
from offbeat.data.mixture import Mixture, WeightedSource, build_mixture, source_names
from offbeat.errors import OffbeatError, UserError

weights_lists = st.lists(st.floats(0.01, 100), min_size=1, max_size=6)


def mixture_of(*weights):
    return Mixture(
        [WeightedSource(Arithmetic(seed=i), f"s{i}", weight, "number") for i, weight in enumerate(weights)], {}
    )


def draw(mixture, count, drawn=None):
    drawn = dict(drawn or {})
    for _ in range(count):
        member, ordinal = mixture.next(drawn)
        assert ordinal == drawn.get(member.name, 0)
        drawn[member.name] = ordinal + 1
    return drawn


@given(weights_lists, st.integers(0, 200))
def test_no_source_is_ever_a_whole_draw_ahead_of_its_share(weights, count):
    drawn = draw(mixture_of(*weights), count)
    for i, weight in enumerate(weights):
        assert drawn.get(f"s{i}", 0) < weight / sum(weights) * count + 1
    assert sum(drawn.values()) == count


@given(weights_lists, st.integers(0, 60), st.integers(0, 60))
def test_a_restart_from_the_counts_goes_on_as_if_nothing_had_happened(weights, before, after):
    mixture = mixture_of(*weights)
    assert draw(mixture_of(*weights), after, draw(mixture, before)) == draw(mixture, before + after)


def test_two_sources_come_in_turn_by_weight():
    mixture, drawn, order = mixture_of(2, 1), {}, []
    for _ in range(6):
        member, ordinal = mixture.next(drawn)
        drawn[member.name] = ordinal + 1
        order.append(member.name)
    assert order == ["s0", "s1", "s0", "s0", "s1", "s0"]


def test_counts_of_a_source_that_is_gone_are_refused():
    with pytest.raises(OffbeatError, match="drawn prompts from old"):
        mixture_of(1).next({"old": 3})


def test_held_out_problems_are_shared_out_by_weight_and_stay_the_same():
    mixture = mixture_of(3, 1)
    held_out = mixture.held_out(40)
    assert [member.name for member, _ in held_out] == ["s0"] * 30 + ["s1"] * 10
    assert mixture.held_out(40) is held_out


def test_sources_have_names_and_seeds_of_their_own():
    mixture = build_mixture([ArithmeticTask(), ArithmeticTask(), ArithmeticTask(reward="exact")], seed=7)
    assert list(mixture.members) == ["arithmetic", "arithmetic-2", "arithmetic-3"]
    assert [member.reward for member in mixture.members.values()] == ["number", "number", "exact"]
    assert mixture.rewards == {"number": "number", "exact": "exact"}
    posed = {tuple(member.problem(i).prompt for i in range(20)) for member in mixture.members.values()}
    assert len(posed) == 3


def test_every_kind_of_task_becomes_a_source(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (tmp_path / "mine.py").write_text("def pose(ordinal):\n    return {'prompt': 'x'}\n")
    tasks = [
        ArithmeticTask(),
        GymTask(source="reasoning-gym", name="chain_sum", weight=2, system="think"),
        FileTask(source="file", path=f"{tmp_path}/data.jsonl", reward="exact"),
        FunctionTask(source="function", path=f"{tmp_path}/mine.py:pose", reward="exact"),
    ]
    mixture = build_mixture(tasks, seed=0)
    assert list(mixture.members) == ["arithmetic", "chain_sum", "data", "pose"]
    assert source_names(tasks) == list(mixture.members)
    assert source_names([*tasks, tasks[0]])[-1] == "arithmetic-2"
    assert mixture.members["chain_sum"].system == "think"
    assert mixture.rewards == {"number": "number", "gym": "gym", "exact": "exact"}
    assert mixture.members["data"].problem(0).answer == "b"
    assert mixture.members["pose"].chat is None


def test_a_reward_from_python_judges_all(tmp_path):
    def judge(response):
        return 1.0

    mixture = build_mixture([ArithmeticTask(), ArithmeticTask(reward="exact")], seed=0, reward=judge)
    assert mixture.rewards == {"judge": judge}
    assert mixture.members["arithmetic-2"].reward == "judge"


def test_a_source_without_a_reward_wants_one(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(
        UserError, match=r"task.reward: data has no reward of its own; .*; in Python, give reward=FUNCTION$"
    ):
        build_mixture([FileTask(source="file", path=f"{tmp_path}/data.jsonl")], seed=0)


def test_a_run_that_began_with_a_reward_from_python_wants_it_again(tmp_path):
    task, home = FileTask(source="file", path=f"{tmp_path}/data.jsonl"), tmp_path / "runs" / "a"
    (tmp_path / "data.jsonl").write_text('{"prompt": "a"}\n')
    told = r'runs/a: its reward, judge, was given from Python.*Run\(".*/runs/a"\)\.resume\(reward='
    with pytest.raises(UserError, match=told):
        build_mixture([task], seed=0, home=home, began_with={"data": "judge"})
    named = task.model_copy(update={"reward": "exact"})
    with pytest.raises(UserError, match=told):
        build_mixture([named], seed=0, home=home, began_with={"data": "judge"})
    assert build_mixture([named], seed=0, home=home, began_with={"data": "exact"}).rewards == {"exact": "exact"}
