import pytest

from offbeat.coordinator.relays import ON_THIS_MACHINE, RelayAssignment, WorkerSite, key_hash, site_of
from offbeat.ledger.errors import Refused


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def at(site: str, name: str = "") -> WorkerSite:
    return WorkerSite(site, (name, 7000) if name else None)


def told(relays: RelayAssignment, worker: str, place: WorkerSite) -> list[str]:
    """The hosts that a worker is sent to."""
    return [source.address[0] for source in relays.sources(worker, place)]


def test_the_first_of_a_site_asks_us_and_the_others_ask_it():
    relays = RelayAssignment()
    assert relays.sources("a", at("home", "a")) == []
    assert told(relays, "b", at("home", "b")) == ["a"]
    assert relays.sources("c", at("away", "c")) == []


def test_whoever_cannot_serve_is_nobodys_source():
    relays = RelayAssignment()
    assert relays.sources("a", at("home")) == []
    assert relays.sources("b", at("home", "b")) == []
    assert told(relays, "a", at("home")) == ["b"]


def test_workers_without_a_site_have_no_peers():
    relays = RelayAssignment()
    assert relays.sources("a", at("", "a")) == []
    assert relays.sources("b", at("", "b")) == []


def test_a_relay_that_left_or_fell_silent_is_not_named_any_more():
    clock = Clock()
    relays = RelayAssignment(clock, silent_s=60.0)
    relays.sources("a", at("home", "a"))
    assert told(relays, "b", at("home", "b")) == ["a"]
    relays.leave("a")
    assert relays.sources("b", at("home", "b")) == []
    assert told(relays, "c", at("home", "c")) == ["b"]
    clock.now_s += 50
    relays.hear("b")
    clock.now_s += 50
    assert told(relays, "c", at("home", "c")) == ["b"]
    clock.now_s += 61
    assert relays.sources("c", at("home", "c")) == []


def test_a_worker_that_moves_to_another_site_is_found_there():
    relays = RelayAssignment()
    relays.sources("a", at("home", "a"))
    relays.sources("a", at("away", "a"))
    assert relays.sources("b", at("home", "b")) == []
    assert told(relays, "c", at("away", "c")) == ["a"]


def test_every_two_workers_have_a_key_that_the_server_knows_by_its_hash_alone():
    relays = RelayAssignment()
    relays.sources("a", at("home", "a"))
    (of_b,), (of_c,) = (relays.sources(name, at("home")) for name in ("b", "c"))
    assert of_b.address == of_c.address == ("a", 7000)
    assert of_b.key != of_c.key
    assert set(relays.guests("a")) == {key_hash(of_b.key), key_hash(of_c.key)}
    assert of_b.key not in repr(of_b)
    assert relays.guests("b") == [], "it serves nobody"
    relays.sources("d", at("away", "d"))
    assert len(relays.guests("a")) == 2, "another site's have nothing to do here"
    assert relays.guests("nobody") == []


def test_a_key_ends_with_its_worker_whichever_way_that_goes():
    clock = Clock()
    relays = RelayAssignment(clock, silent_s=60.0)

    def key_of(worker: str) -> str:
        (source,) = relays.sources(worker, at("home"))
        return key_hash(source.key)

    relays.sources("a", at("home", "a"))
    left, aside, silent, stays = (key_of(name) for name in ("left", "aside", "silent", "stays"))
    assert set(relays.guests("a")) == {left, aside, silent, stays}
    relays.leave("left")
    assert set(relays.guests("a")) == {aside, silent, stays}
    relays.keep({"a", "silent", "stays"})
    assert set(relays.guests("a")) == {silent, stays}
    clock.now_s += 50
    relays.hear("a")
    relays.hear("stays")
    clock.now_s += 50
    assert relays.guests("a") == [stays]
    assert key_of("left") != left, "who comes back has another key"
    assert key_of("stays") == stays


def test_a_workers_address_is_the_one_that_it_calls_from():
    assert site_of("home", "10.0.0.7", "", 7000, []) == WorkerSite("home", ("10.0.0.7", 7000))
    assert site_of("home", "10.0.0.7", "10.0.0.7", 7000, []) == WorkerSite("home", ("10.0.0.7", 7000))
    assert site_of("home", "::ffff:10.0.0.7", "", 7000, []) == WorkerSite("home", ("10.0.0.7", 7000))
    assert site_of("home", "fd00::7", "", 7000, []) == WorkerSite("home", ("fd00::7", 7000))
    assert site_of("home", "10.0.0.7", "", 0, []) == WorkerSite("home")
    assert site_of("", "10.0.0.7", "", 7000, []).site == ""
    assert site_of("home", "unknown", "", 7000, []) == WorkerSite("home"), "who cannot be seen serves nobody"


@pytest.mark.parametrize("host", ["10.0.0.8", "127.0.0.1", "169.254.169.254", "::1"])
def test_another_address_is_refused_unless_the_coordinator_believes_in_its_network(host):
    with pytest.raises(
        Refused, match=f"^this worker calls from 203.0.113.5, but gives {host} as its peer address; .*peer_networks"
    ):
        site_of("home", "203.0.113.5", host, 7000, [])
    with pytest.raises(Refused):
        site_of("home", "203.0.113.5", host, 7000, ["192.168.0.0/16", "fd00::/8"])


def test_behind_one_address_workers_name_their_own():
    place = site_of("home", "203.0.113.5", "10.0.0.8", 7000, ["10.0.0.0/8"])
    assert place == WorkerSite("home", ("10.0.0.8", 7000))


@pytest.mark.parametrize("host", ["x", "10.0.0.1/x?", "evil.example", "http://10.0.0.1", "10.0.0.1:80", "0x7f000001"])
def test_what_is_no_address_is_refused(host):
    with pytest.raises(Refused, match="not an IP address"):
        site_of("home", "10.0.0.7", host, 7000, ["0.0.0.0/0"])


def test_loopback_is_for_those_on_the_same_machine_and_a_proxys_is_nobodys():
    here = site_of("home", "127.0.0.1", "", 7000, [])
    assert here == WorkerSite("home" + ON_THIS_MACHINE, ("127.0.0.1", 7000))
    relays = RelayAssignment()
    relays.sources("here", here)
    assert relays.sources("there", site_of("home", "10.0.0.7", "", 7000, [])) == []
    assert told(relays, "beside", site_of("home", "127.0.0.1", "", 0, [])) == ["127.0.0.1"]
    assert site_of("home", "127.0.0.1", "", 7000, [], behind_proxy=True).address is None
    assert site_of("home", "10.0.0.7", "", 7000, [], behind_proxy=True).address == ("10.0.0.7", 7000)
