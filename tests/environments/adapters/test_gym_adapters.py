import pytest

from offbeat.environments.adapters import gymnasium as text_gym
from offbeat.environments.adapters import reasoning
from offbeat.environments.adapters.find import find_environment, find_tools
from offbeat.environments.protocol import Done, Reply, Turn
from offbeat.errors import UserError

pytest.importorskip("reasoning_gym")


def turn(text):
    return Turn(0, text)


def test_a_problem_of_reasoning_gym_may_be_tried_again():
    kind = find_environment("reasoning-gym:basic_arithmetic", "task.path")
    made = kind(tries=3, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    question = made.begin({}, 11)
    again = kind(tries=3, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    assert again.begin({}, 11) == question, "members of a group get the same problem"
    told = made.step(turn("no number"))
    assert told == "This answer scores 0.00 of 1. Try again; 2 tries left."
    done = made.step(turn(str(made.entry["answer"])))
    assert done == Done(1.0, {"tries": 2, "solved": True})
    for _ in range(2):
        again.step(turn("no number"))
    assert again.step(turn("no number")) == Done(0.0, {"tries": 3, "solved": False})


def test_what_reasoning_gym_does_not_have_is_told():
    with pytest.raises(UserError, match=r"has no such data set; did you mean 'basic_arithmetic'"):
        reasoning.environment("basic_aritmetic")
    with pytest.raises(UserError, match=r"task.options of reasoning-gym:basic_arithmetic: refused"):
        reasoning.environment("basic_arithmetic")(colour="red").begin({}, 1)
    with pytest.raises(UserError, match=r"task.options.tries = 0: allowed 1 or more"):
        reasoning.environment("basic_arithmetic")(tries=0)


def test_entries_without_an_adapter_are_functions_and_classes_of_the_user(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def f(): ...\nclass E: ...\n")
    assert find_tools(f"{file}:f", "task.tools").__name__ == "f"
    assert find_environment(f"{file}:E", "task.path").__name__ == "E"


class TestGymnasium:
    @pytest.fixture(autouse=True)
    def gymnasium(self):
        return pytest.importorskip("gymnasium")

    def test_a_discrete_environment_takes_whole_numbers_and_tells_others(self):
        made = find_environment("gymnasium:FrozenLake-v1", "task.path")(is_slippery=False)
        assert made.begin({}, 3) == "0"
        for wrong, why in (("down", "answer with a whole number from 0 to 3"), ("7", "'7' is no action")):
            with pytest.raises(ValueError, match=why):
                made.step(turn(wrong))
        assert [made.step(turn(action)) for action in "112"] == [Reply("4"), Reply("8"), Reply("9")]
        end = [made.step(turn(action)) for action in "122"][-1]
        assert (end.reward, end.state["observation"]) == (1.0, "15")
        made.close()

    def test_an_environment_of_texts_is_told_as_it_is(self, gymnasium):
        class Echo(gymnasium.Env):
            action_space = observation_space = gymnasium.spaces.Text(20)

            def reset(self, *, seed=None, options=None):
                return f"seed {seed}", {}

            def step(self, action):
                return action.upper(), 0.5, False, action == "enough", {}

        gymnasium.register("OffbeatEcho-v0", entry_point=Echo)
        made = text_gym.environment("OffbeatEcho-v0")()
        assert made.begin({}, 3) == "seed 3"
        assert made.step(turn("hello")) == Reply("HELLO", 0.5)
        assert made.step(turn("enough")) == Done(0.5, {"observation": "ENOUGH", "cut": True})

    def test_an_environment_that_cannot_be_made_is_told(self):
        with pytest.raises(UserError, match=r'path = "gymnasium:NoSuch-v0": it cannot be made'):
            text_gym.environment("NoSuch-v0")()
