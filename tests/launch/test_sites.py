"""Workers of one site: whom they ask, and where they listen, without TLS between them."""

import asyncio
import logging

import pytest

from offbeat.client import wire
from offbeat.client.connection import Connection
from offbeat.client.wire import Malformed
from offbeat.config import from_dict
from offbeat.errors import UserError
from offbeat.launch.joining import JoinedRun
from offbeat.launch.worker_role import Site, receiving, usable

NEAR, FAR = wire.Peer("127.0.0.1", 7000, "near"), wire.Peer("10.0.0.7", 7000, "far")
SIX = wire.Peer("fd00::7", 7000, "six")


def test_peers_beyond_this_machine_are_asked_only_where_keys_may_cross_in_the_clear(caplog):
    assert usable([FAR, NEAR, SIX], allow_plain=True) == {
        "http://10.0.0.7:7000": "far",
        "http://127.0.0.1:7000": "near",
        "http://[fd00::7]:7000": "six",
    }
    assert caplog.messages == []
    with caplog.at_level(logging.WARNING):
        assert usable([FAR, NEAR], allow_plain=False) == {"http://127.0.0.1:7000": "near"}
    assert caplog.messages == ["1 peers are not used, because keys would be sent unencrypted; --allow-plain allows it"]


@pytest.mark.parametrize("host", ["evil.example", "10.0.0.1/x?", "user@10.0.0.1", "", "10.0.0.1\n"])
def test_a_coordinator_names_no_peer_but_by_an_address(host):
    answer = wire.encode({"peers": [{"host": host, "port": 7000, "key": "k"}], "guests": []})
    with pytest.raises(Malformed):
        wire.decode(answer, wire.SourceList)


def test_listening_beyond_this_machine_wants_the_flag_that_the_coordinators_own_url_wants(tmp_path):
    async def run(**flag):
        member = JoinedRun(Connection("http://127.0.0.1:9", patience_s=0.1), "w", "a", from_dict({}))
        site = Site("lab", ("0.0.0.0", 0))
        async with receiving(member, tmp_path, site, lambda figures: None, lambda digest: False, **flag):
            pass

    with pytest.raises(UserError, match=r"^--peer-address 0\.0\.0\.0: keys .* --allow-plain within a private network"):
        asyncio.run(run())
    with pytest.raises(Exception, match="not answered"):  # it listens, and finds no coordinator to tell
        asyncio.run(run(allow_plain=True))
