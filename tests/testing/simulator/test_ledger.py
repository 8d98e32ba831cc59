"""The ledger judges calls: exact results, justified errors, at most one execution."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from aiograd.errors import DeadlineExceeded, WorkerLost
from aiograd.testing.simulator.ledger import ANY, Entry, Ledger, equal
from aiograd.testing.simulator.schedule import Fault, Harm
from aiograd.testing.simulator.world import Node, World


class Story:
    """One call from a to b, and what the ledger says of its outcome."""

    def __init__(self) -> None:
        self.world = World(1)
        self.harm = Harm(self.world)
        self.ledger = Ledger(self.world, self.harm)
        self.caller = Node(self.world, "a", 0, 0)

    def call(self, outcome, expected=ANY, *, seconds=0.0, timeout=5.0, errors=()) -> list[str]:
        async def make():
            await asyncio.sleep(seconds)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        entry = Entry((1,), self.caller, "b", "work", timeout, self.world.loop.time(), quick=True)
        watching = self.ledger.watch(entry, make, expected, errors=errors)
        self.world.loop.run_until_complete(watching)
        return self.invariants

    @property
    def invariants(self) -> list[str]:
        return [text.partition(":")[0] for text in self.ledger.violations]


@pytest.fixture
def story():
    story = Story()
    yield story
    story.world.dispose()
    story.world.loop.close()


def test_an_exact_result_in_time_is_right(story):
    assert story.call(7, 7) == []
    assert story.ledger.outcomes == {"ok": 1}


def test_another_result_violates_i2(story):
    assert story.call(8, 7) == ["I2"]


def test_a_result_after_the_deadline_violates_i1(story):
    assert story.call(7, 7, seconds=5.5) == ["I1"]


def test_the_pause_of_a_caller_excuses_its_late_call(story):
    story.caller.delays.append((1.0, 2.0))
    assert story.call(7, 7, seconds=5.5) == []


def test_an_untyped_error_violates_i2_unless_it_is_expected(story):
    assert story.call(KeyError("x"), errors=(KeyError,)) == []
    assert story.call(KeyError("x")) == ["I2"]


def test_a_lost_worker_needs_a_fault_that_explains_it(story):
    assert story.call(WorkerLost("b")) == ["I8"]
    story.ledger.violations.clear()
    story.harm.note(Fault(0.0, "crash", "b"))
    assert story.call(WorkerLost("b")) == []


def test_a_deadline_that_expires_early_or_without_reason_violates_i2(story):
    assert story.call(DeadlineExceeded("b", "work", 5.0), seconds=1.0) == ["I2", "I2"]


def test_a_call_that_ran_twice_violates_i4(story):
    story.ledger.ran[(1,)] = 2
    assert story.call(7, 7) == ["I4"]


def test_a_call_that_ran_although_its_error_denies_it_violates_i4(story):
    story.harm.note(Fault(0.0, "crash", "b"))
    story.ledger.ran[(1,)] = 1
    assert story.call(WorkerLost("b", executed="no")) == []
    story.ledger.finish()
    assert story.invariants == ["I4"]


def test_arrays_are_equal_only_if_they_are_exactly_so():
    assert equal(np.ones(2), np.ones(2))
    assert not equal(np.ones(2), np.ones(3))
    assert not equal([1.0, 1.0], np.ones(2))
    assert equal(object(), ANY)
