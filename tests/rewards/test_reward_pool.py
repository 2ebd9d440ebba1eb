import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import asynccontextmanager

import numpy as np
import pytest
from living import is_alive
from support_files import SUPPORT

from offbeat.errors import DiskError, OffbeatError, UserError
from offbeat.rewards import guard
from offbeat.rewards.pool import RewardInput, RewardPool
from offbeat.rewards.process import MAX_LOG_BYTES
from offbeat.rewards.wire import HEAD, MARK, Answers, RewardAnswer, frame
from offbeat.trajectory import Reward

FILE = SUPPORT / "rewards_for_tests.py"
OBEY = f"{FILE}:obey"


def says(*responses):
    return [RewardInput(response=response) for response in responses]


@asynccontextmanager
async def opened(pool):
    try:
        yield pool
    finally:
        await pool.close()


def pool_of(tmp_path, reward=OBEY, processes=1, timeout_s=0.5):
    return opened(RewardPool(processes, timeout_s, {"r": reward}, tmp_path / "logs" / "rewards.log"))


def score(tmp_path, *responses, **options):
    async def run():
        async with pool_of(tmp_path, **options) as pool:
            return await pool.score("r", says(*responses))

    return asyncio.run(run())


def log_of(tmp_path):
    return (tmp_path / "logs" / "rewards.log").read_text()


def wait_until(condition, within_s=10.0):
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.02)


def test_results_come_in_the_order_of_the_batch(tmp_path):
    results = score(tmp_path, *(f"value {i}" for i in range(200)), processes=2)
    assert [result.value for result in results] == list(range(200))
    assert results[7].rewards == (Reward(7.0),)


def test_what_waited_behind_a_sample_that_took_the_process_down_is_judged_in_its_order(tmp_path):
    order = tmp_path / "order.txt"
    own = tmp_path / "own.py"
    own.write_text(
        "import os\n"
        "def judge(response):\n"
        f"    with open({str(order)!r}, 'a') as file:\n"
        "        file.write(response + '\\n')\n"
        "    if response == '2':\n"
        "        os._exit(3)\n"
        "    return 1.0\n"
    )
    results = score(tmp_path, *"0123456", reward=f"{own}:judge")
    assert [result.value for result in results] == [1.0, 1.0, None, 1.0, 1.0, 1.0, 1.0]
    judged = order.read_text().split()
    assert judged[judged.index("2") + 1 :][-4:] == [*"3456"]


def test_an_empty_batch_needs_no_process(tmp_path):
    assert score(tmp_path) == []


def test_a_raise_is_an_error_with_its_place_and_its_traceback_is_in_the_log(tmp_path):
    good, bad, quit_, after = score(tmp_path, "value 1", "raise an egg", "exit 3", "value 2")
    assert (good.value, after.value) == (1.0, 2.0)
    assert bad.value is None
    assert bad.error.startswith("raised: ValueError: cannot judge an egg (rewards_for_tests.py:")
    assert quit_.error.startswith("raised: SystemExit: 3")
    assert "Traceback" in log_of(tmp_path)
    assert "in raise_error" in log_of(tmp_path)


def test_a_sample_that_hangs_is_a_timeout_and_costs_nothing_else(tmp_path):
    results = score(tmp_path, *(f"value {i}" for i in range(5)), "hang", *(f"value {i}" for i in range(5, 20)))
    hung = results.pop(5)
    assert hung.value is None
    assert hung.error == "timeout: no reward within 0.5 s (reward.timeout_s)"
    assert [result.value for result in results] == list(range(20))


@pytest.mark.full
def test_several_that_hang_in_one_batch_are_each_found(tmp_path):
    results = score(tmp_path, "value 0", "hang", "value 2", "hang_in_c", "hang", "value 5")
    assert [result.value for result in results] == [0, None, 2, None, None, 5]
    assert all(result.error.startswith("timeout") for result in results if result.value is None)


