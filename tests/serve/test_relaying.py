from offbeat.serve.relaying import Place, Relaying


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def at(site: str, name: str = "") -> Place:
    return Place(site, f"http://{name}" if name else "")


def test_the_first_of_a_site_asks_us_and_the_others_ask_it():
    relaying = Relaying()
    assert relaying.sources("a", at("home", "a")) == []
    assert relaying.sources("b", at("home", "b")) == ["http://a"]
    assert relaying.sources("c", at("away", "c")) == []


def test_whoever_cannot_serve_is_nobodys_source():
    relaying = Relaying()
    assert relaying.sources("a", at("home")) == []
    assert relaying.sources("b", at("home", "b")) == []
    assert relaying.sources("a", at("home")) == ["http://b"]


def test_workers_without_a_site_have_no_peers():
    relaying = Relaying()
    assert relaying.sources("a", at("", "a")) == []
    assert relaying.sources("b", at("", "b")) == []


def test_a_relay_that_left_or_fell_silent_is_not_named_any_more():
    clock = Clock()
    relaying = Relaying(clock, silent_s=60.0)
    relaying.sources("a", at("home", "a"))
    assert relaying.sources("b", at("home", "b")) == ["http://a"]
    relaying.leave("a")
    assert relaying.sources("b", at("home", "b")) == []
    assert relaying.sources("c", at("home", "c")) == ["http://b"]
    clock.now_s += 50
    relaying.hear("b")
    clock.now_s += 50
    assert relaying.sources("c", at("home", "c")) == ["http://b"]
    clock.now_s += 61
    assert relaying.sources("c", at("home", "c")) == []


def test_a_worker_that_moves_to_another_site_is_found_there():
    relaying = Relaying()
    relaying.sources("a", at("home", "a"))
    relaying.sources("a", at("away", "a"))
    assert relaying.sources("b", at("home", "b")) == []
    assert relaying.sources("c", at("away", "c")) == ["http://a"]
