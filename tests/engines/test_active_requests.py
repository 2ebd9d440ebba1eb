"""A request inside a server: any mixture of chunks, loads, moves and broken connections ends in segments without a gap,
each with the version and the oldest KV that its tokens came from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from offbeat.engines.dialect import Chunk, Span
from offbeat.engines.protocol import EngineDied, EngineError, KvMode, Request
from offbeat.engines.server_engine import ActiveRequest, LoadedVersion
from offbeat.trajectory import Sampling

PROMPT = np.arange(1, 6)


def begun(kv: KvMode = KvMode.SAME, kv_lag: int = 0, position: int = 0) -> ActiveRequest:
    request = Request("r", PROMPT, 3, Sampling(max_new_tokens=100), position, kv, kv_lag)
    running = ActiveRequest(request, "w", "engine")
    running.begin(LoadedVersion(0, "0-a"), "life")
    return running


def chunk(*tokens: int, spans: tuple[Span, ...] = ()) -> Chunk:
    return Chunk(tokens, [-float(token) for token in tokens], None, spans)


class ServerWithSpans(RuleBasedStateMachine):
    """Plays a server that tells spans; the truth is kept per token beside it."""

    @initialize(kv=st.sampled_from([KvMode.SAME, KvMode.STALE]), kv_lag=st.integers(0, 3), position=st.integers(0, 4))
    def start(self, kv: KvMode, kv_lag: int, position: int) -> None:
        self.running = begun(kv, kv_lag, position)
        self.num_loads, self.number, self.kv_number = 0, 0, 0
        self.truth: list[tuple[int, int, int]] = []
        """Of each token that counts: itself, its version, the oldest KV."""
        self.inside: list[tuple[int, int, int]] = []
        self.labels: list[str] = []
        self.label = "0-a"

    @rule(num_tokens=st.integers(1, 5))
    def sample(self, num_tokens: int) -> None:
        tokens = [1 + (len(self.truth) + len(self.inside) + i) % 90 for i in range(num_tokens)]
        if len(self.truth) + len(self.inside) + num_tokens < 100:
            self.running.take(chunk(*tokens))
            self.inside += [(token, self.number, self.kv_number) for token in tokens]
            self.labels += [self.label] * num_tokens

    @rule(jump=st.integers(1, 2))
    def load(self, jump: int) -> None:
        self.num_loads += 1
        self.number += jump
        keeps = self.running.may_keep_kv(self.number)
        request = self.running.request
        may = request.kv is KvMode.STALE and self.number - self.kv_number <= request.kv_lag and bool(self.inside)
        assert keeps == may
        self.label = f"{self.number}-{self.num_loads}"
        self.running.load(LoadedVersion(self.number, self.label), keeps_kv=keeps)
        self.kv_number = self.kv_number if keeps else self.number

    @rule()
    def end_and_begin_again(self) -> None:
        self.running.take(chunk(spans=self.spans()))
        self.running.end(has_spans=True)
        self.truth += self.inside
        self.begin_again()

    @rule()
    def break_off(self) -> None:
        is_certain = len(set(self.labels)) <= 1 and self.num_inside_loads == 0
        self.running.break_off()
        if is_certain:
            self.truth += self.inside
        self.begin_again()

    @property
    def num_inside_loads(self) -> int:
        return len(self.running._loaded) - 1

    def begin_again(self) -> None:
        assert self.running.call is None
        before = self.running.num_calls
        self.running.begin(LoadedVersion(self.number, self.label), "life")
        assert self.running.call is not None
        assert self.running.call.tokens == [*PROMPT, *(token for token, _, _ in self.truth)]
        assert self.running.call.sampling.max_new_tokens == 100 - len(self.truth)
        assert self.running.num_calls == before + 1
        self.inside, self.labels, self.kv_number = [], [], self.number

    def spans(self) -> tuple[Span, ...]:
        found: list[Span] = []
        for at, label in enumerate(self.labels):
            if found and found[-1].label == label:
                found[-1] = Span(label, found[-1].start, at + 1)
            else:
                found.append(Span(label, at, at + 1))
        return tuple(found)

    @invariant()
    def segments_tell_the_truth(self) -> None:
        told = []
        at = self.running.request.position
        for segment in self.running.segments:
            assert segment.start == at
            at = segment.end
            assert segment.logprobs is not None
            np.testing.assert_array_equal(segment.logprobs, -segment.tokens.astype(np.float32))
            told += [(int(token), segment.version, segment.kv_version) for token in segment.tokens]
        assert told == self.truth


TestServerWithSpans = ServerWithSpans.TestCase


def test_a_continuation_has_another_seed_and_an_id_of_its_own():
    running = begun()
    first = running.call
    running.take(chunk(7, 8))
    running.end(has_spans=False)
    second = running.begin(LoadedVersion(1, "1-a"), "life")
    assert first is not None
    assert (first.seed, first.id, first.salt) != (second.seed, second.id, second.salt)
    assert first.seed != second.seed
    assert first.id != second.id


def test_requests_share_a_prefix_within_one_load_and_a_refilled_one_with_nobody():
    salts = [begun(kv).call.salt for kv in (KvMode.SAME, KvMode.STALE, KvMode.REFILL)]
    assert salts[0] == salts[1] != salts[2]
    later = begun()
    later.end(has_spans=False)
    assert later.begin(LoadedVersion(0, "0-b"), "life").salt != salts[0]


@pytest.mark.parametrize(
    ("spans", "told"),
    [
        ([Span("0-a", 0, 2)], "end at token 2, but it sent 3 tokens"),
        ([Span("0-a", 1, 3)], "leave a gap or overlap at token 0"),
        ([Span("0-a", 0, 2), Span("0-a", 1, 3)], "leave a gap or overlap at token 2"),
        ([], "end at token 0, but it sent 3 tokens"),
    ],
)
def test_spans_that_do_not_cover_the_answer_are_refused_and_nothing_is_taken_over(spans, told):
    running = begun()
    running.take(chunk(1, 2, 3, spans=tuple(spans)))
    with pytest.raises(EngineError, match=told):
        running.end(has_spans=True)
    assert running.segments == []


def test_tokens_of_weights_that_nobody_here_loaded_end_the_engine():
    running = begun()
    running.take(chunk(1, spans=(Span("theirs", 0, 1),)))
    with pytest.raises(EngineDied, match="'theirs'"):
        running.end(has_spans=True)


def test_a_token_without_its_logprob_is_refused():
    with pytest.raises(EngineError, match="2 tokens but 1 log-probs"):
        begun().take(Chunk([1, 2], [-1.0]))
