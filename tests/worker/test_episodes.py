"""Episodes of a worker: what is appended, what ends them, and what becomes of them when they are interrupted."""

from __future__ import annotations

import asyncio
import time

import pytest
from episode_scenes import (
    EOS,
    SOURCE,
    WrittenEngine,
    an_episode,
    environments,
    ids,
    make_episodes,
    play,
    text_of,
    working,
    write_code,
)
from fake_coordinator import Desk

from offbeat.environments.wire import PartSpec
from offbeat.trajectory import Claim, End, EpisodeRecord, Origin, ToolCall
from offbeat.worker.worker import Worker

GUESS = """
    class Game:
        deterministic = True
        def begin(self, problem, seed):
            self.secret = seed
            return "1 to 9: "
        def step(self, turn):
            if int(turn.text) == self.secret:
                return Done(1.0, {"guesses": turn.number + 1})
            return Reply("+" if int(turn.text) < self.secret else "-", reward=0.25)
"""
TOOL = '''
    def double(number: int) -> int:
        """Doubles a number."""
        return 2 * number
    double.deterministic = True
'''


def bisect(_: int, so_far: str) -> str:
    answers = [char for char in so_far if char in "+-"]
    return ["5<eos>", "8<eos>", "7<eos>"][len(answers)]


def game(folder, code: str = GUESS, name: str = "Game") -> PartSpec:
    return PartSpec(f"{write_code(folder, code)}:{name}")


def tools(folder, code: str, *names: str) -> PartSpec:
    file = write_code(folder, code)
    return PartSpec(tools=tuple(f"{file}:{name}" for name in names))


def test_what_the_environment_says_is_appended_as_given_tokens_and_its_rewards_are_claims(tmp_path, versions):
    desk = asyncio.run(play(tmp_path, game(tmp_path), bisect, version=versions[1]))
    episode = desk.done[1]
    assert text_of(episode.tokens) == "1 to 9: 5<eos>+8<eos>-7<eos>"
    origins = [segment.origin for segment in episode.segments]
    assert origins == [Origin.GIVEN, Origin.SAMPLED] * 3
    assert episode.end is End.ENVIRONMENT
    assert [text_of([token]) for token in episode.tokens[episode.sampled_mask]] == [
        "5",
        "<eos>",
        "8",
        "<eos>",
        "7",
        "<eos>",
    ]
    record = episode.episode
    assert record.claims == (Claim(0.25, "turn", 9), Claim(0.25, "turn", 12), Claim(1.0, "environment", -1))
    assert (record.num_turns, record.state) == (3, {"guesses": 3})


def test_a_call_is_answered_and_a_turn_without_one_ends_the_episode(tmp_path, versions):
    def say(_: int, so_far: str) -> str:
        return f"it is {so_far.rpartition('{')[2].rstrip('}')}<eos>" if so_far else "so [21]"

    desk = asyncio.run(play(tmp_path, tools(tmp_path, TOOL, "double"), say, version=versions[1]))
    episode = desk.done[1]
    assert text_of(episode.tokens) == "so [21]{42}it is 42<eos>"
    assert episode.end is End.STOP
    (call,) = episode.episode.calls
    assert (call.turn, call.tool, call.status) == (0, "double", "ok")


def test_a_turn_that_was_cut_is_never_acted_on(tmp_path, versions):
    code = TOOL.replace("return 2", f'open("{tmp_path}/called", "a").write("x"); return 2')
    desk = asyncio.run(
        play(tmp_path, tools(tmp_path, code, "double"), lambda *_: "x" * 40 + "[21]", version=versions[1])
    )
    assert desk.done[1].end is End.LENGTH
    assert desk.done[1].num_tokens == 32
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize(
    ("said", "limits", "end", "num_turns"),
    [
        ("[21]", {"max_turns": 3}, End.TURNS, 3),
        ("[many]", {}, End.CALLS, 2),
        ("[21]", {"max_new_tokens": 14}, End.OVERFLOW, 2),
    ],
)
def test_a_model_that_never_stops_calling_is_stopped_by_a_limit(tmp_path, versions, said, limits, end, num_turns):
    spec = tools(tmp_path, TOOL, "double")
    desk = asyncio.run(play(tmp_path, spec, lambda *_: said, version=versions[1], **limits))
    assert desk.done[1].end is end
    assert desk.done[1].episode.num_turns == num_turns
    assert text_of(desk.done[1].tokens).endswith(said), "nothing may follow the turn that was the last"


