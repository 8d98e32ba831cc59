"""Termination detection, in every awkward order of reports and calls."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from aiograd.cluster.membership.termination import TerminationDetector


def test_idle_workers_take_two_rounds_of_counts():
    detector = TerminationDetector()
    everyone = ["a", "b"]
    for expected in (False, False, True):
        detector.report("a", 0, 7)
        assert detector.decide(everyone) is None
        detector.report("b", 0, 3)
        assert detector.decide(everyone) is expected


def test_rounds_go_on_while_calls_are_made():
    detector = TerminationDetector()
    for round_number, (started, expected) in enumerate(
        [(1, False), (2, False), (5, False), (5, True)]
    ):
        detector.report("a", 0, started)
        assert detector.decide(["a"]) is expected, round_number


def test_a_round_does_not_wait_for_lost_workers():
    detector = TerminationDetector()
    detector.report("a", 0, 0)
    assert detector.decide(["a", "b"]) is None
    assert detector.decide(["a"]) is False


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
    detector, reported = TerminationDetector(), set()
    for _ in range(10_000):
        ready = [n for n in cluster.names if n not in reported and not cluster.outstanding[n]]
        if (cluster.flying or cluster.answers) and (not ready or chance.random() < 0.5):
            cluster.step()
            continue
        name = chance.choice(ready)
        reported.add(name)
        detector.report(name, cluster.outstanding[name], cluster.started[name])
        done = detector.decide(cluster.names)
        if done:
            assert not cluster.flying
            assert not cluster.answers
            return
        if done is False:
            reported.clear()
    raise AssertionError("the detector never decided")
