"""Ranks find each other, and name one that dies, hangs or never comes."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from gangs import Started, environment_of, free_port, run_gang

from offbeat.errors import UserError
from offbeat.trainer import ranks
from offbeat.trainer.ranks import LOST, RankLost, RankPlace, meet, tell, told


def tell_each_other(gang):
    items = [(place, {"own": torch.tensor([place]).numpy()}) for place in range(gang.rank, 5, gang.size)]
    merged = gang.merge(items)
    return (
        gang.gather(f"rank {gang.rank}".encode() * gang.rank),
        [(place, int(found["own"][0])) for place, found in merged],
        gang.agree("is ill" if gang.rank == 1 else ""),
    )


def test_every_rank_learns_what_all_ranks_say():
    for heard, merged, problems in run_gang(3, tell_each_other):
        assert heard == [b"", b"rank 1", b"rank 2rank 2"]
        assert merged == [(i, i) for i in range(5)]
        assert problems == ["rank 1: is ill"]


def obey(gang):
    if gang.rank == 0:
        gang.order("first", b"body")
        gang.order("second")
        return None
    return [gang.next_order(), gang.next_order()]


def test_orders_come_in_order():
    assert run_gang(3, obey)[1:] == [[("first", b"body"), ("second", b"")]] * 2


def wait_for_orders(gang, ready):
    (ready / str(gang.rank)).touch()
    if gang.rank == 0:
        time.sleep(60)
    return gang.next_order()


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_dies_or_hangs_while_others_wait_is_named(tmp_path, number, lost):
    gang = Started(3, wait_for_orders, tmp_path, folder=tmp_path, lost_after_s=2.0)
    until = time.monotonic() + 60
    while len([file for file in tmp_path.iterdir() if file.name in "012"]) < 3 and time.monotonic() < until:
        time.sleep(0.05)
    began_s, pid = time.monotonic(), gang.ranks[lost].pid
    os.kill(pid, number)
    others = [rank for rank in range(3) if rank != lost]
    for rank in others:
        gang.ranks[rank].wait(20)
    waited_s = time.monotonic() - began_s
    statuses = [gang.ranks[rank].returncode for rank in others]
    gang.ended(1.0)
    assert statuses == [LOST, LOST], [gang.log(rank) for rank in others]
    assert waited_s < 10
    finder = others[0] if lost else 1  # rank 0 finds another; each other finds rank 0
    how = "has ended" if number == signal.SIGKILL else f"has not answered for {2 if lost else 4} s"
    assert f"rank {lost} (" in gang.log(finder)
    assert how in gang.log(finder)
    assert f"pid {pid}" in gang.log(finder)


def test_ranks_that_never_come_are_named_within_the_deadline():
    began_s = time.monotonic()
    with pytest.raises(RankLost, match=r"ranks 1, 2 of 3 did not come to 127\.0\.0\.1:\d+ within 1 s"):
        meet(RankPlace.of(environment_of(0, 3, free_port())), 1.0)
    assert time.monotonic() - began_s < 5


def test_a_rank_whose_rank_0_never_comes_says_so():
    with pytest.raises(RankLost, match=r"rank 1: rank 0 did not come to 127\.0\.0\.1:\d+ within 1 s"):
        meet(RankPlace.of(environment_of(1, 2, free_port())), 1.0)


def test_a_place_is_read_from_torchruns_environment():
    told = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert RankPlace.of({}) is None
    assert RankPlace.of({"WORLD_SIZE": "1", "RANK": "0"}) is None
    place = RankPlace.of({**told, "LOCAL_WORLD_SIZE": "2"})
    assert (place.rank, place.size, place.local_rank, place.local_size) == (3, 4, 1, 2)
    assert (place.address, place.port, place.has_agent_store) == ("a", 1, False)
    with pytest.raises(UserError, match="RANK, MASTER_PORT must be set"):
        RankPlace.of({"WORLD_SIZE": "4", "MASTER_ADDR": "a"})
    with pytest.raises(UserError, match="RANK = 4: must be 0 to 3"):
        RankPlace.of({**told, "RANK": "4"})


PASSWORD = b'{"store": "s3://user:pass@host"}'


def test_what_rank_0_tells_goes_through_the_shared_folder_and_not_through_the_open_store(tmp_path):
    store, heard = dist.HashStore(), list[bytes]()
    reader = threading.Thread(target=lambda: heard.append(told(store, 1, 20.0)))
    reader.start()
    tell(store, 2, PASSWORD, tmp_path, 20.0)
    reader.join(20.0)
    assert heard == [PASSWORD]
    assert b"pass" not in store.get("told")
    assert list(tmp_path.iterdir()) == [], "the file is removed once all have read it"


def test_a_rank_that_does_not_share_the_folder_is_named_on_both_sides(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "SEEN_WITHIN_S", 0.1)
    store, found = dist.HashStore(), list[str]()

    class Elsewhere:
        """The store as a rank sees it whose disk lacks rank 0's folder."""

        def get(self, key):
            return store.get(key).replace(str(tmp_path).encode(), str(tmp_path / "elsewhere").encode())

        def __getattr__(self, name):
            return getattr(store, name)

    def read():
        with pytest.raises(UserError, match="cannot see this folder"):
            told(Elsewhere(), 1, 20.0)
        found.append("refused")

    reader = threading.Thread(target=read)
    reader.start()
    with pytest.raises(UserError, match=r"rank 1: .*cannot see this folder of rank 0; give all ranks a --dir"):
        tell(store, 2, PASSWORD, tmp_path, 20.0)
    reader.join(20.0)
    assert found == ["refused"]
