"""The adapter against a server that speaks OpenEnv's protocol, and one that breaks it."""

import asyncio
import json
import os
import socket
import subprocess

import pytest
from aiohttp import WSMsgType, web

from offbeat.environments.adapters import openenv
from offbeat.environments.protocol import Done, EpisodeFailed, Reply, Turn


async def serve(connection, secrets):
    """Guess a number: an observation with a text, a reward and whether it is over."""
    secret = None

    async def say(kind, data):
        await connection.send_str(json.dumps({"type": kind, "data": data}))

    async for message in connection:
        if message.type is not WSMsgType.TEXT:
            return
        asked = json.loads(message.data)
        if asked["type"] == "reset":
            secret = asked["data"]["seed"] % 10
            secrets.append(secret)
            await say("observation", {"observation": {"message": "Guess.", "num": 0}, "reward": None, "done": False})
        elif asked["type"] == "step":
            guess = asked["data"].get("message")
            if guess == "die":
                return
            if guess == "junk":
                await connection.send_str("]")
            elif guess == "hang":
                continue
            elif guess is None:
                await say("error", {"message": "message: field\nrequired", "code": "VALIDATION_ERROR"})
            elif guess == "fail":
                await say("error", {"message": "it broke", "code": "EXECUTION_ERROR"})
            else:
                won = int(guess) == secret
                told = {"message": "yes" if won else "no", "num": 1}
                await say("observation", {"observation": told, "reward": 1.0 if won else -0.1, "done": won})
        else:
            return


def with_server(play):
    """Runs `play(url, secrets)` beside a server."""

    async def run():
        secrets = []

        async def handle(request):
            connection = web.WebSocketResponse()
            await connection.prepare(request)
            await serve(connection, secrets)
            return connection

        app = web.Application()
        app.router.add_get("/ws", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            return await play(f"http://127.0.0.1:{port}", secrets)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def turn(text):
    return Turn(0, text)


def test_an_episode_with_rewards_of_turns_and_of_its_end():
    async def play(url, secrets):
        made = openenv.environment(url)(action_key="message", observation_key="message")
        found = [await made.begin({}, 7), await made.step(turn(" 3 ")), await made.step(turn("7"))]
        await made.close()
        return found

    begun, wrong, right = with_server(play)
    assert begun == "Guess."
    assert wrong == Reply("no", -0.1)
    assert right == Done(1.0, {"observation": "yes"})


def test_actions_may_be_json_and_observations_all_their_fields():
    async def play(url, secrets):
        made = openenv.environment(url + "/ws")()
        begun = await made.begin({}, 7)
        with pytest.raises(ValueError, match="an action must be a JSON object"):
            await made.step(turn("7"))
        with pytest.raises(ValueError, match=r"message: field required"):
            await made.step(turn("{}"))
        found = await made.step(turn('{"message": "7"}'))
        await made.close()
        return begun, found

    begun, found = with_server(play)
    assert json.loads(begun) == {"message": "Guess.", "num": 0}
    assert found.reward == 1.0


def test_episodes_side_by_side_have_connections_of_their_own():
    async def play(url, secrets):
        made = [openenv.environment(url)(action_key="message") for _ in range(16)]
        await asyncio.gather(*(one.begin({}, seed) for seed, one in enumerate(made)))
        found = await asyncio.gather(*(one.step(turn(str(seed % 10))) for seed, one in enumerate(made)))
        await asyncio.gather(*(one.close() for one in made))
        return found, secrets

    found, secrets = with_server(play)
    assert [done.reward for done in found] == [1.0] * 16
    assert sorted(secrets) == sorted(seed % 10 for seed in range(16))


@pytest.mark.parametrize(
    "guess, told",
    [
        ("die", "the server has closed the connection at step"),
        ("junk", "what it answers to step is no observation: ']'"),
        ("hang", "no answer to step within 0.5 s"),
        ("fail", "error at step: it broke"),
    ],
)
def test_a_server_that_breaks_in_the_middle_fails_that_episode_alone(guess, told):
    async def play(url, secrets):
        made, other = (openenv.environment(url)(action_key="message", timeout_s=0.5) for _ in range(2))
        await made.begin({}, 1)
        await other.begin({}, 2)
        with pytest.raises(EpisodeFailed) as caught:
            await made.step(turn(guess))
        await made.close()
        again = openenv.environment(url)(action_key="message")
        begun = await again.begin({}, 3), await other.step(turn("2"))
        await again.close()
        await other.close()
        return str(caught.value), url, begun

    message, url, (begun, done) = with_server(play)
    assert message.startswith(f"{url.removesuffix('/')}/ws: {told}")
    assert "\n" not in message
    assert json.loads(begun)["message"] == "Guess."
    assert done.reward == 1.0


def test_a_server_that_is_not_there_fails_the_episode():
    async def begin():
        made = openenv.environment("http://127.0.0.1:1")()
        with pytest.raises(EpisodeFailed, match=r"http://127.0.0.1:1/ws: no connection"):
            await made.begin({}, 0)
        await made.close()

    asyncio.run(begin())


REAL = """
import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Say(Action):
    message: str


class Told(Observation):
    message: str = ""


class Guess(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **options):
        self.secret = (seed or 0) % 10
        return Told(message="Guess.")

    def step(self, action, timeout_s=None, **options):
        won = int(action.message) == self.secret
        return Told(message="yes" if won else "no", reward=1.0 if won else -0.1, done=won)

    @property
    def state(self):
        return State()


uvicorn.run(create_fastapi_app(Guess, Say, Told, max_concurrent_envs=8), port=int(sys.argv[1]), log_level="warning")
"""


@pytest.mark.full
@pytest.mark.skipif("OFFBEAT_OPENENV_PYTHON" not in os.environ, reason="OFFBEAT_OPENENV_PYTHON is not set")
def test_a_real_server_of_the_package_openenv_until_it_is_killed(tmp_path):
    file = tmp_path / "server.py"
    file.write_text(REAL)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([os.environ["OFFBEAT_OPENENV_PYTHON"], str(file), str(port)])
    kind = openenv.environment(f"http://127.0.0.1:{port}")

    async def begun():
        for _ in range(100):
            made = kind(action_key="message", observation_key="message")
            try:
                assert await made.begin({}, 7) == "Guess."
                return made
            except EpisodeFailed:
                await asyncio.sleep(1.0)
        raise AssertionError("the server has not started")

    async def play():
        one, other = await begun(), await begun()
        assert await one.step(turn("3")) == Reply("no", -0.1)
        assert await one.step(turn("7")) == Done(1.0, {"observation": "yes"})
        server.kill()
        server.wait()
        with pytest.raises(EpisodeFailed, match="at step"):
            await other.step(turn("7"))
        await one.close()
        await other.close()

    try:
        asyncio.run(play())
    finally:
        server.kill()
        server.wait()
