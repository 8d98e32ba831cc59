"""What a snapshot says about a cluster that does not go on, for planted snapshots."""

from __future__ import annotations

import time

import pytest

from aiograd.observe.snapshot import (
    BLOCKED,
    GATHER,
    LOST,
    STOPPED,
    CallRow,
    CollectiveRow,
    Data,
    PassRow,
    WorkerRow,
)
from aiograd.observe.waits import describe, find, seconds


class World:
    """Builds snapshots call by call."""

    def __init__(self, *names: str) -> None:
        self.data = Data(0.0, names[0])
        self.data.workers = [WorkerRow(name, rank) for rank, name in enumerate(names)]
        self._number = 0

    def call(self, caller, callee, function="f", *, parent=None, age=5.0, began=True, **more):
        self._number += 1
        key = f"{caller}>{callee}#{self._number}"
        line = f"{caller}.py:{self._number}"
        self.data.pending.append(
            CallRow(key, caller, callee, function, line=line, age=age, parent=parent)
        )
        if began:
            row = CallRow(key, caller, callee, function, state="running", age=age, **more)
            row.at = row.at or f"{callee}.py:{100 + self._number}"
            self.data.running.append(row)
        return key


def test_calls_that_wait_for_each_other_are_a_cycle():
    world = World("driver", "a", "b", "c")
    first = world.call("driver", "a", "step")
    second = world.call("a", "b", "step", parent=first)
    third = world.call("b", "c", "step", parent=second)
    world.call("c", "a", "step", parent=third, behind=first)
    world.data.running[-1].state = "turn"
    cycle, *others = find(world.data)
    assert others == []
    assert cycle.kind == "cycle"
    assert cycle.title.startswith("cycle of 3 calls")
    assert [hop.worker for hop in cycle.hops] == ["a", "b", "c"]
    assert [hop.line for hop in cycle.hops] == ["a.py:101", "b.py:102", "c.py:103"]
    assert cycle.hops[-1].note == "waits for a"


def test_thousands_of_calls_that_wait_are_told_in_a_moment():
    queue = World("driver", "a", "b")
    before = None
    for _ in range(3000):
        outer = queue.call("driver", "a", "add")
        before = queue.call("a", "b", "add", parent=outer, behind=before)
    stopped = World("driver", "a")
    stopped.data.workers[1].state = STOPPED
    for _ in range(3000):
        stopped.call("driver", "a", began=False)
    began = time.process_time()
    (chain,) = find(queue.data)
    (worker,) = find(stopped.data)
    # On the loop of a worker, once a second: a time that grows with the square takes minutes here.
    assert time.process_time() - began < 2.0
    assert chain.title.startswith("chain of 3001 calls")
    assert (worker.kind, len(worker.hops)) == ("worker", 3000)


def test_a_call_that_waits_for_two_is_part_of_the_longer_chain():
    world = World("driver", "a", "b", "c")
    first = world.call("driver", "a")
    world.call("a", "b", parent=first)
    second = world.call("a", "c", parent=first)
    world.call("c", "b", "g", parent=second)
    chain, *others = find(world.data)
    assert others == []
    assert [hop.worker for hop in chain.hops] == ["driver", "a", "c", "b"]


def test_a_chain_that_comes_back_is_told_before_other_chains():
    world = World("driver", "a", "b")
    world.call("driver", "b", "slow", age=100.0)
    first = world.call("driver", "a", "step")
    second = world.call("a", "b", "other", parent=first)
    world.call("b", "a", "step", parent=second, at="locked.py:7")
    back, chain = find(world.data)
    assert (back.kind, chain.kind) == ("return", "chain")
    assert back.guilty == "locked.py:7"
    assert "comes back to step on a" in back.title


def test_the_longest_chain_comes_first_and_its_calls_are_told_once():
    world = World("driver", "a", "b")
    world.call("driver", "a", "short", age=50.0)
    first = world.call("driver", "a", "long")
    world.call("a", "b", "inner", parent=first)
    chains = find(world.data)
    assert [[hop.function for hop in chain.hops] for chain in chains] == [
        ["", "long", "inner"],
        ["", "short"],
    ]


def test_young_calls_and_those_of_the_library_are_not_told():
    world = World("driver", "a")
    world.call("driver", "a", age=0.2)
    key = world.call("driver", "a", "rref.fetch")
    for row in (*world.data.pending, *world.data.running):
        if row.key == key:
            row.kind = "service"
    assert find(world.data) == []
    assert len(find(world.data, older=0.1)) == 1


