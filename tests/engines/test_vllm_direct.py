"""vLLM in a worker's own process: frames, the connection, and what the dialect makes of both."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_process import ScriptedProcess, scripted_process, whole

from offbeat.engines.dialect import Call, Chunk, Span
from offbeat.engines.http_calls import ServerAway
from offbeat.engines.protocol import EngineError, Finish, KvMode
from offbeat.engines.vllm.direct import Channel, DirectDialect
from offbeat.engines.vllm.inside import offbeat_frames
from offbeat.engines.vllm.inside.offbeat_frames import Abort, Answer, Ask, Frames, Generate, Part, Parts, frame
from offbeat.trajectory import Sampling
from offbeat.weights.version import Version


def call(id: str = "c") -> Call:
    return Call(id, [1, 2, 3], seed=5, sampling=Sampling(max_new_tokens=4, stop_token_ids=[9]), salt="s", label="a")


def generation(id: str) -> Generate:
    return Generate(id, [1], 0, 1, 1.0, 1.0, 0, 0.0, [], "s")


async def chunks_of(dialect: DirectDialect, asked: Call) -> list[Chunk]:
    async with aclosing(dialect.generate(asked)) as chunks:
        return [chunk async for chunk in chunks]


# Frames


@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(1, 30), min_size=1, max_size=8))
def test_frames_come_out_as_they_went_in_however_the_socket_cuts_them(contents: list[bytes], sizes: list[int]):
    answers = [Answer(number, content) for number, content in enumerate(contents)]
    stream = b"".join(map(frame, answers))
    frames, bodies, at = Frames(), [], 0
    while at < len(stream):
        size = sizes[at % len(sizes)]
        bodies += frames.feed(stream[at : at + size])
        at += size
    assert [offbeat_frames.from_engine.decode(body) for body in bodies] == answers


def test_a_frame_that_no_one_can_mean_is_refused_by_its_length():
    with pytest.raises(ValueError, match="a frame of 4294967295 bytes"):
        list(Frames().feed(b"\xff\xff\xff\xff"))


# The connection


def test_the_parts_of_two_answers_reach_each_its_own_caller(tmp_path):
    def script(message):
        if isinstance(message, Generate) and message.id == "b":  # the last one to come; both are answered in turns
            yield Parts([Part("a", [1], [-1.0]), Part("b", [2], [-2.0], num_cached=3)])
            yield Parts([Part("b", [4], [-4.0], "stop", [("v", 0, 2)]), Part("nobody", [5], [-5.0])])
            yield Parts([Part("a", [3], [-3.0], "length", [("v", 0, 2)])])
        yield from ()

    async def scenario():
        async with scripted_process(tmp_path, script) as process:
            dialect = DirectDialect(Channel(process.url))
            first = asyncio.create_task(chunks_of(dialect, call("a")))
            await asyncio.sleep(0)
            answers = await asyncio.gather(first, chunks_of(dialect, call("b")))
            await dialect.close()
            return answers

    first, second = asyncio.run(scenario())
    assert [(list(c.tokens), list(c.logprobs), c.finish) for c in first] == [
        ([1], [-1.0], None),
        ([3], [-3.0], Finish.LENGTH),
    ]
    assert [(list(c.tokens), c.num_cached, c.finish) for c in second] == [([2], 3, None), ([4], None, Finish.STOP)]
    assert second[-1].spans == [Span("v", 0, 2)]


def test_a_call_that_its_caller_leaves_is_ended_in_the_engine_and_one_that_is_over_is_not(tmp_path):
    def script(message):
        if isinstance(message, Generate):
            yield whole(message) if message.id == "over" else Parts([Part(message.id, [1], [-1.0])])

    async def scenario():
        async with scripted_process(tmp_path, script) as process:
            dialect = DirectDialect(Channel(process.url))
            await chunks_of(dialect, call("over"))
            async with aclosing(dialect.generate(call("left"))) as chunks:
                await anext(chunks)
            await dialect.label()  # messages arrive in order
            await dialect.close()
            return process.received

    received = asyncio.run(scenario())
    assert [message.ids for message in received if isinstance(message, Abort)] == [["left"]]


def test_a_process_that_ends_fails_everything_that_waits_and_all_that_comes_later(tmp_path):
    async def scenario(process: ScriptedProcess, channel: Channel) -> None:
        dialect = DirectDialect(channel)
        running = asyncio.create_task(chunks_of(dialect, call()))
        asked = asyncio.create_task(channel.ask("slow"))
        await asyncio.sleep(0.1)  # until the process has both
        process.end()
        for waiting in (running, asked, dialect.label(), chunks_of(dialect, call("later")), dialect.abort(["c"])):
            with pytest.raises(ServerAway, match="does not answer any more: it has ended") as caught:
                await waiting
            assert caught.value.is_refused, "nothing comes back at this socket"
        await channel.close()

    async def run() -> None:
        async with scripted_process(tmp_path, lambda message: [Parts([])]) as process:
            await asyncio.wait_for(scenario(process, Channel(process.url)), 30)

    asyncio.run(run())


def test_a_socket_at_which_nobody_listens_is_told_by_name(tmp_path):
    url = f"unix:{tmp_path / 'engine'}"

    async def scenario() -> None:
        with pytest.raises(ServerAway, match=rf"{url}: vLLM's process cannot be reached: .*No such file") as caught:
            await Channel(url).ask("label")
        assert caught.value.is_refused

    asyncio.run(scenario())


def test_an_answer_that_does_not_come_in_time_is_missed_and_one_that_comes_late_is_ignored(tmp_path):
    async def scenario() -> None:
        async with scripted_process(tmp_path, lambda message: [Parts([])]) as process:
            channel = Channel(process.url)
            with pytest.raises(ServerAway, match=r"gave no answer within 0\.05 s to 'label'"):
                await channel.ask("label", within_s=0.05)
            (late,) = process.received
            assert isinstance(late, Ask)
            process.script = lambda message: [Answer(message.number, "b")]
            process.say(Answer(late.number, "a"))
            assert await channel.ask("label") == "b"
            await channel.close()

    asyncio.run(scenario())


# The dialect


def test_what_a_process_is_and_can_do_is_read_from_its_answer(tmp_path):
    async def scenario():
        async with scripted_process(tmp_path) as process:
            dialect = DirectDialect(Channel(process.url))
            facts = await dialect.probe()
            await dialect.close()
            return facts, process.asked

    facts, asked = asyncio.run(scenario())
    assert (facts.fingerprint, facts.max_context_tokens) == ("vllm 0.26.0 bfloat16", 2048)
    assert (facts.has_spans, facts.has_labels, facts.kv_modes) == (True, True, frozenset(KvMode))
    assert ("resume", {}) in asked, "an engine before may have been cut off in a load"


def test_log_probs_before_temperature_are_refused_with_the_way_out(tmp_path):
    async def scenario() -> None:
        async with scripted_process(tmp_path) as process:
            process.facts["logprobs_mode"] = "raw_logprobs"
            channel = Channel(process.url)
            with pytest.raises(EngineError, match=r"^engine\.arguments: --logprobs-mode raw_logprobs .* leave this"):
                await DirectDialect(channel).probe()
            await channel.close()

    asyncio.run(scenario())


def test_a_call_carries_all_that_decides_its_answer(tmp_path):
    async def scenario():
        script = lambda message: [whole(message)] if isinstance(message, Generate) else []  # noqa: E731
        async with scripted_process(tmp_path, script) as process:
            dialect = DirectDialect(Channel(process.url))
            await chunks_of(dialect, call())
            await dialect.close()
            return process.received

    (message,) = asyncio.run(scenario())
    assert message == Generate("c", [1, 2, 3], 5, 4, 1.0, 1.0, 0, 0.0, [9], "s")


@pytest.mark.parametrize(
    ("part", "told"),
    [
        (Part("c", error="ValueError: too long"), "ValueError: too long"),
        (Part("c", finish="repetition"), "ended an answer for an unknown reason: repetition"),
    ],
)
def test_an_answer_that_is_none_fails_its_request_and_says_why(tmp_path, part, told):
    async def scenario() -> None:
        script = lambda message: [Parts([part])] if isinstance(message, Generate) else []  # noqa: E731
        async with scripted_process(tmp_path, script) as process:
            dialect = DirectDialect(Channel(process.url))
            with pytest.raises(EngineError, match=told):
                await chunks_of(dialect, call())
            await dialect.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("is_on_cpu", [False, True])
def test_weights_are_named_only_after_they_have_been_read(tmp_path, is_on_cpu):
    folder = tmp_path / "3"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    version = Version(3, step=3, parent=None, digest="3", path=folder)

    async def scenario():
        async with scripted_process(tmp_path) as process:
            process.facts["is_on_cpu"] = is_on_cpu
            dialect = DirectDialect(Channel(process.url))
            await dialect.probe()
            await dialect.stage(version)
            del process.received[:]
            await dialect.pause(keeps_kv=True)
            await dialect.load(version, "3-x")
            await dialect.close()
            return process.asked

    paused, read, *packed, named = asyncio.run(scenario())
    assert paused == ("pause", {"keeps_kv": True})
    assert (read[0], read[1]["method"]) == ("call", "reload_weights")
    assert [arguments["method"] for _, arguments in packed] == (["offbeat_pack_head"] if is_on_cpu else [])
    assert named == ("rename", {"label": "3-x"})
    assert list(tmp_path.glob(".3.served-*")) == [], "the links that vLLM read are gone"