@pytest.mark.full
def test_slow_samples_each_have_the_whole_deadline(tmp_path):
    assert [result.value for result in score(tmp_path, *["sleep 0.6"] * 4, timeout_s=1.2)] == [1.0] * 4


@pytest.mark.parametrize(
    "response, error",
    [
        ("value nan", "value: the reward returned nan; return a finite number"),
        ("value inf", "value: the reward returned inf; return a finite number"),
        ("text", "value: the reward returned 'high', a str; return a finite number"),
        ("nothing", "value: the reward returned None, a NoneType; return a finite number"),
        ("bad_part", "value: the reward returned nan as 'right'; return a finite number"),
        ("no_parts", "value: the reward returned an empty dict; return a number, or numbers by name"),
        ("big", "raised: OverflowError: int too large to convert to float"),
        ("value 1e200", "value: 'reward' is 1e+200; it must be -1e+06 to 1e+06"),
        ("value -1000002", "value: 'reward' is -1000002.0; it must be -1e+06 to 1e+06"),
    ],
)
def test_what_is_no_finite_number_is_an_error_that_names_it(tmp_path, response, error):
    (result,) = score(tmp_path, response)
    assert result.value is None
    assert result.error.startswith(error)


def test_a_bool_is_a_number_and_a_dict_adds_up(tmp_path):
    yes, parts = score(tmp_path, "true", "parts")
    assert yes.value == 1.0
    assert parts.value == 1.25
    assert parts.rewards == (Reward(0.25, "format"), Reward(1.0, "right"))


def test_a_process_that_crashes_fails_one_sample_and_is_replaced(tmp_path):
    results = score(tmp_path, "value 1", "crash", "value 2", "segfault", "value 3")
    assert [result.value for result in results] == [1, None, 2, None, 3]
    assert results[1].error == "crash: the reward process ended with status 3"
    assert results[3].error == "crash: the reward process was killed by SIGSEGV"


def test_a_process_that_is_killed_between_samples_costs_none(tmp_path):
    async def run():
        async with pool_of(tmp_path) as pool:
            for value in (1.0, 2.0):
                (found,) = await pool.score("r", says("pid"))
                os.kill(int(found.value), signal.SIGKILL)
                await asyncio.to_thread(wait_until, lambda pid=int(found.value): not is_alive(pid))
                assert [r.value for r in await pool.score("r", says(*[f"value {value}"] * 20))] == [value] * 20

    asyncio.run(run())


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="this system has no /proc")
def test_the_guard_of_a_reward_process_holds_neither_end_of_its_pipes(tmp_path):
    async def run():
        async with pool_of(tmp_path) as pool:
            (found,) = await pool.score("r", says("pid"))
            its_guard = guard.parents_by_proc()[int(found.value)]
            return [os.readlink(f"/proc/{its_guard}/fd/{stream}") for stream in (0, 1, 2)]

    assert asyncio.run(run()) == [os.devnull] * 3


def test_what_a_reward_prints_lands_in_the_log(tmp_path):
    results = score(tmp_path, "chatter", "value 2")
    assert [result.value for result in results] == [0.5, 2.0]
    for text in ("printed by a reward", "written past Python", "echoed by a process"):
        assert text in log_of(tmp_path)


def test_async_rewards_run_side_by_side(tmp_path):
    async def run():
        async with pool_of(tmp_path, f"{FILE}:obey_async", timeout_s=5) as pool:
            await pool.check({"r": RewardInput("value 1")})
            start_s = time.monotonic()
            results = await pool.score("r", says(*["wait 0.5"] * 40))
            return results, time.monotonic() - start_s

    results, seconds = asyncio.run(run())
    assert [result.value for result in results] == [1.0] * 40
    assert seconds < 10  # one after the other they would take 20 s


