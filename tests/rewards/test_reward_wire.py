"""Messages between the pool and its reward processes, as bytes in a pipe."""

import pytest

from offbeat.rewards.wire import HEAD, MARK, MAX_BYTES, Answers, Junk, RewardAnswer, frame, take_from_process

MESSAGES = [Answers([RewardAnswer(0, error="no")], last=False), Answers([RewardAnswer(1, error="none")], last=True)]


@pytest.mark.parametrize("size", [1, 3, len(MARK), HEAD.size, 1000])
def test_messages_arrive_whole_however_the_pipe_cuts_them(size):
    sent, buffer, found = b"".join(map(frame, MESSAGES)), bytearray(), []
    for start in range(0, len(sent), size):
        buffer += sent[start : start + size]
        found += take_from_process(buffer)
    assert found == MESSAGES
    assert not buffer


@pytest.mark.parametrize(
    "junk",
    [b"x" * len(MARK), HEAD.pack(MARK, MAX_BYTES + 1), HEAD.pack(MARK, 3) + b"{}!", frame(MESSAGES[0]) + b"printed"],
    ids=["not the mark", "too long", "not a message", "behind a message"],
)
def test_what_is_no_message_is_found_as_soon_as_it_is_there(junk):
    with pytest.raises(Junk):
        list(take_from_process(bytearray(junk)))