def test_a_megabyte_is_cut_to_the_limit_of_an_observation(tmp_path, versions):
    code = TOOL.replace("return 2 * number", 'return "a" * 500_000 + "b" * 500_000')

    def say(_: int, so_far: str) -> str:
        return "done<eos>" if "{" in so_far else "[1]"

    desk = asyncio.run(play(tmp_path, tools(tmp_path, code, "double"), say, version=versions[1]))
    observation = text_of(desk.done[1].tokens).removeprefix("[1]").removesuffix("done<eos>")
    assert observation.startswith("{aaa")
    assert observation.endswith("bbb}")
    assert len(observation) <= 64 + len("{}")


def test_what_step_raises_is_told_to_the_model(tmp_path, versions):
    def say(_: int, so_far: str) -> str:
        return "7<eos>" if "error" in so_far else "seven<eos>"

    desk = asyncio.run(play(tmp_path, game(tmp_path), say, version=versions[1], max_observation_tokens=80))
    assert "error: ValueError: invalid literal for int() with base 10: 'seven'" in text_of(desk.done[1].tokens)
    assert desk.done[1].end is End.ENVIRONMENT


def test_an_environment_whose_begin_raises_fails_the_attempt_with_the_reason(tmp_path, versions):
    code = GUESS.replace("self.secret = seed", 'raise RuntimeError("no such level")')
    desk = asyncio.run(play(tmp_path, game(tmp_path, code), bisect, version=versions[1]))
    assert desk.failures[1].startswith("environment: RuntimeError: no such level")


def test_episodes_that_wait_for_a_tool_hold_no_slot(tmp_path, versions):
    code = TOOL.replace("return 2", "import time; time.sleep(0.4); return 2")

    async def scenario() -> float:
        desk = Desk()
        desk.publish(versions[1])
        async with environments(tmp_path, tools(tmp_path, code, "double")) as pool:
            episodes = make_episodes(pool, at_once=8)
            stops = episodes.forms[SOURCE].stop_token_ids
            engine = WrittenEngine(lambda _, so_far: "ok<eos>" if so_far else "[21]", num_slots=1)
            desk.add(*(an_episode(number, stops) for number in range(1, 9)))
            async with working(Worker("w", engine, desk, episodes=episodes)), asyncio.timeout(30):
                await desk.until(lambda: desk.held)
                began_s = time.monotonic()
                await desk.until(lambda: len(desk.done) == 8)
        assert engine.most_running == 1
        return time.monotonic() - began_s

    assert asyncio.run(scenario()) < 2.0, "eight calls of 0.4 s, one after another, take 3.2 s"


def test_a_round_that_ends_while_tools_sleep_has_all_partials_at_once_and_no_call_is_made_twice(tmp_path, versions):
    count = 64
    code = f'''
        def nap(number: int) -> int:
            """Sleeps."""
            import time
            open("{tmp_path}/calls", "a").write(f"{{number}}\\n")
            time.sleep(1.5)
            return number
    '''

    def say(number: int, so_far: str) -> str:
        return "done<eos>" if "{" in so_far else f"[{number}]"

    def num_calls() -> int:
        return len((tmp_path / "calls").read_text().split())

    async def scenario() -> Desk:
        desk = Desk()
        desk.begin_round(versions[1])
        async with environments(tmp_path, tools(tmp_path, code, "nap")) as pool:
            episodes = make_episodes(pool, at_once=count)
            stops = episodes.forms[SOURCE].stop_token_ids
            desk.add(*(an_episode(number, stops) for number in range(1, count + 1)))
            async with working(Worker("w", WrittenEngine(say), desk, episodes=episodes)), asyncio.timeout(30):
                while not (tmp_path / "calls").exists() or num_calls() < count:  # noqa: ASYNC110 - by children
                    await asyncio.sleep(0.01)
                began_s = time.monotonic()
                desk.end_round()
                await desk.until(lambda: len(desk.partials) == count)
                assert time.monotonic() - began_s < 1.0
                desk.begin_round(versions[2])
                await desk.until(lambda: len(desk.done) == count)
        return desk

    desk = asyncio.run(scenario())
    assert all(partial.episode == EpisodeRecord() for partial in desk.partials)
    assert text_of(desk.done[5].tokens) == "[5]{5}done<eos>"
    assert len((tmp_path / "calls").read_text().split()) == count
    assert [call.status for call in desk.done[5].episode.calls] == ["ok"]