def test_async_rewards_hang_raise_crash_and_block_one_by_one(tmp_path):
    responses = ["value 1", "wait 60", "raise x", "own_timeout", "value 2", "crash", "value 3"]
    results = score(tmp_path, *responses, reward=f"{FILE}:obey_async")
    assert [result.value for result in results] == [1, None, None, None, 2, None, 3]
    assert results[1].error.startswith("timeout")
    assert results[3].error.startswith("raised: TimeoutError: the judge is down")
    assert results[5].error.startswith("crash")


@pytest.mark.full
def test_an_async_reward_that_blocks_its_loop_is_found(tmp_path):
    results = score(tmp_path, "value 1", "hang", "wait 0.01", reward=f"{FILE}:obey_async")
    assert [result.value for result in results] == [1, None, 1]
    assert results[1].error.startswith("timeout")


def test_a_function_from_python_is_a_reward_with_all_that_it_closes_over(tmp_path):
    bonus = 10

    def judge(response, tokens, info):
        return bonus + len(response) + sum(tokens) + info["extra"]

    async def run():
        async with pool_of(tmp_path, judge) as pool:
            return await pool.score("r", [RewardInput("abc", tokens=np.array([1, 2], np.int32), info={"extra": 0.5})])

    (result,) = asyncio.run(run())
    assert result.value == 16.5


def test_a_function_with_keyword_arguments_gets_all_there_is(tmp_path):
    async def run():
        async with pool_of(tmp_path, f"{FILE}:everything") as pool:
            sample = RewardInput("four", answer="two", prompt=[{"role": "user", "content": "?"}], info={}, tokens=[1])
            return await pool.score("r", [sample])

    (result,) = asyncio.run(run())
    assert {reward.name: reward.value for reward in result.rewards} == {
        "response": 4.0,
        "answer": 3.0,
        "prompt": 1.0,
        "info": 0.0,
        "tokens": 1.0,
        "final": 4.0,
        "messages": 1.0,
        "turns": 1.0,
        "state": 0.0,
        "claims": 0.0,
    }


