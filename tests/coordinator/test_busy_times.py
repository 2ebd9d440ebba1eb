from offbeat.coordinator.busy_times import BusyTimes


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_time_begins_with_the_first_work_and_ends_with_the_last_answer():
    clock, spans = Clock(), []
    busy = BusyTimes("generate", clock)
    busy.on_span = lambda who, what, start_s, end_s, **details: spans.append((who, what, start_s, end_s, details))
    busy.got_work("a")
    clock.now_s = 1.0
    busy.got_work("a")
    busy.answered("a", 3)
    clock.now_s = 2.0
    busy.answered("a")
    clock.now_s = 5.0
    busy.settle(holding=[])
    assert spans == [("a", "generate", 0.0, 2.0, {"answers": 4})]
    busy.settle(holding=[])
    assert len(spans) == 1


def test_who_goes_on_working_gets_times_end_to_end():
    clock, spans = Clock(), []
    busy = BusyTimes("generate", clock)
    busy.on_span = lambda who, what, start_s, end_s, **details: spans.append((who, start_s, end_s))
    busy.got_work("a")
    busy.got_work("idle")  # which hands its work back untouched
    for now_s in (2.0, 3.0):
        clock.now_s = now_s
        busy.settle(holding=["a"])
    assert spans == [("a", 0.0, 2.0), ("a", 2.0, 3.0)]


def test_who_leaves_is_forgotten_with_a_last_span():
    clock, spans = Clock(), []
    busy = BusyTimes("generate", clock)
    busy.on_span = lambda who, what, start_s, end_s, **details: spans.append((who, start_s, end_s))
    busy.got_work("a")
    clock.now_s = 1.0
    busy.answered("a")
    clock.now_s = 9.0
    busy.left("a")
    busy.left("a stranger")
    busy.settle(holding=["a"])
    assert spans == [("a", 0.0, 1.0)]