async def handed_over(folder, spec: PartSpec, version, say, *, spoil=None) -> Desk:
    """An episode that one worker hands back after its first turn, and another one carries on."""
    desk = Desk()
    desk.begin_round(version)
    async with environments(folder, spec) as first, asyncio.timeout(30):
        episodes = make_episodes(first)
        stops = episodes.forms[SOURCE].stop_token_ids
        desk.add(an_episode(1, stops))
        engine = WrittenEngine(say, token_s=0.02)
        async with working(Worker("one", engine, desk, episodes=episodes)):
            while len(engine.requests) < 2:  # noqa: ASYNC110 - the engine tells nobody
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.03)
            desk.end_round()
            await desk.until(lambda: desk.partials)
    async with environments(folder, spec) as second, asyncio.timeout(30):
        if spoil is not None:
            spoil()
        desk.begin_round(version)
        async with working(Worker("two", WrittenEngine(say), desk, episodes=make_episodes(second))):
            await desk.until(lambda: desk.done or desk.failures)
    return desk


def test_a_deterministic_episode_is_replayed_by_another_worker_and_goes_on_with_equal_tokens(tmp_path, versions):
    def slowly(number: int, so_far: str) -> str:
        return " " * 4 + bisect(number, so_far)

    desk = asyncio.run(handed_over(tmp_path, game(tmp_path), versions[1], slowly))
    (partial,) = desk.partials
    episode = desk.done[1]
    assert episode.tokens[: partial.num_tokens].tolist() == partial.tokens.tolist()
    assert episode.end is End.ENVIRONMENT
    assert len(episode.episode.claims) == 3, "a replay finds the claims again"


def test_an_episode_whose_environment_cannot_be_had_again_is_reported_as_lost(tmp_path, versions):
    code = GUESS.replace("deterministic = True", "deterministic = False")

    def slowly(number: int, so_far: str) -> str:
        return " " * 4 + bisect(number, so_far)

    desk = asyncio.run(handed_over(tmp_path, game(tmp_path, code), versions[1], slowly))
    assert desk.failures[1].startswith("environment_lost: ")


def test_a_replay_that_says_something_else_is_noticed(tmp_path, versions):
    code = GUESS.replace(
        "self.secret = seed", f'self.secret = seed if not __import__("os").path.exists("{tmp_path}/spoilt") else 1'
    )

    def slowly(number: int, so_far: str) -> str:
        return " " * 4 + bisect(number, so_far)

    spoil = (tmp_path / "spoilt").touch
    desk = asyncio.run(handed_over(tmp_path, game(tmp_path, code), versions[1], slowly, spoil=spoil))
    assert desk.failures[1].startswith("environment_lost: the environment of games said something else")


def test_an_environment_that_ends_its_process_fails_alone_and_the_others_are_replayed(tmp_path, versions):
    code = GUESS.replace("if int", 'if turn.text == "boom": __import__("os")._exit(1)\n            if int', 1)

    def say(number: int, so_far: str) -> str:
        return "boom<eos>" if number == 3 else bisect(number, so_far)

    desk = asyncio.run(play(tmp_path, game(tmp_path, code), say, count=12, version=versions[1]))
    assert list(desk.failures) == [3]
    assert "it ended its process" in desk.failures[3]
    assert {text_of(episode.tokens) for episode in desk.done.values()} == {"1 to 9: 5<eos>+8<eos>-7<eos>"}


def test_the_stop_token_of_a_class_ends_a_turn_and_is_not_part_of_its_text(tmp_path, versions):
    code = GUESS.replace("deterministic = True", 'stop_tokens = ("?",)')
    desk = asyncio.run(play(tmp_path, game(tmp_path, code), lambda *_: "7?9", version=versions[1]))
    assert text_of(desk.done[1].tokens) == "1 to 9: 7?"
    assert desk.done[1].end is End.ENVIRONMENT


def test_records_of_calls_name_what_became_of_them(tmp_path, versions):
    def say(_: int, so_far: str) -> str:
        return "[x]" if not so_far else "[4]" if so_far.count("{") == 1 else "ok<eos>"

    desk = asyncio.run(play(tmp_path, tools(tmp_path, TOOL, "double"), say, version=versions[1]))
    calls = desk.done[1].episode.calls
    assert [(call.turn, call.status) for call in calls] == [(0, "malformed"), (1, "ok")]
    assert isinstance(calls[0], ToolCall)
    assert ids("]")[0] != EOS
