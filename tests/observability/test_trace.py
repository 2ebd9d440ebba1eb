import asyncio
import json
import threading
import time

import pytest

from offbeat.observability.trace import Trace


@pytest.fixture
def trace(tmp_path):
    made = Trace(tmp_path / "trace.json")
    yield made
    made.close()


def events(path) -> list[dict]:
    """Reads a trace as viewers do: its closing bracket may be missing."""
    text = path.read_text().rstrip()
    return json.loads(text if text.endswith("]") else text.rstrip(",") + "]")


def spans(path) -> list[dict]:
    return [event for event in events(path) if event["ph"] != "M"]


def test_seconds_are_summed_by_name_and_handed_out_once(trace):
    for _ in range(3):
        with trace.span("train"):
            pass
    with pytest.raises(KeyError), trace.span("publish"):
        raise KeyError  # a span that fails still took its time
    assert set(trace.spans_since_last()) == {"train", "publish"}
    assert trace.spans_since_last() == {}


def test_the_file_is_a_trace_at_any_moment(trace, tmp_path):
    with trace.span("step", step=3), trace.span("train"):
        pass
    trace.flush()
    inner, outer = spans(tmp_path / "trace.json")
    assert (inner["name"], outer["name"], outer["args"]) == ("train", "step", {"step": 3})
    assert inner["tid"] == outer["tid"]
    assert outer["ts"] <= inner["ts"] <= inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1


def test_spans_that_run_at_the_same_time_get_lanes_of_their_own(trace, tmp_path):
    async def work(name: str, begun: asyncio.Barrier) -> None:
        with trace.span(name):
            await begun.wait()

    async def main() -> None:
        with trace.span("step"):
            begun = asyncio.Barrier(2)
            await asyncio.gather(work("generate", begun), work("reward", begun), asyncio.to_thread(in_thread))

    def in_thread() -> None:
        with trace.span("train"):
            pass

    asyncio.run(main())
    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    trace.flush()
    found = spans(tmp_path / "trace.json")
    together = [span for span in found if span["name"] in ("step", "generate", "reward")]
    assert len({span["tid"] for span in together}) == 3
    assert max(span["tid"] for span in found) <= 4  # lanes are used again


def test_a_closed_trace_is_json_and_a_resume_goes_on_with_it(tmp_path):
    path = tmp_path / "trace.json"
    Trace(path).close()
    assert json.loads(path.read_text()) == []
    for name in ("first", "second"):
        trace = Trace(path)
        with trace.span(name):
            pass
        trace.close()
        assert json.loads(path.read_text())[-1]["name"] == name
    assert [span["name"] for span in spans(path)] == ["first", "second"]


def test_spans_that_others_report_have_a_track_by_name(trace, tmp_path):
    with trace.span("train"):
        pass
    now_s = time.monotonic()
    trace.record("worker a", "generate", now_s - 2.0, now_s - 0.5, answers=4)
    trace.record("rewards", "reward", now_s - 1.0, now_s)
    trace.record("worker a", "generate", now_s - 0.5, now_s, answers=2)
    trace.flush()
    names = {event["tid"]: event["args"]["name"] for event in events(tmp_path / "trace.json") if event["ph"] == "M"}
    found = [(names[span["tid"]], span["name"]) for span in spans(tmp_path / "trace.json")]
    generate = ("worker a", "generate")
    assert found == [("trainer", "train"), generate, ("rewards", "reward"), generate]
    _, first, _, second = spans(tmp_path / "trace.json")
    assert (first["dur"], first["args"]) == (1_500_000.0, {"answers": 4})
    assert first["ts"] + first["dur"] == pytest.approx(second["ts"], abs=1)
    assert trace.spans_since_last().keys() == {"train"}


def test_a_trace_goes_on_after_a_kill_and_stops_when_full(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text('[\n{"name": "a", "ph": "X"},\n{"name": "b", "p')
    trace = Trace(path, max_bytes=700)
    for _ in range(20):
        with trace.span("c"):
            pass
    trace.close()
    names = [span["name"] for span in spans(path)]
    assert names[:2] == ["a", "c"]
    assert names[-1] == "the trace is full"
    assert path.stat().st_size < 1000
    assert trace.spans_since_last()["c"] > 0
