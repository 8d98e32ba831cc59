"""PendingGathers and farewells, in every awkward order."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from aiograd.cluster.collectives import PendingGathers
from aiograd.cluster.termination import TerminationDetector

GROUP = (("a", b"1"), ("b", b"2"), ("c", b"3"))


def values(found):
    return [(contribution.name, contribution.value) for contribution in found]


def test_a_gathering_is_complete_when_everyone_has_brought_something():
    leader = PendingGathers()
    for missing, name, value in ((["b", "c"], "a", 1), (["b"], "c", 3)):
        leader.add(GROUP, name, value)
        assert leader.missing(GROUP) == missing
        assert leader.complete(GROUP) == []
    leader.add(GROUP, "b", 2)
    found = leader.complete(GROUP)
    assert values(found) == [("a", 1), ("b", 2), ("c", 3)]  # by rank, whoever came first
    assert list(leader) == []


def test_those_who_come_several_times_pair_up_in_the_order_they_came():
    leader, group = PendingGathers(), GROUP[:2]
    for value in ("b1", "b2"):
        leader.add(group, "b", value)
    for n in (1, 2):
        leader.add(group, "a", f"a{n}")
        assert values(leader.complete(group)) == [("a", f"a{n}"), ("b", f"b{n}")]
    assert list(leader) == []


def test_groups_gather_apart():
    leader = PendingGathers()
    leader.add(GROUP, "a", 1)
    leader.add(GROUP[:2], "b", 2)
    assert leader.missing(GROUP) == ["b", "c"]
    assert leader.missing(GROUP[:2]) == ["a"]


def test_what_is_taken_back_was_never_there():
    leader, group = PendingGathers(), GROUP[:2]
    first, second = leader.add(group, "a", 1), leader.add(group, "a", 1)
    leader.withdraw(first)
    leader.withdraw(first)
    assert list(leader) == [second]
    leader.add(group, "b", 2)
    assert leader.complete(group)[0] is second
    leader.withdraw(second)  # given out already
    assert list(leader) == []


def test_a_death_ends_the_gatherings_it_makes_impossible():
    leader = PendingGathers()
    doomed = leader.add(GROUP, "a", 1)
    other = leader.add(GROUP[:2], "a", 1)
    assert leader.gone(b"3") == [doomed]
    assert leader.gone(b"nobody") == []
    assert list(leader) == [other]
    leader.withdraw(doomed)


def test_a_farewell_of_idle_workers_takes_two_rounds_of_counts():
    farewell = TerminationDetector()
    everyone = ["a", "b"]
    for expected in (False, False, True):
        farewell.report("a", 0, 7)
        assert farewell.decide(everyone) is None
        farewell.report("b", 0, 3)
        assert farewell.decide(everyone) is expected


def test_a_farewell_goes_on_while_calls_are_made():
    farewell = TerminationDetector()
    for round_number, (started, expected) in enumerate(
        [(1, False), (2, False), (5, False), (5, True)]
    ):
        farewell.report("a", 0, started)
        assert farewell.decide(["a"]) is expected, round_number


def test_a_farewell_does_not_wait_for_the_dead():
    farewell = TerminationDetector()
    farewell.report("a", 0, 0)
    assert farewell.decide(["a", "b"]) is None
    assert farewell.decide(["a"]) is False


class Cluster:
    """Workers that pass calls on without waiting for them, and leave when told that all is quiet.

    Each call makes some more from the callee before its answer goes back, as nested
    fire-and-forget calls do.
    """

    def __init__(self, chance: random.Random, workers: int, calls: int) -> None:
        self.chance = chance
        self.names = [f"w{n}" for n in range(workers)]
        self.outstanding = dict.fromkeys(self.names, 0)
        self.started = dict.fromkeys(self.names, 0)
        self.flying: list[tuple[str, str]] = []  # calls on their way: caller, callee
        self.answers: list[str] = []  # answers on their way: to whom
        self.left = calls

    def call(self, caller: str) -> None:
        if self.left:
            self.left -= 1
            self.outstanding[caller] += 1
            self.started[caller] += 1
            self.flying.append((caller, self.chance.choice(self.names)))

    def step(self) -> None:
        moves = [kind for kind in (self.flying, self.answers) if kind]
        kind = self.chance.choice(moves)
        item = kind.pop(self.chance.randrange(len(kind)))
        if kind is self.flying:
            for _ in range(self.chance.choice([1, 1, 1, 1, 2])):
                self.call(item[1])
            self.answers.append(item[0])
        else:
            self.outstanding[item] -= 1


@given(seed=st.integers(0, 2**32), workers=st.integers(1, 4), calls=st.integers(1, 80))
def test_nobody_is_let_go_while_a_call_is_on_its_way(seed, workers, calls):
    chance = random.Random(seed)
    cluster = Cluster(chance, workers, calls)
    cluster.call("w0")  # one chain dodges the counting better than many do
    farewell, reported = TerminationDetector(), set()
    for _ in range(10_000):
        ready = [n for n in cluster.names if n not in reported and not cluster.outstanding[n]]
        if (cluster.flying or cluster.answers) and (not ready or chance.random() < 0.5):
            cluster.step()
            continue
        name = chance.choice(ready)
        reported.add(name)
        farewell.report(name, cluster.outstanding[name], cluster.started[name])
        done = farewell.decide(cluster.names)
        if done:
            assert not cluster.flying
            assert not cluster.answers
            return
        if done is False:
            reported.clear()
    raise AssertionError("the farewell never ended")
