import copy

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from offbeat.weights.relay_tree import ROOT, RelayNode, RelayTree

SITES = ["here", "there", "beyond"]
rates = st.none() | st.sampled_from([1.0, 2.0, 3.5, 100.0])


def tree_of(*names, site="here", fan_out=2):
    tree = RelayTree(fan_out)
    for name in names:
        tree.put(RelayNode(name, site))
    return tree


def parents(tree):
    return {name: parent for site in tree._sites.values() for name, parent in site.parents.items()}


def children(tree, parent):
    return [name for name, other in parents(tree).items() if other == parent]


def depth(tree):
    return max(len(tree.sources(name)) for name in parents(tree))


def least_depth(num_receivers, fan_out):
    depth, level, room = 0, 1, 0
    while room < num_receivers:
        depth, room, level = depth + 1, room + level, level * fan_out
    return depth


def test_of_each_site_one_fetches_from_the_root_and_the_others_from_their_own_site():
    tree = RelayTree()
    for number in range(12):
        tree.put(RelayNode(f"w{number}", SITES[number % 3]))
    assert sorted(children(tree, ROOT)) == ["w0", "w1", "w2"]
    for name, parent in parents(tree).items():
        assert parent == ROOT or int(name[1:]) % 3 == int(parent[1:]) % 3


def test_a_receiver_asks_its_ancestors_in_turn_and_the_root_last():
    tree = tree_of("a", "b", "c", "d", fan_out=1)
    assert tree.sources("d") == ["c", "b", "a", ROOT]
    assert tree.sources("a") == [ROOT]


def test_six_receivers_are_three_levels_deep():
    tree = tree_of(*"abcdef")
    assert parents(tree) == {"a": ROOT, "b": "a", "c": "a", "d": "b", "e": "c", "f": "b"}


def test_who_cannot_serve_hangs_below_those_who_can():
    tree = RelayTree()
    tree.put(RelayNode("deaf", "here", serves=False))
    assert tree.sources("deaf") == [ROOT]
    tree.put(RelayNode("relay", "here"))
    assert parents(tree) == {"relay": ROOT, "deaf": "relay"}


def test_a_site_where_nobody_serves_fetches_from_the_root():
    tree = RelayTree()
    for name in "abc":
        tree.put(RelayNode(name, "here", serves=False))
    assert set(parents(tree).values()) == {ROOT}


def test_a_lone_relay_is_overloaded_rather_than_the_slow_link_crossed_twice():
    tree = tree_of("relay")
    for name in "abcd":
        tree.put(RelayNode(name, "here", serves=False))
    assert children(tree, "relay") == list("abcd")
    tree.put(RelayNode("second", "here"))
    assert len(children(tree, "relay")) == 3  # 5 others, and room for 4: one too many somewhere
    tree.put(RelayNode("third", "here"))
    assert all(len(children(tree, name)) <= 2 for name in ("relay", "second", "third"))


def test_a_head_that_leaves_is_replaced_and_only_those_below_it_hear_of_it():
    tree = tree_of(*"abcdefg")
    before = parents(tree)
    tree.remove("a")
    (head,) = children(tree, ROOT)
    moved = {name for name, parent in parents(tree).items() if parent != before[name]}
    assert moved == {head, *children(tree, head)}
    assert depth(tree) == 3


def test_a_head_that_is_known_to_be_slow_gives_way_to_one_that_is_known_to_be_fast():
    tree = tree_of(*"abc")
    tree.put(RelayNode("a", "here", root_bytes_per_s=1.0))
    assert tree.sources("a") == [ROOT]
    tree.put(RelayNode("c", "here", root_bytes_per_s=1.9))
    assert tree.sources("a") == [ROOT]
    tree.put(RelayNode("c", "here", root_bytes_per_s=2.1))
    assert parents(tree) == {"c": ROOT, "b": "c", "a": "c"}


def test_a_head_is_not_replaced_by_one_that_is_known_to_be_slow():
    tree = tree_of(*"abc", fan_out=3)
    tree.put(RelayNode("b", "here", root_bytes_per_s=0.1))
    tree.remove("a")
    assert children(tree, ROOT) == ["c"]


def test_who_is_far_out_comes_nearer_once_there_is_room():
    tree = RelayTree()
    for name in "abcdefghij":
        tree.put(RelayNode(name, "here", serves=name != "c"))
    assert tree.sources("j") == ["f", "d", "b", "a", ROOT]
    tree.put(RelayNode("c", "here"))
    assert tree.sources("j") == ["c", "a", ROOT]
    before = parents(tree)
    tree.put(RelayNode("c", "here"))
    assert parents(tree) == before  # a single level is not worth a move