def test_check_finds_what_is_wrong_before_training(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("def judge(response)\n    return 1\n")

    def complaint(reward, trial="value 1"):
        async def run():
            async with pool_of(tmp_path, reward) as pool:
                await pool.check({"r": RewardInput(trial)})

        with pytest.raises(UserError) as caught:
            asyncio.run(run())
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "no such reward; did you mean 'number'?" in complaint("nubmer")
    assert "has no function 'obay'; did you mean 'obey'?" in complaint(f"{FILE}:obay")
    assert "SyntaxError: expected ':' (broken.py:1)" in complaint(f"{broken}:judge")
    assert complaint(f"{FILE}:judge_without_asking").endswith("parameter 'solution'; did you mean 'answer'?")
    assert complaint(lambda completion: 1.0).endswith("parameter 'completion'; did you mean 'response'?")
    assert re.search(r"its trial failed: raised: ValueError.*; see \S+/rewards\.log$", complaint(OBEY, trial="raise x"))


def test_check_passes_a_good_reward_and_keeps_its_process(tmp_path):
    async def run():
        async with pool_of(tmp_path) as pool:
            await pool.check({"r": RewardInput("value 1")})
            before = await pool.score("r", says("pid"))
            after = await pool.score("r", says("pid"))
            assert before == after

    asyncio.run(run())


def test_a_slow_judge_keeps_only_its_own_process(tmp_path):
    async def run():
        async with opened(RewardPool(2, 60.0, {"slow": OBEY, "quick": OBEY}, tmp_path / "log")) as pool:
            slow = asyncio.create_task(pool.score("slow", says(*["sleep 30"] * 20)))
            await asyncio.sleep(0)
            async with asyncio.timeout(20):
                for _ in range(5):
                    results = await pool.score("quick", says(*["value 1"] * 50))
                    assert all(result.value == 1.0 for result in results)
            assert not slow.done()
            slow.cancel()

    asyncio.run(run())


def test_a_cancelled_call_leaves_the_pool_to_others(tmp_path):
    async def run():
        async with pool_of(tmp_path, timeout_s=1.0) as pool:
            await pool.check({"r": RewardInput("value 1")})
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await pool.score("r", says(*["sleep 0.5"] * 100))
            async with asyncio.timeout(20):  # the hundred that nobody waits for would take 50 s
                return await pool.score("r", says("value 4"))

    assert asyncio.run(run())[0].value == 4.0


def test_close_ends_a_call_under_way_and_kills_what_the_reward_started(tmp_path):
    notes = tmp_path / "pids"

    async def run():
        async with pool_of(tmp_path, timeout_s=60) as pool:
            call = asyncio.create_task(pool.score("r", says(f"child {notes}")))
            await asyncio.to_thread(wait_until, notes.exists)
        with pytest.raises(OffbeatError, match="closed"):
            await call
        with pytest.raises(OffbeatError, match="closed"):
            await pool.score("r", says("value 1"))

    asyncio.run(run())
    pids = [int(pid) for pid in notes.read_text().split()]
    wait_until(lambda: not any(map(is_alive, pids)))


def test_a_timeout_kills_what_the_reward_started(tmp_path):
    notes = tmp_path / "pids"
    (result,) = score(tmp_path, f"child {notes}", timeout_s=2.0)
    assert result.error.startswith("timeout")
    pids = [int(pid) for pid in notes.read_text().split()]
    wait_until(lambda: not any(map(is_alive, pids)))


OWNER = """
import asyncio, sys
from pathlib import Path
from offbeat.rewards.pool import RewardInput, RewardPool

async def main(reward, response, log):
    pool = RewardPool(1, 600.0, {"r": reward}, Path(log))
    (result,) = await pool.score("r", [RewardInput("pid")])
    print(int(result.value), flush=True)
    await pool.score("r", [RewardInput(response)])

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("doing", ["hang_in_c", "child", "daemon"])
def test_no_process_survives_an_owner_that_is_sigkilled(tmp_path, doing):
    notes, is_in_c = tmp_path / "pids", doing == "hang_in_c"
    response = {"hang_in_c": doing, "child": f"child {notes}", "daemon": f"daemon {notes} hang"}[doing]
    command = [sys.executable, "-c", OWNER, OBEY, response, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_path()) as owner:
        pids = {int(owner.stdout.readline())}
        if is_in_c:
            time.sleep(0.3)
        else:
            wait_until(notes.exists, within_s=20)
            pids |= {int(pid) for pid in notes.read_text().split()}
        assert all(map(is_alive, pids))
        owner.kill()
        wait_until(lambda: not any(map(is_alive, pids)))


def test_a_process_that_cannot_start_again_fails_its_samples_and_says_why(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import os\n\ndef judge(response):\n    return os._exit(1) if response == 'crash' else 1.0\n")

    async def run():
        async with pool_of(tmp_path, f"{file}:judge") as pool:
            await pool.check()
            file.unlink()
            return await pool.score("r", says("a", "crash", "b"))

    good, crashed, late = asyncio.run(run())
    assert good.value == 1.0 or good.error.startswith("start: ")  # it may have been on its way when the process ended
    assert crashed.error.startswith("crash")
    assert late.error.startswith("start: task.reward = ")


def test_a_reward_that_kills_its_parent_costs_its_own_sample(tmp_path):
    results = score(tmp_path, "value 1", "kill_parent", "value 2", timeout_s=30.0)
    assert [result.value for result in results] == [1.0, None, 2.0]
    assert results[1].error.startswith("crash: the reward process was killed by SIGKILL")


@pytest.mark.parametrize("what", [pytest.param("close 3 1024", marks=pytest.mark.full), "close 0 1024"])
def test_a_reward_that_closes_the_pools_pipe_fails_and_no_other_sample_does(tmp_path, what):
    samples = [*(f"value {i}" for i in range(3)), what, *(f"value {i}" for i in range(3, 6))]
    results = score(tmp_path, *samples, timeout_s=10.0)
    harmed = results.pop(3)
    assert harmed.error == "crash: the reward closed or replaced a descriptor of the reward process"
    assert [result.value for result in results] == list(range(6))


@pytest.mark.parametrize("what", ["close 0 3", "close_streams", "overwrite_streams {}"])
def test_a_reward_that_closes_or_replaces_its_streams_leaves_them_whole_for_the_next(tmp_path, what):
    mine = tmp_path / "mine.txt"
    results = score(tmp_path, what.format(mine), "print all is well", "raise an egg", timeout_s=10.0)
    assert [result.value for result in results] == [1.0, 1.0, None]
    assert "all is well" in log_of(tmp_path)
    assert "ValueError: cannot judge an egg" in log_of(tmp_path)
    assert not mine.exists() or mine.read_text() == ""


@pytest.mark.parametrize(
    "junk",
    [
        pytest.param("ff", id="one byte"),
        pytest.param("00" * 64, id="zeros", marks=pytest.mark.full),
        pytest.param(HEAD.pack(MARK, 2**32 - 1).hex(), id="a frame of four gigabytes", marks=pytest.mark.full),
        pytest.param((HEAD.pack(MARK, 2) + bytes(2)).hex(), id="a frame of nothing", marks=pytest.mark.full),
        pytest.param(frame(Answers([RewardAnswer(77, [(1.0, "reward", -1)])], last=False)).hex(), id="a forged answer"),
    ],
)
def test_junk_in_the_pools_pipe_fails_the_sample_that_wrote_it_and_no_other(tmp_path, junk):
    samples = [*(f"value {i}" for i in range(3)), f"scribble {junk}", *(f"value {i}" for i in range(3, 6))]
    results = score(tmp_path, *samples, timeout_s=10.0)
    assert results.pop(3).error == "crash: the reward wrote into the pipe of the reward process"
    assert [result.value for result in results] == list(range(6))


def test_a_flood_of_words_costs_a_bounded_part_of_the_disk(tmp_path):
    results = score(tmp_path, "print the beginning", "flood 80", "print the end", timeout_s=60.0)
    assert [result.value for result in results] == [1.0] * 3
    kept = list((tmp_path / "logs").iterdir())
    assert sum(file.stat().st_size for file in kept) <= 2 * MAX_LOG_BYTES + (1 << 20)
    assert log_of(tmp_path).endswith("the end\n")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process that left its session cannot be found")
@pytest.mark.parametrize(
    "then",
    [pytest.param("value", marks=pytest.mark.full), "hang", "crash", pytest.param("segfault", marks=pytest.mark.full)],
)
def test_a_daemon_in_a_session_of_its_own_ends_with_the_process_that_left_it(tmp_path, then):
    notes = tmp_path / "pid"
    (result,) = score(tmp_path, f"daemon {notes} {then}", timeout_s=2.0)
    kinds = {"value": None, "hang": "timeout", "crash": "crash", "segfault": "crash"}
    assert (result.error or "").partition(":")[0] == (kinds[then] or "")
    wait_until(lambda: not is_alive(int(notes.read_text())))


def test_descendants_are_found_without_proc_too():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        assert guard.parents_by_ps()[child.pid] == os.getpid()
        if sys.platform == "linux":
            assert guard.parents_by_proc()[child.pid] == os.getpid()
        assert child.pid in guard.descendants(os.getpid())
    finally:
        child.kill()
        child.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process needs a temporary file")
def test_a_process_needs_no_room_among_the_temporary_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    assert score(tmp_path, "value 1")[0].value == 1.0


def test_a_log_that_cannot_be_written_is_told_in_one_line(tmp_path):
    (tmp_path / "logs").write_text("in its way")
    with pytest.raises(DiskError, match=r"rewards\.log: cannot be written: .*, then resume the run"):
        score(tmp_path, "value 1")


def test_a_reward_process_imports_nothing_heavy():
    code = "import sys, offbeat.rewards.child as _; print({'torch', 'pydantic', 'numpy'} & {*sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_path())
    assert found.stdout.strip() == "set()"


def _path():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