def test_a_call_that_never_began_says_so():
    world = World("driver", "a")
    world.call("driver", "a", began=False)
    (chain,) = find(world.data)
    assert chain.hops[-1].note == "has not begun there"
    assert chain.guilty == "driver.py:1"


def test_a_blocked_worker_names_the_line_and_who_waits_for_it():
    world = World("driver", "a", "b")
    row = world.data.workers[2]
    row.state, row.why, row.blocked, row.at = BLOCKED, "blocked for 9 s", 9.0, "user.py:12"
    first = world.call("driver", "a", "outer")
    world.call("a", "b", "inner", parent=first, began=False)
    (found,) = find(world.data)
    assert (found.kind, found.guilty, found.age) == ("worker", "user.py:12", 9.0)
    assert found.hops[0].note == "blocks the event loop"
    assert (found.hops[1].worker, found.hops[1].function) == ("a", "outer")
    assert found.hops[1].note == "calls inner on b"


def test_a_lost_worker_that_nobody_waits_for_is_not_stuck():
    world = World("driver", "a")
    world.data.workers[1].state = LOST
    assert find(world.data) == []


def test_a_barrier_names_who_never_came_and_where_that_one_is():
    world = World("a", "b", "c")
    for name in ("a", "b"):
        key = world.call("driver", name, "train")
        world.call(name, "a", GATHER, parent=key)
    world.call("driver", "c", "train", at="loop.py:40")
    world.data.collectives = [CollectiveRow("a", ["a", "b", "c"], ["a", "b"], ["c"], 5.0)]
    barrier, *others = find(world.data)
    assert barrier.title == "c never reached the barrier of a, b, c"
    assert barrier.guilty == "loop.py:40"
    assert [hop.worker for hop in barrier.hops] == ["a", "b", "c"]
    assert [each.kind for each in others] == ["chain"]  # the call that c runs


def test_a_pass_that_waits_for_a_stopped_worker_is_told_with_it():
    world = World("driver", "a")
    row = world.data.workers[1]
    row.state, row.why = STOPPED, "process 7 is stopped"
    world.data.passes = [
        PassRow("driver", "1", "2", "driver", "waiting", {"a": 3}, ["a"], 6.0, "train.py:9")
    ]
    (found,) = find(world.data)
    assert found.title == "a is stopped: process 7 is stopped"
    assert found.guilty == "train.py:9"
    assert found.hops[0].note == "its backward pass waits for 3 edges of a"


def test_a_pass_that_does_not_end_says_who_waits_for_whom():
    world = World("driver", "a")
    world.data.passes = [
        PassRow("a", "1", "2", "driver", "computing", {}, ["driver"], 6.0),
        PassRow("driver", "1", "2", "driver", "waiting", {"a": 1}, ["a"], 6.0, "train.py:9"),
    ]
    (found,) = find(world.data)
    assert (found.kind, found.guilty) == ("pass", "train.py:9")
    assert [hop.note for hop in found.hops] == ["waits for edges: 1 of a", "computing"]


def test_a_cycle_of_a_thousand_calls_is_found():
    world = World("driver", "a")
    keys = [world.call("a", "a")]
    for _ in range(1000):
        keys.append(world.call("a", "a", parent=keys[-1]))
    world.data.running[-1].behind = keys[0]
    cycle = find(world.data)[0]
    assert cycle.kind == "cycle"
    assert len(cycle.hops) == 1001


def test_lines_are_in_columns_and_many_hops_are_cut():
    world = World("driver", "a")
    row = world.data.workers[1]
    row.state, row.why = STOPPED, "it is"
    for _ in range(12):
        world.call("driver", "a", "f", began=False)
    lines = describe(find(world.data), most=3)
    assert lines[0] == "a is stopped: it is"
    assert lines[1] == "  driver  –  driver.py:1     5.0 s  calls f on a"
    assert lines[-1] == "  … and 9 more"


@pytest.mark.parametrize(
    ("age", "text"),
    [(None, "?"), (0.26, "0.3 s"), (99.0, "99.0 s"), (130.0, "2 min 10 s"), (7400.0, "2 h 3 min")],
)
def test_durations_are_for_people(age, text):
    assert seconds(age) == text
