"""What one seed of a succession means: how many members, and rounds of faults.

The faults of a round are drawn before it, by the parts that workers have then ("the coordinator"
is another one in each round), so a round is a function from the members in order of rank to faults.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from aiograd.testing.simulator.schedule import Fault

ROUNDS: Final = 2
# Seconds. Below the two that must not be noticed, around the silence and the resumption after which
# a peer is lost, and for as long as an election and more.
STOPS: Final = (1.0, 4.0, 5.5, 6.5, 8.0, 12.0, 20.0)
# Messages of an election, and of what it may interrupt.
MESSAGES: Final = (
    *("cluster.elect", "cluster.elect", "cluster.succeed", "cluster.succeed"),
    *("cluster.term", "cluster.change", "cluster.welcome", "cluster.confirmed", "reply"),
)


@dataclass(frozen=True)
class Round:
    """What goes wrong between two times at which all is well."""

    kind: str
    faults: tuple[Fault, ...]
    # Two sides that cannot reach each other for a while; empty: all can.
    sides: tuple[frozenset[str], ...] = ()
    joins: tuple[float, ...] = ()  # when a newcomer tries to join meanwhile


@dataclass(frozen=True)
class SuccessionPlan:
    """Everything about a run that is decided before it."""

    seed: int
    members: int
    rounds: int

    def draw_round(self, number: int, members: Sequence[str], leader: str) -> Round:
        """Draw a round for these members, in order of rank."""
        rng = random.Random(f"{self.seed} succession round {number}")
        kind = rng.choice(sorted(KINDS))
        return KINDS[kind](rng, list(members), leader)


def make_plan(seed: int) -> SuccessionPlan:
    """Draw the size of a cluster from a seed."""
    rng = random.Random(f"{seed} succession")
    return SuccessionPlan(seed, rng.choice((3, 4, 5, 5, 6, 7)), ROUNDS)


# ── kinds of rounds ─────────────────────────────────────────────────────────────────────────────


def _joins(rng: random.Random) -> tuple[float, ...]:
    """Let newcomers come just when the coordinator is lost, in some rounds."""
    return tuple(rng.uniform(0.0, 3.0) for _ in range(rng.choice((0, 0, 1, 2))))


def _cut_pairs(sides: Sequence[frozenset[str]], at: float, seconds: float) -> list[Fault]:
    first, second = sides
    return [Fault(at, "cut", a, b, seconds) for a in sorted(first) for b in sorted(second)]


def _death(rng: random.Random, members: list[str], leader: str) -> Round:
    """The coordinator ends, and perhaps the next ones, too."""
    at, faults = rng.uniform(0.0, 2.0), []
    others = [name for name in members if name != leader]
    dead = [leader, *others[: rng.choice((0, 0, 0, 1, 2))]]
    if rng.random() < 0.3:
        dead = [leader, *rng.sample(others, rng.randint(1, max(1, len(members) // 2)))]
    for name in dead:
        faults.append(Fault(at, rng.choice(("crash", "crash", "vanish")), name))
        at += rng.choice((0.0, 0.001, 0.05, 0.5, 1.5, 4.0))
    return Round("death", tuple(faults), joins=_joins(rng))


def _cut_off(rng: random.Random, members: list[str], leader: str) -> Round:
    """The coordinator is cut off, alone or with others."""
    others = [name for name in members if name != leader]
    with_it = rng.sample(others, rng.randint(0, len(others) - 1))
    sides = frozenset({leader, *with_it}), frozenset(others) - frozenset(with_it)
    at, seconds = rng.uniform(0.0, 1.0), rng.choice(STOPS)
    faults = _cut_pairs(sides, at, seconds)
    # On either side somebody may end meanwhile: those that are left are still a part of that side.
    if rng.random() < 0.4:
        later = at + rng.choice((0.5, 6.5, 7.0, 9.0))
        faults.append(Fault(later, "crash", rng.choice(sorted(sides[rng.randrange(2)]))))
    return Round("cut off", tuple(faults), sides, _joins(rng))


def _stopped(rng: random.Random, members: list[str], leader: str) -> Round:
    """The coordinator is stopped and comes back, perhaps together with another one."""
    at, seconds = rng.uniform(0.0, 1.0), rng.choice(STOPS)
    faults = [Fault(at, "pause", leader, seconds=seconds)]
    if rng.random() < 0.5:
        other = rng.choice([name for name in members if name != leader])
        pause = rng.choice((0.5, 2.0, 4.0, 7.0))
        faults.append(Fault(at + rng.uniform(0.0, 7.0), "pause", other, seconds=pause))
    return Round("stopped", tuple(faults), joins=_joins(rng))


def _bystanders(rng: random.Random, members: list[str], leader: str) -> Round:
    """The coordinator is well: others end, or cannot reach each other or the coordinator."""
    others = [name for name in members if name != leader]
    at, faults = rng.uniform(0.0, 1.0), []
    for name in rng.sample(others, rng.randint(1, len(others) - 1)):
        kind = rng.choice(("crash", "vanish", "cut", "pause"))
        if kind == "cut":
            other = rng.choice([each for each in members if each != name])
            faults.append(Fault(at, kind, name, other, rng.choice(STOPS)))
        else:
            seconds = rng.choice(STOPS) if kind == "pause" else 0.0
            faults.append(Fault(at, kind, name, seconds=seconds))
        at += rng.choice((0.0, 0.0, 0.01, 0.5))
    return Round("bystanders", tuple(faults), joins=_joins(rng))


def _timely(rng: random.Random, members: list[str], leader: str) -> Round:
    """The coordinator ends, and somebody else just when it sends a message of the election."""
    others = [name for name in members if name != leader]
    faults = [Fault(rng.uniform(0.0, 1.0), rng.choice(("crash", "vanish")), leader)]
    # The members of low rank send most of the messages of an election.
    for name in rng.sample(others[:3], min(len(others), rng.choice((1, 1, 2)))):
        kind = rng.choice(("crash", "crash", "vanish", "pause", "reset"))
        other = rng.choice([each for each in others if each != name]) if kind == "reset" else ""
        seconds = rng.choice((0.5, 2.0, 4.0, 8.0)) if kind == "pause" else 0.0
        nth, early = float(rng.randint(1, 5)), float(rng.randint(0, 1))
        faults.append(Fault(nth, kind, name, other, seconds, early, on=rng.choice(MESSAGES)))
    return Round("timely", tuple(faults), joins=_joins(rng))


def _growing(rng: random.Random, members: list[str], leader: str) -> Round:
    """The coordinator ends in the middle of an admission."""
    nth, early = float(rng.randint(1, 4)), float(rng.randint(0, 1))
    on = rng.choice(("cluster.change", "cluster.welcome", "cluster.confirmed"))
    kind = rng.choice(("crash", "crash", "vanish", "pause"))
    seconds = rng.choice(STOPS) if kind == "pause" else 0.0
    joins = tuple(rng.uniform(0.0, 0.05) for _ in range(rng.randint(1, 4)))
    return Round("growing", (Fault(nth, kind, leader, "", seconds, early, on=on),), joins=joins)


KINDS: Final[dict[str, Callable[[random.Random, list[str], str], Round]]] = {
    "death": _death,
    "cut off": _cut_off,
    "stopped": _stopped,
    "bystanders": _bystanders,
    "timely": _timely,
    "growing": _growing,
}