def test_who_moves_to_another_site_is_fed_there():
    tree = tree_of("a", "b")
    tree.put(RelayNode("x", "there"))
    tree.put(RelayNode("a", "there"))
    assert parents(tree) == {"b": ROOT, "x": ROOT, "a": "x"}


def test_who_is_gone_already_may_be_said_to_be_gone():
    tree = tree_of("a")
    tree.remove("a")
    tree.remove("a")
    assert parents(tree) == {}


@given(st.integers(1, 40), st.integers(1, 4))
def test_who_joins_moves_nobody_and_the_tree_is_as_flat_as_can_be(num_receivers, fan_out):
    tree = RelayTree(fan_out)
    for number in range(num_receivers):
        before = parents(tree)
        tree.put(RelayNode(f"w{number}", "here"))
        assert {name: parents(tree)[name] for name in before} == before
    assert depth(tree) == least_depth(num_receivers, fan_out)


@given(st.integers(2, 40), st.integers(1, 4), st.data())
def test_who_leaves_moves_few_and_the_tree_stays_flat(num_receivers, fan_out, data):
    tree = tree_of(*(f"w{number}" for number in range(num_receivers)), fan_out=fan_out)
    for _ in range(data.draw(st.integers(1, num_receivers - 1))):
        gone = data.draw(st.sampled_from(sorted(parents(tree))))
        before, num_below = parents(tree), len(children(tree, gone))
        tree.remove(gone)
        moved = [name for name, parent in parents(tree).items() if parent != before[name]]
        assert len(moved) <= num_below + 2  # those below, the one in its place, and one that is far out
        assert depth(tree) <= least_depth(len(parents(tree)), fan_out) + 1


class Receivers(RuleBasedStateMachine):
    """Receivers come, go, move, and turn out to be faster, slower or deaf."""

    names = Bundle("names")

    @initialize(fan_out=st.integers(1, 3))
    def start(self, fan_out):
        self.tree, self.known, self.num_names = RelayTree(fan_out), {}, 0

    def put(self, name, site, serves, from_root):
        self.known[name] = RelayNode(name, site, serves, from_root)
        self.tree.put(self.known[name])
        return name

    @rule(target=names, site=st.sampled_from(SITES), serves=st.booleans(), from_root=rates)
    def join(self, site, serves, from_root):
        self.num_names += 1
        return self.put(f"w{self.num_names}", site, serves, from_root)

    @rule(name=names, site=st.sampled_from(SITES), serves=st.booleans(), from_root=rates)
    def change(self, name, site, serves, from_root):
        self.put(name, site, serves, from_root)

    @rule(name=consumes(names))
    def leave(self, name):
        del self.known[name]
        self.tree.remove(name)

    @invariant()
    def all_reach_the_root_through_receivers_of_their_site_that_serve(self):
        parent_of = parents(self.tree)
        assert parent_of.keys() == self.known.keys()
        for name, receiver in self.known.items():
            line, at = [], name
            while at != ROOT:
                at = parent_of[at]
                assert at not in line, "a cycle"
                line.append(at)
            assert line == self.tree.sources(name)
            assert all(self.known[other].site == receiver.site and self.known[other].serves for other in line[:-1])

    @invariant()
    def one_of_each_site_hangs_on_the_root_where_anyone_serves(self):
        for site in {receiver.site for receiver in self.known.values()}:
            members = [receiver for receiver in self.known.values() if receiver.site == site]
            heads = [member.name for member in members if parents(self.tree)[member.name] == ROOT]
            assert len(heads) == (1 if any(member.serves for member in members) else len(members))

    @invariant()
    def nobody_feeds_more_than_its_share_where_there_is_room(self):
        for site in {receiver.site for receiver in self.known.values()}:
            members = [receiver.name for receiver in self.known.values() if receiver.site == site]
            fan_outs = {name: self.tree._fan_out if self.known[name].serves else 0 for name in members}
            if sum(fan_outs.values()) >= len(members) - 1:
                assert all(len(children(self.tree, name)) <= fan_outs[name] for name in members if fan_outs[name])

    @invariant()
    def whoever_dies_leaves_the_others_connected(self):
        for gone in self.known:
            without = copy.deepcopy(self.tree)
            without.remove(gone)
            assert parents(without).keys() == self.known.keys() - {gone}
            for name in parents(without):
                assert gone not in without.sources(name)
                assert without.sources(name)[-1] == ROOT


TestReceivers = Receivers.TestCase
